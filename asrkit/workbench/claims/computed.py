"""Verdicts on claims that arithmetic on published numbers settles."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from asrkit.workbench.claims.claims import Claim, Record
from asrkit.workbench.claims.evidence import Evidence
from asrkit.workbench.claims.formulas import evaluate
from asrkit.workbench.claims.grids import GridLine, grid_lines

SHOWN_LINES = 4  # of a grid, where lines disagree


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known about a claim: a label, why, and values in the claim's unit.

    `measured` is from this machine, or computed. `recorded` is the newest record of another
    machine; it is shown and decides nothing here, and `there` is the label that it would have
    there, where it settles the claim. `evidence` was measured close to the claim and decides
    nothing either; where the label is "evidence, not comparable", `measured` and `recorded` are
    taken from it.
    """

    label: str
    why: str
    measured: float | None = None
    recorded: Record | None = None
    there: str = ""
    evidence: tuple[Evidence, ...] = ()


@functools.lru_cache(maxsize=512)
def verdict_by_formula(claim: Claim) -> Verdict:
    """The verdict on a claim with a formula; computed once for each claim, and kept."""
    if claim.grid:
        return _judge_grid(claim)
    value = evaluate(claim.formula, claim.params)
    params = ", ".join(f"{name} = {number:g}" for name, number in claim.params.items())
    return Verdict(
        label=label_of(claim, value, value, value, "arithmetic checked"),
        why=f"{claim.formula} with {params}: {_gap(claim, value)}. {claim.notes}".rstrip(),
        measured=value,
    )


def label_of(claim: Claim, value: float, low: float, high: float, best_label: str) -> str:
    """The label of a value with quartiles `low` and `high`; `best_label` where it agrees."""
    if claim.agrees(value):
        return best_label
    if claim.kind == "ratio" and _is_same_direction(claim.quoted or 0.0, low, high):
        return "direction only"
    return "not reproduced"


def _is_same_direction(quoted: float, low: float, high: float) -> bool:
    """Whether the quartiles of a ratio lie on the quoted ratio's side of 1."""
    if quoted > 1:
        return low > 1
    return quoted != 1 and high < 1


def _gap(claim: Claim, value: float) -> str:
    """A computed value beside what it has to be: "212.5 frames, within 10 % of 200 frames"."""
    rule = claim.rule
    if not claim.agrees(value):
        rule = f"not {rule}"
    return f"{claim.show(value)}, {rule}"


def _judge_grid(claim: Claim) -> Verdict:
    lines = list(grid_lines(claim))
    if claim.take:
        return _judge_extreme(claim, lines)
    wrong = [line for line in lines if not claim.agrees(line.value, line.printed)]
    wrong.sort(key=lambda line: -abs(line.value - line.printed))
    agreeing = len(lines) - len(wrong)
    why = f"{claim.formula}: {agreeing} of {len(lines)} lines agree"
    if wrong:
        why += f"; not {'; '.join(_disagreement(claim, line) for line in wrong[:SHOWN_LINES])}"
    if len(wrong) > SHOWN_LINES:
        why += ", …"
    is_right = agreeing == claim.quoted == len(lines)
    return Verdict(
        label="arithmetic checked" if is_right else "not reproduced",
        why=f"{why}. {claim.notes}".rstrip(),
        measured=agreeing,
    )


def _judge_extreme(claim: Claim, lines: Sequence[GridLine]) -> Verdict:
    """The verdict on a claim about the largest or the smallest value of a grid."""
    ordered = sorted(lines, key=lambda line: line.value, reverse=claim.take == "max")
    extreme = ordered[0]
    why = f"{claim.formula}: the {claim.take} of {len(lines)} lines is at {extreme.name}."
    value = extreme.value
    return Verdict(
        label=label_of(claim, value, value, value, "arithmetic checked"),
        why=f"{why} {_gap(claim, value)}. {claim.notes}".rstrip(),
        measured=value,
    )


def _disagreement(claim: Claim, line: GridLine) -> str:
    if not claim.column:
        return line.name
    return f"{line.name}: {line.value:.4g} where {line.printed:g} is printed"
