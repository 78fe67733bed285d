"""Workers: which one does what, and what becomes of jobs whose worker ends."""

import os
import signal
import time
from pathlib import Path

import pytest

from asrkit.transcribe.workers import Layout, Workers, transcribe_jobs

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="this system forks no process"
)
TWO = Layout(cores=((), ()), threads=1)
ENOUGH_S = 60.0
ORPHANS = """
import os, time
from asrkit.transcribe.workers import Layout, Workers

def work(job):
    os.write(2, b"%d\\n" % os.getpid())
    time.sleep(1e6)

with Workers(Layout(cores=((), (), ()), threads=1), work) as workers:
    jobs = iter(enumerate("abc"))
    next(workers.results(lambda: next(jobs, None)))
"""


def doubled(items):
    """Twice each number; `die` ends the worker, and an `odd` one is an error that nothing expects."""
    for item in items:
        if item == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if item == "odd":
            raise KeyError(item)
    return [(2 * item, os.getpid()) for item in items]


def failed(item):
    """What stands for an item that ended its worker twice."""
    return item, None


def outcome(jobs, layout=TWO, work=doubled, **how):
    """Results of each job by its number, without process ids, and these."""
    with Workers(layout, work, **how) as workers:
        found = dict(transcribe_jobs(workers, jobs, failed))
    pids = {pid for results in found.values() for _, pid in results if pid}
    return {n: [one for one, _ in results] for n, results in found.items()}, pids


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


def test_each_job_is_done_once_and_an_item_that_ends_its_worker_twice_is_an_error(
    capfd,
):
    jobs = [[1, 2], [3, "die", 4], [], ["odd"], *([n] for n in range(5, 9))]
    found, pids = outcome(jobs)
    assert found == {
        0: [2, 4], 1: [6, "die", 8], 2: [], 3: ["odd"], 4: [10], 5: [12], 6: [14], 7: [16],
    }  # fmt: skip
    assert len(pids) > 1 and os.getpid() not in pids
    wait_until(lambda: not any(map(running, pids)))
    told = [
        line for line in capfd.readouterr().err.splitlines() if " ended by " in line
    ]
    again = "; its recordings are transcribed again"
    twice = " for a second time with this recording"
    ends = sorted(line.split(") ")[1] for line in told)
    assert ends == sorted(
        f"ended by {why}{what}"
        for why in ("signal 9", "exit code 1")
        for what in (again, twice)
    )


def test_a_spawned_worker_does_the_jobs_too():
    found, pids = outcome([[1], [2]], Layout(), method="spawn")
    assert found == {0: [2], 1: [4]} and len(pids) == 1
