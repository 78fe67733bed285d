"""Training by several processes: the same as by one, whatever happens to them."""

import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import soundfile
import torch
import torch.distributed as dist

from asrkit.cli import main
from asrkit.data import Utterances
from asrkit.files import LOCK
from asrkit.models import Checkpoint, TransducerModel
from asrkit.runtime import usable_cores
from asrkit.training import evaluate, train
from asrkit.training.lanes import weigh
from asrkit.training.processes import _number_of_attempt

sys.path.insert(0, str(Path(__file__).parent))
from gang import (
    ATTENTION,
    CHAIN,
    CONFIG,
    JASPER,
    LAMB,
    MODEL,
    NOVOGRAD,
    RECURRENT,
    SMOOTHED,
    TOKENIZER,
    WAYS,
    batches_from,
    every_pair,
    losses,
    run,
    work,
)

pytestmark = pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(),
    reason="needs Linux: sockets and processes are read in /proc",
)


@pytest.fixture(scope="module")
def gang(tiny_speech, tmp_path_factory, start_method):
    """Folder in which four processes have left what they found in all scenarios."""
    folder = tmp_path_factory.mktemp("gang")
    torch.save(tiny_speech, folder / "speech.pt")
    torch.multiprocessing.start_processes(work, (folder,), nprocs=4, start_method=start_method)
    return folder


@pytest.fixture(scope="module")
def alone(tiny_speech, tmp_path_factory):
    """The run of two lanes by one process."""
    out = tmp_path_factory.mktemp("alone")
    return train(MODEL, TOKENIZER, tiny_speech, tiny_speech, out=out, config=CONFIG, progress=False)


def found(gang: Path, name: str, rank: int = 0) -> object:
    """What a scenario has left on a rank."""
    return json.loads((gang / f"{name}-{rank}.json").read_text())


def apart(some: list[float], others: list[float]) -> float:
    """Largest relative difference between the losses of two runs."""
    ratios = torch.tensor(some, dtype=torch.float64) / torch.tensor(others, dtype=torch.float64)
    return (ratios - 1).abs().max().item()


def test_two_ranks_train_bit_for_bit_what_one_process_trains(gang, alone):
    for rank in (0, 1):
        their_losses, dev, _ = found(gang, "replicated", rank)
        assert their_losses == losses(alone)
        assert dev == str(alone.dev)
    states = [torch.load(out / "state.pt") for out in (gang / "replicated", alone.path.parent)]
    for part in ("model", "ema"):
        for name, value in states[0][part].items():
            assert torch.equal(value, states[1][part][name]), name


def test_a_rank_waits_two_minutes_for_the_others_once_the_first_step_is_done(gang):
    assert found(gang, "replicated", 1)[2] == [True] * CONFIG.steps


def test_sharded_weights_learn_what_whole_ones_learn(gang, alone):
    assert apart(found(gang, "sharded"), losses(alone)) < 1e-5


def test_an_lstm_learns_by_lamb_on_two_ranks_what_it_learns_on_one_and_by_mean_of_means_does_not(
    gang, tiny_speech, tmp_path, monkeypatch
):
    whole = losses(run(tiny_speech, tmp_path / "whole", LAMB, model=RECURRENT))
    theirs = found(gang, "recurrent_sharded")
    assert found(gang, "recurrent") == theirs[:10]
    assert apart(theirs, whole) < 1e-4  # 2e-7 by the order of sums

    def mean_of_means(per_label, labels, all_labels, *, processes):
        """The gradient of the mean of the lanes' means; the value stays that of `weigh`."""
        wrong = per_label * (processes / LAMB.lanes)
        right = weigh(per_label, labels, all_labels, processes=processes)
        return wrong + (right - wrong).detach()

    monkeypatch.setattr("asrkit.training.state.weigh", mean_of_means)
    wrong = losses(run(tiny_speech, tmp_path / "means", LAMB, model=RECURRENT))
    assert apart(wrong[:1], whole[:1]) < 1e-6
    assert apart(wrong, whole) > 1e-3  # 5e-2


def test_a_ctc_model_learns_by_novograd_on_two_ranks_what_it_learns_on_one(
    gang, tiny_speech, tmp_path
):
    whole = losses(run(tiny_speech, tmp_path, NOVOGRAD, model=JASPER))
    theirs = found(gang, "ctc_alone_sharded")
    assert found(gang, "ctc_alone") == theirs[:3]
    assert theirs == pytest.approx(whole, rel=1e-4)


