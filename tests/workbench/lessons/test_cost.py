"""One core in every way of computing: the estimate of all blocks, and what is timed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asrkit.models import presets
from asrkit.workbench.bench.suites.encoders import shrunk
from asrkit.workbench.bench.suites.ways import TOLERANCE
from asrkit.workbench.lessons import cost as lesson
from asrkit.workbench.measure import Timing

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCKS = 5
SHRUNK = shrunk(presets.parakeet_rnnt_1_1b())
TINY = replace(SHRUNK, encoder=replace(SHRUNK.encoder, layers=BLOCKS))


def test_every_way_of_this_cpu_is_timed_and_encodes_what_float32_encodes():
    found = lesson.time_ways(TINY, seconds=1.0, few=1, more=BLOCKS, repeats=2)
    assert [way.name for way in found] == lesson.ways_here()
    assert found[0].name == "float32" and found[0].error == 0
    for way in found:
        assert len(way.rtfx) == 2 and min(way.rtfx) > 0
        dtype = way.name.removeprefix("optimized_")
        assert way.error <= TOLERANCE[dtype], way
        if dtype != "float32":
            assert way.error > 0


def test_a_model_whose_blocks_cost_alike_is_estimated_exactly(monkeypatch):
    def measured(arms, *, repeats, warmup):
        """Two seconds beside the blocks, three for each: 5 with one block, 11 with three."""
        assert warmup == 0
        cost_ms = {"1": 5e3, "3": 11e3}
        return {
            name: Timing(
                samples_ms=(1.0,) * repeats,
                cpu_ms=(cost_ms[name.rpartition(" ")[2]],) * repeats,
                warmup=0,
                timer="",
            )
            for name in arms
        }

    monkeypatch.setattr(lesson, "measure", measured)
    found = lesson.time_ways(TINY, seconds=1.0, few=1, more=3, repeats=2)
    seconds_of_all = 2 + 3 * BLOCKS
    for way in found:
        assert way.rtfx == pytest.approx((1 / seconds_of_all,) * 2)


def test_noise_makes_no_model_faster_than_a_part_of_it():
    few, more = np.array([3.0]), np.array([2.0])
    assert lesson.of_all_blocks(few, more, few=1, more=3, blocks=42) == 2.0


def test_its_speed_carries_quartiles_and_says_that_it_is_an_estimate():
    way = lesson.WayOnCore(
        name="optimized_int8", rtfx=(4.0, 1.0, 2.0, 5.0, 3.0), error=0.1
    )
    speed = way.speed("parakeet_rnnt_1_1b")
    assert speed.rtfx.ends == [2.0, 3.0, 4.0] and way.middle == 3.0
    assert (speed.per, speed.origin, speed.batch) == ("core", "estimated here", 1)
    assert "optimized int8" in speed.note and "random" in speed.note


@pytest.mark.parametrize(("few", "more"), [(0, 2), (2, 2), (1, BLOCKS + 1)])
def test_numbers_of_blocks_that_make_no_line_are_refused(few, more):
    with pytest.raises(
        ValueError, match=f"few, more: expected 1 <= few < more <= {BLOCKS}"
    ):
        lesson.time_ways(TINY, seconds=1.0, few=few, more=more, repeats=1)


def test_one_core_and_all_cores_work_in_turns():
    done = []
    cores = lesson.usable_cores(2)
    threads = torch.get_num_threads()

    def work():
        done.append(sum(range(20_000)))

    found = lesson.core_rates(work, 3.0, cores=cores, repeats=2)
    assert len(found) == 2 and all(rate > 0 for rates in found for rate in rates)
    assert len(done) == 3 * (1 + len(cores))
    assert torch.get_num_threads() == threads


def test_no_more_cores_are_used_than_asked_for():
    assert len(lesson.usable_cores(1)) == 1
