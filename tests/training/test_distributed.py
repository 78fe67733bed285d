"""Training by several processes: the same as by one, whatever happens to them."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asrkit.cli import main
from asrkit.files import lock

sys.path.insert(0, str(Path(__file__).parent))
from trainings import (
    ATTENTION,
    CTC,
    ENCODERS,
    SHORT,
    TDT,
    TRANSDUCER,
    logged,
    losses,
    noise_corpus,
    run,
    wait_for_lines,
)

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
    with ExitStack() as open_:
        sockets = [open_.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


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
    found = {}
    for name, port in ports.items():
        os.environ["MASTER_PORT"] = str(port)
        if name in REFUSED:
            found[name] = refusal(rank, name, speech, folder / name)
        else:
            model, config = TRAINED[name]
            found[name] = losses(run(speech, folder / name, config, model))
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def pair(tiny_speech, tmp_path_factory, start_method):
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("pair")
    torch.save(tiny_speech, folder / "speech.pt")
    names = [*TRAINED, *REFUSED]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    with lock(folder / "folder in use"):
        torch.multiprocessing.start_processes(
            work, (folder, ports), nprocs=2, start_method=start_method
        )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", TRAINED)
def test_two_processes_train_what_one_accumulates(pair, tiny_speech, tmp_path, name):
    model, config = TRAINED[name]
    alone = losses(run(tiny_speech, tmp_path, replace(config, accumulate=2), model))
    assert pair[0][name] == pytest.approx(alone, rel=1e-5)


def test_processes_that_do_not_fit_together_are_refused(pair):
    for name, said in REFUSED.items():
        assert said in pair[1][name]
    assert REFUSED["folder in use"] in pair[0]["folder in use"]


@pytest.fixture
def two_cores():
    """Two cores only, also for what is started: one torch thread, alone or as one of two."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    yield
    os.sched_setaffinity(0, before)


@contextmanager
def torchrun(command):
    """Two processes of `asrkit`, restarted when one dies; ended with the block."""
    flags = "--standalone --nproc-per-node 2 --max-restarts 3 -m asrkit".split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    agent = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *flags, *command],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield agent
    finally:
        agent.terminate()
        agent.wait()


@pytest.mark.live
@pytest.mark.skipif(
    sys.platform != "linux", reason="asks /proc for the processes of torchrun"
)
def test_a_killed_process_of_torchrun_starts_all_again_from_the_state_even_with_fresh(
    tmp_path, capfd, two_cores
):
    manifest = noise_corpus(tmp_path, *(" ".join(["yes"] * n) for n in range(1, 7)))
    command = ["train", "--manifest", manifest, "--steps", "16"]
    command += ["--seconds", "inf", "--no-progress", "--checkpoint-seconds", "0"]
    broken = tmp_path / "broken"
    whole = tmp_path / "whole"
    log = broken / "log.jsonl"
    with torchrun([*command, "--out", str(broken), "--fresh"]) as agent:
        wait_for_lines(agent, log)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text()
        _, second = map(int, children.split())
        os.kill(second, signal.SIGKILL)
        said, _ = agent.communicate(timeout=600)
    assert agent.returncode == 0, said
    assert said.count(f"resuming {broken} at step") == 1, said
    assert said.count("trained for 16 steps") == 1
    assert main([*command, "--out", str(whole), "--accumulate", "2"]) == 0
    assert len(logged(log)) == 16
    # a sum of two is the same in either order
    assert logged(log) == logged(whole / "log.jsonl")
