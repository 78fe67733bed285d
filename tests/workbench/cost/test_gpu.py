"""The two numbers of latencies."""

from itertools import product

import numpy as np
import pytest

from asrkit.workbench.cost import LatencyCell, two_numbers


def cells(floor_ms, TFLOP_per_s, noise=0.0):
    same = {"batch": 1, "seconds": 1.0, "precision": "FP16"}
    draw = np.random.default_rng(0)
    made = []
    for FLOP in np.geomspace(1e10, 1e13, 15):
        ms = max(floor_ms, FLOP / TFLOP_per_s / 1e9) * np.exp(noise * draw.normal())
        made.append(LatencyCell(FLOP=FLOP, latency_ms=ms, **same))
    return made


def test_two_numbers_are_recovered_from_exact_latencies():
    found = two_numbers(cells(35.0, 146.0))
    assert found.floor_ms == pytest.approx(35.0)
    assert found.TFLOP_per_s == pytest.approx(146.0)
    assert found.deviation < 1e-9
    assert found.ms(1e9) == found.floor_ms
    assert found.ms(146e12) == pytest.approx(1000)


def test_no_other_two_numbers_fit_better():
    noisy = cells(20.0, 50.0, noise=0.2)
    found = two_numbers(noisy)

    def spread(floor, rate):
        fit = [max(floor, cell.FLOP / rate / 1e9) for cell in noisy]
        gaps = np.log([cell.latency_ms for cell in noisy]) - np.log(fit)
        return np.sqrt(np.mean(gaps**2))

    floor = found.floor_ms
    rate = found.TFLOP_per_s
    assert spread(floor, rate) == pytest.approx(found.deviation)
    for a, b in product((0.97, 1.0, 1.03), repeat=2):
        assert spread(a * floor, b * rate) >= found.deviation - 1e-6
