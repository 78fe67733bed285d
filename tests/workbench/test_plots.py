import base64
import re
from xml.etree import ElementTree

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
import torch

from asrkit.workbench import plots
from asrkit.workbench.cost import (
    Instance,
    Range,
    Speed,
    fit_epochs,
    fit_steps,
    joint_bytes,
    published_runs,
    transcription_cost,
    without_buckets,
)
from asrkit.workbench.plots.palette import DARK, GREEN, RED, THINGS, colours_of
from asrkit.workbench.plots.svg import HEAVY_BYTES
from asrkit.workbench.profiling import Timing


def test_a_picture_without_words_is_refused():
    figure, _ = plots.canvas("title")
    with pytest.raises(ValueError, match="alt: expected a sentence"):
        plots.as_html(figure, "plot")


def picture_in(html):
    """The SVG inside an `<img>`."""
    data = re.fullmatch(r'<img alt="[^"<]+" src="data:image/svg\+xml;base64,([^"]+)">', html)[1]
    return base64.b64decode(data).decode()


def test_html_holds_the_picture_itself_and_its_escaped_alt_text():
    figure, _ = plots.canvas("A title")
    html = plots.as_html(figure, 'A plot of "this" & that thing')
    assert "&quot;this&quot; &amp; that" in html
    root = ElementTree.fromstring(picture_in(html))
    assert "A title" in [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_picture_is_shown_with_its_words(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    figure, _ = plots.canvas("title")
    plots.show(figure, "A canvas with nothing on it")
    (data,) = shown
    assert data["text/html"] == plots.as_html(figure, "A canvas with nothing on it")
    assert data["text/plain"] == "A canvas with nothing on it"


def test_colours_of_the_palette_change_with_the_scheme_and_no_others():
    figure, ax = plots.canvas("title")
    ax.plot([0, 1], [0, 1], color=plots.COLOURS[0])
    ax.plot([1, 0], [0, 1], color="#123456")
    picture = picture_in(plots.as_html(figure, "Two lines that cross once"))
    assert "stroke:var(--blue)" in picture and "stroke: #123456" in picture
    light, dark = re.findall(r"--blue:(#\w{6})", picture)
    assert light == plots.COLOURS[0] != dark
    assert "@media screen and (prefers-color-scheme:dark)" in picture
    assert "#000000" not in picture.split("</style>")[1]


def test_a_number_on_a_mark_stays_black_and_one_beside_it_follows_the_scheme():
    figure, ax = plots.canvas("title")
    ax.scatter([0, 1], [0, 1], c=[0, 1], cmap="Blues", s=300)
    ax.text(0, 0, "on a mark")
    ax.text(0.5, 0, "beside it")
    root = ElementTree.fromstring(picture_in(plots.as_html(figure, "Two marks, one with a word")))
    fills = {
        text.text: "fill: #010101" in text.get("style", "")
        for text in root.iter("{http://www.w3.org/2000/svg}text")
    }
    assert (fills["on a mark"], fills["beside it"]) == (True, False)


def test_a_heat_map_keeps_one_pixel_a_value_and_many_points_become_a_picture():
    figure, ax = plots.canvas("title")
    plots.lattice(torch.rand(7, 4), list("abc"), ax)
    picture = picture_in(plots.as_html(figure, "A lattice of four rows"))
    assert re.search(r'<image [^>]*width="7" height="4"', picture)
    figure, ax = plots.canvas("title")
    ax.scatter(*np.random.default_rng(0).random((2, 5000)))
    picture = picture_in(plots.as_html(figure, "Five thousand points at random"))
    assert picture.count("<image") == 1 and "<text" in picture
    assert len(picture) < HEAVY_BYTES


def test_words_and_lines_on_a_heat_map_are_the_same_in_both_schemes():
    figure, ax = plots.canvas("title")
    ax.imshow(torch.rand(3, 3).numpy())
    ax.plot([0, 2], [0, 2], color=plots.COLOURS[1])
    ax.text(1, 1, "one")
    picture = picture_in(plots.as_html(figure, "Nine values and a line"))
    assert f"stroke: {plots.COLOURS[1]}" in picture and "var(--red)" not in picture
    assert re.search(r"fill: #010101[^>]*>one<", picture) and "--ink:#e6edf3" in picture


def test_a_thing_has_one_colour_and_an_unknown_one_is_refused():
    assert plots.colour("lean") in plots.COLOURS
    with pytest.raises(ValueError, match="thing: expected one of .*lean.*, got 'mean'. Add it"):
        plots.colour("mean")


def test_names_that_are_unknown_get_colours_that_no_other_has():
    names = ["norm", "logits", "copy", "gradient of logits"]
    colours = colours_of(names)
    assert list(colours) == names and len({*colours.values()}) == 4
    assert colours["logits"] == plots.colour("logits")
    assert len(colours_of(map(str, range(30)))) == 30
    assert {*THINGS.values()} <= {*DARK}


def framed(monkeypatch, values, **how):
    """What a slider over bars displays, and the values that were drawn."""
    shown, drawn = [], []

    def draw(value):
        drawn.append(value)
        figure, ax = plots.canvas(f"{value} bars")
        ax.bar(range(value), range(value))
        return figure, f"Some {value} bars of a slider"

    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    plots.frames(draw, values, "bars <n>", **how)
    return shown[0], drawn


def test_a_slider_draws_every_frame_and_shows_the_first_one_only(monkeypatch):
    data, drawn = framed(monkeypatch, [2, 3, 5], start=3)
    assert drawn == [2, 3, 5]
    frames = re.findall(
        r'<div class="frame" data-name="(\d)"( hidden)?><img alt="([^"]*)"', data["text/html"]
    )
    assert frames == [
        ("2", " hidden", "Some 2 bars of a slider"),
        ("3", "", "Some 3 bars of a slider"),
        ("5", " hidden", "Some 5 bars of a slider"),
    ]
    assert 'data-label="bars &lt;n&gt;"' in data["text/html"]
    assert data["text/plain"] == "bars <n>: 2, 3, 5"


def test_a_slider_in_a_notebook_moves_its_picture(monkeypatch):
    from ipywidgets.widgets.widget import _instances

    data, _ = framed(monkeypatch, [2, 3, 5], start=3)
    model = data["application/vnd.jupyter.widget-view+json"]["model_id"]
    slider, picture = _instances[model].children
    assert "Some 3 bars" in picture.value
    slider.value = 2
    assert "Some 5 bars" in picture.value and slider.description == "bars <n>"


@pytest.mark.parametrize(("values", "how", "said"), [
    ([1], {}, "values: expected 2 to 20, got 1"),
    (range(21), {}, "values: expected 2 to 20, got 21"),
    ([1, 2], {"start": 3}, r"start: expected one of \[1, 2\], got 3"),
])  # fmt: skip
def test_a_slider_of_no_use_is_refused(monkeypatch, values, how, said):
    with pytest.raises(ValueError, match=said):
        framed(monkeypatch, values, **how)


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
        ends[bar.get_y() + bar.get_height() / 2] = max(
            ends[bar.get_y() + bar.get_height() / 2], bar.get_x() + bar.get_width()
        )
    assert list(ends.values()) == [3, 4]
    assert [float(x) for x in ax.lines[0].get_xdata()] == [5] and ax.get_xlabel() == "MB"
    assert len({bar.get_facecolor() for bar in ax.patches}) == 2


def test_a_timeline_keeps_the_order_and_gives_a_name_one_colour():
    _, ax = plots.canvas("Two rows")
    plots.timeline(
        {
            "a": [("cast", 1.0), ("product", 2.0), ("cast", 3.0)],
            "b": [("norm", 4.0), ("cast", 1.0)],
        },
        ax,
        unit="µs",
    )
    drawn = {}
    for spans in ax.collections:
        for path in spans.get_paths():
            (left, low), (right, _) = path.vertices.min(0), path.vertices.max(0)
            drawn[round(low + 0.4), left, right] = tuple(spans.get_facecolor()[0])
    assert sorted(drawn) == [(0, 0, 1), (0, 1, 3), (0, 3, 6), (1, 0, 4), (1, 4, 5)]
    assert drawn[0, 0, 1] == drawn[0, 3, 6] == drawn[1, 4, 5] and len(set(drawn.values())) == 3
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["cast", "product", "norm"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == [
        "a",
        "b",
    ] and ax.get_xlabel() == "time, µs"
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
        assert (area.get_x(), area.get_x() + area.get_width()) == (
            bars[0].get_x(),
            bars[-1].get_x() + bars[-1].get_width(),
        )
    assert (
        pale[0].get_x() + pale[0].get_width() < pale[1].get_x() and ax.get_ylabel() == "length, s"
    )


def test_lengths_are_counted_by_seconds_and_by_rate_and_one_axes_shows_seconds_only():
    seconds, tokens = np.array([1.0, 2.0, 2.0, 4.0]), np.array([5, 10, 20, 20])
    _, axes = plots.canvas("title", columns=3)
    plots.lengths(seconds, tokens, axes)
    assert [sum(bar.get_height() for bar in ax.patches) for ax in axes[:2]] == [4, 4]
    assert (
        axes[1].get_xlabel() == "tokens per second" and sum(axes[2].collections[0].get_array()) == 4
    )
    _, ax = plots.canvas("title")
    assert plots.lengths(seconds, tokens, [ax])[0].get_xlabel() == "length, s"


def test_a_waterfall_goes_from_level_to_level_and_ends_with_what_is_left():
    _, ax = plots.canvas("title")
    plots.waterfall({"eager": 10.0, "folded": 7.0, "slower": 8.0}, ax, unit="ms")
    spans = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in ax.patches]
    assert spans == [(0, 10), (7, 10), (7, 8), (0, 8)]
    fall, rise = (matplotlib.colors.to_hex(ax.patches[row].get_facecolor()) for row in (1, 2))
    assert (fall, rise) == (GREEN, RED)
    assert [label.get_text() for label in ax.get_yticklabels()][-1] == "what is left"
    assert [text.get_text().strip() for text in ax.texts] == ["10", "7", "8", "8"]
    with pytest.raises(ValueError, match="^levels: expected a start and a step"):
        plots.waterfall({"eager": 10.0}, ax)


def test_a_tornado_reaches_from_the_outcome_of_the_lowest_to_that_of_the_highest_input():
    _, ax = plots.canvas("title")
    plots.tornado({"rtfx": (30.0, 5.0), "price": (8.0, 12.0)}, 10.0, ax, unit="USD")
    spans = [sorted((bar.get_x(), bar.get_x() + bar.get_width())) for bar in ax.patches]
    assert spans == [[10, 30], [5, 10], [8, 10], [10, 12]]
    assert [bar.get_facecolor() for bar in ax.patches[:2]] == [
        bar.get_facecolor() for bar in ax.patches[2:]
    ]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == [
        "rtfx",
        "price",
    ] and ax.get_xlabel() == "USD"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "input at its lowest",
        "input at its highest",
    ]


def test_break_even_lines_pass_through_their_markers_and_fall_with_rtfx():
    import dataclasses

    from asrkit.workbench import cost

    prices, (core, gpu) = cost.load_prices(), cost.published_speeds()[:2]
    faster = dataclasses.replace(core, rtfx=cost.Range(8.0, 9.0, 10.0), origin="recorded")
    pairs = [("c7a.48xlarge", core), ("p4de.24xlarge", gpu), ("c7a.48xlarge", faster)]
    costs = [
        cost.transcription_cost(prices[name], speed, hours=500, startup_s=60)
        for name, speed in pairs
    ]
    _, ax = plots.canvas("title")
    plots.break_even(costs, ax)
    lines, markers = (
        [line for line in ax.lines if (len(line.get_xdata()) > 2) is long] for long in (True, False)
    )
    assert len(lines) == 2 and len(markers) == 3
    for one, marker in zip(
        sorted(costs, key=lambda one: one.speed.rtfx.middle), markers, strict=True
    ):
        (x,), (y,) = marker.get_xdata(), marker.get_ydata()
        line = next(line for line in lines if line.get_color() == marker.get_color())
        assert (x, y) == (one.speed.rtfx.middle, one.usd_per_million_hours.middle)
        assert np.exp(
            np.interp(np.log(x), np.log(line.get_xdata()), np.log(line.get_ydata()))
        ) == pytest.approx(y, rel=0.02)
        assert (np.diff(line.get_ydata()) < 0).all()
    assert [marker.get_markerfacecolor() for marker in markers] == [
        "white",
        markers[0].get_color(),
        "white",
    ]
    assert [text.get_text() for text in ax.texts] == [
        "4.5, published",
        "9, recorded",
        "2,053, published",
    ]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "c7a.48xlarge, 192 cores",
        "p4de.24xlarge, 8 GPUs",
    ]


