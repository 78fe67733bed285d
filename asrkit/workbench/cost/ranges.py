"""Quantities that are known only within bounds."""

from dataclasses import dataclass
from math import inf
from operator import add, mul, truediv

from asrkit.shapes import expect


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
        ordered = 0 <= self.low <= self.middle <= self.high < inf
        expect(ordered, "range", "0 <= lowest <= middle <= highest", self.ends)

    @classmethod
    def of(cls, value: "Range | float", argument: str = "value") -> "Range":
        """`value` itself, or a number as a range without width.

        Raises:
            ValueError: a number below zero or not finite; the message names `argument`.
        """
        if isinstance(value, Range):
            return value
        expect(0 <= value < inf, argument, "a finite number, not below 0", value)
        return cls(value, value, value)

    @classmethod
    def parse(cls, text: str, argument: str) -> "Range":
        """The range that `4`, `4:6` (with the mean in the middle) or `4:5:6` stands for.

        Raises:
            ValueError: something else, numbers out of order, or not 0 and outside 1e-12..1e12; the
                message names `argument`.
        """
        try:
            ends = [float(part) for part in text.split(":")]
        except ValueError:
            ends = []
        in_bounds = all(end == 0 or 1e-12 <= end <= 1e12 for end in ends)
        expect(
            1 <= len(ends) <= 3 and in_bounds and ends == sorted(ends),
            argument,
            "a number, 0 or in 1e-12..1e12, or LOW:HIGH, or LOW:MIDDLE:HIGH",
            repr(text),
        )
        middle = sum(ends) / len(ends)
        if len(ends) == 3:
            middle = ends[1]
        return cls(ends[0], middle, ends[-1])

    def __add__(self, other: "Range | float") -> "Range":
        return Range(*map(add, self.ends, Range.of(other).ends))

    def __mul__(self, other: "Range | float") -> "Range":
        return Range(*map(mul, self.ends, Range.of(other).ends))

    def __truediv__(self, other: "Range | float") -> "Range":
        return Range(*map(truediv, self.ends, reversed(Range.of(other).ends)))

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
