"""What a share measures, in which order and why, and how the minutes are dealt out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asrkit.workbench.tables import aligned

RESERVE_S = 30.0  # at the end, in which nothing runs; less where the minutes are few
LAST_CASE_S = 60.0  # at the end, in which nothing begins; likewise
CHECKS_SHARE = 0.35  # of the time that checks may take
CHECKS_S = 160.0  # an estimate for an H100, compiling included
ELSEWHERE = {
    "batching": "computed from lengths, needs no GPU: run `asrkit bench batching`",
    "engines": "on one core of a CPU: run `asrkit bench engines --peers`",
    "workers": "on the cores of a CPU: run `asrkit bench workers`",
    "bulk": "whole commands on the cores of a CPU: run `asrkit bench bulk --peers`",
}
COMPILED = "compiled"  # the part that a rehearsal on a CPU leaves out


class Part(NamedTuple):
    """A suite or some of it.

    Attributes:
        name: of the part, by which the manifest keeps it.
        weight: its share of the time that no part needs, see budget_s.
        why: what it is good for.
        suite: whose cases it measures; "" for the suite of the same name.
        options: of the suite.
        estimate_s: what all of it takes on an H100, its process included; not measured.
        owed: whether the time of the estimate is reserved for it.
        cases: what the names of all its cases begin with, if a check may fail all of them.
    """

    name: str
    weight: float
    why: str
    suite: str = ""
    options: Mapping[str, Any] = {}
    estimate_s: float = 0.0
    owed: bool = False
    cases: str = ""

    @property
    def suite_name(self) -> str:
        """The suite whose cases it measures."""
        return self.suite or self.name

    @property
    def owed_s(self) -> float:
        """Seconds that are reserved for the part."""
        if not self.owed:
            return 0.0
        return self.estimate_s


def _claims(
    name: str, weight: float, why: str, groups: Sequence[str], estimate_s: float, owed: bool = True
) -> Part:
    """Some groups of the suite of claims."""
    return Part(name, weight, why, "claims", {"only": tuple(groups)}, estimate_s, owed)


def _ladder(kind: str, weight: float, why: str, estimate_s: float, owed: bool = True) -> Part:
    """The ladder of one kind of model, of whose slow arms there are few."""
    options = {"kind": kind, "few": True}
    name = f"ladder-{kind}"
    return Part(name, weight, why, "ladder", options, estimate_s, owed, cases=name)


PARTS = (
    _claims("casts", 0.2, "three claims in a few seconds", ["casts"], 10),
    _claims(
        "frontends",
        0.5,
        "batched CTC front end, autocast: six claims of one model",
        ["frontends", "half"],
        30,
    ),
    _claims(
        "loops", 0.7, "windowed looping with graphs, of RNN-T and TDT: six claims", ["loops"], 39
    ),
    _claims(
        "windows",
        0.7,
        "windowed looping, graphs off, step and full, turns fused and plain: sets the default",
        ["windows"],
        40,
    ),
    _ladder("rnnt", 1.5, "all steps together at RNN-T 1.1B, the summary of the series", 76),
    _ladder("tdt", 1, "the same for TDT 0.6B", 50),
    Part(
        "losses-large",
        1,
        "the losses beside torchaudio's at one large shape",
        "losses",
        {"first": True},
        40,
        True,
    ),
    Part(
        "training",
        1,
        "a training step with the joint whole and lean: what `asrkit train` chooses between; an "
        "LSTM encoder in phases",
        estimate_s=120,
    ),
    Part(
        "optimizers",
        0.5,
        "LAMB beside torch's optimizers at 49 million parameters: no GPU has measured it",
        estimate_s=30,
    ),
    Part(
        "jasper",
        1,
        "Jasper 10x5 DR beside its published tables: five claims, three of them of inference",
        options={"compiled": False},
        estimate_s=80,
    ),
    _claims(
        "recognisers",
        2,
        "1.1B with and without graphs, an encoder's idle time: four claims",
        ["recognisers", "idle"],
        65,
        owed=False,
    ),
    _claims(
        "attention",
        1.5,
        "Canary-1B and its Flash, frames projected in every step and keys kept: two claims",
        ["attention"],
        110,
        owed=False,
    ),
    Part(
        "encoder",
        2,
        "most of the time of a recogniser goes here",
        options={"compiled": False},
        estimate_s=90,
    ),
    Part(
        "decoders",
        2,
        "every loop and graph over batch sizes: sets the default",
        estimate_s=165,
    ),
    Part(
        "losses",
        2,
        "all shapes, kernels counted, and the largest batches that train",
        estimate_s=230,
    ),
    _ladder("ctc", 1, "the ladder without a loop over labels", 40, owed=False),
    Part(
        "aed",
        1,
        "decoding by attention: what to keep, graphs, drafts; layers moved to the encoder",
        estimate_s=90,
    ),
    Part("features", 0.2, "small, and part of the claims already", estimate_s=8),
    Part("precision", 1, "what half precision costs and loses, at published sizes", estimate_s=60),
    Part(
        COMPILED,
        2,
        "torch.compile takes longest, so it gets the time that is left",
        "encoder",
        {"compiled": True},
        200,
    ),
)


def ends(total_s: float) -> tuple[float, float]:
    """Seconds after which nothing begins any more, and seconds after which nothing runs."""
    return total_s - min(LAST_CASE_S, total_s / 6), total_s - min(RESERVE_S, total_s / 12)


def budget_s(parts: Sequence[Part], left_s: float) -> float:
    """Seconds that the first of some parts may take.

    The first is worth most, so it gets all that it needs of the time that is not reserved for the
    others (`Part.owed_s`), and of what is left beyond that a share by its weight. With too little
    time for all reservations, those of the first parts are kept.

    Args:
        parts: those that are still to be measured, in order.
        left_s: seconds left for all of them.
    """
    first = parts[0]
    free_s = left_s - sum(part.owed_s for part in parts[1:])
    if free_s < first.owed_s:
        return min(first.owed_s, left_s)
    weight = first.weight / sum(part.weight for part in parts)
    share_s = first.owed_s + (free_s - first.owed_s) * weight
    return min(free_s, max(share_s, first.estimate_s))


def lines(minutes: float, *, width: int = 0) -> Iterator[str]:
    """The plan as a table: for each part the estimate, the time it may take, and why.

    The time of a part is computed as if all parts before it used up theirs.

    Args:
        minutes: of the run.
        width: longest line of the table, in columns; 0 for any.
    """
    begins, _ = ends(60 * minutes)
    checks_s = min(CHECKS_S, CHECKS_SHARE * 60 * minutes)
    left_s = begins - checks_s
    why = "every path against its reference: what fails is not measured"
    rows = [
        ["part", "needs", "may take", "why"],
        ["checks", f"{CHECKS_S:.0f}", f"{checks_s:.0f}", why],
    ]
    for number, part in enumerate(PARTS):
        budget = budget_s(PARTS[number:], left_s)
        left_s -= budget
        why = part.why
        if part.owed:
            why += " (reserved)"
        rows.append([part.name, f"{part.estimate_s:.0f}", f"{budget:.0f}", why])
    for name, why in ELSEWHERE.items():
        rows.append([name, "", "", f"elsewhere: {why}"])
    yield f"Plan of {minutes:g} minutes on an H100, in seconds. Needs are estimates, not measured."
    yield from aligned(rows, right=[1, 2], width=width)
    yield "reserved: earlier parts leave it the time that it needs."
    yield "Time that a part does not use goes to the parts after it."
    yield "Run again with the same --out, or with --resume, it continues with what is missing."
