"""Counts of a Jasper against the model itself, and the two numbers of its latencies."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from asrkit.models import CTCModel, Jasper, JasperConfig, Stage, presets
from asrkit.workbench.cost import (
    CARDS,
    LatencyCell,
    jasper_flops,
    jasper_parameters,
    published_latencies,
    two_numbers,
)

LARGE = presets.jasper_10x5dr()
MINI = presets.mini_jasper()


@pytest.mark.parametrize("config", [LARGE, MINI], ids=["jasper_10x5dr", "mini_jasper"])
def test_parameters_are_those_of_the_model(config):
    with torch.device("meta"):
        model = CTCModel(config)
    count = sum(weight.numel() for weight in model.parameters())
    assert jasper_parameters(config.encoder, vocab_size=config.vocab_size) == count
    encoder = sum(weight.numel() for weight in model.encoder.parameters())
    assert jasper_parameters(config.encoder, vocab_size=None) == encoder


def test_jasper_has_333_million_parameters_and_a_third_of_a_teraflop_in_ten_seconds():
    assert jasper_parameters(LARGE.encoder) == 332_632_349
    assert jasper_flops(LARGE.encoder, frames=1000) == pytest.approx(332.5e9, rel=1e-3)


class CountedConv(nn.Conv1d):
    """Adds two operations for each product of a weight to `total`."""

    total = 0

    def forward(self, x):
        y = super().forward(x)
        CountedConv.total += 2 * self.weight.numel() * y.shape[0] * y.shape[2]
        return y


STRIDED = JasperConfig(
    bins=8,
    stages=(
        Stage(channels=6, kernel=5, repeat=1, stride=2, dense=False),
        Stage(channels=6, kernel=3, repeat=2),
        Stage(channels=4, kernel=3, repeat=3),
        Stage(channels=5, kernel=3, repeat=1, dilation=2, dense=False),
    ),
)


@pytest.mark.parametrize("frames", [1, 2, 17, 40])
def test_operations_are_counted_as_the_convolutions_do_them(frames, monkeypatch):
    for config in (STRIDED, replace(STRIDED, residual="none"), MINI.encoder):
        monkeypatch.setattr(CountedConv, "total", 0)
        encoder = Jasper(config).eval()
        for part in encoder.modules():
            if isinstance(part, nn.Conv1d):
                part.__class__ = CountedConv
        with torch.inference_mode():
            encoder(torch.randn(3, frames, config.bins), torch.full((3,), frames))
        assert jasper_flops(config, frames=frames, B=3, vocab_size=None) == CountedConv.total
        head = 2 * encoder.width * 29 * 3 * -(-frames // 2)
        assert jasper_flops(config, frames=frames, B=3) == CountedConv.total + head


def cells(floor_ms, TFLOP_per_s, noise=0.0):
    draw = np.random.default_rng(0)
    works = np.geomspace(1e10, 1e13, 15)
    return [
        LatencyCell(
            batch=1,
            seconds=1.0,
            precision="FP16",
            FLOP=FLOP,
            latency_ms=max(floor_ms, FLOP / TFLOP_per_s / 1e9)
            * float(np.exp(noise * draw.normal())),
        )
        for FLOP in works
    ]


def test_two_numbers_are_found_again():
    found = two_numbers(cells(35.0, 146.0))
    assert found.floor_ms == pytest.approx(35.0, rel=1e-3)
    assert found.TFLOP_per_s == pytest.approx(146.0, rel=1e-3)
    assert found.deviation < 1e-3
    assert found.ms(1e9) == found.floor_ms
    assert found.ms(146e12) == pytest.approx(1000, rel=1e-3)


def test_no_other_two_numbers_are_nearer():
    noisy = cells(20.0, 50.0, noise=0.2)
    found = two_numbers(noisy)

    def spread(floor, rate):
        predicted = [max(floor, cell.FLOP / rate / 1e9) for cell in noisy]
        gaps = [np.log(cell.latency_ms / ms) for cell, ms in zip(noisy, predicted, strict=True)]
        return float(np.sqrt(np.mean(np.square(gaps))))

    assert spread(found.floor_ms, found.TFLOP_per_s) == pytest.approx(found.deviation)
    for floor in (0.97, 1.0, 1.03):
        for rate in (0.97, 1.0, 1.03):
            there = spread(floor * found.floor_ms, rate * found.TFLOP_per_s)
            assert there >= found.deviation - 1e-6


@pytest.mark.parametrize(("precision", "floor_ms", "rate", "deviation"), [
    ("FP16", 35.0, 146, 0.06),
    ("TF32", 37.0, 78, 0.11),
])  # fmt: skip
def test_the_published_cells_of_an_a100_are_two_numbers(precision, floor_ms, rate, deviation):
    found = two_numbers(published_latencies("DGX A100", precision))
    assert found.floor_ms == pytest.approx(floor_ms, rel=0.01)
    assert found.TFLOP_per_s == pytest.approx(rate, rel=0.01)
    assert found.deviation == pytest.approx(deviation, abs=0.005)


def test_published_float32_is_faster_than_its_cards_and_half_precision_is_not():
    peaks = {card.name: card for card in CARDS}
    v100 = peaks["Tesla V100 (16 GB)"].float32_TFLOP_per_s
    t4 = peaks["Tesla T4"].float32_TFLOP_per_s
    assert (v100, t4) == (15.7, 8.1)
    fastest = max(cell.TFLOP_per_s for cell in published_latencies("DGX-1 16GB", "FP32"))
    assert fastest == pytest.approx(32.3, abs=0.1) and fastest > 2 * v100
    on_t4 = max(cell.TFLOP_per_s for cell in published_latencies("T4", "FP32"))
    assert on_t4 == pytest.approx(10.3, abs=0.1) and on_t4 > t4
    half = max(cell.TFLOP_per_s for cell in published_latencies("DGX A100", "FP16"))
    assert half < peaks["A100 (80 GB)"].half_TFLOP_per_s


def test_tables_are_read_whole_and_unknown_cells_are_refused():
    assert len(published_latencies()) == 150
    assert len(published_latencies("DGX A100", "TF32")) == 15
    with pytest.raises(ValueError, match="system, precision: expected one of .*DGX A100 in FP16"):
        published_latencies("DGX A100", "FP32")


def test_fits_and_counts_of_nothing_are_refused():
    with pytest.raises(ValueError, match="cells: expected at least three, got 2"):
        two_numbers(cells(1.0, 1.0)[:2])
    with pytest.raises(ValueError, match="cells: expected two amounts of work"):
        two_numbers(cells(1.0, 1.0)[:1] * 3)
    with pytest.raises(ValueError, match="frames: expected at least 1, got 0"):
        jasper_flops(MINI.encoder, frames=0)
    with pytest.raises(ValueError, match="B: expected at least 1, got 0"):
        jasper_flops(MINI.encoder, frames=1, B=0)
    with pytest.raises(ValueError, match="vocab_size: expected at least 1, or None, got 0"):
        jasper_parameters(MINI.encoder, vocab_size=0)
