"""Pictures: alt texts, SVG, colours in both schemes and sliders; every mark is drawn once."""

import base64
import importlib
import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from asrkit.workbench import plots
from asrkit.workbench.lessons import start_here
from asrkit.workbench.plots.palette import DARK, THINGS, colours_of
from asrkit.workbench.plots.svg import MAX_VECTOR_BYTES

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


def test_html_has_the_picture_with_its_words_and_its_escaped_alt_text():
    figure, _ = plots.canvas("26% of 80 %")
    html = plots.as_html(figure, 'A plot of "this" & that thing')
    assert "&quot;this&quot; &amp; that" in html
    assert "26\u00a0% of 80\u00a0%" in words_in(html)


def test_colours_of_the_palette_change_with_the_scheme_and_no_others():
    figure, ax = plots.canvas("title")
    for shade in (plots.COLOURS[0], "#123456"):
        ax.plot([0, 1], [0, 1], color=shade)
    picture = picture_in(plots.as_html(figure, "Two lines in two colours"))
    assert "stroke:var(--blue)" in picture and "stroke: #123456" in picture
    light, dark = re.findall(r"--blue:(#\w{6})", picture)
    assert light == plots.COLOURS[0] != dark
    assert "@media screen and (prefers-color-scheme:dark)" in picture
    assert "#000000" not in picture.split("</style>")[1]


@pytest.fixture
def slider(monkeypatch):
    """The output of a slider over bars."""
    shown = []

    def draw(value, height):
        figure, ax = plots.canvas(f"{value} bars")
        ax.bar(range(value), range(value))
        return figure, f"Some {value} bars of height {height:g}"

    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    controls = {"bars <n>": [2, 3, 5], "height": [1.0, 9.0]}
    plots.explore(draw, controls, start=[3, 1.0])
    return shown[0]


def test_a_slider_draws_every_frame_and_shows_the_first_one_only(slider):
    html = slider["text/html"]
    frames = re.findall(
        r'<div class="frame" data-name="(\d)"( hidden)?><img alt="Some (\d) bars', html
    )
    assert frames == [("2", " hidden", "2"), ("3", "", "3"), ("5", " hidden", "5")]
    assert 'data-label="bars &lt;n&gt;"' in html
    assert slider["text/plain"] == "bars <n>: 2, 3, 5"


def test_a_control_in_a_notebook_draws_the_picture_again(slider):
    from ipywidgets.widgets.widget import _instances

    model = slider["application/vnd.jupyter.widget-view+json"]["model_id"]
    bars, height, picture = _instances[model].children
    assert "Some 3 bars of height 1" in picture.value
    bars.value = 5
    assert "Some 5 bars of height 1" in picture.value
    height.value = 9.0
    assert "Some 5 bars of height 9" in picture.value


def test_pictures_leave_no_state_behind():
    before = dict(matplotlib.rcParams)
    figure, ax = plots.canvas("title")
    plots.dots({"one": [2.0]}, ax)
    plots.as_html(figure, "A short random waveform drawn")
    assert plt.get_fignums() == [] and dict(matplotlib.rcParams) == before


def test_a_picture_owes_nothing_to_the_matplotlibrc_of_the_user(tmp_path):
    def drawn():
        figure, ax = plots.canvas("title")
        plots.dots({"one": [2.0]}, ax, limit=("bound", 1.0))
        ax.annotate("text", (1, 0))
        return plots.as_html(figure, "A dot beside its bound")

    plain = drawn()
    own = "text.usetex: True\naxes.facecolor: black\nlines.markersize: 20\n"
    (tmp_path / "matplotlibrc").write_text(own)
    with matplotlib.rc_context():
        matplotlib.rc_file(tmp_path / "matplotlibrc")
        importlib.reload(plots)
        assert drawn() == plain


MARKS = {
    "dots": (({"a": (1.0, 2.0, 4.0), "b": [3000.0]},), {"limit": ("bound", 0.5)}),
    "intervals": (({"a": (1.2, 1.5, 1.6), "b": (0.9, 1.1, 1.2)},), {}),
    "lattice": ((torch.rand(5, 3), ["a", "b"]), {"caption": "share"}),
    "stacked": (({"a": {"x": 1, "y": 2}, "b": {"y": 4}},), {"measured": {"b": 5}}),
}


@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_is_drawn_with_its_names(mark):
    arguments, options = MARKS[mark]
    figure, axes = plots.canvas("The title")
    getattr(plots, mark)(*arguments, axes, **options)
    words = words_in(plots.as_html(figure, "A picture of a mark"))
    assert {"The title", "a", "b"} <= {*words}


@pytest.mark.parametrize(("refused", "message"), [
    (lambda: plots.as_html(plots.canvas("title")[0], "plot"), "alt: expected a sentence"),
    (lambda: plots.colour("mean"), "thing: expected one of .*lean.*, got 'mean'. Add it"),
    (lambda: plots.explore(None, {"n": [1]}, start=[1]), "controls.*: expected 2 to 20, got 1"),
    (lambda: plots.explore(None, {"n": [1, 2]}, start=[3]), "start: expected one of .* for n, got 3"),
    (lambda: plots.explore(None, {"n": [1, 2]}, start=[]), "start: expected 1 values, got 0"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused(refused, message):
    with pytest.raises(ValueError, match=message):
        refused()


def test_a_thing_has_one_colour_in_every_picture_and_no_other_name_has_it():
    names = ["norm", "logits", "copy", "gradient of logits"]
    colours = colours_of(names)
    assert list(colours) == names and len({*colours.values()}) == 4
    assert colours["logits"] == plots.colour("logits")
    assert {*THINGS.values()} <= {*DARK}


def test_a_training_curve_shows_running_medians():
    history = [{"seconds": float(i), "loss": loss} for i, loss in enumerate((5, 9, 4))]
    _, medians = start_here.training_curve(history, plots.canvas("title")[1]).lines
    assert list(medians.get_ydata()) == [7, 5, 6.5]


def test_many_points_become_a_picture():
    figure, ax = plots.canvas("title")
    ax.scatter(*np.random.default_rng(0).random((2, 5000)))
    picture = picture_in(plots.as_html(figure, "Five thousand points at random"))
    assert picture.count("<image") == 1 and "<text" in picture
    assert len(picture) < MAX_VECTOR_BYTES


def test_notebooks_make_no_control_of_their_own():
    """A browser moves the slider of `plots.explore` for all of them."""
    for path in NOTEBOOKS.glob("*.ipynb"):
        assert "ipywidgets" not in path.read_text("utf-8"), path.name
