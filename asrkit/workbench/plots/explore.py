"""Controls that compute and draw a figure again; without a kernel, a slider over drawn pictures."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from html import escape
from typing import Any

from matplotlib.figure import Figure

from asrkit.shapes import expect
from asrkit.workbench.plots.canvas import as_html

MIN_VALUES = 2
MAX_VALUES = 20


def explore(
    draw: Callable[..., tuple[Figure, str]],
    controls: Mapping[str, Sequence[Any]],
    *,
    start: Sequence[Any],
) -> None:
    """Display a slider for each control and, below them, the picture for the chosen values.

    In JupyterLab a change calls `draw` with the new values. The report has no kernel: there the
    first control chooses among pictures that are drawn now, and the others keep their start.

    Args:
        draw: Called with a value of each control, in their order; returns a figure and its alt
            text. It should take less than a second.
        controls: What each slider changes, with its unit -> its 2 to 20 hashable values.
        start: The value of each control to show first.

    Raises:
        ValueError: A control has too few or too many values, or none that equals its start.
    """
    import ipywidgets
    from IPython.display import display

    expect(len(controls) > 0, "controls", "at least one", 0)
    expect(len(start) == len(controls), "start", f"{len(controls)} values", len(start))
    sliders = []
    for (label, values), first in zip(controls.items(), start, strict=True):
        is_in_range = MIN_VALUES <= len(values) <= MAX_VALUES
        expect(is_in_range, f"controls[{label!r}]", f"{MIN_VALUES} to {MAX_VALUES}", len(values))
        are_different = len({*map(_name, values)}) == len(values)
        expect(are_different, f"controls[{label!r}]", "values with different names", list(values))
        expect(first in values, "start", f"one of {list(values)} for {label}", first)
        slider = ipywidgets.SelectionSlider(
            options=[(_name(value), value) for value in values],
            value=first,
            description=label,
            style={"description_width": f"{max(map(len, controls))}ch"},
            layout={"width": "36em", "max_width": "100%"},
        )
        sliders.append(slider)
    first_label, first_values = next(iter(controls.items()))
    picture = cache(lambda *values: as_html(*draw(*values)))
    pictures = [picture(value, *start[1:]) for value in first_values]
    shown = ipywidgets.HTML(picture(*start))

    def redraw(_: object) -> None:
        try:
            shown.value = picture(*(slider.value for slider in sliders))
        except Exception as error:  # a callback's error would leave the old picture
            shown.value = escape(f"{type(error).__name__}: {error}")

    for slider in sliders:
        slider.observe(redraw, "value")
    data = ipywidgets.VBox([*sliders, shown])._repr_mimebundle_()
    at = first_values.index(start[0])
    data["text/html"] = _html(first_label, first_values, pictures, at)
    data["text/plain"] = f"{first_label}: {', '.join(map(_name, first_values))}"
    display(data, raw=True)


def _name(value: Any) -> str:
    """A value as the slider shows it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _html(label: str, values: Sequence[Any], pictures: Sequence[str], shown: int) -> str:
    """All pictures, hidden except number `shown`; the report's script adds the slider."""
    parts = []
    for number, (value, picture) in enumerate(zip(values, pictures, strict=True)):
        hidden = "" if number == shown else " hidden"
        name = escape(_name(value))
        parts.append(f'<div class="frame" data-name="{name}"{hidden}>{picture}</div>')
    return f'<div class="frames" data-label="{escape(label)}">{"".join(parts)}</div>'
