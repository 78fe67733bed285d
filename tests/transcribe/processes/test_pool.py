"""Forked processes that work on jobs: who has what, and what comes of those that die."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from asrkit.models.packed import PackedLinear
from asrkit.transcribe.processes import (
    Done,
    Ended,
    Layout,
    Message,
    Pool,
    choose_layout,
    pool,
)

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="this system forks no process"
)
TWO = Layout(cores=((), ()), threads=1, why="")
ENOUGH_S = 60.0
ORPHANS = """
import sys, time
from asrkit.transcribe.processes import Layout, Message, Pool

def work(channel):
    for job in channel.jobs():
        channel.send(__import__("os").getpid())
        time.sleep(1e6)

jobs = [1, 2]
layout = Layout(cores=((), ()), threads=1, why="")
with Pool(layout, work, lambda held: None if held or not jobs else jobs.pop()) as pool:
    for event in pool.events():
        if isinstance(event, Message):
            print(event.value, flush=True)
"""


@pytest.fixture(autouse=True)
def small_tensors(one_thread):
    """One thread, as whoever forks has it."""


def drawn_from(jobs):
    """A `draw` that hands out these jobs, also as the second of a process."""
    return lambda held: jobs.pop(0) if jobs else None


def outcome(layout, work, draw):
    """All events of a pool, and what each job said."""
    events, said = [], {}
    with Pool(layout, work, draw) as made:
        for event in made.events():
            events.append(event)
            if isinstance(event, Message):
                said.setdefault(event.job, []).append(event.value)
    return events, said


def running(pid):
    """Whether a process is there and has not ended: a zombie has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition):
    """Wait for it, but not for ever."""
    deadline = time.monotonic() + ENOUGH_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def doubled(channel):
    """Work that says each job twice, and where it was done."""
    for job in channel.jobs():
        channel.send(2 * job)
        channel.send(os.getpid())
        channel.done()


def test_each_job_is_done_once_and_said_in_its_order():
    events, said = outcome(TWO, doubled, drawn_from([*range(7)]))
    assert sorted(event.job for event in events if isinstance(event, Done)) == [
        *range(7)
    ]
    assert all(said[job][0] == 2 * job for job in range(7))
    pids = {values[1] for values in said.values()}
    assert len(pids) == 2 and os.getpid() not in pids
    wait_until(lambda: not any(map(running, pids)))


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system pins no process"
)
def test_a_process_has_the_cores_and_the_threads_of_its_layout():
    def work(channel):
        for _ in channel.jobs():
            channel.send(
                (tuple(sorted(os.sched_getaffinity(0))), torch.get_num_threads())
            )
            channel.done()

    cpus = sorted(os.sched_getaffinity(0))
    layout = Layout(cores=((cpus[0],), (cpus[-1],)), threads=1, why="")
    _, said = outcome(layout, work, drawn_from([1, 2]))
    assert {values[0] for values in said.values()} == {
        ((cpus[0],), 1),
        ((cpus[-1],), 1),
    }
    assert sorted(os.sched_getaffinity(0)) == cpus
    assert choose_layout(1).pinned or len(cpus) > 1


def test_a_killed_process_is_told_with_what_it_held_and_another_one_goes_on():
    jobs = ["fine", "die", "late"]

    def work(channel):
        for job in channel.jobs():
            if job == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            channel.send(os.getpid())
            channel.done()

    layout = Layout(cores=((),), threads=1, why="")
    events, said = outcome(layout, work, drawn_from(jobs))
    (ended,) = [event for event in events if isinstance(event, Ended)]
    assert (ended.number, ended.why, ended.jobs[0]) == (1, "signal 9", "die")
    assert said["fine"] == [ended.pid]
    lost = {*ended.jobs} - {"die"}
    assert {*said} | lost == {
        "fine",
        "late",
    }  # the next job may have been given to it already


def test_several_threads_want_a_process_that_has_used_one(one_thread):
    layout = Layout(cores=((),), threads=2, why="")
    torch.set_num_threads(2)
    with pytest.raises(
        ValueError, match="^threads: expected 1, or torch.set_num_threads.1. befo"
    ):
        Pool(layout, doubled, drawn_from([]))


def test_processes_that_end_again_and_again_are_one_line(monkeypatch):
    monkeypatch.setattr(pool, "MOST_DEATHS", 4)
    with pytest.raises(
        RuntimeError, match="ended 4 times in a row .exit code 7.. Fewer --workers"
    ):
        outcome(TWO, lambda channel: os._exit(7), lambda held: None if held else 1)


def test_a_process_that_says_it_cannot_go_on_is_one_line():
    def work(channel):
        raise ValueError("disk: full\nof it")

    with pytest.raises(RuntimeError, match="^disk: full of it$"):
        outcome(TWO, work, drawn_from([1]))


@pytest.mark.skipif(not Path("/proc").exists(), reason="this system has no /proc")
def test_no_process_outlives_the_one_that_forked_it_however_that_ended():
    for how in (signal.SIGKILL, signal.SIGTERM):
        parent = subprocess.Popen(
            [sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True
        )
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(map(running, pids))
        parent.send_signal(how)
        assert parent.wait(ENOUGH_S) == -how
        parent.stdout.close()
        wait_until(lambda these=pids: not any(map(running, these)))


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="no smaps_rollup here"
)
@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here"
)
@torch.inference_mode()
def test_packed_weights_are_in_memory_once():
    plain = nn.Linear(4096, 8192)
    layer = PackedLinear(plain.weight, plain.bias).eval()  # in oneDNN's own layout
    del plain
    weights = 4 * 4096 * 8192
    row = torch.randn(1, 4096)
    wanted = layer(row)

    def work(channel):
        for _ in channel.jobs():
            right = torch.equal(layer(row), wanted)
            rollup = Path("/proc/self/smaps_rollup").read_text()
            own, all_of_it = (
                sum(
                    int(size) * 1024
                    for size in re.findall(rf"^{kind}: *(\d+) kB", rollup, re.M)
                )
                for kind in ("Private_(?:Clean|Dirty)", "Rss")
            )
            channel.send((right, own, all_of_it))
            channel.done()

    _, said = outcome(TWO, work, drawn_from([1, 2]))
    for ((right, own, all_of_it),) in said.values():
        assert right and own < weights < all_of_it