def test_intervals_show_on_which_side_of_the_mark_they_lie():
    rows = {"faster": (1.2, 1.5, 1.6), "slower": (0.7, 0.8, 0.9), "unsure": (0.9, 1.1, 1.2)}
    _, ax = plots.canvas("title")
    plots.intervals(rows, ax)
    lines, dots = ax.lines[:-1:2], ax.lines[1:-1:2]
    assert [tuple(line.get_xdata()) for line in lines] == [(1.2, 1.6), (0.7, 0.9), (0.9, 1.2)]
    assert [dot.get_xdata()[0] for dot in dots] == [1.5, 0.8, 1.1]
    assert len({dot.get_color() for dot in dots}) == 3
    assert ax.get_xscale() == "linear" and ax.texts[0].get_text() == "1.50"
    with pytest.raises(ValueError, match="rows\\['outside'\\]: expected 1 <= value <= 2, got 3"):
        plots.intervals({"outside": (1, 3, 2)}, ax)


def test_pictures_of_decoding_have_a_row_an_utterance_and_a_round():
    states = np.array([[0, 1, 2, 2], [0, 0, 1, 0]])
    figure, ax = plots.canvas("title")
    plots.waiting(states, ax, calls=10)
    plots.waiting_legend(ax)
    assert ax.images[0].get_array().shape == (2, 4) and ax.get_xlim() == (-0.5, 9.5)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["working", "waiting", "finished"]
    _, ax = plots.canvas("title")
    plots.waits_matrix(np.array([[0.0, 2.0], [1.0, 0.0]]), ax)
    assert [text.get_text() for text in ax.texts] == ["2", "1"]
    _, ax = plots.canvas("title")
    plots.pointer_jumping([True, True, True, False], list("abcd"), ax)
    assert len(ax.get_yticks()) == 3  # the start and two rounds
    reached = [arrow.xy[0] for arrow in ax.texts if arrow.xyann == (0, -2)]
    assert reached == [3]


