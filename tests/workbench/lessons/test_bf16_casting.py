import copy

import numpy as np
import pytest
import torch

from asrkit.models import FastConformerConfig
from asrkit.workbench.bench.suites import precision
from asrkit.workbench.lessons import bf16_casting as lesson


def test_a_frozen_layer_casts_its_weights_in_every_call_and_one_that_learns_casts_them_once():
    linear = torch.nn.Linear(8, 4)
    frozen = copy.deepcopy(linear).requires_grad_(False)
    x = torch.randn(3, 8)
    assert lesson.casts_by_operand(linear, x, 3) == {
        "cast of weight": 2,
        "cast of activation": 3,
    }
    assert lesson.casts_by_operand(frozen, x, 3) == {
        "cast of weight": 6,
        "cast of activation": 3,
    }


def test_bytes_of_an_encoders_casts_grow_linearly_between_the_ends_that_are_counted():
    config = FastConformerConfig(width=16, layers=1, heads=2, subsampling_channels=8)
    found = lesson.encoder_cast_bytes(config, (1, 2, 3), 64)
    casts = precision.autocast_casts(
        lambda: lesson.FastConformer(config), 2, 64, config.bins, device="cuda"
    )
    for operand in ("weight", "activation"):
        counted = sum(cast.bytes for cast in casts if cast.operand == operand)
        assert found[operand][1] == pytest.approx(counted)
    assert found["weight"][0] == found["weight"][2] > 0
    assert found["activation"][0] < found["activation"][2]


@pytest.mark.parametrize(("TFLOP_per_s", "product_us"), [(0.001, 25.6), (1.0, 5.056)])
def test_a_layers_least_times_are_its_bytes_or_operations_over_the_cards_rates(
    TFLOP_per_s, product_us
):
    times = lesson.layer_us(
        np.array([1, 100]), inputs=8, outputs=16, memory_GB_per_s=1.0,
        bfloat16_TFLOP_per_s=TFLOP_per_s,
    )  # fmt: skip
    found = [times[name][1] for name in (lesson.CAST, lesson.CAST_OF_INPUT)]
    assert found == pytest.approx([5.568, 4.8])  # 6 bytes a value
    assert times["product"][1] == pytest.approx(product_us)
