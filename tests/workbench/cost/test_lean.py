"""The lean loss's least time and its memory, against a hand's sums."""

import pytest

from asrkit.workbench.cost import CARDS, lean_floor_ms, lean_peak

SHAPE = {"B": 2, "T": 10, "U1": 5, "D": 8, "V": 16}
(H100,) = [card for card in CARDS if card.name == "H100"]


def test_the_least_time_is_four_products_and_the_passes_between_them():
    card = H100._replace(half_TFLOP_per_s=1, float32_TFLOP_per_s=0.5, memory_GB_per_s=1)
    half, single = (lean_floor_ms(card, **SHAPE, itemsize=size) for size in (2, 4))
    assert half["products"] == pytest.approx(4 * 2 * 100 * 8 * 16 / 1e9)
    assert half["passes"] == pytest.approx(100 * (3 * 8 + 4 * 16) * 2 / 1e6)
    assert single == {name: pytest.approx(2 * ms) for name, ms in half.items()}


def test_the_peak_is_a_chunk_and_the_sums():
    parts = lean_peak(**SHAPE, chunk_bytes=40 * 16 * 2).parts
    assert parts["tile"] == 40 * (16 + 2 * 8) * 2
    assert parts["lattice"] == 20 * 100
    assert parts["gradients"] == 4 * (2 * 15 * 8 + 16 * 8)
    assert lean_peak(**SHAPE).parts["tile"] == 100 * (16 + 2 * 8) * 2  # no more than there is
