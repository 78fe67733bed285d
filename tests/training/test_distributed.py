"""Training by several processes: the same losses as by one, also after a kill."""

import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch

from asrkit.cli import main
from asrkit.files import lock
from asrkit.models import load_checkpoint
from asrkit.training.distributed import process_group, store_of_this_start

sys.path.insert(0, str(Path(__file__).parent))
from trainings import (
    ATTENTION,
    CTC,
    ENCODERS,
    SHORT,
    TDT,
    TOKENIZER,
    TRANSDUCER,
    logged,
    losses,
    noise_corpus,
    run,
    wait_for_lines,
)

TRAINED = {  # runs of two processes, compared with one that accumulates
    "transducer": (TRANSDUCER, SHORT),
    "idle CTC head": (TRANSDUCER, replace(SHORT, ctc_weight=0.0)),
    "TDT by LAMB": (TDT, replace(SHORT, optimizer="lamb")),
    "Jasper by NovoGrad": (
        replace(CTC, encoder=ENCODERS["jasper"]),
        replace(SHORT, optimizer="novograd"),
    ),
    "attention": (ATTENTION, SHORT),
    "float16": (TRANSDUCER, replace(SHORT, precision="float16")),  # overflows at first
    "2D buckets": (
        TRANSDUCER,
        replace(SHORT, batching="bucketed2d", buckets=2, memory=0.015),
    ),
    "corrupt": (TRANSDUCER, SHORT),  # one batch of one process has samples of NaN
    "unaligned": (CTC, SHORT),  # one batch of one process has no alignment
}
REFUSED = {
    "other seed": "settings: expected the same on all processes, got other ones on rank 1: seed 0 -> 1",
    "other data": "got other ones on rank 1: train_set sha256:",
    "folder in use": "out: expected a folder that no other training uses",
    "one utterance": "batches: expected from 1 to the number of utterances, 1, got 2. Each process, ",
}


def free_ports(count):
    """Unused ports of this machine."""
    with ExitStack() as open_:
        sockets = [open_.enter_context(socket.socket()) for _ in range(count)]
        for socket_ in sockets:
            socket_.bind(("127.0.0.1", 0))
        return [socket_.getsockname()[1] for socket_ in sockets]


def refusal(rank, name, speech, out):
    """Message of the error that a process raises."""
    config = replace(SHORT, seed=rank if name == "other seed" else 0)
    rows = range(len(speech) - rank if name == "other data" else len(speech))
    rows = rows[:1] if name == "one utterance" else rows
    try:
        run(speech.select(rows), out, config)
    except ValueError as error:
        return str(error)
    return ""


def trained(name, speech, out, **settings):
    """A run of `TRAINED`, in one process or as one of two."""
    model, config = TRAINED[name]
    wrong = 3  # the second batch of the second step
    bad = replace(speech, texts=["seven " * 40] * len(speech))

    def supplied(first):
        for number in itertools.count(first):
            source = bad if name == "unaligned" and number == wrong else speech
            batch = source.batch([number % len(speech)], TOKENIZER)
            if name == "corrupt" and number == wrong:
                batch.waveforms[0, 500:600] = math.nan
            yield batch

    options = {"batches": supplied} if name in ("corrupt", "unaligned") else {}
    with mock.patch("asrkit.training.optimizer.FIRST_SCALE", 2.0**18):
        return run(speech, out, replace(config, **settings), model, **options)