def test_bars_of_costs_begin_with_ones_own_in_another_colour():
    costs = [
        transcription_cost(
            Instance(name=name, usd_per_hour=Range.of(2.0), cores=1, gpus=1),
            Speed(rtfx=Range.of(10.0), per=per, origin="assumed"),
            hours=100,
        )
        for name, per in (("yours", "core"), ("theirs", "core"), ("card", "gpu"))
    ]
    _, ax = plots.canvas("title")
    plots.cost_bars(costs, ax)
    assert [bar.get_width() for bar in ax.patches] == [20, 20, 20]
    shades = [matplotlib.colors.to_hex(bar.get_facecolor()) for bar in ax.patches]
    assert shades[1:] == [plots.colour("cores"), plots.colour("GPUs")] and len({*shades}) == 3
    assert [text.get_text() for text in ax.get_yticklabels()] == [
        "yours, RTFx 10 assumed",
        "theirs, RTFx 10 assumed",
        "card, RTFx 10 assumed",
    ]


def test_ways_on_a_core_stand_beside_the_published_one_and_the_fastest_is_solid():
    quartiles = {"eager": Range(2.0, 3.0, 4.0), "int8": Range(8.0, 9.0, 9.5)}
    _, ax = plots.canvas("title")
    plots.ways_on_core(quartiles, ax, published=4.5, break_even=31.0)
    assert [bar.get_width() for bar in ax.patches] == [3.0, 9.0]
    shades = [matplotlib.colors.to_hex(bar.get_facecolor()) for bar in ax.patches]
    assert shades[1] == plots.colour("cores") != shades[0]
    lines = {line.get_label(): line.get_xdata()[0] for line in ax.lines}
    assert lines["published: 4.5"] == 4.5
    assert lines["costs what the GPUs cost: 31"] == 31.0
    assert ax.get_xlim()[1] > 31.0
    assert [text.get_text() for text in ax.texts] == ["3.0", "9.0"]


