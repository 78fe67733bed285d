"""Ceilings at their smallest: what is measured, what a floor is, and that nothing stays switched."""

import contextlib
from itertools import product

import pytest
import torch

from asrkit.models.inference import tf32
from asrkit.workbench import records
from asrkit.workbench.measure.ceilings import Ceilings, ceilings

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_arithmetic_and_stream_is_measured_and_the_best_repeat_counts():
    found = ceilings("cpu", quick=True)
    by = {
        (measurement.metric, measurement.impl): measurement
        for measurement in found.measurements
    }
    names = ["float32", "bfloat16", "float16"]
    pairs = {*product(["matrix_product", "weight_stream"], names), ("copy", "float32")}
    assert {*by} == pairs
    best = {key: max(measurement.samples) for key, measurement in by.items()}
    assert found.flops == {name: best["matrix_product", name] for name in names}
    streams = [best[key] for key in best if key[0] != "matrix_product"]
    assert found.bytes_per_s == max(streams)
    for measurement in found.measurements:
        assert records.problem(measurement.record()) == ""


def test_work_takes_as_long_as_the_slower_of_its_operations_and_its_bytes():
    rates = {"float32": 2e3, "bfloat16": 9e9}
    found = Ceilings(flops=rates, bytes_per_s=30.0, measurements=())
    for FLOP, B, least_ms in [(4000, 10, 2000.0), (4000, 90, 3000.0), (0, 0, 0.0)]:
        assert found.floor_ms(FLOP, B, "float32") == pytest.approx(least_ms)


@pytest.mark.parametrize("on", [True, False])
def test_tf32_is_as_it_was_afterwards_even_after_an_error(on):
    cudnn = torch.backends.cudnn
    products = torch.backends.cuda.matmul
    before = products.allow_tf32, cudnn.allow_tf32
    with contextlib.suppress(KeyError), tf32(on):
        for setting in (products, cudnn.conv, cudnn.rnn):
            assert setting.fp32_precision == ("tf32" if on else "ieee")
        raise KeyError
    # torch's older settings can be read as before
    assert (products.allow_tf32, cudnn.allow_tf32) == before


def test_tf32_is_switched_after_torchs_newer_setting_was_used_as_well():
    """Asking for allow_tf32 raises then."""
    matmul = torch.backends.cuda.matmul
    conv = torch.backends.cudnn.conv
    before = [setting.fp32_precision for setting in (matmul, conv)]
    try:
        matmul.fp32_precision = "tf32"
        with tf32(False):
            assert [setting.fp32_precision for setting in (matmul, conv)] == [
                "ieee",
                "ieee",
            ]
        assert [setting.fp32_precision for setting in (matmul, conv)] == [
            "tf32",
            before[1],
        ]
    finally:
        matmul.fp32_precision, conv.fp32_precision = before
