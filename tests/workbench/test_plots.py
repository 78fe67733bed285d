"""Pictures: alt texts, SVG, colours of either scheme and sliders; and every mark, drawn once."""

import base64
import re
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_hex, to_rgba

from asrkit.models import JasperConfig
from asrkit.workbench import cost, plots
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
from asrkit.workbench.jasper_studies import TrainingMemory, seed_runs
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


def test_pictures_leave_no_state_behind():
    import matplotlib
    import matplotlib.pyplot as plt

    before = dict(matplotlib.rcParams)
    figure, ax = plots.canvas("title")
    plots.waveform(torch.rand(100), 100, ax)
    plots.as_html(figure, "A short random waveform drawn")
    assert plt.get_fignums() == [] and dict(matplotlib.rcParams) == before


def test_what_fills_memory_has_a_colour_of_its_own_in_a_legend():
    shape = {"B": 3, "T": 80, "U1": 41, "V": 1024, "D": 256}
    parts = set()
    for variant in ("torchaudio", "wavefront", "numba", "overwrite", "split", "packed", "lean"):
        parts |= {*joint_bytes(variant, **shape, nodes=5980).parts}
    parts -= {"tile"}  # notebook 02 calls it tiles
    assert len(parts) > 7 and len({plots.colour(part) for part in parts}) == len(parts)


def test_a_per_cent_in_a_figure_has_a_space():
    figure, _ = plots.canvas("26% of 80 %")
    picture = picture_in(plots.as_html(figure, "A canvas with a title"))
    assert "26\u00a0% of 80\u00a0%" in picture


def test_a_part_that_the_palette_knows_has_its_colour_in_every_picture():
    for rows in ({"a": {"logits": 1}}, {"a": {"other": 1, "logits": 2}}):
        _, ax = plots.canvas("title")
        plots.stacked(rows, ax)
        shades = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
        face = shades["logits"].patches[0].get_facecolor()
        assert face == to_rgba(plots.colour("logits"))


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


def timing(*samples_ms):
    return Timing(samples_ms=samples_ms, warmup=0, timer="clock")


def priced(name, per, rtfx=10.0):
    """What 100 hours cost on a machine with a core and a GPU."""
    machine = Instance(name=name, usd_per_hour=Range.of(2.0), cores=1, gpus=1)
    speed = Speed(rtfx=Range.of(rtfx), per=per, origin="assumed")
    return transcription_cost(machine, speed, hours=100)


def simulated(workers):
    """What 100 shards of an hour take on some workers that fail."""
    fleet = cost.Fleet(workers=workers, rtfx=3.0, failure_h=9.0, startup_s=60.0)
    return cost.simulate(cost.equal_shards(100, 1.0), fleet)


RUNS = without_buckets(published_runs())
A100 = [run for run in RUNS if run.gpu == "a100"]
CELLS = cost.published_latencies("DGX A100", "FP16")
MEMORY = TrainingMemory(fixed_GiB=2.0, utterance_GiB=0.5)
MODEL = {"D": 1024, "layers": 24, "V": 4128, "heads": 8}
WORK = {"again": {"encoder": 3.0, "steps": 7.0}, "kept": {"encoder": 3.0, "steps": 2.0}}
SECONDS = np.array([3.0, 9.0, 4.0])
ERRORS = pd.DataFrame(
    {"T": T, "format": "float16", "sums": sums, "loss": T, "gradient": T}
    for sums in ("float64", "in the format")
    for T in (10, 20)
)
BATCHES = pd.DataFrame(
    [("success", 1, 512, 50), ("success", 1, 512, 60), ("aborted", 1, 512, 120)],
    columns=["status", "buckets", "global_batch", "epochs"],
)
CURVES = pd.DataFrame({"1D": [60.0, 70.0], "2D": [80.0, 90.0]}, index=[1, 8])
INTERVALS = {"faster": (1.2, 1.5, 1.6), "unsure": (0.9, 1.1, 1.2)}

