"""One published number, and what would count as measuring it again."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from asrkit.files import shipped
from asrkit.workbench.tables import percent

# Units as tables show them behind a number; any other follows after a space.
UNITS = {"1": "", "us": " µs", "s/s": "× real time"}
SHARES = ("share", "wer")  # metrics that are shown in per cent


# Compared by identity, so that what is computed from a claim can be kept for it.
@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """One published number: who says it, in our words, and what would count as measuring it again.

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
    quoted: int | float | None  # None where the text gives no number
    notebook: str
    needs: str = "cpu"
    # For arithmetic, or a ratio that is estimated: an expression over `params`, and over the
    # columns of a grid.
    formula: str = ""
    params: Mapping[str, float] = field(default_factory=dict)
    # A table of data/published: the formula is computed for each of its lines, and `quoted` is the
    # number of lines that agree.
    grid: str = ""
    keys: Sequence[str] = ()  # the columns that name a line
    # The lines that are meant: a value, or a list of values, for a column.
    where: Mapping[str, Any] = field(default_factory=dict)
    # The line that a line is compared with: these keys differ, and `base_x` is its column x.
    base: Mapping[str, Any] = field(default_factory=dict)
    # What a line prints and the formula should give; without it the formula says whether a line
    # agrees.
    column: str = ""
    take: str = ""  # max or min: the formula's largest or smallest value is what was quoted
    # For a ratio: numerator and denominator; empty where the text names no baseline.
    arms: Sequence[str] = ()
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"rel": 0.1})
    # Smallest params of a record; with less it confirms the direction at most.
    least: Mapping[str, float] = field(default_factory=dict)
    # Records of other names that are shown beside the claim and cannot settle it: what they are
    # called, why they cannot, and impl and arms where several have that name.
    evidence: Sequence[Mapping[str, Any]] = ()
    # Why the claim is listed in the appendix and left out of headline counts: "tautology", "not
    # speech" or "ours", a quantity of this project. Empty: it is not.
    appendix: str = ""
    notes: str = ""

    def agrees(self, value: float, printed: float | None = None) -> bool:
        """Whether `value` is `printed`, by default what is quoted, within the tolerance."""
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
        """Whether there is a number, and for a ratio also two arms, to compare with."""
        has_baseline = self.kind != "ratio" or bool(self.arms) or bool(self.formula)
        return self.quoted is not None and has_baseline

    @property
    def rule(self) -> str:
        """What a measurement has to be, in words: "within 10 % of 1×", "above 50 %"; else a dash.

        Where a record of a smaller scale settles nothing, the scale is part of it: "within 10 % of
        1× with at least 8 cores".
        """
        if not self.is_defined:
            return "–"
        ((rule, size),) = self.tolerance.items()
        if self.grid and not self.take:
            return f"each line within {size:g} of its cell" if self.column else "true in each line"
        words = rule
        if rule in ("rel", "abs"):
            words = f"within {self._tolerated(rule, size)} of" if size else "exactly"
        scale = "".join(f" with at least {least:g} {name}" for name, least in self.least.items())
        return f"{words} {self.show(self.quoted)}{scale}"

    def _tolerated(self, rule: str, size: float) -> str:
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
    """One set of objects, so that each formula is computed once."""
    entries = yaml.safe_load(shipped("claims.yaml").read_text("utf-8"))
    return tuple(Claim(**entry) for entry in entries)


def load_claims() -> list[Claim]:
    """The claims that asrkit ships, of data/claims.yaml."""
    return list(_claims())
