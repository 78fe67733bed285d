"""How many processes there are, on which cores and in which dtype."""

import os
import platform
from itertools import chain

import pytest

from asrkit.runtime import usable_cores
from asrkit.transcribe.processes import choose_layout, cores
from asrkit.transcribe.processes.cores import affinity, same_core, shares
from asrkit.transcribe.processes.memory import free_memory

LINUX = platform.system() == "Linux"
pinned_system = pytest.mark.skipif(not LINUX, reason="this system pins no process")


@pytest.fixture
def one_core():
    """This process on one logical CPU, as `taskset` or a job scheduler leaves it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield min(before)
    os.sched_setaffinity(0, before)


@pytest.fixture
def topology(tmp_path):
    """Four cores of two threads each, as Linux describes them: CPU 5 is a thread of core 1."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    return tmp_path


def test_each_of_as_many_processes_as_cores_has_one_of_them():
    most = min(usable_cores(), len(affinity()))
    layout = choose_layout(most, threads=1)
    assert (layout.workers, layout.threads, layout.why) == (most, 1, "as asked")
    if layout.pinned:
        assert sorted(chain.from_iterable(layout.cores)) == affinity()
        assert {len(one) for one in layout.cores} == {1}


@pinned_system
def test_the_affinity_mask_of_this_process_is_what_is_divided(one_core):
    layout = choose_layout("auto")
    assert (layout.workers, layout.threads) == (1, 1)
    assert layout.cores in (
        ((one_core,),),
        ((),),
    )  # a quota below one core pins nothing
    with pytest.raises(
        ValueError, match="^workers: expected auto, or 1 to 1, the cores of this"
    ):
        choose_layout(2)


@pytest.mark.parametrize("wrong", [0, -1, 10**6, 1.5, True, "many", ""])
def test_a_number_of_processes_that_cannot_be_is_one_line(wrong):
    with pytest.raises(
        ValueError, match="^workers: expected auto, or 1 to .*, got"
    ) as error:
        choose_layout(wrong)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", [0, 10**6])
def test_more_threads_than_cores_are_one_line(wrong):
    with pytest.raises(
        ValueError, match="^threads: expected 1 to .* with 1 workers on .* cores"
    ):
        choose_layout(1, threads=wrong)


def test_auto_takes_no_more_processes_than_recordings_or_memory():
    layout = choose_layout("auto", recordings=1)
    assert layout.workers == 1
    assert choose_layout("auto", recordings=0).workers == 1
    assert 1 <= choose_layout("auto").workers <= usable_cores()


def test_free_memory_is_no_more_than_a_container_has_left(tmp_path):
    machine = tmp_path / "meminfo"
    machine.write_text("MemAvailable:    524288 kB\n")
    (tmp_path / "memory.current").write_text("300\n")
    for limit, wanted in (
        ("max", 2**29),
        ("1000", 700),
        ("200", 0),
        (f"{2**40}", 2**29),
    ):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert free_memory(machine, tmp_path) == wanted
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_memory(tmp_path / "none", tmp_path) == 700
    (tmp_path / "memory.stat").write_text(
        "anon 200\ninactive_file 50\nactive_file 50\n"
    )
    assert free_memory(machine, tmp_path) == 750


def test_a_quota_of_a_container_is_rounded_down_to_whole_cores(tmp_path):
    most = usable_cores(tmp_path)
    for quota, wanted in (("max", most), ("20000", 1), ("150000", min(2, most))):
        (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
        assert usable_cores(tmp_path) == wanted


def test_auto_leaves_the_memory_that_the_model_takes(tmp_path, monkeypatch):
    memory = tmp_path / "meminfo"
    memory.write_text("MemAvailable:    4194304 kB\n")
    monkeypatch.setattr(free_memory, "__defaults__", (memory, tmp_path / "none"))
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    monkeypatch.setattr(cores, "affinity", lambda: [*range(8)])
    monkeypatch.setattr(cores, "same_core", lambda mask: [[cpu] for cpu in mask])
    alone = choose_layout("auto")
    assert (alone.workers, alone.why) == (4, "as 4.0 GiB of free memory allow")
    beside = choose_layout("auto", model_bytes=5 * 2**29)
    assert (beside.workers, beside.threads) == (1, 8)
    assert beside.why == "as 1.5 GiB of free memory beside the model allow"
    assert choose_layout("auto", model_bytes=2**40).workers == 1


def test_threads_of_one_core_stay_together_while_there_are_cores(topology):
    groups = same_core(range(8), topology)
    assert groups == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert same_core([2, 3], topology) == [[2], [3]]
    assert same_core([2, 3], topology / "none") == [[2], [3]]
    assert shares(groups, 2) == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert shares(groups, 3) == ((0, 4), (1, 5), (2, 6, 3, 7))
    assert shares(groups, 8) == ((0,), (4,), (1,), (5,), (2,), (6,), (3,), (7,))
    for number in range(1, 9):
        assert sorted(chain.from_iterable(shares(groups, number))) == [*range(8)]
