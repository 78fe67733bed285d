"""The verdict on a claim, from its formula or from this machine's records of it."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asrkit.workbench.claims.arithmetic import evaluate, grid_lines
from asrkit.workbench.claims.claims import Claim
from asrkit.workbench.machine import this_machine
from asrkit.workbench.records import Record, measured_on
from asrkit.workbench.tables import percent

LEGEND = {  # verdict -> what it means
    "reproduced": "Measured on this machine, and within the tolerance of the claim.",
    "arithmetic checked": "Recomputed from published numbers, and within the tolerance of the "
    "claim. Nothing was measured.",
    "direction only": "Agrees in part. Either a ratio lies on the published side of 1, but outside "
    "the tolerance; or the value is within the tolerance, but was measured at a smaller scale than "
    "the claim is about. The reason says which.",
    "not reproduced": "Measured or recomputed, and it disagrees.",
    "too noisy": "A time was measured, but with fewer than three repeats, or they are too far "
    "apart for a verdict.",
    "evidence, not comparable": "Something close to it was measured, and the value is shown. It "
    "cannot settle the claim: other hardware, other conditions, or nothing published to compare "
    "with.",
    "ill-defined": "The source gives no number, or does not say what was compared with what, so "
    "there is nothing to reproduce.",
    "not measurable here": "It needs what is not here: a GPU, many machines, or the weights, data "
    "or code of its source.",
    "not measured yet": "No run has measured it: its notebook did not run, or needs a larger size.",
}
NOT_COMPARABLE = "evidence, not comparable"
LACKING = {  # what a claim needs -> why it was not measured
    "cuda": "Needs a CUDA GPU.",
    "cluster": "Needs many GPUs, or machines that are not at hand.",
    "source": "Needs weights, data or code of its source, which asrkit does not have.",
}
OTHER_DEVICE = "measured on a CPU, and the claim is about a GPU"
NO_BASELINE = "the source gives no number and baseline to compare with"
TIMED = ("ratio", "latency", "throughput")  # kinds whose samples have a spread
RELATIVE = ("ratio", "share")  # metrics for which a CPU's value is evidence about a GPU's
NOISE = 0.5  # largest interquartile range over the median that still allows a verdict


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A measurement that is close to a claim and cannot settle it.

    Attributes:
        record: The measurement; its value is in the claim's unit.
        why: What differs from the claim.
        is_here: Whether this machine measured it.
    """

    record: Record
    why: str
    is_here: bool


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known about a claim; all values are in the claim's unit.

    Attributes:
        label: The verdict, a key of LEGEND.
        why: The reason in words.
        measured: The value from this machine, or the computed one.
        recorded: The newest record of another machine. It is shown, and decides nothing here.
        there: The label that `recorded` gives on its own machine, if it settles the claim.
        evidence: Measurements close to the claim, which decide nothing either. If the label is
            NOT_COMPARABLE, `measured` and `recorded` come from them.
    """

    label: str
    why: str
    measured: float | None = None
    recorded: Record | None = None
    there: str = ""
    evidence: tuple[Evidence, ...] = ()


def verdict(claim: Claim, records: Sequence[Record], machine: Record | None = None) -> Verdict:
    """The verdict on `claim`; never from another machine's records.

    Args:
        claim: The claim.
        records: Records of any claims and machines.
        machine: The machine whose records decide; by default this one.
    """
    if claim.formula and claim.quoted is not None:
        return _by_formula(claim)
    if machine is None:
        machine = this_machine()
    own_records = _matching(claim, records, claim.id, claim.arms)
    newest = _newest([record for record in own_records if _settles(claim, record)], machine)
    evidence = _evidence(claim, records, own_records, machine)
    if evidence and not newest:
        return _not_comparable(claim, evidence)
    here = newest.get(True)
    recorded = newest.get(False)
    measured = None
    if here:
        measured = here["value"]
        label, why = _by_record(claim, here)
        why = f"{why}. Reproduced means {claim.rule}."
    else:
        label, why = _unmeasured(claim, machine)
    there = ""
    if recorded:
        there, _ = _by_record(claim, recorded)
    return Verdict(
        label=label,
        why=f"{why} {claim.notes}".strip(),
        measured=measured,
        recorded=recorded,
        there=there,
        evidence=evidence,
    )


def _settles(claim: Claim, record: Record) -> bool:
    """Whether a record decides the claim on the machine that measured it."""
    on_cuda = str(record["params"].get("device")).startswith("cuda")
    return claim.is_defined and (on_cuda or claim.needs == "cpu")


def _evidence(
    claim: Claim, records: Sequence[Record], own_records: Sequence[Record], machine: Record
) -> tuple[Evidence, ...]:
    """The newest records, here and elsewhere, of each kind that cannot settle the claim."""
    groups = list[tuple[list[Record], str]]()  # records, and why they settle nothing
    if not claim.is_defined or claim.metric in RELATIVE:
        unsettling = [record for record in own_records if not _settles(claim, record)]
        groups.append((unsettling, OTHER_DEVICE if claim.is_defined else NO_BASELINE))
    for entry in claim.evidence:
        close = _matching(claim, records, entry["what"], entry.get("arms", ()), "estimated")
        of_impl = [record for record in close if entry.get("impl") in (None, record["impl"])]
        groups.append((of_impl, entry["why"]))
    return tuple(
        Evidence(record=record, why=why, is_here=is_here)
        for group, why in groups
        for is_here, record in _newest(group, machine).items()
    )


@functools.lru_cache(maxsize=512)
def _by_formula(claim: Claim) -> Verdict:
    if claim.take:
        lines = list(grid_lines(claim))
        choose = max if claim.take == "max" else min
        extreme = choose(lines, key=lambda line: line.value)
        value = extreme.value
        why = f"the {claim.take} of {len(lines)} lines is at {extreme.name}. "
    elif claim.grid:
        return _by_lines(claim)
    else:
        value = evaluate(claim.formula, claim.params)
        params = ", ".join(f"{name} = {number:g}" for name, number in claim.params.items())
        why = f"with {params}, "
    rule = claim.rule if claim.agrees(value) else f"not {claim.rule}"
    return Verdict(
        label=_label(claim, value, value, value, "arithmetic checked"),
        why=f"{claim.formula}: {why}{claim.show(value)}, {rule}. {claim.notes}".rstrip(),
        measured=value,
    )


def _by_lines(claim: Claim) -> Verdict:
    """The verdict on a claim about every line of a grid."""
    lines = list(grid_lines(claim))
    wrong = [line.name for line in lines if not claim.agrees(line.value, line.printed)]
    agreeing = len(lines) - len(wrong)
    why = f"{claim.formula}: {agreeing} of {len(lines)} lines agree"
    if wrong:
        why += f"; not {'; '.join(wrong)}"
    is_right = agreeing == claim.quoted == len(lines)
    return Verdict(
        label="arithmetic checked" if is_right else "not reproduced",
        why=f"{why}. {claim.notes}".rstrip(),
        measured=agreeing,
    )


def _by_record(claim: Claim, record: Record) -> tuple[str, str]:
    """The label that a record gives on its own machine, and why."""
    n, low, middle, high = (record["stats"][name] for name in ("n", "p25", "p50", "p75"))
    why = f"{n} repeats, quartiles {claim.show(low)} to {claim.show(high)}"
    if n == 1:
        why = "measured once"
    if claim.kind in TIMED and (n < 3 or high - low > NOISE * abs(middle)):
        wanted = f"3 repeats and a spread within {percent(NOISE)} of the median"
        return "too noisy", f"{why}; a verdict needs {wanted}"
    best_label = "reproduced"
    for name, least in claim.least.items():
        size = record["params"].get(name, 0)
        if size < least:
            best_label = "direction only"
            why += f"; {size:g} {name}: fewer than {least:g} confirm the direction at most"
    return _label(claim, record["value"], low, high, best_label), why


def _label(claim: Claim, value: float, low: float, high: float, best_label: str) -> str:
    """The label of a value with quartiles `low` and `high`; `best_label` if the value agrees."""
    if claim.agrees(value):
        return best_label
    quoted = claim.quoted or 0.0
    same_side = (quoted > 1 and low > 1) or (quoted < 1 and high < 1)
    if claim.kind == "ratio" and same_side:
        return "direction only"
    return "not reproduced"


def _unmeasured(claim: Claim, machine: Record) -> tuple[str, str]:
    """The label of a claim that no record of this machine decides, and why."""
    if not claim.is_defined:
        why = "" if claim.notes else "The text does not say what was compared."
        return "ill-defined", why
    if claim.needs == "cpu" or (claim.needs == "cuda" and machine["gpus"]):
        return "not measured yet", ""
    return "not measurable here", LACKING[claim.needs]


def _not_comparable(claim: Claim, evidence: tuple[Evidence, ...]) -> Verdict:
    """The verdict on a claim for which only evidence exists; the first of each side is shown."""
    records = {item.is_here: item.record for item in reversed(evidence)}
    why = " ".join(_describe(claim, item) for item in evidence)
    return Verdict(
        label=NOT_COMPARABLE,
        why=f"{why} {claim.notes}".rstrip(),
        measured=records[True]["value"] if True in records else None,
        recorded=records.get(False),
        evidence=evidence,
    )


def _describe(claim: Claim, evidence: Evidence) -> str:
    """The evidence in words: value, what was measured, where, and why it settles nothing."""
    record = evidence.record
    what = " over ".join(record["params"].get("arms", ())) or record["impl"]
    value = claim.show(record["value"])
    if what:
        value += f" ({what})"
    return f"{value} on {origin(record)}: {evidence.why}."


def origin(record: Record) -> str:
    """Device, code version and day of a record."""
    return f"{measured_on(record)}, {record['captured_at'][:10]}"


def _matching(
    claim: Claim, records: Iterable[Record], what: str, arms: Sequence[str], origin: str = ""
) -> list[Record]:
    """Measured records named `what`, with these arms and the claim's metric and unit.

    Records whose origin is `origin` count as well.
    """
    return [
        record
        for record in records
        if record["what"] == what
        and record["metric"] == claim.metric
        # Records write shares as "1" or as "fraction".
        and (claim.metric == "ratio" or record["unit"].replace("fraction", "1") == claim.unit)
        and record["origin"] in ("measured", origin)
        and tuple(record["params"].get("arms", ())) == tuple(arms)
        and not record["params"].get("quick")  # sizes that only show that the code runs
    ]


def _newest(records: Iterable[Record], machine: Record) -> dict[bool, Record]:
    """The newest of `records` from `machine` (True), and the newest from any other (False)."""
    by_age = sorted(records, key=lambda record: record["captured_at"])
    return {record["machine"]["id"] == machine["id"]: record for record in by_age}