# mark -> (axes, how it is drawn on them, words that a reader has to find)
# fmt: off
MARKS = {
    "all_reduce_over_gpus": (1, lambda ax: plots.all_reduce_over_gpus(1e8, [8, 64, 512], ax), "ring; tree; switches"),
    "arcs": (1, lambda ax: plots.arcs(["a", "b"], 3, "bybyb", ax), "∅; a; b; blank"),
    "break_even": (1, lambda ax: plots.break_even([priced("x", "core"), priced("y", "gpu", 90.0)], ax),
                   "x, 1 core; y, 1 GPU; 10, assumed; 90, assumed"),
    "cast_bytes": (1, lambda ax: plots.cast_bytes({"weight": [2.0, 2.0], "activation": [1.0, 5.0]}, (1, 8), ax, xlabel="batch"),
                   "batch; weight; activation"),
    "cost_bars": (1, lambda ax: plots.cost_bars([priced("yours", "core"), priced("card", "gpu")], ax),
                  "yours, RTFx 10 assumed; card, RTFx 10 assumed"),
    "days_over_workers": (1, lambda ax: plots.days_over_workers({("GPUs", "a"): [simulated(1), simulated(10)]}, ax), "GPUs, a"),
    "decoder_work": (2, lambda axes: plots.decoder_work({"deep": WORK, "shallow": WORK}, axes, unit="GFLOP"),
                     "deep; shallow; 5; 10; GFLOP"),
    "decoding_steps": (1, lambda ax: plots.decoding_steps([5, 5, 5], ax, accepted=[4, 0, 2]),
                       "tokens of the draft, in the first step; steps; waiting"),
    "deep_over_shallow": (1, lambda ax: plots.deep_over_shallow({"NeMo 3.0": {1: [2.0], 8: [3.0]}}, ax, operations={"K/V kept": 0.85}),
                          "NeMo 3.0; 1; 8"),
    "dense_branches": (2, lambda axes: plots.dense_branches(JasperConfig().branch_channels(), axes),
                       "55 convolutions of one frame; fused: 10 products"),
    "diagonal": (1, lambda ax: plots.diagonal(3, 4, 3, ax), ""),
    "dots": (1, lambda ax: plots.dots({"lean": (1.0, 2.0, 4.0), "other": [3000.0]}, ax, limit=("bound", 0.5)),
             "lean; other; 2; 3,000; bound"),
    "epochs_and_critical_batch": (1, lambda ax: plots.epochs_and_critical_batch(RUNS, fit_epochs(RUNS), ax), "critical batch 3,430"),
    "epochs_over_batch": (1, lambda ax: plots.epochs_over_batch(BATCHES, ax), ""),
    "flat_shards": (1, lambda ax: plots.flat_shards({"embedding": 10, "lstm": 70, "output": 21}, 4, ax), ""),
    "format_steps": (1, lambda ax: plots.format_steps({"float32": torch.float32, "bfloat16": torch.bfloat16}, ax), "float32; bfloat16"),
    "gain_over_speed": (1, lambda ax: plots.gain_over_speed(90.0, {"a": 5.0, "b": 5.0}, (10,), ax), ""),
    "intervals": (1, lambda ax: plots.intervals(INTERVALS, ax), "faster; unsure; 1.50; times as fast"),
    "latency_over_work": (1, lambda ax: plots.latency_over_work({"A100, FP16": CELLS}, ax), "A100, FP16: 34.9 ms, 146 TFLOP/s"),
    "lattice": (1, lambda ax: plots.lattice(torch.rand(5, 4), list("a b"), ax, path=[(0, 0), (1, 0)], caption="share"), "∅; a; ␣; b"),
    "lengths": (3, lambda axes: plots.lengths(SECONDS, np.array([5, 10, 20]), axes), "length, s; tokens per second"),
    "loss_over_padded_speech": (1, lambda ax: plots.loss_over_padded_speech([("random", [1.0, 2.0], [3.0, 1.0])] * 2, ax), "random"),
    "magnitudes": (1, lambda ax: plots.magnitudes({"power": (1e-20, 10.0)}, ax, edges=(6e-5,)), "power"),
    "memory_over_batch": (1, lambda ax: plots.memory_over_batch({(100, 4): [1.0, 2.0], (100, 2): [0.5, 1.0]}, [1, 2], ax, capacities={"T4": 16.0}),
                          "U = 100, float32; U = 100, float16; T4"),
    "minutes_over_gpus": (1, lambda ax: plots.minutes_over_gpus(A100, fit_epochs(RUNS), fit_steps(A100), [1, 8, 64], ax, batches=[64]), ""),
    "ms_per_utterance": (1, lambda ax: plots.ms_per_utterance({1: {"loop": timing(3)}, 4: {"loop": timing(8)}}, ax), "loop"),
    "padded_batches": (1, lambda ax: plots.padded_batches([SECONDS, SECONDS[:1]], ax), "length, s"),
    "padded_lattices": (2, lambda axes: plots.padded_lattices(torch.tensor([10, 5]), torch.tensor([4, 2]), axes), ""),
    "phased_batch": (1, lambda ax: plots.phased_batch(SECONDS, [(5.0, 3), (9.0, 1)], ax, slowest=7.0), "length, s"),
    "pointer_jumping": (1, lambda ax: plots.pointer_jumping([True, True, True, False], list("abcd"), ax), "beyond"),
    "rank_work": (1, lambda ax: plots.rank_work([SECONDS, SECONDS[:2]], ax, phases=2, most=50.0), ""),
    "rate_over_batch": (1, lambda ax: plots.rate_over_batch(CELLS, ax, peaks={"FP16": 312.0}), ""),
    "ratios_over_steps": (1, lambda ax: plots.ratios_over_steps({"encoder": [1.0, 2.0]}, ax, every=10), "encoder"),
    "rounding_errors": (2, lambda axes: plots.rounding_errors(ERRORS, axes), ""),
    "seed_dots": (1, lambda ax: plots.seed_dots(seed_runs(of="test-clean"), ax),
                  "test-clean, DGX A100; a seed; mean of the seeds; reported"),
    "spectrogram": (1, lambda ax: plots.spectrogram(torch.rand(50, 80), 0.01, ax), "time, s"),
    "stacked": (1, lambda ax: plots.stacked({"a": {"x": 1, "y": 2}, "b": {"y": 4}}, ax, measured={"b": 5}, unit="MB"), "MB; a; b; x; y"),
    "step_cells": (1, lambda ax: plots.step_cells({"self-attention": 4, "feed-forward": 8}, ax, rows=5),
                   "self-attention: 4; feed-forward: 8"),
    "step_floor": (1, lambda ax: plots.step_floor({"24 layers": MODEL}, (1, 128), ax, T=250, U=70, card="H100"),
                   "24 layers: weights; 24 layers: keys and values; 24 layers: operations"),
    "tdt_arcs": (1, lambda ax: plots.tdt_arcs((0, 1, 2), ax), ""),
    "time_bars": (1, lambda ax: plots.time_bars({"float32": timing(1, 2, 9), "autocast": timing(1)}, ax, unit="ms", things={"autocast": "cast"}),
                  "float32; autocast"),
    "time_over_memory": (1, lambda ax: plots.time_over_memory({"lean": timing(3, 4, 5)}, {"lean": 2**21}, ax, ylabel="ms"), "lean; ms"),
    "timeline": (1, lambda ax: plots.timeline({"a": [("cast", 1.0), ("norm", 2.0)], "b": [("cast", 4.0)]}, ax, unit="µs"),
                 "a; b; cast; norm; time, µs"),
    "tornado": (1, lambda ax: plots.tornado({"rtfx": (30.0, 5.0), "price": (8.0, 12.0)}, 10.0, ax, unit="USD"),
                "rtfx; price; USD; input at its lowest; input at its highest"),
    "training_curve": (1, lambda ax: plots.training_curve([{"seconds": float(i), "loss": 5.0 - i} for i in range(4)], ax),
                       "loss, nats per label"),
    "training_memory_bars": (1, lambda ax: plots.training_memory_bars({"float32": MEMORY, "mixed": MEMORY}, (16, 32), ax, cards={"16 GB": 16}),
                             "float32; mixed; 16 GB"),
    "utilisation_lines": (1, lambda ax: plots.utilisation_lines(CURVES, ax, xlabel="ranks"), "ranks; 1D; 2D"),
    "waiting": (1, lambda ax: plots.waiting_legend(plots.waiting(np.array([[0, 1, 2, 2]]), ax, calls=10)), "working; waiting; finished"),
    "waits_matrix": (1, lambda ax: plots.waits_matrix(np.array([[0.0, 2.0], [1.0, 0.0]]), ax), "2; 1"),
    "waterfall": (1, lambda ax: plots.waterfall({"eager": 10.0, "folded": 7.0, "slower": 8.0}, ax, unit="ms"),
                  "what is left; eager; 10; 7; 8"),
    "waveform": (1, lambda ax: plots.waveform(torch.rand(100), 100, ax), "time, s"),
    "ways_on_core": (1, lambda ax: plots.ways_on_core({"eager": Range(2.0, 3.0, 4.0), "int8": Range(8.0, 9.0, 9.5)}, ax, published=4.5, break_even=31.0),
                     "eager; int8; published: 4.5; costs what the GPUs cost: 31; 3.0; 9.0"),
}
# fmt: on


