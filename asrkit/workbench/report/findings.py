"""What a run found: a number and a sentence each, computed from its records.

A finding is left out where one of its two records is missing, where they were not taken under the
same conditions, or where they contradict the sentence. No number is typed here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asrkit.workbench.report.columns import UNITS
from asrkit.workbench.report.notebook_run import NotebookRun

Record = Mapping[str, Any]
MOST = 6
NO_BREAK_SPACE = "\u00a0"  # between a number and its unit
LEAST_FACTOR = 1.1  # less than this is no finding
CONDITIONS = ("B", "T", "U1", "V", "D", "shape", "dtype", "device", "threads", "day", "ranks")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A side of a comparison: the record that it takes by name and implementation, and words."""

    what: str
    impl: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A comparison of two arms by `metric`, and how a page says it.

    `number` and `sentence` may name {baseline} and {ours}, the two values with their units, and
    {factor}, by which ours is better. `quantity` names what the bars measure.
    """

    notebook: str
    metric: str
    baseline: Arm
    ours: Arm
    sentence: str
    quantity: str
    number: str = "{factor}×"
    more_is_better: bool = False


DECLARED = (
    Declared(
        notebook="03_loss_kernels",
        metric="latency",
        baseline=Arm(what="rnnt-loss", impl="torchaudio", label="torchaudio"),
        ours=Arm(what="rnnt-loss", impl="numba_cpu", label="asrkit"),
        sentence="RNN-T loss and gradient are {factor} times as fast as torchaudio's.",
        quantity="Time of the loss and its gradient",
    ),
    Declared(
        notebook="02_joint_memory",
        metric="peak",
        baseline=Arm(what="joint-peak", impl="torchaudio", label="torchaudio"),
        ours=Arm(what="joint-peak", impl="lean", label="lean loss"),
        sentence="The lean loss trains the joint in 1/{factor} of the memory of torchaudio's.",
        quantity="Peak memory of joint, loss and gradients",
        number="1/{factor}",
    ),
    Declared(
        notebook="08_batching",
        metric="share",
        baseline=Arm(what="useful-compute", impl="random", label="random"),
        ours=Arm(what="useful-compute", impl="balanced", label="balanced"),
        sentence="On simulated ranks, balanced batches raise useful compute from {baseline} to "
        "{ours}.",
        quantity="Share of the ranks' time that is neither padding nor waiting",
        number="{baseline} → {ours}",
        more_is_better=True,
    ),
    Declared(
        notebook="06_label_looping",
        metric="joint_calls",
        baseline=Arm(what="decoder-calls", impl="one_by_one", label="one by one"),
        ours=Arm(what="decoder-calls", impl="windowed_looping", label="batched"),
        sentence="Batched decoding calls the joint {ours} times instead of {baseline}.",
        quantity="Calls of the joint for the same labels",
        number="{baseline} → {ours}",
    ),
    Declared(
        notebook="07_cuda_graphs",
        metric="syncs",
        baseline=Arm(what="decoder-launches", impl="frame_looping", label="frame looping"),
        ours=Arm(what="decoder-launches", impl="windowed_looping", label="windowed looping"),
        sentence="A GPU decoder would wait {factor} times less often: counted, not timed.",
        quantity="Waits of the host for the GPU, per second of speech",
    ),
    Declared(
        notebook="12_cost",
        metric="cost",
        baseline=Arm(what="million-hours", impl="cores", label="CPU cores"),
        ours=Arm(what="million-hours", impl="GPUs", label="GPUs"),
        sentence="A million hours of speech cost {ours} on GPUs and {baseline} on CPU cores, "
        "at public prices.",
        quantity="Cost of a million hours of speech",
        number="{ours}",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of a finding; `share` is its length, 1 for the longer of the two."""

    label: str
    text: str
    share: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding on the index; `notebook` is where it leads, `quantity` what the bars measure."""

    notebook: str
    number: str
    sentence: str
    quantity: str
    bars: Sequence[Bar]


def findings_of(
    runs: Sequence[NotebookRun], declared: Sequence[Declared] = DECLARED
) -> list[Finding]:
    """Findings that the records of a run support, at most six, in the order of `declared`."""
    records = {run.name: run.records for run in runs}
    found = []
    for one in declared:
        finding = _finding(one, records.get(one.notebook, ()))
        if finding is not None:
            found.append(finding)
    return found[:MOST]


def _finding(declared: Declared, records: Sequence[Record]) -> Finding | None:
    baseline = _record(records, declared.baseline, declared.metric)
    ours = _record(records, declared.ours, declared.metric)
    if baseline is None or ours is None or _conditions(baseline) != _conditions(ours):
        return None
    smaller = min(baseline["value"], ours["value"])
    longest = max(baseline["value"], ours["value"])
    is_better = (ours["value"] > baseline["value"]) == declared.more_is_better
    if not is_better or smaller <= 0 or longest / smaller < LEAST_FACTOR:
        return None
    words = {
        "baseline": _text(baseline),
        "ours": _text(ours),
        "factor": _rounded(longest / smaller),
    }
    sides = ((declared.baseline, baseline), (declared.ours, ours))
    bars = [
        Bar(label=arm.label, text=_text(record), share=record["value"] / longest)
        for arm, record in sides
    ]
    return Finding(
        notebook=declared.notebook,
        number=declared.number.format(**words),
        sentence=declared.sentence.format(**words),
        quantity=declared.quantity,
        bars=bars,
    )


def _record(records: Sequence[Record], arm: Arm, metric: str) -> Record | None:
    """The last record of an arm: later ones are of the larger sizes."""
    for record in reversed(records):
        if (record["what"], record["metric"], record["impl"]) == (arm.what, metric, arm.impl):
            return record
    return None


def _conditions(record: Record) -> list[Any]:
    """What two records must have in common to be compared."""
    return [record["unit"], *(record["params"].get(name) for name in CONDITIONS)]


def _text(record: Record) -> str:
    """The value of a record with its unit."""
    value = record["value"]
    if record["unit"] == "USD":
        return f"${value:,.0f}"
    factor, unit = UNITS.get(record["unit"], (1, f" {record['unit']}"))
    return _rounded(value * factor) + unit.replace(" ", NO_BREAK_SPACE)


def _rounded(value: float) -> str:
    if value < 10 and value != round(value):
        return f"{value:.2g}"
    return f"{value:,.0f}"
