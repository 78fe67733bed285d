"""One core in every variant: the times, and the estimate for all blocks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asrkit.models import presets
from asrkit.workbench.lessons import cost as lesson
from asrkit.workbench.lessons.shared.variants import TOLERANCE
from benchmarks.suites.encoders import shrunk

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCKS = 5
SHRUNK = shrunk(presets.parakeet_rnnt_1_1b())
TINY = replace(SHRUNK, encoder=replace(SHRUNK.encoder, layers=BLOCKS))


def test_every_variant_of_this_cpu_is_timed_and_encodes_as_float32_does():
    found = lesson.time_variants(TINY, seconds=1.0, few=1, more=BLOCKS, repeats=2)
    assert [variant.name for variant in found] == lesson.supported_variants()
    assert found[0].name == "float32" and found[0].error == 0
    for variant in found:
        assert len(variant.rtfx) == 2 and min(variant.rtfx) > 0
        assert variant.error > 0 or "float32" in variant.name
        assert variant.error <= TOLERANCE[variant.name.removeprefix("optimized_")], (
            variant
        )


@pytest.mark.parametrize(("few", "more", "all_blocks"), [(5, 11, 128), (3, 2, 2)])
def test_blocks_cost_alike_and_noise_makes_no_model_faster_than_a_part_of_it(
    few, more, all_blocks
):
    times = np.array([few]), np.array([more])
    assert lesson.time_of_all_blocks(*times, few=1, more=3, blocks=42) == all_blocks


def test_its_speed_has_quartiles_and_is_called_an_estimate():
    rtfx = (4.0, 1.0, 2.0, 5.0, 3.0)
    speed = lesson.VariantOnCore(name="float32", rtfx=rtfx, error=0.1).speed("a model")
    assert speed.rtfx.ends == [2.0, 3.0, 4.0]
    assert (speed.per, speed.origin, speed.batch) == ("core", "estimated here", 1)


def test_one_core_and_all_cores_work_in_turns():
    done = []
    cores = lesson.usable_cores(2)

    def work():
        done.append(sum(range(20_000)))

    found = lesson.core_rates(work, 3.0, cores=cores, repeats=2)
    assert len(found) == 2 and min(map(min, found)) > 0
    assert len(done) == 3 * (1 + len(cores))
    assert torch.get_num_threads() == 1