def test_machines_of_a_kind_share_a_colour_and_differ_in_their_dashes():
    speed = Speed(rtfx=Range.of(10.0), per="core", origin="assumed")
    machines = [Instance(name=name, usd_per_hour=Range.of(2.0), cores=1) for name in "ab"]
    _, ax = plots.canvas("title")
    plots.break_even([transcription_cost(one, speed, hours=100) for one in machines], ax)
    lines = [line for line in ax.lines if len(line.get_xdata()) > 2]
    assert [line.get_color() for line in lines] == [plots.colour("cores")] * 2
    assert [line.get_linestyle() for line in lines] == ["-", "--"]


def test_days_over_workers_are_those_of_the_outcomes_above_the_days_without_waste():
    from asrkit.workbench import cost

    shards = cost.equal_shards(100, 1.0)
    lines = {}
    for kind, words, failure_h in (("GPUs", "a", 1.0), ("cores", "b", 1.0), ("cores", "c", 9.0)):
        lines[kind, words] = [
            cost.simulate(
                shards, cost.Fleet(workers=number, rtfx=3.0, failure_h=failure_h, startup_s=60.0)
            )
            for number in (1, 10)
        ]
    _, ax = plots.canvas("title")
    plots.days_over_workers(lines, ax)
    ideal, drawn = ax.lines[::2], ax.lines[1::2]
    for line, below, outcomes in zip(drawn, ideal, lines.values(), strict=True):
        assert [*line.get_xdata()] == [*below.get_xdata()] == [1, 10]
        assert [*line.get_ydata()] == [outcome.days for outcome in outcomes]
        without_waste = [100 / 3 / 24, 100 / 3 / 24 / 10]
        assert [*below.get_ydata()] == pytest.approx(without_waste)
        assert (line.get_ydata() > below.get_ydata()).all()
    assert [line.get_color() for line in drawn] == [plots.colour(kind) for kind, _ in lines]
    assert [line.get_linestyle() for line in drawn] == ["-", "-", "--"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "GPUs, a",
        "cores, b",
        "cores, c",
    ]


