"""Findings of the index: they follow the records of a run, and are left out where those do not support them."""

import pytest

from asrkit.workbench import records
from asrkit.workbench.report import NotebookRun
from asrkit.workbench.report.findings import DECLARED, LEAST_FACTOR, findings_of

UNITS = {
    "latency": "ms",
    "peak": "B",
    "share": "fraction",
    "cost": "USD",
    "syncs": "1/s",
}


def record(declared, impl, value, **params):
    """A sealed record of one arm."""
    unit = UNITS.get(declared.metric, "1")
    return records.Measurement(
        declared.what, declared.metric, unit, value, impl=impl, params=params
    ).record()


def baselines(declared):
    """Implementations that ours is compared with."""
    return [impl for impl in declared.arms if impl != declared.ours]


def run(declared, *published):
    """A run of the notebook of a finding that published these records."""
    return NotebookRun(
        name=declared.notebook,
        status="ran",
        records=published,
    )


def pair(declared, factor=2.0, **params):
    """Records in which ours is better by `factor`."""
    ends = (0.25 * factor, 0.25)
    if declared.more_is_better:
        ends = (0.25, 0.25 * factor)
    return (
        record(declared, baselines(declared)[0], ends[0], T=80),
        record(declared, declared.ours, ends[1], **{"T": 80, **params}),
    )


@pytest.mark.parametrize("declared", DECLARED, ids=lambda declared: declared.notebook)
def test_a_finding_says_what_its_records_say(declared):
    (finding,) = findings_of([run(declared, *pair(declared, 3.0))])
    assert finding.notebook == declared.notebook
    assert "{" not in finding.sentence + finding.number
    assert sorted(share for _, _, share in finding.bars) == pytest.approx([1 / 3, 1])
    shown = [declared.arms[baselines(declared)[0]], declared.arms[declared.ours]]
    assert [name for name, _, _ in finding.bars] == shown


@pytest.mark.parametrize(("values", "texts", "number"), [
    ((3.96, 1.418), ["3.96", "1.42"], "2.8×"), ((120.6, 74.88), ["121", "74.9"], "1.6×"), ((2849.9, 1000.2), ["2,850", "1,000"], "2.9×"),
])  # fmt: skip
def test_a_factor_is_the_quotient_of_the_values_that_stand_beside_it(
    values, texts, number
):
    loss = DECLARED[0]
    both = (
        record(loss, "torchaudio", values[0]),
        record(loss, loss.ours, values[1]),
    )
    (finding,) = findings_of([run(loss, *both)])
    assert finding.number == number
    assert [text for _, text, _ in finding.bars] == [
        f"{text}\u00a0ms" for text in texts
    ]


@pytest.mark.parametrize(
    "declared",
    [one for one in DECLARED if len(one.arms) > 2],
    ids=lambda one: one.notebook,
)
def test_ours_is_compared_with_the_best_baseline_and_every_baseline_is_shown(declared):
    made = [
        record(declared, impl, value)
        for value, impl in enumerate(baselines(declared), 4)
    ]
    ours = record(declared, declared.ours, 2.0)
    (finding,) = findings_of([run(declared, *made, ours)])
    best = declared.arms[baselines(declared)[0]]
    assert finding.number == "2×" and best in finding.sentence
    assert [name for name, _, _ in finding.bars] == [*declared.arms.values()]
    assert (
        findings_of([run(declared, *made, record(declared, declared.ours, 3.9))]) == []
    )


@pytest.mark.parametrize("declared", DECLARED, ids=lambda declared: declared.notebook)
def test_a_finding_that_its_records_do_not_support_is_left_out(declared):
    baseline, ours = pair(declared)
    assert (
        findings_of([run(declared, baseline)])
        == findings_of([run(declared, ours)])
        == []
    )
    for factor in (0.5, 1.0, LEAST_FACTOR - 0.01):
        assert findings_of([run(declared, *pair(declared, factor))]) == []
    assert findings_of([run(declared, *pair(declared, T=160))]) == []
