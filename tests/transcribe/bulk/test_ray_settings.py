"""What is decided about a Ray cluster before Ray is imported, and what an actor does: none of this needs Ray."""

import importlib.util
import json
import sys

import pytest

from asrkit.cli import main
from asrkit.transcribe.bulk import Machine, RayActors, plan, ray_actors
from asrkit.transcribe.bulk.tasks import as_json

AT = ["--address", "127.0.0.1:1"]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """Nothing in the environment about Ray; processes take one thread each."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def installed(monkeypatch):
    """As if Ray were installed; nothing here gets as far as to import it."""
    monkeypatch.setattr(ray_actors, "NEEDED", ())


def test_ray_that_is_absent_is_one_line_that_names_parts(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ray" else find("os")
    )
    remedy = "pip install .asrkit.scale.., or pass --part K/N, which needs no Ray"
    with pytest.raises(
        ValueError, match=f"^on: expected Ray Data, got no ray. {remedy}"
    ):
        RayActors(address="local")


def test_device_and_gpus_of_an_actor(installed):
    actors = RayActors(address="local")
    assert actors.need(Machine()) == {"CPU": 1.0}
    assert actors.need(Machine(device="cuda", threads=3)) == {"CPU": 3.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (["--shards"], "--address: expected HOST:PORT of a Ray cluster, or local to start one here, got none. Start a cluster (docs/scale.md), or pass --part K/N, which needs no Ray."),
        (["--shards", *AT, "--actors", "0"], "--actors: expected 1 to 10,000, got 0."),
        (["--shards", *AT, "--device", "cuda:0"], "--device: expected cpu or cuda with --on ray, got cuda:0."),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_line(
    installed, talks, model, tmp_path, capsys, more, wanted
):
    out = ["--out", str(tmp_path / "out"), "--on", "ray", "--no-progress"]
    assert (
        main(
            [
                "transcribe",
                "--dtype",
                "float32",
                str(talks),
                "--model",
                str(model),
                *out,
                *more,
            ]
        )
        == 2
    )
    assert capsys.readouterr().err == f"asrkit transcribe: {wanted}\n"
    assert "ray" not in sys.modules


def test_an_actor_transcribes_shards_in_one_process_and_answers_with_their_counts(
    talks, task, tmp_path, wanted, found
):
    made = plan(talks, task, tmp_path / "out", shard_h=4 / 3600)
    actor = ray_actors.ShardActor(
        str(made.out), json.dumps(as_json(Machine(threads=1)))
    )
    with actor.worker:
        answers = [answer_of(actor, shard.name) for shard in made.shards]
        process = actor.worker.process
        again = answer_of(
            actor, made.shards[0].name
        )  # done before: nothing of it is done now
        assert actor.worker.process is process
    assert found(made.out) == wanted(talks)
    assert [answer["shard"] for answer in answers] == [
        shard.name for shard in made.shards
    ]
    assert sum(answer["counts"]["recordings"] for answer in answers) == 12
    audio_s = sum(answer["counts"]["audio_s"] for answer in answers)
    transcribed_s = sum(answer["transcribed_s"] for answer in answers)
    assert transcribed_s == pytest.approx(audio_s) and audio_s > 100
    assert again == answers[0] | {"transcribed_s": 0}


def answer_of(actor, name):
    """What an actor answers for a shard."""
    (answer,) = actor({"name": [name]})["answer"]
    return json.loads(answer)
