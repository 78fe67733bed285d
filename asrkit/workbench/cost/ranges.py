"""Quantities that are known only within bounds."""

from dataclasses import dataclass
from math import inf

from asrkit.shapes import expect, expect_types


@dataclass(frozen=True)
class Range:
    """What a quantity may be: lowest, middle and highest value, none below zero.

    Ranges add, multiply and divide to ranges. A range that occurs twice in a formula counts as two
    that vary independently; so the formulas here use each once.

    >>> Range(1, 2, 4) / Range(1, 2, 2) + 1
    Range(low=1.5, middle=2.0, high=5.0)
    """

    low: float
    middle: float
    high: float

    def __post_init__(self) -> None:
        expect_types(self)
        ordered = 0 <= self.low <= self.middle <= self.high
        expect(ordered, "range", "0 <= lowest <= middle <= highest", self.ends)

    @classmethod
    def of(cls, value: "Range | float", argument: str = "value") -> "Range":
        """`value` itself, or a number as a range without width.

        Raises:
            ValueError: a number below zero or not finite; the message names `argument`.
        """
        if isinstance(value, Range):
            return value
        number = isinstance(value, int | float) and not isinstance(value, bool)
        expect(number and 0 <= value < inf, argument, "a finite number, not below 0", value)
        return cls(value, value, value)

    @classmethod
    def parse(cls, text: str, argument: str, *, single: bool = False) -> "Range":
        """The range that `4`, `4:6` (with the mean in the middle) or `4:5:6` stands for.

        Args:
            text: what was typed.
            argument: what the error names.
            single: accept only one number.

        Raises:
            ValueError: something else, numbers out of order, or not 0 and outside 1e-12..1e12.
        """
        try:
            ends = [float(part) for part in text.split(":")]
        except ValueError:
            ends = []
        wanted = "a number, 0 or in 1e-12..1e12"
        most_ends = 1
        if not single:
            wanted += ", or LOW:HIGH, or LOW:MIDDLE:HIGH"
            most_ends = 3
        right_number = 1 <= len(ends) <= most_ends
        in_bounds = all(end == 0 or 1e-12 <= end <= 1e12 for end in ends)
        expect(right_number and in_bounds and ends == sorted(ends), argument, wanted, repr(text))
        middle = sum(ends) / len(ends)
        if len(ends) == 3:
            middle = ends[1]
        return cls(ends[0], middle, ends[-1])

    def __add__(self, other: "Range | float") -> "Range":
        addend = Range.of(other)
        return Range(self.low + addend.low, self.middle + addend.middle, self.high + addend.high)

    def __mul__(self, other: "Range | float") -> "Range":
        factor = Range.of(other)
        return Range(self.low * factor.low, self.middle * factor.middle, self.high * factor.high)

    def __truediv__(self, other: "Range | float") -> "Range":
        divisor = Range.of(other)
        expect(divisor.low > 0, "divisor", "above 0", divisor.low)
        return Range(self.low / divisor.high, self.middle / divisor.middle, self.high / divisor.low)

    def __rtruediv__(self, other: float) -> "Range":
        return Range.of(other) / self

    __radd__ = __add__
    __rmul__ = __mul__

    @property
    def ends(self) -> list[float]:
        """[lowest, middle, highest]."""
        return [self.low, self.middle, self.high]

    def __str__(self) -> str:
        """`5 (4–8)`; a range without width is its number."""
        low, middle, high = map(_number_text, self.ends)
        if low == high:
            return middle
        return f"{middle} ({low}–{high})"


def _number_text(number: float) -> str:
    if number >= 1000:
        return f"{number:,.0f}"
    return f"{number:.4g}"
