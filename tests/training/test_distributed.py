"""Training by several processes: the same as by one, whatever happens to them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import soundfile
import torch

from asrkit.cli import main
from asrkit.files import lock

sys.path.insert(0, str(Path(__file__).parent))
from trainings import ATTENTION, CTC, ENCODERS, SHORT, TDT, TRANSDUCER, losses, run

TRAINED = {  # what two processes train to the losses of one that accumulates
    "transducer": (TRANSDUCER, SHORT),
    "idle CTC head": (TRANSDUCER, replace(SHORT, ctc_weight=0.0)),
    "TDT by LAMB": (TDT, replace(SHORT, optimizer="lamb")),
    "Jasper by NovoGrad": (
        replace(CTC, encoder=ENCODERS["jasper"]),
        replace(SHORT, optimizer="novograd"),
    ),
    "attention": (ATTENTION, SHORT),
}
REFUSED = {
    "other seed": "settings: expected the same on all processes, got other ones on rank 1: seed 0 -> 1",
    "other data": "got other ones on rank 1: train_set sha256:",
    "folder in use": "out: expected a folder of no other training that runs now",
}


def free_ports(count):
    """Ports of this machine that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def refusal(rank, name, speech, out):
    """Text of the error with which a process is refused."""
    config = replace(SHORT, seed=rank if name == "other seed" else 0)
    rows = range(len(speech) - rank if name == "other data" else len(speech))
    try:
        run(speech.select(rows), out, config)
    except ValueError as error:
        return str(error)
    return ""


def work(rank, folder, ports):
    """Train, and be refused, as one of two processes; what came of it goes to `RANK.json`."""
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    speech = torch.load(folder / "speech.pt", weights_only=False)
    ports = iter(ports)
    found = {}
    for name, (model, config) in TRAINED.items():
        os.environ["MASTER_PORT"] = str(next(ports))
        found[name] = losses(run(speech, folder / name, config, model))
    for name in REFUSED:
        os.environ["MASTER_PORT"] = str(next(ports))
        found[name] = refusal(rank, name, speech, folder / name)
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def pair(tiny_speech, tmp_path_factory, start_method):
    """Folder in which two processes have left what they found."""
    folder = tmp_path_factory.mktemp("pair")
    torch.save(tiny_speech, folder / "speech.pt")
    ports = free_ports(len(TRAINED) + len(REFUSED))
    with lock(folder / "folder in use"):
        torch.multiprocessing.start_processes(
            work, (folder, ports), nprocs=2, start_method=start_method
        )
    return folder


@pytest.mark.parametrize("name", TRAINED)
def test_two_processes_train_what_one_accumulates(pair, tiny_speech, tmp_path, name):
    model, config = TRAINED[name]
    alone = losses(run(tiny_speech, tmp_path, replace(config, accumulate=2), model))
    theirs = json.loads((pair / "0.json").read_text())[name]
    assert theirs == pytest.approx(alone, rel=1e-5)


def test_processes_that_do_not_fit_together_are_refused(pair):
    found = [json.loads((pair / f"{rank}.json").read_text()) for rank in (0, 1)]
    for name, said in REFUSED.items():
        assert said in found[1][name]
    assert REFUSED["folder in use"] in found[0]["folder in use"]


@pytest.fixture
def two_cores():
    """Two cores only, also for what is started: one torch thread, alone or as one of two."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    yield
    os.sched_setaffinity(0, before)


def corpus(folder):
    """A manifest of noise: six utterances, of one to six words."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for words in range(1, 7):
        noise = 0.1 * torch.randn(4000 + 2000 * words, generator=generator)
        soundfile.write(str(folder / f"{words}.wav"), noise.numpy(), 16_000)
        text = " ".join(["yes"] * words)
        rows.append(
            {"audio": f"{words}.wav", "text": text, "split": "train", "id": str(words)}
        )
    (folder / "manifest.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "manifest.jsonl")


@contextmanager
def torchrun(command):
    """Two processes of `asrkit`, restarted when one dies; ended with the block."""
    flags = [
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        "-m",
        "asrkit",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    agent = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *flags, *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield agent
    finally:
        agent.terminate()
        agent.wait()


@pytest.mark.skipif(
    sys.platform != "linux", reason="asks /proc for the processes of torchrun"
)
def test_a_killed_process_of_torchrun_starts_all_again_from_the_state_even_with_fresh(
    tmp_path, capfd, two_cores
):
    command = [
        "train",
        "--manifest",
        corpus(tmp_path),
        "--steps",
        "16",
        "--seconds",
        "inf",
    ]
    command += ["--no-progress", "--checkpoint-seconds", "0", "--out"]
    log = tmp_path / "run/log.jsonl"
    with torchrun([*command, str(tmp_path / "run"), "--fresh"]) as agent:
        patience = time.monotonic() + 120
        while not log.exists() or log.read_bytes().count(b"\n") < 4:
            assert agent.poll() is None and time.monotonic() < patience
            time.sleep(0.01)
        children = (
            Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        )
        assert len(children) == 2
        os.kill(int(children[1]), signal.SIGKILL)
        said, _ = agent.communicate(timeout=240)
        assert agent.returncode == 0, said
    assert said.count(f"resuming {tmp_path / 'run'} at step") == 1, said
    assert said.count("trained for 16 steps") == 1
    assert main([*command, str(tmp_path / "whole"), "--accumulate", "2"]) == 0
    logs = []
    for path in (log, tmp_path / "whole/log.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        logs.append([(line["step"], line["loss"]) for line in lines])
    assert len(logs[0]) == 16
    assert logs[0] == logs[1]  # a sum of two is the same in either order
