import copy

import numpy as np
import pytest
import torch

from asrkit.models import FastConformerConfig
from asrkit.workbench.bench.suites import precision
from asrkit.workbench.lessons import bf16_casting as lesson

LAYER = {
    "inputs": 8,
    "outputs": 16,
    "memory_GB_per_s": 1.0,
    "bfloat16_TFLOP_per_s": 0.001,
}


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


def test_a_layers_least_times_are_its_bytes_and_operations_over_the_cards_rates():
    times = lesson.layer_us(100, **LAYER)
    assert times["cast of input and weight"] == pytest.approx(
        6 * (100 * 8 + 8 * 16) / 1e3
    )
    assert times["cast of the input alone"] == pytest.approx(6 * 100 * 8 / 1e3)
    assert times["product"] == pytest.approx(
        2 * 100 * 8 * 16 / 1e3
    )  # limited by arithmetic
    by_memory = lesson.layer_us(1, **LAYER | {"bfloat16_TFLOP_per_s": 1.0})
    assert by_memory["product"] == pytest.approx(2 * (8 + 8 * 16 + 16) / 1e3)
    many = lesson.layer_us(np.array([1, 100]), **LAYER)
    assert many["product"][1] == times["product"]