def test_an_attention_decoder_learns_on_two_ranks_what_it_learns_on_one(
    gang, tiny_speech, tmp_path
):
    whole = losses(run(tiny_speech, tmp_path / "joint", SMOOTHED, model=ATTENTION))
    theirs = found(gang, "attention_sharded")
    assert found(gang, "attention") == theirs[:3]
    assert theirs == pytest.approx(whole, rel=1e-4)
    config = replace(SMOOTHED, steps=2, ctc_weight=0.0)
    alone = losses(run(tiny_speech, tmp_path / "alone", config, model=ATTENTION))
    assert found(gang, "attention_alone") == pytest.approx(alone, rel=1e-4)


def test_weights_without_a_gradient_do_not_hold_up_the_ranks(gang, tiny_speech, tmp_path):
    config = replace(CONFIG, steps=3, ctc_weight=0.0)
    assert found(gang, "untrained_heads") == losses(run(tiny_speech, tmp_path, config))


def test_ranks_share_an_evaluation_out(gang, tiny_speech):
    torch.manual_seed(0)
    checkpoint = Checkpoint(TransducerModel(MODEL).eval(), TOKENIZER, {}, {})
    rate, texts, _ = evaluate(checkpoint, tiny_speech, batch_seconds=5.0)
    for rank in (0, 1):
        assert found(gang, "scores", rank) == [str(rate), texts]


@pytest.mark.parametrize(
    "scenario, said",
    [
        ("other_data", "train_set: expected the same on all processes"),
        ("other_settings", "seed: expected the same on all processes, 0 as on rank 0, got 1"),
        ("other_torch", "torch: expected the same on all processes"),
        ("other_batches", "train_set: expected the same plan of step 2 on all processes"),
        ("uneven_lanes", "lanes: expected a multiple of the 2 processes, got 3"),
        ("folder_in_use", "out: expected a folder of no other training that runs now"),
    ],
)
def test_ranks_that_do_not_fit_together_are_all_refused(gang, scenario, said):
    for rank in (0, 1):
        assert said in found(gang, scenario, rank)


def test_all_ranks_stop_and_save_when_one_cannot_read_its_audio(gang):
    assert found(gang, "unreadable", 0) == "Another process could not make its batches."
    assert found(gang, "unreadable", 1) == "audio: expected sound."
    assert torch.load(gang / "unreadable/state.pt")["step"] == 3


def test_ranks_wait_for_a_slow_one_and_train_the_same(gang, tiny_speech, tmp_path):
    config = replace(CONFIG, steps=5)
    alone = run(tiny_speech, tmp_path, config, batches=batches_from(tiny_speech))
    for rank in (0, 1):
        assert found(gang, "slow", rank) == losses(alone)


@pytest.mark.parametrize("scenario", ["not_finite", "not_finite_sharded"])
def test_all_ranks_skip_a_step_whose_gradient_is_not_finite_on_one(gang, scenario):
    for rank in (0, 1):
        norms = found(gang, scenario, rank)[0]
        assert [math.isfinite(norm) for norm in norms] == [True, True, False, True]
    first, before, skipped = found(gang, scenario)[1]
    assert before == skipped != first


def test_every_number_of_ranks_and_wrapper_goes_on_with_the_state_of_every_other(
    gang, tiny_speech, tmp_path
):
    whole = losses(run(tiny_speech, tmp_path, CHAIN))
    chain = every_pair(WAYS)
    pairs = set(itertools.pairwise(chain))
    assert len(pairs) == len(WAYS) ** 2
    finished, theirs = found(gang, f"link{len(chain) - 1}")
    assert finished and apart(theirs, whole) < 1e-5
    assert found(gang, "link7") == [False, theirs[:8]]  # each stopped after its step, and had saved


@pytest.fixture
def two_cores():
    """Two cores only, also for what is started: one torch thread, alone or as a rank of two."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    yield
    os.sched_setaffinity(0, before)


def corpus(folder: Path) -> str:
    """A manifest of noise: six utterances, of one to six words."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for words in range(1, 7):
        noise = 0.1 * torch.randn(4000 + 2000 * words, generator=generator)
        soundfile.write(str(folder / f"{words}.wav"), noise.numpy(), 16_000)
        text = " ".join(["yes"] * words)
        rows.append({"audio": f"{words}.wav", "text": text, "split": "train", "speaker": "x"})
        rows[-1] |= {"duration": len(noise) / 16_000, "id": str(words)}
    manifest = folder / "manifest.jsonl"
    manifest.write_text("\n".join(map(json.dumps, rows)))
    return str(manifest)


