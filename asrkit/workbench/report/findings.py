"""What a run found: a number and a sentence each, computed from its records.

Ours is compared with the best of its baselines. A finding is left out where a record of ours or of
every baseline is missing, where they were not taken under the same conditions, or where they
contradict the sentence. No number is typed here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asrkit.workbench.report.columns import UNITS
from asrkit.workbench.report.notebook_run import NotebookRun
from asrkit.workbench.tables import NO_BREAK_SPACE

Record = Mapping[str, Any]
MOST = 6
LEAST_FACTOR = 1.1  # less than this is no finding
SHOWN_UNITS = {**UNITS, "B": (1e-6, " MB")}  # bytes as notebook 02 writes them
EXACT_FROM = 100  # values from here on are shown to the unit, smaller ones with three digits
CONDITIONS = ("B", "T", "U1", "V", "D", "shape", "dtype", "device", "threads", "day", "ranks")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A side of a comparison: the record that it takes by name and implementation, and words."""

    what: str
    impl: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A comparison of an arm with its baselines by `metric`, and how a page says it.

    `number` and `sentence` may name {baseline} and {ours}, the values of the best baseline and of
    ours with their units, {against}, the name of that baseline, {batch}, how many utterances were
    done together, and {factor}, by which ours is better: the quotient of the two values as they are
    shown. `quantity` names what the bars measure.
    """

    notebook: str
    metric: str
    baselines: Sequence[Arm]
    ours: Arm
    sentence: str
    quantity: str
    number: str = "{factor}×"
    more_is_better: bool = False


DECLARED = (
    Declared(
        notebook="03_loss_kernels",
        metric="latency",
        baselines=(Arm(what="rnnt-loss", impl="torchaudio", label="torchaudio"),),
        ours=Arm(what="rnnt-loss", impl="numba_cpu", label="asrkit"),
        sentence="RNN-T loss and gradient are {factor} times as fast as torchaudio's.",
        quantity="Time of the loss and its gradient",
    ),
    Declared(
        notebook="02_joint_memory",
        metric="peak",
        baselines=(Arm(what="joint-peak", impl="torchaudio", label="torchaudio"),),
        ours=Arm(what="joint-peak", impl="lean", label="lean loss"),
        sentence="The lean loss trains the joint in 1/{factor} of the memory of torchaudio's.",
        quantity="Peak memory of joint, loss and gradients",
        number="1/{factor}",
    ),
    Declared(
        notebook="08_batching",
        metric="share",
        baselines=(Arm(what="useful-compute", impl="random", label="random"),),
        ours=Arm(what="useful-compute", impl="balanced", label="balanced"),
        sentence="On simulated ranks, balanced batches raise useful compute from {baseline} to "
        "{ours}.",
        quantity="Share of the ranks' time that is neither padding nor waiting",
        number="{baseline} → {ours}",
        more_is_better=True,
    ),
    Declared(
        notebook="06_label_looping",
        metric="latency",
        baselines=(
            Arm(what="transducer-greedy-batch", impl="one_by_one", label="one by one"),
            Arm(what="transducer-greedy-batch", impl="frame_looping", label="frame looping"),
            Arm(what="transducer-greedy-batch", impl="label_looping", label="label looping"),
        ),
        ours=Arm(what="transducer-greedy-batch", impl="windowed_looping", label="windowed looping"),
        sentence="Windowed looping decodes {batch} utterances together {factor} times as fast as "
        "{against}.",
        quantity="Time of greedy decoding",
    ),
    Declared(
        notebook="07_cuda_graphs",
        metric="syncs",
        baselines=(
            Arm(what="decoder-launches", impl="frame_looping", label="frame looping"),
            Arm(what="decoder-launches", impl="label_looping", label="label looping"),
        ),
        ours=Arm(what="decoder-launches", impl="windowed_looping", label="windowed looping"),
        sentence="With {against}, a GPU that decodes would wait for its host {factor} times as "
        "often as with windowed looping: counted, not timed.",
        quantity="Waits of the host for the GPU, per second of speech",
    ),
    Declared(
        notebook="12_cost",
        metric="cost",
        baselines=(Arm(what="million-hours", impl="cores", label="CPU cores"),),
        ours=Arm(what="million-hours", impl="GPUs", label="GPUs"),
        sentence="A million hours of speech cost {ours} on GPUs and {baseline} on CPU cores, "
        "at the newest public prices.",
        quantity="Cost of a million hours of speech",
        number="{ours}",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of a finding; `share` is its length, 1 for the longest."""

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
    ours = _record(records, declared.ours, declared.metric)
    if ours is None:
        return None
    baselines = dict[Arm, Record]()
    for arm in declared.baselines:
        record = _record(records, arm, declared.metric)
        if record is not None and _conditions(record) == _conditions(ours):
            baselines[arm] = record
    best = _best(baselines, more_is_better=declared.more_is_better)
    if best is None or not _is_better(declared, ours, baselines[best]):
        return None
    baseline = baselines[best]
    words = {
        "baseline": _text(baseline),
        "ours": _text(ours),
        "against": best.label,
        "batch": _batch(ours),
        "factor": _factor(_shown(baseline)[0], _shown(ours)[0]),
    }
    return Finding(
        notebook=declared.notebook,
        number=declared.number.format(**words),
        sentence=declared.sentence.format(**words),
        quantity=declared.quantity,
        bars=_bars({**baselines, declared.ours: ours}),
    )