def drawn(mark):
    """A mark on axes of its own: the figure, and the words in it."""
    columns, draw, _ = MARKS[mark]
    figure, axes = plots.canvas("The title", columns=columns)
    draw(axes)
    picture = picture_in(plots.as_html(figure, "A picture of a mark"))
    texts = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    words = ["".join(text.itertext()).strip() for text in texts]
    return axes, words + [
        label for ax in figure.axes for label in ax.get_legend_handles_labels()[1]
    ]


@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_draws_its_words(mark):
    _, words = drawn(mark)
    assert "The title" in words
    missing = [
        word for word in MARKS[mark][2].split("; ") if not any(word in text for text in words)
    ]
    assert not missing, words


def test_marks_show_the_numbers_that_they_are_given():
    def ys(mark, line):
        return list(drawn(mark)[0].lines[line].get_ydata())

    assert ys("ms_per_utterance", 0) == [3, 2]
    assert (ys("epochs_over_batch", 0), ys("epochs_over_batch", -1)) == ([55], [120])
    gains = ys("gain_over_speed", 2)
    assert (gains[0], gains[-1]) == pytest.approx((100 * 10 / 90, 100 * 10 / 0.09))
    assert [bar.get_width() for bar in drawn("time_bars")[0].patches] == [2, 1]
    assert list(drawn("memory_over_batch")[0].lines[1].get_ydata()) == [0.5, 1.0]
    ax, _ = drawn("days_over_workers")
    assert list(ax.lines[1].get_ydata()) == [simulated(1).days, simulated(10).days]
    useful = sum(
        bar.get_width() * bar.get_height() for bar in drawn("phased_batch")[0].containers[-1]
    )
    assert useful == pytest.approx(SECONDS.sum())
    assert plots.nodes_at_once(4, 3).tolist() == [
        sum(0 <= k - u < 4 for u in range(3)) for k in range(6)
    ]