def log_lines(out: Path) -> int:
    """Whole lines of a run's log."""
    log = out / "log.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def wait_for(condition: Callable[[], bool]) -> None:
    """Return as soon as `condition` holds; fail after two minutes."""
    patience = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < patience
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening(pid: int) -> set[str]:
    """Addresses at which a process listens, as /proc writes them: hexadecimal."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        kind, _, inode = str(descriptor.readlink()).partition(":")
        if kind == "socket":
            inodes.add(inode.strip("[]"))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses.add(fields[1].partition(":")[0])
    return addresses


PART = ".state-*.pt"  # a state that is being written


def kill_in_mid_save(pid: int, out: Path) -> None:
    """End a rank by signal 9 while it writes the state of the run."""
    patience = time.monotonic() + 120
    while True:
        os.kill(pid, signal.SIGSTOP)  # so that it cannot end the write after a look
        if list(out.glob(PART)):
            os.kill(pid, signal.SIGKILL)
            return
        os.kill(pid, signal.SIGCONT)
        assert time.monotonic() < patience
        time.sleep(0.001)


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1


@contextmanager
def two_ranks(command: list[str], out: Path) -> Iterator[tuple[subprocess.Popen, list[int]]]:
    """`asrkit train --ranks 2`, and the process numbers of its ranks, some steps on."""
    before = log_lines(out)
    agent = subprocess.Popen(
        [sys.executable, "-m", "asrkit", *command, "--ranks", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ranks: list[int] = []
    try:
        wait_for(lambda: log_lines(out) >= before + 4 or agent.poll() is not None)
        assert agent.poll() is None, agent.stdout.read()
        ranks = children(agent.pid)
        assert len(ranks) == 2
        yield agent, ranks
    finally:
        for pid in (agent.pid, *ranks):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        agent.wait()
        agent.stdout.close()


def test_a_run_whose_ranks_and_agents_are_killed_ends_as_one_that_nobody_touched(
    tmp_path, capfd, monkeypatch, two_cores
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out = tmp_path / "run"
    command = ["train", "--manifest", corpus(tmp_path), "--lanes", "2"]
    command += ["--steps", "30", "--seconds", "inf"]
    command += ["--no-progress", "--checkpoint-seconds", "0", "--out"]
    here = [*command, str(out)]

    with two_ranks([*here, "--fresh"], out) as (agent, ranks):
        addresses = set().union(*map(listening, (agent.pid, *ranks)))
        assert addresses and addresses <= LOOPBACK  # gloo's, of each rank
        os.kill(ranks[1], signal.SIGKILL)
        steps = log_lines(out)
        wait_for(lambda: log_lines(out) > steps + 2)  # the agent has started both again, not anew
        again = children(agent.pid)
        assert len(again) == 2 and not set(again) & set(ranks)
        agent.kill()
        wait_for(lambda: not any(map(alive, again)))  # orphans save, and leave
        saved = torch.load(out / "state.pt")["step"]
        assert saved == log_lines(out) < 30

    with two_ranks(here, out) as (agent, _):
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(60) == 128 + signal.SIGTERM
        said = agent.stdout.read()
        assert f"resuming {out} at step {saved}" in said and "stopped at step" in said
        assert torch.load(out / "state.pt")["step"] == log_lines(out) >= saved + 4

    with two_ranks(here, out) as (agent, ranks):
        agent.kill()
        kill_in_mid_save(ranks[0], out)
        wait_for(lambda: not alive(ranks[1]))
    assert list(out.glob(PART))

    assert main(here) == 0  # two lanes, one process
    assert main([*command, str(tmp_path / "whole")]) == 0
    logs = []
    for folder in (out, tmp_path / "whole"):
        lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
        logs.append([(line["step"], line["loss"], line["gradient_norm"]) for line in lines])
    assert logs[0] == logs[1] and len(logs[0]) == 30
    weights = [torch.load(folder / "state.pt")["model"] for folder in (out, tmp_path / "whole")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    names = {LOCK, "log.jsonl", "model.safetensors", "state-previous.pt", "state.pt"}
    assert {path.name for path in out.iterdir()} <= names


@contextmanager
def two_nodes(command: list[str], folder: Path) -> Iterator[list[subprocess.Popen]]:
    """Two agents of torchrun that meet over TCP as on two machines, with a rank each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    agents = []
    try:
        for node in ("0", "1"):
            flags = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3"]
            flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
            flags += ["--rdzv-id", "test", "--node-rank", node, "--local-addr", "127.0.0.1"]
            with (folder / f"said-{node}").open("w") as said:
                agent = subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", *flags, "-m", *command],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                    stdout=said,
                    stderr=subprocess.STDOUT,
                )
            agents.append(agent)
        yield agents
    finally:
        for agent in agents:
            if agent.poll() is None:
                for pid in (*children(agent.pid), agent.pid):
                    os.kill(pid, signal.SIGKILL)
                agent.wait()


