"""How long an encoder's work takes at the rates that a GPU's data sheet names: a prediction, not a measurement."""

from asrkit.cost.counts import CARDS, NVIDIA
from asrkit.shapes import expect

# Operations a second of dense bfloat16 products, 1e12; the sheets' larger figure counts zeros of sparse weights.
BFLOAT16_TFLOP_PER_S = {"H100": 989.4, "H200": 989.4}
SOURCES = {"H100": f"{NVIDIA}/data-center/h100/", "H200": f"{NVIDIA}/data-center/h200/"}


def predicted_ms(FLOP: float, B: float, card: str, *, reached: float = 1.0) -> float:
    """Milliseconds of FLOP operations of bfloat16 products, then of B bytes that all else reads and writes.

    `reached` is the share of both published rates that is attained: 1 is what no program goes below, if it is right that
    products and the rest do not overlap, and that products wait for no memory.

    >>> round(predicted_ms(989.4e9, 3350e6, "H100"), 6)  # one millisecond of each
    2.0
    """
    rates = {one.name: one.memory_GB_per_s for one in CARDS if one.name in BFLOAT16_TFLOP_PER_S}
    expect(card in rates, "card", f"one of {sorted(rates)}", repr(card))
    expect(0 < reached <= 1, "reached", "a share above 0, at most 1", reached)
    bytes_per_s = 1e9 * (rates[card] or 0)
    return 1e3 * (FLOP / (1e12 * BFLOAT16_TFLOP_PER_S[card]) + B / bytes_per_s) / reached
