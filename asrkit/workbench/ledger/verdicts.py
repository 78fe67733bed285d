"""What formulas and records say about a claim."""

from collections.abc import Sequence
from dataclasses import dataclass

from asrkit.shapes import expect
from asrkit.workbench.ledger.claims import Claim, Record
from asrkit.workbench.ledger.formulas import evaluate
from asrkit.workbench.ledger.grids import GridLine, grid_lines
from asrkit.workbench.machine import this_machine

LABELS = (
    "reproduced",
    "arithmetic checked",
    "direction only",
    "not reproduced",
    "too noisy",
    "ill-defined",
    "not measurable here",
    "not measured yet",
)
LACKING = {  # what a claim needs -> why it was not measured
    "cpu": "",
    "cuda": "Needs a CUDA GPU.",
    "cluster": "Needs many GPUs, or machines that are not at hand.",
}
TIMED = ("ratio", "latency", "throughput")  # kinds whose samples have a spread
SHOWN_LINES = 4  # of a grid, where lines disagree


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known about a claim: a label, why, and the value that decided, in the claim's unit.

    `measured` is from this machine, or computed. `recorded` is the newest record of another
    machine; it is shown and decides nothing.
    """

    label: str
    why: str
    measured: float | None = None
    recorded: Record | None = None


def verdict(claim: Claim, records: Sequence[Record], machine: Record | None = None) -> Verdict:
    """The verdict on `claim`; never from another machine's records.

    An ill-defined claim shows what was measured all the same.

    Args:
        claim: The claim.
        records: Records of any claims and machines.
        machine: The machine whose records decide; by default this one.

    Raises:
        ValueError: The claim's formula cannot be computed.
    """
    if claim.formula and claim.quoted is not None:
        return _computed(claim)
    machine = this_machine() if machine is None else machine
    here, recorded = _newest(claim, records, machine)
    if claim.quoted is None or (claim.kind == "ratio" and not claim.arms):
        return Verdict(
            label="ill-defined",
            why=claim.notes or "The text does not say what was compared.",
            measured=here["value"] if here else None,
            recorded=recorded,
        )
    if here:
        label, why = _judge_record(claim, here)
        why = f"{why}. Reproduced means {claim.rule}. {claim.notes}".rstrip()
        return Verdict(label=label, why=why, measured=here["value"], recorded=recorded)
    if _is_beyond(claim, machine, recorded):
        why = f"{LACKING[claim.needs]} {claim.notes}".rstrip()
        return Verdict(label="not measurable here", why=why, recorded=recorded)
    return Verdict(label="not measured yet", why=claim.notes, recorded=recorded)


def _newest(
    claim: Claim, records: Sequence[Record], machine: Record
) -> tuple[Record | None, Record | None]:
    """The newest record of the claim from `machine`, and the newest from any other."""
    here, elsewhere = None, None
    evidence = [record for record in records if _is_evidence(claim, record)]
    for record in sorted(evidence, key=lambda record: record["captured_at"]):
        if record["machine"]["id"] == machine["id"]:
            here = record
        else:
            elsewhere = record
    return here, elsewhere


def _is_evidence(claim: Claim, record: Record) -> bool:
    """Whether a record measures the claim's quantity, with its arms, on a device of its kind."""
    params = record["params"]
    if params.get("quick"):  # sizes that only show that the code runs
        return False
    if claim.needs != "cpu" and not str(params.get("device")).startswith("cuda"):
        return False
    if claim.metric != "ratio" and record["unit"] != claim.unit:
        return False
    return (
        record["what"] == claim.id
        and record["metric"] == claim.metric
        and record["origin"] == "measured"
        and tuple(params.get("arms", ())) == tuple(claim.arms)
    )


def _is_beyond(claim: Claim, machine: Record, recorded: Record | None) -> bool:
    """Whether this machine cannot measure the claim."""
    if claim.needs == "cluster":
        return True
    is_measured_somewhere = recorded is not None or claim.status == "measured"
    return claim.needs == "cuda" and not machine["gpus"] and is_measured_somewhere


def _judge_record(claim: Claim, record: Record) -> tuple[str, str]:
    """The label that a record of this machine gives, and why."""
    stats = record["stats"]
    low, high = stats["p25"], stats["p75"]
    why = "one observation"
    if stats["n"] > 1:
        why = f"{stats['n']} repeats, quartiles {claim.show(low)} to {claim.show(high)}"
    is_noisy = stats["n"] < 3 or high - low > claim.noise * abs(stats["p50"])
    if claim.kind in TIMED and is_noisy:
        wanted = f"a verdict needs 3 repeats and a spread within {claim.noise:.0%} of the median"
        return "too noisy", f"{why}; {wanted}"
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
    if claim.kind == "ratio" and _is_same_direction(claim.quoted or 0.0, low, high):
        return "direction only"
    return "not reproduced"


def _is_same_direction(quoted: float, low: float, high: float) -> bool:
    """Whether the quartiles of a ratio lie on the quoted ratio's side of 1."""
    if quoted > 1:
        return low > 1
    return quoted != 1 and high < 1


def _computed(claim: Claim) -> Verdict:
    """The verdict on a claim with a formula."""
    if claim.grid:
        return _judge_grid(claim)
    value = evaluate(claim.formula, claim.params)
    params = ", ".join(f"{name} = {number:g}" for name, number in claim.params.items())
    return Verdict(
        label=_label(claim, value, value, value, "arithmetic checked"),
        why=f"{claim.formula} with {params}. {claim.notes}".rstrip(),
        measured=value,
    )


def _judge_grid(claim: Claim) -> Verdict:
    lines = list(grid_lines(claim))
    expect(bool(lines), "where", "lines of the grid", "none")
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
    choose = max if claim.take == "max" else min
    extreme = choose(lines, key=lambda line: line.value)
    why = f"{claim.formula}: the {claim.take} of {len(lines)} lines is at {extreme.name}."
    value = extreme.value
    return Verdict(
        label=_label(claim, value, value, value, "arithmetic checked"),
        why=f"{why} {claim.notes}".rstrip(),
        measured=value,
    )


def _disagreement(claim: Claim, line: GridLine) -> str:
    if not claim.column:
        return line.name
    return f"{line.name}: {line.value:.4g} where {line.printed:g} is printed"