def _best(baselines: Mapping[Arm, Record], *, more_is_better: bool) -> Arm | None:
    """The baseline that is hardest to beat; None where there is none."""
    if not baselines:
        return None
    ordered = sorted(baselines, key=lambda arm: baselines[arm]["value"])
    if more_is_better:
        return ordered[-1]
    return ordered[0]


def _is_better(declared: Declared, ours: Record, baseline: Record) -> bool:
    """Whether ours is better by enough to be a finding."""
    smaller, larger = sorted((ours["value"], baseline["value"]))
    if smaller <= 0 or larger / smaller < LEAST_FACTOR:
        return False
    return bool((ours["value"] > baseline["value"]) == declared.more_is_better)


def _bars(arms: Mapping[Arm, Record]) -> list[Bar]:
    """A bar for each arm, the longest of length 1."""
    longest = max(record["value"] for record in arms.values())
    return [
        Bar(label=arm.label, text=_text(record), share=record["value"] / longest)
        for arm, record in arms.items()
    ]


def _record(records: Sequence[Record], arm: Arm, metric: str) -> Record | None:
    """The last record of an arm: later ones are of the larger sizes."""
    for record in reversed(records):
        if (record["what"], record["metric"], record["impl"]) == (arm.what, metric, arm.impl):
            return record
    return None


def _conditions(record: Record) -> list[Any]:
    """What two records must have in common to be compared."""
    return [record["unit"], *(record["params"].get(name) for name in CONDITIONS)]


def _batch(record: Record) -> str:
    """How many utterances a record is of; empty where it does not say."""
    params = record["params"]
    shape = params.get("shape", [""])
    return str(params.get("B", shape[0]))


def _shown(record: Record) -> tuple[float, str]:
    """The value of a record, rounded as it is shown, and its unit."""
    factor, unit = SHOWN_UNITS.get(record["unit"], (1, f" {record['unit']}"))
    value = record["value"] * factor
    if value >= EXACT_FROM or record["unit"] == "fraction":
        return float(round(value)), unit
    return float(f"{value:.3g}"), unit


def _text(record: Record) -> str:
    """The value of a record with its unit."""
    value, unit = _shown(record)
    number = f"{value:g}"
    if value >= EXACT_FROM:
        number = f"{value:,.0f}"
    return number + unit.replace(" ", NO_BREAK_SPACE)


def _factor(one: float, other: float) -> str:
    """The larger of two values over the smaller."""
    factor = max(one, other) / min(one, other)
    if factor < 10 and factor != round(factor):
        return f"{factor:.2g}"
    return f"{factor:,.0f}"