def test_marks_have_the_colours_of_what_they_show():
    shades = [to_hex(bar.get_facecolor()) for bar in drawn("time_bars")[0].patches]
    assert shades == [plots.colour("float32"), plots.colour("cast")]
    shades = [to_hex(bar.get_facecolor()) for bar in drawn("waterfall")[0].patches]
    assert shades[1:3] == [GREEN, RED]
    own, gpu = (to_hex(bar.get_facecolor()) for bar in drawn("cost_bars")[0].patches)
    assert own not in (plots.colour("cores"), gpu) and gpu == plots.colour("GPUs")
    assert drawn("days_over_workers")[0].lines[1].get_color() == plots.colour("GPUs")


@pytest.mark.parametrize(("columns", "draw", "said"), [
    (1, lambda ax: plots.lattice(torch.rand(5, 4), ["a"], ax), "labels: expected 3"),
    (1, lambda ax: plots.timeline({"a": [(str(i), 1.0) for i in range(11)]}, ax), "rows: expected at most 10 different names, got 11"),
    (1, lambda ax: plots.waterfall({"eager": 10.0}, ax), "levels: expected a start and a step"),
    (1, lambda ax: plots.intervals({"outside": (1, 3, 2)}, ax), r"rows\['outside'\]: expected 1 <= value <= 2, got 3"),
    (1, lambda ax: plots.dots({"zero": [0.0]}, ax), "values: expected above 0"),
    (1, lambda ax: plots.flat_shards({"all": 101}, 102, ax), "ranks: expected from 1 to 101"),
    (1, lambda ax: plots.step_cells({"feed-forward": 142}, ax, rows=1), "parts: expected at most 50 cells, got 142"),
    (1, lambda ax: plots.step_cells({"steps": -1}, ax), "parts: expected numbers of cells, 0 or more"),
    (2, lambda axes: plots.decoder_work({"deep": WORK, "shallow": WORK}, axes[:1], unit="GFLOP"), "axes: expected 2 of them, one a model, got 1"),
    (1, lambda ax: plots.decoding_steps([5, 5], ax, accepted=[5, 0]), "accepted: expected 0 to one less than the length"),
    (1, lambda ax: plots.decoding_steps([5, 5], ax, accepted=[1]), "accepted: expected 2 numbers, got 1"),
    (1, lambda ax: plots.step_floor({"a": MODEL}, (1,), ax, T=250, U=70, card="A10"), "card: expected one of .*'H100'.*, got 'A10'"),
    (1, lambda ax: plots.step_floor(dict.fromkeys("abcd", MODEL), (1,), ax, T=250, U=70, card="H100"), "sizes: expected at most 3 models, .*, got 4"),
    (1, lambda ax: plots.rate_over_batch(CELLS, ax, peaks={"FP8": 1.0}), r"precision: expected one of FP32, .*, got \['FP8'\]"),
    (1, lambda ax: plots.training_memory_bars({"half": MEMORY}, (16,), ax, cards={}), "memories: expected keys of float32, mixed, got"),
    (2, lambda axes: plots.dense_branches([[], []], axes), "channels: expected a stage with branches at least"),
    (1, lambda ax: plots.phased_batch(SECONDS, [(10.0, 2)], ax), "phases: expected a first one of all 3 utterances, got 2"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused(columns, draw, said):
    _, axes = plots.canvas("title", columns=columns)
    with pytest.raises(ValueError, match=said):
        draw(axes)
