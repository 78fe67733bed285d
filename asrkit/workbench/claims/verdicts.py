"""What formulas and records say about a claim."""

from collections.abc import Sequence

from asrkit.workbench.claims.claims import Claim, Record
from asrkit.workbench.claims.computed import Verdict, label_of, verdict_by_formula
from asrkit.workbench.claims.evidence import Evidence, deciding, evidence, newest, origin
from asrkit.workbench.claims.labels import NOT_COMPARABLE
from asrkit.workbench.machine import this_machine

LACKING = {  # what a claim needs -> why it was not measured
    "cpu": "",
    "cuda": "Needs a CUDA GPU.",
    "cluster": "Needs many GPUs, or machines that are not at hand.",
}
TIMED = ("ratio", "latency", "throughput")  # kinds whose samples have a spread


def verdict(claim: Claim, records: Sequence[Record], machine: Record | None = None) -> Verdict:
    """The verdict on `claim`; never from another machine's records.

    Args:
        claim: The claim.
        records: Records of any claims and machines.
        machine: The machine whose records decide; by default this one.
    """
    if claim.formula and claim.quoted is not None:
        return verdict_by_formula(claim)
    if machine is None:
        machine = this_machine()
    here, recorded = newest(deciding(claim, records), machine)
    beside = evidence(claim, records, machine)
    if recorded is None and beside and not here:
        return _not_comparable(claim, beside)
    there = ""
    if recorded:
        there, _ = _judge_record(claim, recorded)
    measured = None
    if here:
        measured = here["value"]
        label, why = _judge_record(claim, here)
        why = f"{why}. Reproduced means {claim.rule}. {claim.notes}".rstrip()
    else:
        label, why = _unmeasured(claim, machine, recorded)
    return Verdict(
        label=label, why=why, measured=measured, recorded=recorded, there=there, evidence=beside
    )


def _not_comparable(claim: Claim, beside: tuple[Evidence, ...]) -> Verdict:
    """The verdict on a claim beside which something was measured that cannot settle it."""
    measured = None
    recorded = None
    for one in reversed(beside):  # the first of each kind stays
        if one.is_here:
            measured = one.record["value"]
        else:
            recorded = one.record
    why = " ".join(_told(claim, one) for one in beside)
    return Verdict(
        label=NOT_COMPARABLE,
        why=f"{why} {claim.notes}".rstrip(),
        measured=measured,
        recorded=recorded,
        evidence=beside,
    )


def _told(claim: Claim, one: Evidence) -> str:
    """A measurement in words: value, what was measured, where, and why it settles nothing."""
    what = " over ".join(one.record["params"].get("arms", ())) or one.record["impl"]
    value = claim.show(one.record["value"])
    if what:
        value += f" ({what})"
    return f"{value} on {origin(one.record)}: {one.why}."


def _unmeasured(claim: Claim, machine: Record, recorded: Record | None) -> tuple[str, str]:
    """The label of a claim that nothing of this machine decides, and why."""
    lacking = f"{LACKING[claim.needs]} {claim.notes}".strip()
    if not claim.is_defined:
        return "ill-defined", claim.notes or "The text does not say what was compared."
    if claim.status == "planned" and recorded is None:
        return "planned", lacking
    if claim.needs == "cluster" or (claim.needs == "cuda" and not machine["gpus"]):
        return "not measurable here", lacking
    return "not measured yet", claim.notes


def _judge_record(claim: Claim, record: Record) -> tuple[str, str]:
    """The label that a record gives on its own machine, and why."""
    stats = record["stats"]
    low = stats["p25"]
    high = stats["p75"]
    why = "one observation"
    if stats["n"] > 1:
        why = f"{stats['n']} repeats, quartiles {claim.show(low)} to {claim.show(high)}"
    is_noisy = stats["n"] < 3 or high - low > claim.noise * abs(stats["p50"])
    if claim.kind in TIMED and is_noisy:
        spread = f"a spread within {100 * claim.noise:.0f} % of the median"
        wanted = f"a verdict needs 3 repeats and {spread}"
        return "too noisy", f"{why}; {wanted}"
    best_label = "reproduced"
    for name, least in claim.least.items():
        size = record["params"].get(name, 0)
        if size < least:
            best_label = "direction only"
            why += f"; {size:g} {name}: fewer than {least:g} confirm the direction at most"
    return label_of(claim, record["value"], low, high, best_label), why
