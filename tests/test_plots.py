import re

import numpy as np
import pytest
import torch

from asrkit import plots


def test_a_picture_without_words_is_refused():
    figure, _ = plots.canvas("title")
    with pytest.raises(ValueError, match="alt: expected a sentence"):
        plots.as_html(figure, "plot")


def test_html_holds_the_picture_itself_and_its_escaped_alt_text():
    figure, _ = plots.canvas("title")
    html = plots.as_html(figure, 'A plot of "this" & that thing')
    assert re.fullmatch(r'<img alt="[^"<]+" src="data:image/png;base64,[A-Za-z0-9+/=]+">', html)
    assert "&quot;this&quot; &amp; that" in html


def test_the_lattice_names_its_rows_after_the_labels_and_draws_the_path():
    _, ax = plots.canvas("title")
    plots.lattice(torch.rand(5, 4), list("a b"), ax, path=[(0, 0), (1, 0), (1, 1)], caption="share")
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["∅", "a", "␣", "b"]
    assert ax.lines[0].get_xydata().tolist() == [[0, 0], [1, 0], [1, 1]]
    assert ax.images[0].get_array().shape == (4, 5)
    with pytest.raises(ValueError, match="labels: expected 3"):
        plots.lattice(torch.rand(5, 4), ["a"], ax)


def test_the_curve_shows_every_step_in_seconds_and_nats():
    _, ax = plots.canvas("title")
    plots.training_curve([{"seconds": float(i), "loss": 5.0 - i} for i in range(4)], ax)
    assert ax.lines[0].get_xdata().tolist() == [0, 1, 2, 3]
    assert ax.get_ylabel() == "loss, nats per label"


def test_a_spectrogram_measures_time_in_seconds():
    _, ax = plots.canvas("title")
    plots.spectrogram(torch.rand(50, 80), 0.01, ax)
    assert ax.images[0].get_extent() == [0, 0.5, 0, 80]


def test_pictures_leave_no_state_behind():
    import matplotlib
    import matplotlib.pyplot as plt

    before = dict(matplotlib.rcParams)
    figure, ax = plots.canvas("title")
    plots.waveform(torch.rand(100), 100, ax)
    plots.as_html(figure, "A short random waveform drawn")
    assert plt.get_fignums() == [] and dict(matplotlib.rcParams) == before


def test_stacked_bars_add_up_and_measured_totals_are_marked():
    figure, ax = plots.canvas("Two rows")
    plots.stacked({"a": {"x": 1, "y": 2}, "b": {"y": 4}}, ax, measured={"b": 5}, unit="MB")
    ends = {bar.get_y() + bar.get_height() / 2: 0.0 for bar in ax.patches}
    for bar in ax.patches:
        ends[bar.get_y() + bar.get_height() / 2] = max(ends[bar.get_y() + bar.get_height() / 2], bar.get_x() + bar.get_width())
    assert list(ends.values()) == [3, 4]
    assert [float(x) for x in ax.lines[0].get_xdata()] == [5] and ax.get_xlabel() == "MB"
    assert len({bar.get_facecolor() for bar in ax.patches}) == 2


def test_a_timeline_keeps_the_order_and_gives_a_name_one_colour():
    _, ax = plots.canvas("Two rows")
    plots.timeline({"a": [("cast", 1.0), ("product", 2.0), ("cast", 3.0)], "b": [("norm", 4.0), ("cast", 1.0)]}, ax, unit="µs")
    drawn = {}
    for spans in ax.collections:
        for path in spans.get_paths():
            (left, low), (right, _) = path.vertices.min(0), path.vertices.max(0)
            drawn[round(low + 0.4), left, right] = tuple(spans.get_facecolor()[0])
    assert sorted(drawn) == [(0, 0, 1), (0, 1, 3), (0, 3, 6), (1, 0, 4), (1, 4, 5)]
    assert drawn[0, 0, 1] == drawn[0, 3, 6] == drawn[1, 4, 5] and len(set(drawn.values())) == 3
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["cast", "product", "norm"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["a", "b"] and ax.get_xlabel() == "time, µs"
    with pytest.raises(ValueError, match="rows: expected at most 10 different names, got 11"):
        plots.timeline({"a": [(str(i), 1.0) for i in range(11)]}, ax)


def test_padded_batches_show_the_area_of_each_batch_and_what_of_it_is_used():
    _, ax = plots.canvas("Two batches")
    batches = [np.array([1.0, 3.0, 2.0]), np.array([5.0])]
    plots.padded_batches(batches, ax)
    pale = [bar for bar in ax.patches if bar.get_alpha()]
    dark = [bar for bar in ax.patches if not bar.get_alpha()]
    assert [bar.get_width() * bar.get_height() for bar in pale] == [9, 5]
    assert [bar.get_width() * bar.get_height() for bar in dark] == [1, 3, 2, 5]
    for area, bars in zip(pale, (dark[:3], dark[3:]), strict=True):
        assert (area.get_x(), area.get_x() + area.get_width()) == (bars[0].get_x(), bars[-1].get_x() + bars[-1].get_width())
    assert pale[0].get_x() + pale[0].get_width() < pale[1].get_x() and ax.get_ylabel() == "length, s"


def test_lengths_are_counted_by_seconds_and_by_rate_and_one_axes_shows_seconds_only():
    seconds, tokens = np.array([1.0, 2.0, 2.0, 4.0]), np.array([5, 10, 20, 20])
    _, axes = plots.canvas("title", columns=3)
    plots.lengths(seconds, tokens, axes)
    assert [sum(bar.get_height() for bar in ax.patches) for ax in axes[:2]] == [4, 4]
    assert axes[1].get_xlabel() == "tokens per second" and sum(axes[2].collections[0].get_array()) == 4
    _, ax = plots.canvas("title")
    assert plots.lengths(seconds, tokens, [ax])[0].get_xlabel() == "length, s"