def test_names_of_frames_that_have_no_room_are_left_out_and_those_of_labels_are_not():
    _, ax = plots.canvas("title")
    is_blank = [frame != 30 for frame in range(32)]
    plots.pointer_jumping(is_blank, [str(frame) for frame in range(32)], ax)
    ticks = [int(tick) for tick in ax.get_xticks()]
    assert ticks[-2:] == [30, 32] and ticks[0] == 0 and min(np.diff(ticks)) == 2
    assert [text.get_text() for text in ax.get_xticklabels()][-2:] == ["30", "beyond"]


def test_what_fills_memory_has_a_colour_of_its_own_in_a_legend():
    shape = {"B": 3, "T": 80, "U1": 41, "V": 1024, "D": 256}
    parts = set()
    for variant in ("torchaudio", "wavefront", "numba", "overwrite", "split", "packed", "lean"):
        parts |= {*joint_bytes(variant, **shape, nodes=5980).parts}
    parts -= {"tile"}  # notebook 02 calls it tiles
    assert len(parts) > 7 and len({plots.colour(part) for part in parts}) == len(parts)


def test_a_heat_map_lets_the_page_through_where_it_is_low_and_its_words_follow_the_scheme():
    figure, ax = plots.canvas("title")
    plots.waits_matrix(np.array([[0.0, 2.0], [1.0, 0.0]]), ax)
    assert ax.images[0].to_rgba(np.array([0.0]))[0, 3] == 0
    picture = picture_in(plots.as_html(figure, "Two utterances that wait"))
    assert re.search(r"<text [^>]*>2</text>", picture) and "#010101" not in picture
    states = np.array([[0, 1, 2, 2]])
    _, ax = plots.canvas("title")
    plots.waiting(states, ax)
    working, waiting, finished = ax.images[0].to_rgba(states)[0, :3, 3]
    assert (working, waiting) == (1, 1) and finished < 0.2


