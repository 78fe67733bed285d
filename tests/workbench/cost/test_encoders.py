"""Predicted times of encoders: arithmetic on published rates."""

import pytest

from asrkit.workbench.cost import CARDS, predicted_ms


def test_products_and_bytes_take_their_time_one_after_the_other():
    (card,) = [one for one in CARDS if one.name == "H100"]
    by_memory = predicted_ms(0, 1e9, "H100")
    assert by_memory == pytest.approx(1e3 / card.memory_GB_per_s / 0.8)
    by_products = predicted_ms(1e12, 1e9, "H100") - by_memory
    assert by_products == pytest.approx(1e3 / card.half_TFLOP_per_s / 0.8)
    assert predicted_ms(1e12, 1e9, "H100", reached=0.4) == pytest.approx(
        2 * predicted_ms(1e12, 1e9, "H100")
    )


@pytest.mark.parametrize("card, reached, message", [
    ("A10", 1.0, r"^card: expected one of \['A100 \(80 GB\)', 'H100', 'H200'\], got 'A10'"),
    ("H100", 0.0, "^reached: expected a share above 0, at most 1, got 0.0"),
    ("H100", 1.5, "^reached: expected"),
])  # fmt: skip
def test_unknown_cards_and_shares_are_refused(card, reached, message):
    with pytest.raises(ValueError, match=message):
        predicted_ms(1, 1, card, reached=reached)
