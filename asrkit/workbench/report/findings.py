"""What a run found: a number and a sentence each, computed from its records.

Ours is compared with the best of its baselines. A finding is left out where a record of ours or of
every baseline is missing, where they were not taken under the same conditions, or where they
contradict the sentence. No number is typed here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asrkit.workbench.records import CONDITIONS, Record
from asrkit.workbench.report.execute import NotebookRun
from asrkit.workbench.tables import NO_BREAK_SPACE

LEAST_FACTOR = 1.1  # less than this is no finding
UNITS = {  # unit of a record -> factor and text of what is shown
    "1": (1, ""),
    "B": (1e-6, " MB"),
    "B/s": (1e-9, " GB/s"),
    "fraction": (100, " %"),
    "FLOP/s": (1e-9, " GFLOP/s"),
    "s/s": (1, "× real time"),
    "us": (1, " µs"),
    "1/s": (1, " per s"),
}
EXACT_FROM = 100  # values from here on are shown to the unit, smaller ones with three digits


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A comparison of `ours` with its baselines, and how a page says it.

    `arms` are the implementations whose records of `what` and `metric` are compared, with their
    names on the page. `number` and `sentence` may name {baseline} and {ours}, the values of the
    best baseline and of ours with their units, {against}, the name of that baseline, {batch}, how
    many utterances were done together, {shape}, and {factor}, by which ours is better: the quotient
    of the two values as they are shown. `quantity` names what the bars measure, `basis` how the
    values came about.
    """

    notebook: str
    what: str
    metric: str
    arms: Mapping[str, str]
    ours: str
    sentence: str
    quantity: str
    basis: str = "timed"
    number: str = "{factor}×"
    more_is_better: bool = False