def test_a_per_cent_in_a_figure_has_a_space():
    figure, _ = plots.canvas("26% of 80 %")
    picture = picture_in(plots.as_html(figure, "A canvas with a title"))
    assert "26\u00a0% of 80\u00a0%" in picture


def test_dots_keep_their_value_their_spread_and_the_colour_of_their_name():
    _, ax = plots.canvas("title")
    plots.dots({"lean": (1.0, 2.0, 4.0), "other": [3000.0]}, ax, limit=("bound", 0.5))
    spread, dot = ax.lines[:2]
    assert [*spread.get_xdata()] == [1, 4] and [*dot.get_xdata()] == [2]
    assert dot.get_color() == plots.colour("lean")
    assert [text.get_text() for text in ax.texts] == ["2", "3,000", "bound"]
    assert ax.get_xscale() == "log" and [text.get_text() for text in ax.get_yticklabels()] == [
        "lean",
        "other",
    ]
    with pytest.raises(ValueError, match="values: expected above 0"):
        plots.dots({"zero": [0.0]}, ax)


def test_a_part_that_the_palette_knows_has_its_colour_in_every_picture():
    for rows in ({"a": {"logits": 1}}, {"a": {"other": 1, "logits": 2}}):
        _, ax = plots.canvas("title")
        plots.stacked(rows, ax)
        shades = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
        face = shades["logits"].patches[0].get_facecolor()
        assert face == matplotlib.colors.to_rgba(plots.colour("logits"))


def test_a_path_through_the_lattice_follows_its_arcs():
    _, ax = plots.canvas("title")
    plots.arcs(["a", "b"], 3, "bybyb", ax)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["∅", "a", "b"]
    words = [text.get_text() for text in ax.texts if text.get_text()]
    assert words == ["blank", "a", "blank", "b", "blank"]
    arrows = [text for text in ax.texts if not text.get_text()]
    assert len(arrows) == 6 + 6 + len("bybyb")  # blanks inside the lattice, labels, the path
    assert arrows[-1].xy == (3, 2)


def test_a_diagonal_holds_as_many_nodes_as_lie_on_it():
    by_hand = [sum(0 <= k - u < 4 for u in range(3)) for k in range(6)]
    assert plots.nodes_at_once(4, 3).tolist() == by_hand
    for k in (0, 3):
        _, ax = plots.canvas("title")
        plots.diagonal(k, 4, 3, ax)
        assert len(ax.collections[2].get_offsets()) == by_hand[k]


def test_a_tdt_node_has_a_label_arc_for_each_duration_and_no_blank_that_stays():
    _, ax = plots.canvas("title")
    plots.tdt_arcs((0, 1, 2), ax)
    ends = [text.xy for text in ax.texts][2:]  # the first two are those of RNN-T
    assert ends == [(2, 1), (3, 1), (1, 2), (2, 2), (3, 2)]


def test_memory_over_the_batch_has_a_line_for_each_format_and_a_level_for_each_gpu():
    _, ax = plots.canvas("title")
    curves = {(100, 4): [1.0, 2.0], (100, 2): [0.5, 1.0], (200, 4): [2.0, 4.0]}
    plots.memory_over_batch(curves, [1, 2], ax, capacities={"T4": 16.0})
    lines = {line.get_label(): line for line in ax.lines}
    assert [*lines["U = 100, float16"].get_ydata()] == [0.5, 1.0]
    assert lines["U = 100, float16"].get_linestyle() == "--"
    assert lines["U = 100, float32"].get_color() != lines["U = 200, float32"].get_color()
    assert [text.get_text() for text in ax.texts] == ["T4"]


