"""Workers: their number and cores, their jobs, and the retries of jobs whose worker ends."""

import os
import re
import signal
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn
from waiting import running, wait_until

from asrkit.memory import free_memory
from asrkit.models.cpu.prepacked import PrepackedLinear
from asrkit.sound_files import Sound
from asrkit.threads import same_core, usable_cores
from asrkit.transcribe import Layout, choose_layout
from asrkit.transcribe.bulk import layout as layout_module
from asrkit.transcribe.bulk import workers
from asrkit.transcribe.bulk.in_workers import recording_jobs
from asrkit.transcribe.bulk.workers import Workers

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="this system forks no process"
)
pins = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system pins no process"
)
TWO = Layout(cores=((), ()), threads=1)


def doubled(items, advance):
    """Twice each number, with the process id; words end the worker, or are errors."""
    if items:
        advance(0.5)
    for item in items:
        if item == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if item == "odd":
            raise KeyError(item)  # which nothing expects: it ends the worker too
        if item == "full":
            raise OSError(28, "No space left on device")
        if item == range(3, 6):
            os._exit(3)
    numbers = chain.from_iterable(map(whole_numbers, items))
    return [(2 * number, os.getpid()) for number in numbers]


def whole_numbers(item):
    """The items that are retried one by one: a range is split into its numbers."""
    return item if isinstance(item, range) else [item]


def outcome(jobs, layout=TWO, work=doubled, **how):
    """Results of each job by its number, and the process ids of its workers."""
    how = {"split": whole_numbers, **how}
    with Workers(layout, work, lambda item: (item, None), **how) as workers:
        found = dict(workers.results(jobs))
    pids = {pid for results in found.values() for _, pid in results if pid}
    return {n: [one for one, _ in results] for n, results in found.items()}, pids


def test_each_job_is_done_once_and_an_item_that_ends_its_worker_twice_is_an_error(
    capfd,
):
    jobs = [[1, 2], [3, "die", 4], [], ["odd"], [range(2)], [range(3, 6), 7], [8]]
    reported = []
    found, pids = outcome(jobs, advance=reported.append)
    assert (
        len(reported) == 19
    )  # 6 jobs with items, 8 items that are tried alone, and 5 deaths
    assert sum(reported) == 4.5  # progress of workers that ended is subtracted
    wanted = [[2, 4], [6, "die", 8], [], ["odd"], [0, 2], [6, 8, 10, 14], [16]]
    assert found == dict(enumerate(wanted))
    assert len(pids) > 1
    assert os.getpid() not in pids
    wait_until(lambda: not any(map(running, pids)))
    output = capfd.readouterr().err
    lines = re.findall(r"worker \d \(process \d+\) ended by (.*); its rec", output)
    assert sorted(lines) == ["exit code 1", "exit code 3", "signal 9"]


def test_a_replacement_that_ends_while_it_loads_is_replaced_too(tmp_path, capfd):
    flag = tmp_path / "flag"

    def work(items, advance):
        if items == ["die"]:
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if not items and flag.exists():
            flag.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return doubled(items, advance)

    one = Layout(cores=((),), threads=1)
    found, _ = outcome([[1], ["die"], [2]], one, work)
    assert found == {0: [2], 1: ["die"], 2: [4]}
    assert capfd.readouterr().err.count("ended by signal 9") == 1


def test_an_error_is_raised_as_it_is_and_workers_that_always_end_are_one_line(
    monkeypatch,
):
    with pytest.raises(OSError, match="No space left on device"):
        outcome([[1], ["full"]])
    monkeypatch.setattr(workers, "MOST_DEATHS", 4)
    wanted = "ended 4 times in a row .signal 9.. Fewer --workers"
    with pytest.raises(RuntimeError, match=wanted):
        outcome([["die"]] * 9)


def test_workers_with_several_threads_need_a_parent_with_one(one_thread):
    torch.set_num_threads(2)
    wanted = "^threads: expected 1, or torch.set_num_threads.1. before torch computes"
    with pytest.raises(ValueError, match=wanted):
        Workers(Layout(threads=2), doubled, failed=str)


