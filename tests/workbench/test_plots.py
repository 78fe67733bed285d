"""Pictures: alt texts, SVG, colours of either scheme and sliders; and every mark, drawn once."""

import base64
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba

from asrkit.workbench import plots
from asrkit.workbench.lessons import start_here
from asrkit.workbench.plots.palette import DARK, THINGS, colours_of
from asrkit.workbench.plots.svg import HEAVY_BYTES

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def picture_in(html):
    """The SVG inside an `<img>`."""
    data = re.fullmatch(
        r'<img alt="[^"<]+" src="data:image/svg\+xml;base64,([^"]+)">', html
    )[1]
    return base64.b64decode(data).decode()


def words_in(html):
    """The words in the SVG of an `<img>`."""
    texts = ElementTree.fromstring(picture_in(html)).iter(
        "{http://www.w3.org/2000/svg}text"
    )
    return ["".join(text.itertext()).strip() for text in texts]


def test_html_holds_the_picture_itself_and_its_escaped_alt_text():
    figure, _ = plots.canvas("A title")
    html = plots.as_html(figure, 'A plot of "this" & that thing')
    assert "&quot;this&quot; &amp; that" in html
    root = ElementTree.fromstring(picture_in(html))
    assert "A title" in [
        text.text for text in root.iter("{http://www.w3.org/2000/svg}text")
    ]


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
        r'<div class="frame" data-name="(\d)"( hidden)?><img alt="([^"]*)"',
        data["text/html"],
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


def test_pictures_leave_no_state_behind():
    import matplotlib
    import matplotlib.pyplot as plt

    before = dict(matplotlib.rcParams)
    figure, ax = plots.canvas("title")
    plots.dots({"one": [2.0]}, ax)
    plots.as_html(figure, "A short random waveform drawn")
    assert plt.get_fignums() == [] and dict(matplotlib.rcParams) == before


def test_a_per_cent_in_a_figure_has_a_space():
    figure, _ = plots.canvas("26% of 80 %")
    picture = picture_in(plots.as_html(figure, "A canvas with a title"))
    assert "26\u00a0% of 80\u00a0%" in picture


# fmt: off
MARKS = {
    "dots": (({"lean": (1.0, 2.0, 4.0), "other": [3000.0]},), {"limit": ("bound", 0.5)}),
    "intervals": (({"faster": (1.2, 1.5, 1.6), "unsure": (0.9, 1.1, 1.2)},), {}),
    "lattice": ((torch.rand(5, 4), list("a b")), {"caption": "share"}),
    "stacked": (({"a": {"x": 1, "y": 2}, "b": {"y": 4}},), {"measured": {"b": 5}, "unit": "MB"}),
    "timeline": (({"a": [("cast", 1.0), ("norm", 2.0)], "b": [("cast", 4.0)]},), {"unit": "µs"}),
}
# fmt: on


def test_every_mark_is_drawn_by_a_notebook_or_here():
    code = "".join(path.read_text("utf-8") for path in NOTEBOOKS.glob("*.ipynb"))
    drawn = {*re.findall(r"plots\.(\w+)", code), *MARKS, "as_html"}
    assert {*plots.__all__} - drawn == set()


@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_is_drawn_with_words(mark):
    arguments, options = MARKS[mark]
    figure, axes = plots.canvas("The title")
    getattr(plots, mark)(*arguments, axes, **options)
    words = words_in(plots.as_html(figure, "A picture of a mark"))
    assert "The title" in words and len(words) > 1


@pytest.mark.parametrize(("refused", "said"), [
    (lambda ax: plots.as_html(ax.figure, "plot"), "alt: expected a sentence"),
    (lambda _: plots.colour("mean"), "thing: expected one of .*lean.*, got 'mean'. Add it"),
    (lambda _: plots.frames(None, [1], "n", start=1), "values: expected 2 to 20, got 1"),
    (lambda _: plots.frames(None, [1, 2], "n", start=3), r"start: expected one of \[1, 2\], got 3"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused(refused, said):
    with pytest.raises(ValueError, match=said):
        refused(plots.canvas("title")[1])


def test_a_thing_has_one_colour_in_every_picture_and_no_other_name_has_it():
    names = ["norm", "logits", "copy", "gradient of logits"]
    colours = colours_of(names)
    assert list(colours) == names and len({*colours.values()}) == 4
    assert colours["logits"] == plots.colour("logits") and {*THINGS.values()} <= {*DARK}
    _, ax = plots.canvas("title")
    plots.stacked({"a": {"other": 1, "logits": 2}}, ax)
    shades = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    assert shades["logits"].patches[0].get_facecolor() == to_rgba(
        plots.colour("logits")
    )


def test_numbers_that_marks_compute_are_right():
    history = [{"seconds": float(i), "loss": loss} for i, loss in enumerate((5, 9, 4))]
    _, medians = start_here.training_curve(history, plots.canvas("title")[1]).lines
    assert list(medians.get_ydata()) == [7, 5, 6.5]


def test_many_points_become_a_picture():
    figure, ax = plots.canvas("title")
    ax.scatter(*np.random.default_rng(0).random((2, 5000)))
    picture = picture_in(plots.as_html(figure, "Five thousand points at random"))
    assert (
        picture.count("<image") == 1
        and "<text" in picture
        and len(picture) < HEAVY_BYTES
    )