DECLARED = (
    Declared(
        notebook="03_loss_kernels",
        what="rnnt-loss",
        metric="latency",
        arms={"torchaudio": "torchaudio", "numba_cpu": "asrkit"},
        ours="numba_cpu",
        sentence="RNN-T loss and gradient of {shape} logits are {factor} times as fast as "
        "torchaudio's.",
        quantity="Time of the loss and its gradient",
    ),
    Declared(
        notebook="02_joint_memory",
        what="joint-peak",
        metric="peak",
        arms={"torchaudio": "torchaudio", "lean": "lean loss"},
        ours="lean",
        sentence="Training the joint with the lean loss takes {factor} times less memory than "
        "with torchaudio's.",
        quantity="Peak memory of joint, loss and gradients",
        basis="measured",
        number="{factor}× less",
    ),
    Declared(
        notebook="08_batching",
        what="useful-compute",
        metric="share",
        arms={"random": "random", "balanced": "balanced"},
        ours="balanced",
        sentence="On simulated ranks, with synthetic lengths that vary widely, balanced batches "
        "raise useful compute from {baseline} to {ours}.",
        quantity="Share of the ranks' time that is neither padding nor waiting",
        basis="simulated",
        number="{baseline} → {ours}",
        more_is_better=True,
    ),
    Declared(
        notebook="06_label_looping",
        what="transducer-greedy-batch",
        metric="latency",
        arms={
            "one_by_one": "one by one",
            "frame_looping": "frame looping",
            "label_looping": "label looping",
            "windowed_looping": "windowed looping",
        },
        ours="windowed_looping",
        sentence="Windowed looping decodes {batch} utterances together {factor} times as fast as "
        "{against}.",
        quantity="Time of greedy decoding",
    ),
    Declared(
        notebook="07_cuda_graphs",
        what="decoder-launches",
        metric="syncs",
        arms={
            "frame_looping": "frame looping",
            "label_looping": "label looping",
            "windowed_looping": "windowed looping",
        },
        ours="windowed_looping",
        sentence="With windowed looping, the host waits for the GPU {factor} times less often than "
        "with {against}.",
        quantity="Waits of the host for the GPU, per second of speech",
        basis="counted",
        number="{factor}× fewer",
    ),
    Declared(
        notebook="12_cost",
        what="million-hours",
        metric="cost",
        arms={"cores": "CPU cores", "GPUs": "GPUs"},
        ours="GPUs",
        sentence="A million hours of speech cost {ours} on GPUs and {baseline} on CPU cores, "
        "at the newest public prices and published speeds.",
        quantity="Cost of a million hours of speech",
        basis="computed from prices",
        number="{ours}",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding on the index. `bars` are (name, value with its unit, length from 0 to 1)."""

    notebook: str
    number: str
    sentence: str
    quantity: str
    basis: str
    bars: Sequence[tuple[str, str, float]]


def findings_of(runs: Sequence[NotebookRun]) -> list[Finding]:
    """Findings that the records of a run support, in the order of `DECLARED`."""
    records = {run.name: run.records for run in runs}
    found = [_finding(one, records.get(one.notebook, ())) for one in DECLARED]
    return [finding for finding in found if finding]


def _finding(declared: Declared, records: Sequence[Record]) -> Finding | None:
    found: dict[str, dict[str, Record]] = {}  # under the same conditions: arm -> its last record
    for record in records:
        is_one = (record["what"], record["metric"]) == (declared.what, declared.metric)
        if is_one and record["value"] > 0:  # else there is no factor
            found.setdefault(str(_conditions(record)), {})[record["impl"]] = record
    others = declared.arms.keys() - {declared.ours}
    comparable = [arms for arms in found.values() if declared.ours in arms and others & arms.keys()]
    if not comparable:
        return None
    taken = comparable[-1]  # later records are of the larger sizes
    ours = taken[declared.ours]
    arms = {impl: taken[impl] for impl in declared.arms if impl in taken}
    baselines = sorted((arms[impl]["value"], impl) for impl in arms if impl != declared.ours)
    value, against = baselines[-1 if declared.more_is_better else 0]
    gain = ours["value"] / value if declared.more_is_better else value / ours["value"]
    if gain < LEAST_FACTOR:
        return None
    baseline = arms[against]
    params = ours["params"]
    words = {
        "baseline": value_with_unit(baseline),
        "ours": value_with_unit(ours),
        "against": declared.arms[against],
        "batch": params.get("B") or (params.get("shape") or [""])[0],
        "shape": " × ".join(map(str, params.get("shape", ()))),
        "factor": _factor(_rounded(baseline, value), _rounded(ours, ours["value"])),
    }
    longest = max(record["value"] for record in arms.values())
    return Finding(
        notebook=declared.notebook,
        number=declared.number.format(**words),
        sentence=declared.sentence.format(**words),
        quantity=f"{declared.quantity}: {'more' if declared.more_is_better else 'less'} is better",
        basis=declared.basis,
        bars=[
            (declared.arms[impl], value_with_unit(record), record["value"] / longest)
            for impl, record in arms.items()
        ],
    )


def _conditions(record: Record) -> list[Any]:
    """What two records must have in common to be compared."""
    return [record["unit"], *(record["params"].get(name) for name in CONDITIONS)]


def _rounded(record: Record, value: float) -> float:
    """A value in the unit in which it is shown, rounded as it is shown."""
    factor, _ = UNITS.get(record["unit"], (1, ""))
    if value * factor >= EXACT_FROM:
        return float(round(value * factor))
    return float(f"{value * factor:.3g}")


def value_with_unit(record: Record, value: float | None = None) -> str:
    """The value of a record with its unit: "1,280 ms", "2.41 MB", "93.1 %".

    Args:
        record: The record.
        value: Another value in the record's unit, as a quartile.
    """
    _, unit = UNITS.get(record["unit"], (1, f" {record['unit']}"))
    if record["metric"] == "ratio":
        unit = "×"
    rounded = _rounded(record, record["value"] if value is None else value)
    number = f"{rounded:,.0f}" if rounded >= EXACT_FROM else f"{rounded:g}"
    return number + unit.replace(" ", NO_BREAK_SPACE)


def _factor(one: float, other: float) -> str:
    """The larger of two values over the smaller."""
    factor = max(one, other) / min(one, other)
    if factor < 10 and factor != round(factor):
        return f"{factor:.2g}"
    return f"{factor:,.0f}"