def work(rank, folder, ports):
    """Run all cases as one of two processes; losses and messages go to `RANK.json`."""
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    speech = torch.load(folder / "speech.pt", weights_only=False)
    results = {}
    for name, port in ports.items():
        os.environ["MASTER_PORT"] = str(port)
        if name in REFUSED:
            results[name] = refusal(rank, name, speech, folder / name)
        else:
            results[name] = losses(trained(name, speech, folder / name))
    (folder / f"{rank}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def pair(tiny_speech, tmp_path_factory, start_method):
    """Results of both processes, and their folder."""
    folder = tmp_path_factory.mktemp("pair")
    torch.save(tiny_speech, folder / "speech.pt")
    names = [*TRAINED, *REFUSED]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    with lock(folder / "folder in use"):
        torch.multiprocessing.start_processes(
            work, (folder, ports), nprocs=2, start_method=start_method
        )
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    return *results, folder


def test_processes_that_torchrun_did_not_start_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    message = "^processes: expected processes of torchrun, .* Start them by torchrun"
    with pytest.raises(ValueError, match=message), process_group(torch.device("cpu")):
        pass


@pytest.mark.parametrize("name", TRAINED)
def test_two_processes_equal_one_that_accumulates(pair, tiny_speech, tmp_path, name):
    tolerance = 2e-3 if name == "float16" else 1e-5
    alone = trained(name, tiny_speech, tmp_path, accumulate=2)
    for rank in (0, 1):
        wanted = pytest.approx(losses(alone), rel=tolerance, nan_ok=True)
        assert pair[rank][name] == wanted
    assert sum(map(math.isnan, losses(alone))) == (name == "corrupt")
    overflows = "overflows" in alone.history[-1]
    assert overflows == (name == "float16")
    # running statistics of batch norms too
    ours, wanted = (
        load_checkpoint(folder).model.state_dict()
        for folder in (pair[2] / name, tmp_path)
    )
    torch.testing.assert_close(ours, wanted, rtol=10 * tolerance, atol=tolerance)
    logs = [
        [json.loads(line).get("overflows") for line in file.read_text().splitlines()]
        for file in (pair[2] / name / "log.jsonl", tmp_path / "log.jsonl")
    ]
    assert logs[0] == logs[1]
    assert bool(logs[0][-1]) == (name == "float16")


def test_processes_that_do_not_fit_together_are_refused(pair):
    for name, message in REFUSED.items():
        assert message in pair[1][name]
    assert REFUSED["folder in use"] in pair[0]["folder in use"]


def start(store, order):
    """Stores of one start, by rank; processes arrive one after the other."""
    stores = {}

    def join(rank):
        stores[rank] = store_of_this_start(store, rank, len(order))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return stores


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_a_start_sees_no_key_of_an_earlier_one(order):
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(seconds=30))
    dead = start(store, order)
    dead[0].set("address", "of the dead")
    store.set("first", "killed before all had answered")
    now = start(store, order)
    assert not now[0].check(["address"])
    now[order[0]].set("address", "of now")
    assert {now[rank].get("address") for rank in order} == {b"of now"}
    assert dead[1].get("address") == b"of the dead"


@pytest.fixture
def two_cores():
    """Two cores for this process and its children: one torch thread, alone or as one of two."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    yield
    os.sched_setaffinity(0, before)


@contextmanager
def torchrun(command):
    """Two processes of `asrkit`, restarted when one dies, until the block ends."""
    flags = "--standalone --nproc-per-node 2 --max-restarts 3 -m asrkit".split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
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
    sys.platform != "linux", reason="finds the processes of torchrun in /proc"
)
def test_a_killed_process_of_torchrun_starts_all_again_from_the_state_even_with_fresh(
    tmp_path, capfd, two_cores
):
    manifest = noise_corpus(tmp_path, *(" ".join(["yes"] * n) for n in range(1, 7)))
    command = ["train", "--manifest", manifest, "--steps", "16"]
    command += ["--seconds", "inf", "--no-progress", "--checkpoint-seconds", "0"]
    command += ["--batching", "bucketed2d", "--buckets", "2", "--memory", "0.05"]
    broken = tmp_path / "broken"
    whole = tmp_path / "whole"
    log = broken / "log.jsonl"
    with torchrun([*command, "--out", str(broken), "--fresh"]) as agent:
        wait_for_lines(agent, log)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text()
        _, second = map(int, children.split())
        os.kill(second, signal.SIGKILL)
        output, _ = agent.communicate(timeout=600)
    assert agent.returncode == 0, output
    assert output.count(f"resuming {broken} at step") == 1, output
    assert output.count("trained for 16 steps") == 1
    assert main([*command, "--out", str(whole), "--accumulate", "2"]) == 0
    assert len(logged(log)) == 16
    # a sum of two is the same in either order
    assert logged(log) == logged(whole / "log.jsonl")
