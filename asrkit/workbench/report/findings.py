"""Findings of a run: a number and a sentence each, computed from its records.

data/findings.yaml declares the comparisons: our implementation with the best of its baselines. A
finding is left out if a record is missing, if the records were taken under different conditions, or
if they contradict the sentence. No number is typed by hand.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asrkit.files import shipped_yaml
from asrkit.workbench.records import CONDITIONS, Record
from asrkit.workbench.report.execute import NotebookRun
from asrkit.workbench.tables import NO_BREAK_SPACE

SMALLEST_FACTOR = 1.1  # a smaller factor is no finding
UNITS = {  # unit of a record -> factor and unit on the page
    "1": (1, ""),
    "B": (1e-6, " MB"),
    "B/s": (1e-9, " GB/s"),
    "fraction": (100, " %"),
    "FLOP/s": (1e-9, " GFLOP/s"),
    "s/s": (1, "× real time"),
    "us": (1, " µs"),
    "1/s": (1, " per s"),
}
INTEGER_FROM = 100  # values from here on are shown as integers, smaller ones with three digits


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One entry of data/findings.yaml.

    Attributes:
        notebook: The notebook that publishes the records.
        what: Name of the records.
        metric: Metric of the records.
        arms: The compared implementations, with their names on the page.
        ours: The implementation that is compared with the others.
        sentence: The finding. It may contain {baseline} and {ours}, the values of the best baseline
            and of ours with units; {against}, the name of that baseline; {batch}, the number of
            utterances in a batch; {shape}; and {factor}, the ratio of the two values as shown.
        quantity: What the bars measure.
        basis: How the values were obtained.
        number: The headline, with the same placeholders as the sentence.
        more_is_better: Whether a larger value is better.
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


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding on the index. `bars` are (name, value with its unit, length from 0 to 1)."""

    notebook: str
    number: str
    sentence: str
    quantity: str
    basis: str
    bars: Sequence[tuple[str, str, float]]


@functools.cache
def comparisons() -> tuple[Comparison, ...]:
    """The comparisons of data/findings.yaml."""
    return tuple(Comparison(**entry) for entry in shipped_yaml("findings.yaml"))


def findings_of(runs: Sequence[NotebookRun]) -> list[Finding]:
    """The findings that the records of a run support, in the order of data/findings.yaml."""
    records = {run.name: run.records for run in runs}
    findings = [_finding(one, records.get(one.notebook, ())) for one in comparisons()]
    return [finding for finding in findings if finding]


def _finding(comparison: Comparison, records: Sequence[Record]) -> Finding | None:
    by_conditions: dict[str, dict[str, Record]] = {}  # the last record of each arm
    for record in records:
        is_compared = (record["what"], record["metric"]) == (comparison.what, comparison.metric)
        if is_compared and record["value"] > 0:  # a value of 0 has no factor
            by_conditions.setdefault(str(_conditions(record)), {})[record["impl"]] = record
    others = comparison.arms.keys() - {comparison.ours}
    complete = [
        arms for arms in by_conditions.values() if comparison.ours in arms and others & arms.keys()
    ]
    if not complete:
        return None
    # later records are of the larger sizes
    arms = {impl: complete[-1][impl] for impl in comparison.arms if impl in complete[-1]}
    ours = arms[comparison.ours]
    best = max if comparison.more_is_better else min
    against = best(others & arms.keys(), key=lambda impl: (arms[impl]["value"], impl))
    baseline = arms[against]
    gain = baseline["value"] / ours["value"]
    if comparison.more_is_better:
        gain = 1 / gain
    if gain < SMALLEST_FACTOR:
        return None
    params = ours["params"]
    words = {
        "baseline": value_with_unit(baseline),
        "ours": value_with_unit(ours),
        "against": comparison.arms[against],
        "batch": params.get("B") or (params.get("shape") or [""])[0],
        "shape": " × ".join(map(str, params.get("shape", ()))),
        "factor": _factor(_rounded(baseline), _rounded(ours)),
    }
    longest = max(record["value"] for record in arms.values())
    better = "more" if comparison.more_is_better else "less"
    return Finding(
        notebook=comparison.notebook,
        number=comparison.number.format(**words),
        sentence=comparison.sentence.format(**words),
        quantity=f"{comparison.quantity}: {better} is better",
        basis=comparison.basis,
        bars=[
            (comparison.arms[impl], value_with_unit(record), record["value"] / longest)
            for impl, record in arms.items()
        ],
    )


def _conditions(record: Record) -> list[Any]:
    """The unit and the params in which two records must agree to be compared."""
    return [record["unit"], *(record["params"].get(name) for name in CONDITIONS)]


def _rounded(record: Record, value: float | None = None) -> float:
    """A value, by default the record's, in the unit on the page and rounded as on the page."""
    factor, _ = UNITS.get(record["unit"], (1, ""))
    scaled = factor * (record["value"] if value is None else value)
    return float(round(scaled) if scaled >= INTEGER_FROM else f"{scaled:.3g}")


def value_with_unit(record: Record, value: float | None = None) -> str:
    """The value of a record with its unit: "1,280 ms", "2.41 MB", "93.1 %".

    Args:
        record: The record.
        value: Another value in the record's unit, such as a quartile.
    """
    _, unit = UNITS.get(record["unit"], (1, f" {record['unit']}"))
    if record["metric"] == "ratio":
        unit = "×"
    rounded = _rounded(record, value)
    number = f"{rounded:,.0f}" if rounded >= INTEGER_FROM else f"{rounded:g}"
    return number + unit.replace(" ", NO_BREAK_SPACE)


def _factor(a: float, b: float) -> str:
    """The larger of two values over the smaller."""
    factor = max(a, b) / min(a, b)
    if factor < 10 and factor != round(factor):
        return f"{factor:.2g}"
    return f"{factor:,.0f}"
