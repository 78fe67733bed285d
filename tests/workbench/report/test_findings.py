"""Findings of the index follow from the records of a run, and are left out if the records do not support them."""

import pytest

from asrkit.workbench import records
from asrkit.workbench.report import NotebookRun
from asrkit.workbench.report.findings import SMALLEST_FACTOR, comparisons, findings_of

UNITS = {"latency": "ms", "peak": "B", "share": "fraction", "cost": "USD", "syncs": "1/s"}  # fmt: skip
COMPARISONS = comparisons()
MANY = [one for one in COMPARISONS if len(one.arms) > 2]


def found(comparison, values, **of_ours):
    """Findings of a run of its notebook that published a value for each of these arms."""
    published = []
    for impl, value in values.items():
        params = {"T": 80, **(of_ours if impl == comparison.ours else {})}
        what, metric = comparison.what, comparison.metric
        unit = UNITS.get(metric, "1")
        made = records.Measurement(what, metric, unit, value, impl=impl, params=params)
        published.append(made.record())
    run = NotebookRun(name=comparison.notebook, status="ran", records=published)
    return findings_of([run])


def pair(comparison, factor=2.0):
    """Values of one baseline and of ours, better by `factor`."""
    baseline, ours = 0.25 * factor, 0.25
    if comparison.more_is_better:
        baseline, ours = ours, baseline
    return {baselines(comparison)[0]: baseline, comparison.ours: ours}


def baselines(comparison):
    """The implementations that ours is compared with."""
    return [impl for impl in comparison.arms if impl != comparison.ours]


@pytest.mark.parametrize(
    "comparison", COMPARISONS, ids=lambda comparison: comparison.notebook
)
def test_a_finding_has_the_values_of_its_records(comparison):
    values = pair(comparison, 3.0)
    (finding,) = found(comparison, values)
    assert finding.notebook == comparison.notebook
    assert "{" not in finding.sentence + finding.number
    assert finding.quantity.endswith("is better") and "1/" not in finding.sentence
    names, _, shares = zip(*finding.bars, strict=True)
    assert sorted(shares) == pytest.approx([1 / 3, 1])
    assert list(names) == [comparison.arms[impl] for impl in values]


@pytest.mark.parametrize(("baseline", "ours", "texts", "number"), [
    (3.96, 1.418, ["3.96", "1.42"], "2.8×"),
    (120.6, 74.88, ["121", "74.9"], "1.6×"),
    (2849.9, 1000.2, ["2,850", "1,000"], "2.9×"),
])  # fmt: skip
def test_a_factor_is_the_quotient_of_the_values_that_are_shown(
    baseline, ours, texts, number
):
    (finding,) = found(COMPARISONS[0], {"torchaudio": baseline, "numba_cpu": ours})
    assert finding.number == number
    shown = [text.removesuffix("\u00a0ms") for _, text, _ in finding.bars]
    assert shown == texts


@pytest.mark.parametrize("comparison", MANY, ids=lambda comparison: comparison.notebook)
def test_ours_is_compared_with_the_best_baseline_and_every_baseline_is_shown(
    comparison,
):
    best, *_ = baselines(comparison)
    values = {impl: 4.0 + n for n, impl in enumerate(baselines(comparison))}
    (finding,) = found(comparison, values | {comparison.ours: 2.0})
    assert finding.number.startswith("2×") and comparison.arms[best] in finding.sentence
    assert [name for name, _, _ in finding.bars] == [*comparison.arms.values()]
    assert found(comparison, values | {comparison.ours: 3.9}) == []


def test_a_finding_is_of_the_last_conditions_under_which_both_were_measured():
    comparison = COMPARISONS[0]
    runs = [
        records.Measurement(
            "rnnt-loss", "latency", "ms", value, impl=impl, params={"T": T}
        )
        for T, values in ((80, (2.0, 1.0)), (160, (6.0, 2.0)))
        for impl, value in zip(comparison.arms, values, strict=True)
    ]
    made = [one.record() for one in runs]
    (finding,) = findings_of(
        [NotebookRun(name=comparison.notebook, status="ran", records=made)]
    )
    assert finding.number == "3×"


@pytest.mark.parametrize(
    "comparison", COMPARISONS, ids=lambda comparison: comparison.notebook
)
def test_a_finding_that_its_records_do_not_support_is_left_out(comparison):
    values = pair(comparison)
    for impl in values:  # nothing is 0 times as much as something
        assert found(comparison, values | {impl: 0.0}) == []
    for impl, value in values.items():
        assert found(comparison, {impl: value}) == []
    assert found(comparison, values, T=160) == []
    for factor in (0.5, 1.0, SMALLEST_FACTOR - 0.01):
        assert found(comparison, pair(comparison, factor)) == []
