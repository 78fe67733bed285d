"""One published number, and what would count as measuring it again."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asrkit.files import shipped_yaml
from asrkit.workbench.tables import percent

# Units as tables show them after a number; any other unit follows a space.
UNITS = {"1": "", "us": " µs", "s/s": "× real time"}
SHARES = ("share", "wer")  # metrics that are shown in per cent


# Compared by identity, so that results can be cached by claim.
@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """One published number: its source, the claim in our words, and what counts as measuring it.

    `kind` is arithmetic, ratio, latency, throughput, memory or quality; `needs` is cpu, cuda,
    cluster or source (weights, data or code of the source); `tolerance` has one of rel, abs, above
    and below.
    """

    id: str
    text: str
    source: Mapping[str, str]
    kind: str
    metric: str
    unit: str
    quoted: int | float | None  # None if the text gives no number
    notebook: str
    needs: str = "cpu"
    # For arithmetic, or an estimated ratio: an expression over `params` and the grid's columns.
    formula: str = ""
    params: Mapping[str, float] = field(default_factory=dict)
    # A table of data/published. The formula is computed for each line of the table, and `quoted`
    # is the number of lines that agree.
    grid: str = ""
    keys: Sequence[str] = ()  # the columns that identify a line
    # Which lines count: a value, or a list of values, for a column.
    where: Mapping[str, Any] = field(default_factory=dict)
    # The line to compare a line with: these keys differ, and `base_x` is its column x.
    base: Mapping[str, Any] = field(default_factory=dict)
    # The column whose printed value the formula should give. Without it, the formula itself is
    # true for a line that agrees.
    column: str = ""
    take: str = ""  # max or min: the quoted number is the formula's largest or smallest value
    # For a ratio: numerator and denominator; empty if the text names no baseline.
    arms: Sequence[str] = ()
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"rel": 0.1})
    # Smallest params of a record. Smaller ones confirm the direction at most.
    least: Mapping[str, float] = field(default_factory=dict)
    # Records under other names that are shown with the claim and cannot settle it: `what`, `why`
    # they cannot, and `impl` and `arms` if several records have that name.
    evidence: Sequence[Mapping[str, Any]] = ()
    # Why the claim is in the appendix, which headline counts leave out: "tautology", "not speech"
    # or "ours", a quantity of this project. Empty: the claim is not in the appendix.
    appendix: str = ""
    notes: str = ""

    def agrees(self, value: float, printed: float | None = None) -> bool:
        """Whether `value` is `printed`, by default the quoted number, within the tolerance."""
        if printed is None:
            printed = self.quoted or 0.0
        gap = value - printed
        ((rule, size),) = self.tolerance.items()
        return {
            "rel": abs(gap) <= size * abs(printed),
            "abs": abs(gap) <= size,
            "above": gap >= size,
            "below": -gap >= size,
        }[rule]

    @property
    def is_defined(self) -> bool:
        """Whether the source gives a number to compare with and, for a ratio, two arms."""
        has_baseline = self.kind != "ratio" or bool(self.arms) or bool(self.formula)
        return self.quoted is not None and has_baseline

    @property
    def rule(self) -> str:
        """The tolerance in words: "within 10 % of 1×", "above 50 %"; a dash if ill-defined.

        If the claim names a smallest scale, that is included: "within 10 % of 1× with at least 8
        cores".
        """
        if not self.is_defined:
            return "–"
        ((rule, size),) = self.tolerance.items()
        if self.grid and not self.take:
            return f"each line within {size:g} of its cell" if self.column else "true in each line"
        words = rule
        if rule in ("rel", "abs"):
            words = f"within {self._margin(rule, size)} of" if size else "exactly"
        scale = "".join(f" with at least {least:g} {name}" for name, least in self.least.items())
        return f"{words} {self.show(self.quoted)}{scale}"

    def _margin(self, rule: str, size: float) -> str:
        if rule == "rel":
            return percent(size)
        if self._is_share:
            return f"{100 * size:.3g} percentage points"
        return f"{size:g}"

    @property
    def _is_share(self) -> bool:
        return self.metric in SHARES and self.unit == "1"

    def show(self, value: float | None) -> str:
        """`value` with the claim's unit, as tables show it; a dash for None."""
        if value is None:
            return "–"
        if self._is_share:
            return f"{100 * value:.3g} %"
        text = f"{value:.4g}"
        if "e+" in text:  # 19340.2 is 19,340 and not 1.934e+04
            text = f"{float(text):,.0f}"
        if self.metric == "ratio":
            return f"{text}×"
        return text + UNITS.get(self.unit, f" {self.unit}")


@functools.cache
def _claims() -> tuple[Claim, ...]:
    """The claims, loaded once, so that each formula is computed once."""
    return tuple(Claim(**entry) for entry in shipped_yaml("claims.yaml"))


def load_claims() -> list[Claim]:
    """The claims of data/claims.yaml."""
    return list(_claims())