def test_a_padded_lattice_is_blue_where_the_utterance_is():
    _, axes = plots.canvas("title", columns=2)
    plots.padded_lattices(torch.tensor([10, 5]), torch.tensor([4, 2]), axes)
    pale, own = axes[1].collections
    assert pale.get_paths()[0].vertices.max(0).tolist() == [10, 5]
    assert own.get_paths()[0].vertices.max(0).tolist() == [5, 3]


def test_formats_resolve_what_torch_says_and_magnitudes_reach_from_end_to_end():
    _, (top, bottom) = plots.canvas("title", rows=2)
    plots.format_steps({"float32": torch.float32, "bfloat16": torch.bfloat16}, top)
    steps = {line.get_label(): line for line in top.lines}
    at_one = np.flatnonzero(steps["bfloat16"].get_xdata() == 1.0)[0]
    assert steps["bfloat16"].get_ydata()[at_one] == torch.finfo(torch.bfloat16).eps
    plots.magnitudes({"power": (1e-20, 10.0)}, bottom, edges=(6e-5,))
    assert [*bottom.lines[0].get_xdata()] == [1e-20, 10.0]
    assert [tick.get_text() for tick in bottom.get_yticklabels()] == ["power"]


RUNS = without_buckets(published_runs())
A100 = [run for run in RUNS if run.gpu == "a100"]


def test_epochs_have_a_dot_a_run_and_the_critical_batch():
    _, ax = plots.canvas("epochs")
    plots.epochs_and_critical_batch(RUNS, fit_epochs(RUNS), ax)
    assert len(ax.lines[0].get_xdata()) == len(RUNS)
    assert any("critical batch 3,430" in text.get_text() for text in ax.texts)


def test_minutes_of_a_fixed_batch_end_where_a_gpu_would_have_no_utterance():
    _, ax = plots.canvas("minutes")
    plots.minutes_over_gpus(
        A100, fit_epochs(RUNS), fit_steps(A100), [1, 8, 64, 512], ax, batches=[64]
    )
    fixed, best, *published = ax.lines
    assert list(fixed.get_xdata()) == [1, 8, 64]
    assert list(best.get_xdata()) == [1, 8, 64, 512]
    assert len(published) == len({(run.gpus, run.batch) for run in A100})
    assert all(fixed.get_ydata() >= best.get_ydata()[:3])


def test_an_all_reduce_has_a_line_an_algorithm():
    _, ax = plots.canvas("sums")
    plots.all_reduce_over_gpus(1e8, [8, 64, 512], ax)
    assert [line.get_label() for line in ax.lines] == ["ring", "tree", "switches"]


def test_a_flat_vector_is_cut_into_equal_parts():
    _, ax = plots.canvas("flat")
    plots.flat_shards({"embedding": 10, "lstm": 70, "output": 21}, 4, ax)
    assert [patch.get_width() for patch in ax.patches] == [10, 70, 21]
    assert [line.get_xdata()[0] for line in ax.lines] == [0, 26, 52, 78, 104]
    with pytest.raises(ValueError, match="ranks: expected from 1 to 101"):
        plots.flat_shards({"all": 101}, 102, ax)


def test_ratios_have_a_line_a_tensor_over_steps():
    _, ax = plots.canvas("ratios")
    plots.ratios_over_steps({"encoder": [1.0, 2.0], "bias": [3.0, 4.0]}, ax, every=10)
    assert [list(line.get_xdata()) for line in ax.lines] == [[10, 20], [10, 20]]
    assert ax.lines[0].get_color() == plots.colour("encoder")


def timing(*samples_ms):
    return Timing(samples_ms=samples_ms, warmup=0, timer="clock")


def test_bars_of_casts_stand_on_each_other_and_add_up():
    _, ax = plots.canvas("title")
    plots.cast_bytes({"weight": [2.0, 2.0], "activation": [1.0, 5.0]}, (1, 8), ax, xlabel="batch")
    tops = [bar.get_y() + bar.get_height() for bar in ax.patches]
    assert tops == [2.0, 2.0, 3.0, 7.0]


