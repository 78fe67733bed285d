"""What is decided about a Ray cluster before Ray is imported, and what an actor does: none of this needs Ray."""

import json
import os
import socket
import sys

import pytest

from asrkit.cli import main
from asrkit.transcribe.bulk import Machine, RayActors, plan, ray_actors, ray_cluster
from asrkit.transcribe.bulk.ray_cluster import (
    address_of,
    connected,
    host_and_port,
    is_public,
    room,
    token_environment,
)
from asrkit.transcribe.bulk.tasks import as_json

FREE = "127.0.0.1:1"  # a port where nobody listens


@pytest.fixture(autouse=True)
def own_environment(tmp_path, monkeypatch):
    """A home without a token, and nothing said about Ray."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def installed(monkeypatch):
    """As if Ray were installed; nothing here gets as far as to import it."""
    versions = {"ray": "2.60.0"}
    plain = ray_cluster.importlib.metadata.version
    monkeypatch.setattr(
        ray_cluster.importlib.metadata, "version", lambda name: versions.get(name) or plain(name)
    )
    return versions


def test_ray_that_is_absent_or_old_is_one_line_that_names_parts(installed, monkeypatch):
    installed["ray"] = "2.58.1"
    remedy = "pip install .asrkit.scale.., or pass --part K/N, which needs no Ray"
    with pytest.raises(ValueError, match=f"^on: expected Ray 2.59 or newer, got 2.58.1. {remedy}"):
        RayActors(address="local")
    installed["ray"] = "3.0.0.dev0"
    RayActors(address="local")
    monkeypatch.setattr(ray_cluster, "NEEDED", ("pyarrow", "no_such_module"))
    with pytest.raises(ValueError, match="^on: expected Ray Data, got Ray without no_such_module"):
        RayActors(address="local")


def test_an_address_is_given_or_in_the_environment_and_else_parts_are_named(monkeypatch):
    for address in ("10.0.0.1:6379", "head.cluster:1", "[fd00::1]:6379", "local"):
        assert address_of(address) == address
    with pytest.raises(
        ValueError, match="^address: expected HOST:PORT .*, got none. Start .* --part"
    ):
        address_of(None)
    for wrong in (
        "auto",
        "ray://10.0.0.1:10001",
        "10.0.0.1",
        ":6379",
        "host:",
        "a b:1",
        "h:123456",
    ):
        with pytest.raises(ValueError, match="^address: expected HOST:PORT"):
            address_of(wrong)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert address_of(None) == "10.0.0.2:6379" and address_of("local") == "local"
    assert host_and_port("[fd00::1]:6379") == ("fd00::1", 6379)


def test_public_addresses_are_told_from_private_ones():
    assert is_public("8.8.8.8") and is_public("2001:4860:4860::8888")
    for private in (
        "127.0.0.1",
        "10.1.2.3",
        "192.168.0.1",
        "100.64.0.1",
        "fd00::1",
        "::1",
        "localhost",
    ):
        assert not is_public(private)
    with pytest.raises(
        ValueError, match="^address: expected a host that is known, got .nowhere.inv"
    ):
        is_public("nowhere.invalid")


def test_a_token_is_used_where_there_is_one_and_made_for_a_cluster_of_ones_own(
    tmp_path, monkeypatch, capsys
):
    assert token_environment("10.0.0.1:6379") == {}
    mine = token_environment("local")
    assert mine["RAY_AUTH_MODE"] == "token" and len(mine["RAY_AUTH_TOKEN"]) == 64
    assert token_environment("local") != mine
    file = tmp_path / "home" / ".ray" / "auth_token"
    file.parent.mkdir(parents=True)
    file.write_text("secret")
    file.chmod(0o600)
    for address in ("local", "10.0.0.1:6379"):
        assert token_environment(address) == {"RAY_AUTH_MODE": "token"}
    assert capsys.readouterr().err == ""
    file.chmod(0o644)
    token_environment("local")
    assert (
        capsys.readouterr().err == f"asrkit: others can read the token of Ray: chmod 600 {file}\n"
    )
    file.write_text(" \n")
    with pytest.raises(
        ValueError, match="^token: expected a token in a file that can be read, got"
    ):
        token_environment("local")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "other")
    assert token_environment("10.0.0.1:6379") == {"RAY_AUTH_MODE": "token"}
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert token_environment("local") == {}
    assert "this Ray asks for no token" in capsys.readouterr().err


def test_a_token_that_is_asked_for_and_not_there_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(
        ValueError, match="^token: expected the token of the cluster, got none. Copy"
    ):
        token_environment("10.0.0.1:6379")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="^token: expected a file, got .*none."):
        token_environment("10.0.0.1:6379")


def test_an_address_where_nobody_answers_is_one_line_and_imports_no_ray():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    wanted = (
        f"^address: expected a Ray cluster at 127.0.0.1:{port}, got no answer .*Connection refused"
    )
    with pytest.raises(RuntimeError, match=wanted), connected(f"127.0.0.1:{port}"):
        pass
    assert "ray" not in sys.modules and not os.environ.get("RAY_USAGE_STATS_ENABLED")


class Cluster:
    """What `room` asks of Ray: nodes with 4 CPUs and 2 GPUs, of which so much is free on each."""

    def __init__(self, *free):
        self.free = free
        self.all = [
            {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 2.0, "memory": 1e9}} for _ in free
        ]
        self.all += [{"Alive": False, "Resources": {"CPU": 64.0, "GPU": 64.0}}]
        self._private = self.state = self  # where Ray keeps the function below

    def nodes(self):
        return self.all

    def available_resources_per_node(self):
        return dict(enumerate(self.free))


def test_room_is_counted_by_node_and_what_is_free(monkeypatch):
    monkeypatch.setattr(ray_cluster, "FREE_S", 0.0)
    one, half, three = ({"CPU": 1.0, "GPU": gpus} for gpus in (1.0, 0.5, 3.0))
    cluster = Cluster({"CPU": 4.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 1.0})
    assert room(cluster, {"CPU": 3.0}, 1, None) == 2  # one a node
    assert room(cluster, one, 1, None) == 3 and room(cluster, half, 1, None) == 6
    assert room(cluster, one, 2, 2) == 2
    free = "8 of 8 CPUs and 3 of 4 GPUs are free on 2 nodes. Pass fewer"
    for need, least, each, fit in (
        (one, 4, "1 GPU", 3),
        (three, 1, "3 GPUs", 0),
        (one, 9, "1 GPU", 3),
    ):
        wanted = f"^actors: expected room for {least} with 1 CPU and {each} each, got room for {fit}: {free}"
        with pytest.raises(ValueError, match=wanted):
            room(cluster, need, least, least)


def test_cpus_that_are_free_on_several_nodes_make_no_room_for_one_actor(monkeypatch):
    monkeypatch.setattr(ray_cluster, "FREE_S", 0.0)
    cluster = Cluster({"CPU": 2.0}, {"CPU": 1.0}, {})
    assert room(cluster, {"CPU": 1.0}, 1, None) == 3
    assert room(cluster, {"CPU": 2.0}, 1, None) == 1
    wanted = "^actors: expected room for 1 with 3 CPUs each, got room for 0: 3 of 12 CPUs and 0 of 6 GPUs are free on 3 nodes"
    with pytest.raises(ValueError, match=wanted):
        room(cluster, {"CPU": 3.0}, 1, 1)


def test_room_waits_for_actors_that_are_about_to_leave(monkeypatch):
    cluster = Cluster({})
    answers = iter([{}, {0: {"CPU": 1.0}}, {0: {"CPU": 4.0}}])
    monkeypatch.setattr(cluster, "available_resources_per_node", lambda: next(answers))
    assert room(cluster, {"CPU": 1.0}, 1, 4) == 4


def test_device_and_gpus_of_an_actor_have_to_agree(installed):
    actors = RayActors(address="local")
    assert actors.need(Machine()) == {"CPU": 1.0}
    assert actors.need(Machine(device="cuda", threads=3)) == {"CPU": 3.0, "GPU": 1.0}
    assert RayActors(address="local", gpus=0.5).need(Machine(device="cuda"))["GPU"] == 0.5
    for gpus, device, got in ((1, "cpu", "1 with cpu"), (0, "cuda", "0 with cuda")):
        with pytest.raises(
            ValueError, match=f"^gpus_per_actor: expected more than 0 .*, got {got}"
        ):
            RayActors(address="local", gpus=gpus).need(Machine(device=device))
    with pytest.raises(
        ValueError, match="^device: expected cpu or cuda on Ray, got cuda:1. Ray gives"
    ):
        actors.need(Machine(device="cuda:1"))


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ([], "--address: expected HOST:PORT of a Ray cluster, or local to start one here, got none. Start a cluster (docs/scale.md), or pass --part K/N, which needs no Ray."),
        (["--address", "auto"], "--address: expected HOST:PORT of a Ray cluster, or local to start one here, got 'auto'."),
        (["--address", FREE], f"--address: expected a Ray cluster at {FREE}, got no answer (Connection refused). Start it, or pass --part K/N, which needs no Ray."),
        (["--address", FREE, "--actors", "0"], "--actors: expected N, or MIN:MAX, of 1 to 10,000, got 0."),
        (["--address", FREE, "--actors", "3:2"], "--actors: expected N, or MIN:MAX, of 1 to 10,000, got (3, 2)."),
        (["--address", FREE, "--actors", "many"], "--actors: expected N or MIN:MAX, such as 8 or 2:16, got 'many'."),
        (["--address", FREE, "--gpus-per-actor", "-1"], "--gpus-per-actor: expected 0 or more GPUs, got -1.0."),
        (["--address", FREE, "--gpus-per-actor", "1"], "--gpus-per-actor: expected more than 0 with --device cuda, and 0 without, got 1 with cpu."),
        (["--address", FREE, "--device", "cuda:0"], "--device: expected cpu or cuda on Ray, got cuda:0. Ray gives each actor its GPU."),
        (["--address", FREE, "--device", "tpu"], "--device: expected cpu, or cuda where there is a GPU, got tpu. asrkit doctor says more."),
        (["--address", FREE, "--workers", "2"], "--workers: expected no --on ray with it, got 2. --actors N gives processes."),
        (["--address", FREE, "--part", "0/2"], "--part: expected no --on ray with it, got 0/2. Pass one of them."),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_line(installed, talks, model, tmp_path, capsys, more, wanted):
    out = ["--out", str(tmp_path / "out"), "--shards", "--on", "ray", "--no-progress"]
    assert main(["transcribe", str(talks), "--model", str(model), *out, *more]) == 2
    assert capsys.readouterr().err == f"asrkit transcribe: {wanted}\n"
    assert "ray" not in sys.modules


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (["--on", "ray"], "--on: expected --shards with it, got ray."),
        (["--address", "local"], "--address: expected --on ray with it, got local."),
        (["--shards", "--actors", "2"], "--actors: expected --on ray with it, got 2."),
    ],
)
def test_options_of_ray_need_it(speech, model, capsys, more, wanted):
    assert main(["transcribe", str(speech[0]), "--model", str(model), *more]) == 2
    assert capsys.readouterr().err == f"asrkit transcribe: {wanted}\n"


def test_a_plan_for_gpus_that_are_elsewhere_is_made_here(talks, task, tmp_path):
    made = plan(talks, task, tmp_path / "cuda", device="cuda")
    assert made.made_by == plan(talks, task, tmp_path / "cpu").made_by


def asked(actor, name):
    """What an actor answers for a shard."""
    (answer,) = actor({"name": [name]})["answer"]
    return json.loads(answer)


@pytest.fixture
def actor():
    """Makes an actor that ends with the test: of a folder."""
    made = []

    def make(out):
        machine = json.dumps(as_json(Machine(threads=1)))
        made.append(ray_actors.ShardActor(str(out), machine, "run"))
        return made[-1]

    yield make
    for one in made:
        one.worker.__exit__(None, None, None)


def test_an_actor_hears_shards_in_one_process_and_answers_with_their_counts(
    talks, task, tmp_path, wanted, found, actor
):
    made = plan(talks, task, tmp_path / "out", shard_h=4 / 3600)
    one = actor(made.out)
    answers = [asked(one, shard.name) for shard in made.shards]
    process = one.worker.worker.process
    assert process.poll() is None and found(made.out) == wanted(talks)
    assert [answer["shard"] for answer in answers] == [shard.name for shard in made.shards]
    assert sum(answer["counts"]["recordings"] for answer in answers) == 12
    assert sum(answer["failed"] for answer in answers) == 3
    audio_s = sum(answer["counts"]["audio_s"] for answer in answers)
    assert sum(answer["heard_s"] for answer in answers) == pytest.approx(audio_s) and audio_s > 100
    again = asked(one, made.shards[0].name)  # done before: nothing of it is heard now
    assert again == answers[0] | {"heard_s": 0, "failed": 0}
    assert one.worker.worker.process is process
    assert not [*made.work.glob("*/starts-*")][1:]  # of the shard that was asked for twice


def test_an_actor_says_in_one_line_what_keeps_it_from_hearing(talks, task, tmp_path, actor):
    answer = asked(actor(tmp_path / "elsewhere"), "x")
    assert answer["stop"].startswith("out: expected a folder with a plan, got no plan.json in")
    assert answer["node"] == os.uname().nodename


def test_a_shard_whose_actors_end_again_and_again_ends_the_run(talks, task, tmp_path, actor):
    made = plan(talks, task, tmp_path / "out", shard_h=1.0)
    name = made.shards[0].name
    log = made.work / name / "starts-run"
    log.parent.mkdir()
    log.write_bytes(b"." * ray_actors.MOST_STARTS)
    answer = asked(actor(made.out), name)
    assert answer["stop"].startswith(f"the actors that heard shard {name} ended 20 times. The same")
    (log.parent / "starts-run").unlink()
    assert asked(actor(made.out), name)["counts"]["recordings"] == 12
