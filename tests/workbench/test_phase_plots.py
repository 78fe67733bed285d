"""Pictures of phases: the areas are the cells that are computed."""

import numpy as np
import pytest

from asrkit.data import Lengths, Presorted, Random, at_most_utterances, computed_seconds, plan
from asrkit.workbench import plots
from asrkit.workbench.plots.svg import as_svg

SECONDS = np.array([3.0, 9.0, 4.0, 10.0, 1.0])


def areas(ax, label):
    """Summed area of the bars that were drawn with this label."""
    return {
        container.get_label(): sum(bar.get_width() * bar.get_height() for bar in container)
        for container in ax.containers
    }[label]


def test_the_cells_of_a_batch_are_those_of_its_phases():
    lengths = Lengths(SECONDS, [0] * 5)
    epoch = plan(Random(limit=at_most_utterances(5)), lengths)
    for count in (1, 2, 4):
        _, ax = plots.canvas("A batch")
        (phases,) = epoch.phases(lengths, count)
        plots.phased_batch(SECONDS, phases, ax, slowest=7.0)
        bars = [container for container in ax.containers if container.get_label() != "useful"]
        drawn = sum(bar.get_width() * bar.get_height() for one in bars for bar in one)
        assert len(bars) == count
        for (bar,), (end, rows) in zip(bars, phases, strict=True):
            assert (bar.get_x(), bar.get_width()) == (0, rows)
            assert bar.get_y() + bar.get_height() == pytest.approx(end)
        assert drawn == pytest.approx(computed_seconds(SECONDS, count))
        assert areas(ax, "useful") == pytest.approx(SECONDS.sum())
        heights = [bar.get_height() for bar in ax.containers[-1]]
        assert heights == sorted(SECONDS, reverse=True)
        (line,) = ax.lines
        assert set(line.get_ydata()) == {7.0}


def test_ranks_wait_for_the_slowest_and_less_so_when_presorted():
    random = np.random.default_rng(0)
    lengths = Lengths(random.uniform(1, 16, 64), np.zeros(64))
    strategy = Random(limit=at_most_utterances(8))
    waiting = {}
    for name, one in (("random", strategy), ("presorted", Presorted(strategy))):
        (step,) = plan(one, lengths, ranks=8).steps
        batches = [lengths.seconds[rows] for rows in step]
        _, ax = plots.canvas("Ranks")
        plots.rank_work(batches, ax, phases=2, most=200.0)
        computed = [computed_seconds(seconds, 2) for seconds in batches]
        assert areas(ax, "useful") == pytest.approx(0.8 * lengths.seconds.sum())
        assert areas(ax, "padding") == pytest.approx(0.8 * (sum(computed) - lengths.seconds.sum()))
        waiting[name] = areas(ax, "waiting")
        assert waiting[name] == pytest.approx(0.8 * sum(max(computed) - c for c in computed))
        assert ax.get_ylim() == (0, 200)
    assert waiting["presorted"] < 0.5 * waiting["random"]


def test_pictures_of_phases_follow_the_scheme_and_move_with_a_slider(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    lengths = Lengths(SECONDS, [0] * 5)
    epoch = plan(Random(limit=at_most_utterances(5)), lengths)

    def draw(count):
        figure, ax = plots.canvas(f"{count} phases")
        plots.phased_batch(SECONDS, epoch.phases(lengths, count)[0], ax)
        return figure, f"Bars of five utterances in {count} phases"

    plots.frames(draw, [1, 2, 4], "phases k")
    assert "phases k: 1, 2, 4" in shown[0]["text/plain"]
    figure, _ = draw(2)
    svg = as_svg(figure)
    assert "var(--blue)" in svg and "var(--red)" in svg


def test_phases_of_another_batch_are_refused():
    _, ax = plots.canvas("A batch")
    with pytest.raises(ValueError, match="phases: expected a first one of all 5 utterances, got 4"):
        plots.phased_batch(SECONDS, [(10.0, 4)], ax)
