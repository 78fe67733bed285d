"""Quantities that are known as a range, and arithmetic on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import add, mul, truediv

from asrkit.shapes import expect


@dataclass(frozen=True)
class Range:
    """The possible values of a quantity: lowest, middle and highest, none below zero.

    Ranges can be added, multiplied and divided. A range that occurs twice in a formula counts as
    two that vary independently, so the formulas of this package use each range once.

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
    def of(cls, value: "Range | float") -> "Range":
        """`value` itself if it is a range; a number becomes a range without width."""
        if isinstance(value, Range):
            return value
        return cls(value, value, value)

    @classmethod
    def parse(cls, text: str, argument: str) -> "Range":
        """The range written as `4`, as `4:6` (the middle is the mean) or as `4:5:6`.

        Raises:
            ValueError: The text is something else, its numbers are out of order, or one is neither
                0 nor in 1e-12..1e12. The message names `argument`.
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
        """`5 (4–8)`; a range without width is shown as its number."""
        low, middle, high = map(_number_text, self.ends)
        if low == high:
            return middle
        return f"{middle} ({low}–{high})"


def _number_text(number: float) -> str:
    if number >= 1000:
        return f"{number:,.0f}"
    return f"{number:.4g}"


def range_text(ends: Sequence[float] | None) -> str:
    """[lowest, middle, highest] as text; a dash if the range is unknown."""
    if not ends:
        return "–"
    return str(Range(*ends))