def test_a_killed_rank_of_two_torchruns_starts_all_again_from_the_state_even_with_fresh(tmp_path):
    out = tmp_path / "run"
    command = ["asrkit.cli", "train", "--manifest", corpus(tmp_path), "--out", str(out), "--fresh"]
    command += ["--steps", "12", "--seconds", "inf", "--no-progress", "--checkpoint-seconds", "0"]
    with two_nodes(command, tmp_path) as agents:
        wait_for(lambda: log_lines(out) >= 3)
        # its agent counts a restart, the other does not: both ranks have to agree on it
        os.kill(children(agents[1].pid)[0], signal.SIGKILL)
        assert [agent.wait(240) for agent in agents] == [0, 0]
    said = (tmp_path / "said-0").read_text() + (tmp_path / "said-1").read_text()
    assert said.count(f"resuming {out} at step") == 1, said
    assert log_lines(out) == 12


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_ranks_agree_on_the_number_of_their_attempt_whatever_the_dead_left(monkeypatch, order):
    patience = timedelta(seconds=20)
    monkeypatch.setattr("asrkit.training.processes.PATIENT", patience)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)
    stores = [server]
    for _ in range(2):  # a store serves one call at a time
        stores.append(dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=patience))
    for attempt in (1, 2, 3):
        with ThreadPoolExecutor(3) as pool:
            numbers = [pool.submit(_number_of_attempt, stores[rank], rank, 3) for rank in order]
            assert [number.result(60) for number in numbers] == [attempt] * 3
        server.set("asrkit-asked-1", "asrkit-told-dead")


def test_a_port_in_use_is_said_in_one_line(tmp_path, capsys, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (variables | {"MASTER_PORT": port}).items():
            monkeypatch.setenv(name, value)
        command = ["train", "--manifest", corpus(tmp_path), "--steps", "2", "--no-progress"]
        assert main([*command, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("asrkit train: ") and f"port: {port}" in error and "\n" not in error
    assert not (tmp_path / "run/log.jsonl").exists()


def test_an_error_of_the_input_is_said_once_in_one_line_and_nothing_starts_again(tmp_path):
    command = ["train", "--manifest", corpus(tmp_path), "--steps", "2", "--no-progress"]
    command += ["--out", str(tmp_path / "run"), "--ranks", "2", "--lanes", "4"]
    sound = (tmp_path / "1.wav").read_bytes()
    (tmp_path / "1.wav").write_bytes(sound[: len(sound) // 2])  # ranks read it, the agent does not
    done = subprocess.run(
        [sys.executable, "-m", "asrkit", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("asrkit train: ") == 1 and "1.wav" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments, variables, said",
    [
        (["--ranks", "0"], {}, "--ranks: expected from 1 to the"),
        (["--ranks", str(usable_cores() + 1)], {}, "--ranks: expected from 1 to the"),
        (["--ranks", "1", "--lanes", "0"], {}, "--lanes: expected a multiple of the 1 ranks"),
        (["--ranks", "1"], {"RANK": "0"}, "--ranks: expected no --ranks under torchrun, got 1"),
        (["--lanes", "3"], {"WORLD_SIZE": "2"}, "--lanes: expected a multiple of the 2 ranks"),
    ],
)
def test_ranks_and_lanes_that_do_not_go_are_refused_in_one_line(
    tmp_path, capsys, monkeypatch, arguments, variables, said
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--out", str(tmp_path / "run"), *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error
    assert not (tmp_path / "run").exists()


def test_more_lanes_than_utterances_are_refused(tiny_speech, tmp_path):
    few = Utterances(
        waveforms=tiny_speech.waveforms[:3],
        ids=tiny_speech.ids[:3],
        texts=tiny_speech.texts[:3],
        speakers=tiny_speech.speakers[:3],
    )
    with pytest.raises(ValueError, match="lanes: expected from 1 to the number of utterances, 3"):
        run(few, tmp_path, replace(CONFIG, lanes=4))
