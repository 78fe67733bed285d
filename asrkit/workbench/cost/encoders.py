"""How long an encoder takes at the rates of a GPU's data sheet: predicted, not measured."""

from asrkit.shapes import expect
from asrkit.workbench.cost.cards import CARDS


def predicted_ms(FLOP: float, B: float, card: str, *, reached: float = 0.8) -> float:
    """Milliseconds of bfloat16 matrix products, and then of all other work's memory traffic.

    Neither measured nor a lower bound: another program may move fewer bytes, or overlap both.

    Args:
        FLOP: floating-point operations of the products.
        B: bytes that everything else reads and writes.
        card: name of one of CARDS whose rates are known.
        reached: share of both published rates that is attained; no program attains all of them.

    >>> round(predicted_ms(0.8 * 989.5e9, 0.8 * 3350e6, "H100"), 6)  # one millisecond of each
    2.0
    """
    cards = {known.name: known for known in CARDS if known.half_TFLOP_per_s}
    expect(card in cards, "card", f"one of {sorted(cards)}", repr(card))
    expect(0 < reached <= 1, "reached", "a share above 0, at most 1", reached)
    FLOP_per_s = 1e12 * (cards[card].half_TFLOP_per_s or 0)
    bytes_per_s = 1e9 * (cards[card].memory_GB_per_s or 0)
    return 1e3 * (FLOP / FLOP_per_s + B / bytes_per_s) / reached