def test_a_bar_of_times_is_its_median_and_has_the_colour_of_its_thing():
    _, ax = plots.canvas("title")
    plots.time_bars(
        {"float32": timing(1, 2, 9), "autocast": timing(1)},
        ax,
        unit="ms",
        things={"autocast": "cast"},
    )
    assert [bar.get_width() for bar in ax.patches] == [2, 1]
    shades = [matplotlib.colors.to_hex(bar.get_facecolor()) for bar in ax.patches]
    assert shades == [plots.colour("float32"), plots.colour("cast")]


def test_points_of_time_over_memory_lie_where_their_numbers_say():
    _, ax = plots.canvas("title")
    plots.time_over_memory({"lean": timing(3, 4, 5)}, {"lean": 2**21}, ax, ylabel="ms")
    x, y = ax.lines[0].get_data()
    assert (x[0], y[0]) == (2.0, 4.0)


def test_errors_are_solid_with_wide_sums_and_dashed_with_sums_in_the_format():
    rows = [{"T": T, "format": "float16", "sums": sums, "loss": T, "gradient": T}
            for sums in ("float64", "in the format") for T in (10, 20)]  # fmt: skip
    _, axes = plots.canvas("title", columns=2)
    plots.rounding_errors(pd.DataFrame(rows), axes)
    assert [line.get_linestyle() for line in axes[1].lines] == ["-", "--"]


def test_spans_fill_a_share_of_the_time_up_to_their_end():
    assert plots.busy_share([(0, 2), (6, 2)]) == 0.5


def test_time_per_utterance_divides_by_the_batch():
    _, ax = plots.canvas("title")
    plots.ms_per_utterance({1: {"loop": timing(3)}, 4: {"loop": timing(8)}}, ax)
    assert list(ax.lines[0].get_ydata()) == [3, 2]


def test_loops_are_worth_more_the_faster_the_rest_is():
    _, ax = plots.canvas("title")
    plots.gain_over_speed(90.0, {"a": 5.0, "b": 5.0}, (10,), ax)
    both = ax.lines[2].get_ydata()
    assert both[0] == pytest.approx(100 * 10 / 90) and both[-1] == pytest.approx(100 * 10 / 0.09)


def test_ways_to_batch_have_a_line_each_and_keep_their_colours():
    _, (left, right) = plots.canvas("title", columns=2)
    table = pd.DataFrame({"1D": [60.0, 70.0], "2D": [80.0, 90.0]}, index=[1, 8])
    plots.utilisation_lines(table, left, xlabel="ranks", legend=False)
    plots.utilisation_lines(table, right, xlabel="utterances")
    assert [line.get_color() for line in left.lines] == [line.get_color() for line in right.lines]
    assert left.get_legend() is None and right.get_legend() is not None


def test_a_way_that_was_trained_twice_stands_in_the_legend_once():
    _, ax = plots.canvas("title")
    runs = [(way, [1.0, 2.0], [3.0, 1.0]) for way in ("random", "balanced", "random")]
    plots.loss_over_padded_speech(runs, ax)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["random", "balanced"]


def test_runs_that_stopped_are_crosses_and_no_part_of_a_mean():
    runs = pd.DataFrame([("success", 1, 512, 50), ("success", 1, 512, 60), ("aborted", 1, 512, 120)],
                        columns=["status", "buckets", "global_batch", "epochs"])  # fmt: skip
    _, ax = plots.canvas("title")
    plots.epochs_over_batch(runs, ax)
    means, lost = ax.lines[0].get_ydata(), ax.lines[-1].get_ydata()
    assert list(means) == [55] and list(lost) == [120]


def test_a_live_curve_is_drawn_at_most_every_few_seconds(monkeypatch):
    drawn = []
    monkeypatch.setattr("IPython.display.display", lambda *_: None)
    monkeypatch.setattr(
        "asrkit.workbench.plots.live.as_html", lambda *_: drawn.append(1) or "<img>"
    )
    history = [{"step": 1, "seconds": 0.1, "loss": 2.0}]
    slow = plots.live_training_curve(every_s=1000)
    slow(history)
    assert not drawn
    plots.live_training_curve(every_s=0)(history)
    assert drawn == [1]