def test_a_spawned_worker_does_jobs_too_and_runs_no_script_again(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('run again')")
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", str(script), raising=False)
    monkeypatch.setattr(main, "__spec__", None, raising=False)
    found, pids = outcome([[1], [2]], Layout(), method="spawn")
    assert found == {0: [2], 1: [4]}
    assert len(pids) == 1


@pytest.mark.skipif(not Path("/proc").exists(), reason="this system has no /proc")
def test_no_worker_outlives_the_process_that_started_it_however_that_ended(
    forked, tmp_path
):
    def work(items, advance):
        (tmp_path / f"{os.getpid()}.pid").touch()
        time.sleep(1e6)

    three = Layout(cores=((),) * 3, threads=1)
    parent = forked(lambda: outcome([[1]] * 3, three, work))
    wait_until(lambda: len([*tmp_path.glob("*.pid")]) == 3)
    pids = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert all(map(running, pids))
    parent.kill()
    parent.join()
    wait_until(lambda: not any(map(running, pids)))


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="no smaps_rollup here"
)
@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here"
)
@torch.inference_mode()
def test_packed_weights_are_in_memory_once():
    plain = nn.Linear(4096, 8192)
    layer = PrepackedLinear(plain.weight, plain.bias).eval()  # in oneDNN's own layout
    del plain
    weights = 4 * 4096 * 8192
    row = torch.randn(1, 4096)
    wanted = layer(row)

    def work(items, advance):
        assert torch.equal(layer(row), wanted)
        rollup = Path("/proc/self/smaps_rollup").read_text()
        own = int(re.search(r"Private_Dirty: *(\d+) kB", rollup)[1])
        return [(1024 * own, os.getpid())]

    found, _ = outcome([[1], [2]], work=work)
    assert all(own < weights for (own,) in found.values())


@pins
def test_a_worker_has_the_cores_and_the_threads_of_its_layout():
    def work(items, advance):
        cores = tuple(sorted(os.sched_getaffinity(0)))
        return [((cores, torch.get_num_threads()), os.getpid())]

    cpus = sorted(os.sched_getaffinity(0))
    layout = Layout(cores=((cpus[-1],),), threads=1)
    assert outcome([[1]], layout, work)[0] == {0: [((cpus[-1],), 1)]}
    assert sorted(os.sched_getaffinity(0)) == cpus


def test_workers_share_out_the_cores_of_this_process():
    most = usable_cores()
    layout = choose_layout(most, threads=1)
    assert (layout.workers, layout.threads, layout.why) == (most, 1, "as requested")
    if any(layout.cores):
        cpus = [*chain.from_iterable(layout.cores)]
        assert sorted(cpus) == sorted(os.sched_getaffinity(0))
        assert {len(one) for one in layout.cores} == {1}
    assert choose_layout(1).threads == len({same_core(cpu) for cpu in range(most)})
    with pytest.raises(ValueError, match=r"^workers: expected auto, or 1 to .*, got 0"):
        choose_layout(0)


@pins
def test_auto_takes_no_more_workers_than_cores_recordings_or_memory(monkeypatch):
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})  # like taskset or a job scheduler
    try:
        assert (choose_layout("auto").workers, choose_layout("auto").threads) == (1, 1)
    finally:
        os.sched_setaffinity(0, cpus)
    assert choose_layout("auto", recordings=1).workers == 1
    layout = choose_layout("auto", model_bytes=2**60)
    assert layout.workers == 1
    assert usable_cores() == 1 or layout.why == "as free memory allows"
    monkeypatch.setattr(
        layout_module, "free_memory", lambda: float("inf")
    )  # as on macOS
    assert choose_layout("auto", recordings=10**6).why == "one a core"


def test_free_memory_is_no_more_than_a_container_may_have(tmp_path):
    assert free_memory(tmp_path) == float("inf")
    (tmp_path / "proc").mkdir()
    machine = "MemTotal:  999999 kB\nMemAvailable:    524288 kB\n"
    (tmp_path / "proc/meminfo").write_text(machine)
    limit = tmp_path / "sys/fs/cgroup/memory.max"
    limit.parent.mkdir(parents=True)
    for text, wanted in (("max\n", 2**29), ("1000\n", 1000), ("9" * 12, 2**29)):
        limit.write_text(text)
        assert free_memory(tmp_path) == wanted


def test_threads_of_one_core_are_known_from_linux(tmp_path):
    for cpu in range(4):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    assert same_core(0, tmp_path) == same_core(2, tmp_path) != same_core(1, tmp_path)


def test_jobs_grow_and_shrink_towards_the_end():
    sounds = [Sound(Path(str(n)), duration_s=10.0) for n in range(600)]
    drawn = [*recording_jobs(sounds, workers=2, batch_s=60.0)]
    assert [one for job in drawn for one in job] == sounds
    sizes = [10 * len(job) for job in drawn]
    assert sizes[:5] == [60, 120, 240, 360, 360]
    assert max(sizes) == 360
    assert sizes[-3:] == [30, 30, 30] or sizes[-1] < 30 == sizes[-2]
    unnamed = [Sound(Path("a" * 300))]  # no system opens such a name: reading it fails
    assert [*recording_jobs(unnamed, workers=2, batch_s=60.0)] == [unnamed]
