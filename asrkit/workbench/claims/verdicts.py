"""What formulas and records say about a claim; never what another machine measured."""

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
    "too noisy": "A time was measured, but with fewer than three repeats, or they lie too far "
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
RELATIVE = ("ratio", "share")  # metrics of which a CPU's value tells something beside a GPU's
NOISE = 0.5  # largest interquartile range over median that still carries a verdict


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A measurement close to what a claim says, which cannot settle it.

    `record["value"]` is in the claim's unit; `why` says what differs; `is_here` whether this
    machine measured it.
    """

    record: Record
    why: str
    is_here: bool


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
    alike = _alike(claim, records, claim.id, claim.arms)
    deciding = [record for record in alike if _settles(claim, record)]
    others = list[Record]()
    if not claim.is_defined or claim.metric in RELATIVE:
        others = [record for record in alike if not _settles(claim, record)]
    kinds = [(others, OTHER_DEVICE if claim.is_defined else NO_BASELINE)]
    for entry in claim.evidence:
        close = _alike(claim, records, entry["what"], entry.get("arms", ()), "estimated")
        fitting = [one for one in close if entry.get("impl") in (None, one["impl"])]
        kinds.append((fitting, entry["why"]))
    beside = []
    for kind, why in kinds:
        for is_here, record in _newest(kind, machine).items():
            beside.append(Evidence(record=record, why=why, is_here=is_here))
    newest = _newest(deciding, machine)
    if beside and not newest:
        return _not_comparable(claim, beside)
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
        evidence=tuple(beside),
    )


def _settles(claim: Claim, record: Record) -> bool:
    """Whether a record decides the claim on the machine that measured it."""
    on_cuda = str(record["params"].get("device")).startswith("cuda")
    return claim.is_defined and (on_cuda or claim.needs == "cpu")


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
    """The label of a value with quartiles `low` and `high`; `best_label` where it agrees."""
    if claim.agrees(value):
        return best_label
    quoted = claim.quoted or 0.0
    same_side = (quoted > 1 and low > 1) or (quoted < 1 and high < 1)
    if claim.kind == "ratio" and same_side:
        return "direction only"
    return "not reproduced"


def _unmeasured(claim: Claim, machine: Record) -> tuple[str, str]:
    """The label of a claim that nothing of this machine decides, and why."""
    if not claim.is_defined:
        why = "" if claim.notes else "The text does not say what was compared."
        return "ill-defined", why
    if claim.needs == "cpu" or (claim.needs == "cuda" and machine["gpus"]):
        return "not measured yet", ""
    return "not measurable here", LACKING[claim.needs]


def _not_comparable(claim: Claim, beside: Sequence[Evidence]) -> Verdict:
    """The verdict on a claim beside which something was measured that cannot settle it."""
    records = {one.is_here: one.record for one in reversed(beside)}  # the first of each kind stays
    why = " ".join(_told(claim, one) for one in beside)
    return Verdict(
        label=NOT_COMPARABLE,
        why=f"{why} {claim.notes}".rstrip(),
        measured=records[True]["value"] if True in records else None,
        recorded=records.get(False),
        evidence=tuple(beside),
    )


def _told(claim: Claim, one: Evidence) -> str:
    """A measurement in words: value, what was measured, where, and why it settles nothing."""
    what = " over ".join(one.record["params"].get("arms", ())) or one.record["impl"]
    value = claim.show(one.record["value"])
    if what:
        value += f" ({what})"
    return f"{value} on {origin(one.record)}: {one.why}."


def origin(record: Record) -> str:
    """Device, code version and day of a record."""
    return f"{measured_on(record)}, {record['captured_at'][:10]}"


def _alike(
    claim: Claim, records: Iterable[Record], what: str, arms: Sequence[str], origin: str = ""
) -> list[Record]:
    """Measured records of one name with the claim's metric and unit and these arms.

    Those of `origin` count as well.
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
