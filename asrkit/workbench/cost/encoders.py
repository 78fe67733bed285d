"""How long an encoder's work takes at the rates that a GPU's data sheet names: a prediction, not a
measurement.
"""

from asrkit.shapes import expect
from asrkit.workbench.cost.counts import CARDS


def predicted_ms(FLOP: float, B: float, card: str, *, reached: float = 1.0) -> float:
    """Milliseconds of FLOP operations of bfloat16 products, then of B bytes that all else reads and
    writes.

    Predicted from data sheets for this program's bytes: neither measured nor a floor, since another
    program may move fewer bytes or overlap both. `reached` is the share of both published rates
    that is attained; no program attains all of them.

    >>> round(predicted_ms(989.5e9, 3350e6, "H100"), 6)  # one millisecond of each
    2.0
    """
    cards = {one.name: one for one in CARDS if one.half_TFLOP_per_s}
    expect(card in cards, "card", f"one of {sorted(cards)}", repr(card))
    expect(0 < reached <= 1, "reached", "a share above 0, at most 1", reached)
    products_per_s, bytes_per_s = (
        1e12 * (cards[card].half_TFLOP_per_s or 0),
        1e9 * (cards[card].memory_GB_per_s or 0),
    )
    return 1e3 * (FLOP / products_per_s + B / bytes_per_s) / reached
