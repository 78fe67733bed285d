"""Quantities that are known within ends."""

from dataclasses import dataclass
from math import inf

from asrkit.shapes import expect, expect_types


@dataclass(frozen=True)
class Range:
    """What a quantity may be: lowest, middle, highest, none below zero. Ranges add, multiply and
    divide to ranges.

    One that occurs twice in a formula counts as two that vary by themselves; so the formulas here
    use each once.

    >>> Range(1, 2, 4) / Range(1, 2, 2) + 1
    Range(low=1.5, middle=2.0, high=5.0)
    """

    low: float
    middle: float
    high: float

    def __post_init__(self) -> None:
        expect_types(self)
        expect(
            0 <= self.low <= self.middle <= self.high,
            "range",
            "0 <= lowest <= middle <= highest",
            self.ends,
        )

    @classmethod
    def of(cls, value: "Range | float", argument: str = "value") -> "Range":
        """`value`, a number as a range without width; ValueError names `argument` if it is below
        zero or not finite.
        """
        if isinstance(value, Range):
            return value
        number = isinstance(value, int | float) and not isinstance(value, bool)
        expect(number and 0 <= value < inf, argument, "a finite number, not below 0", value)
        return cls(value, value, value)

    def __add__(self, other: "Range | float") -> "Range":
        more = Range.of(other)
        return Range(self.low + more.low, self.middle + more.middle, self.high + more.high)

    def __mul__(self, other: "Range | float") -> "Range":
        by = Range.of(other)
        return Range(self.low * by.low, self.middle * by.middle, self.high * by.high)

    def __truediv__(self, other: "Range | float") -> "Range":
        by = Range.of(other)
        expect(by.low > 0, "divisor", "above 0", by.low)
        return Range(self.low / by.high, self.middle / by.middle, self.high / by.low)

    def __rtruediv__(self, other: float) -> "Range":
        return Range.of(other) / self

    __radd__, __rmul__ = __add__, __mul__

    @property
    def ends(self) -> list[float]:
        """[lowest, middle, highest]."""
        return [self.low, self.middle, self.high]

    def __str__(self) -> str:
        """`5 (4–8)`; a range without width is its number."""
        low, middle, high = (f"{end:,.0f}" if end >= 1000 else f"{end:.4g}" for end in self.ends)
        return middle if low == high else f"{middle} ({low}–{high})"
