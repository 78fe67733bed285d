"""A slider whose pictures are drawn in advance, so that it works without a kernel."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure

from asrkit.shapes import expect
from asrkit.workbench.plots.canvas import as_html

MIN_VALUES = 2
MAX_VALUES = 20


def frames(
    draw: Callable[[Any], tuple[Figure, str]], values: Sequence[Any], label: str, *, start: Any
) -> None:
    """Display a slider over `values` and, below it, the picture for the chosen value.

    All pictures are drawn at once. JupyterLab shows a widget that chooses among them. The report
    shows the same pictures with a range input or, without scripts, the one for `start`.

    Args:
        draw: Returns the figure for a value, and its alt text.
        values: From 2 to 20 values, in the order of the slider.
        label: What the slider changes, with its unit.
        start: The value to show first.

    Raises:
        ValueError: There are too few or too many values, or `start` is not one of them.
    """
    import ipywidgets
    from IPython.display import display

    is_in_range = MIN_VALUES <= len(values) <= MAX_VALUES
    expect(is_in_range, "values", f"{MIN_VALUES} to {MAX_VALUES}", len(values))
    expect(start in values, "start", f"one of {list(values)}", start)
    first = list(values).index(start)
    names = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in values]
    pictures = [as_html(*draw(value)) for value in values]
    slider = ipywidgets.SelectionSlider(
        options=[(name, number) for number, name in enumerate(names)],
        value=first,
        description=label,
        style={"description_width": "initial"},
        layout={"width": "36em", "max_width": "100%"},
    )
    shown = ipywidgets.HTML(pictures[first])

    def move(change: dict[str, Any]) -> None:
        shown.value = pictures[change["new"]]

    slider.observe(move, "value")
    data = ipywidgets.VBox([slider, shown])._repr_mimebundle_()
    data["text/html"] = _html(names, pictures, label, first)
    data["text/plain"] = f"{label}: {', '.join(names)}"
    display(data, raw=True)


def _html(names: Sequence[str], pictures: Sequence[str], label: str, first: int) -> str:
    """All pictures, hidden except number `first`; the report's script adds the slider."""
    parts = []
    for number, (name, picture) in enumerate(zip(names, pictures, strict=True)):
        hidden = "" if number == first else " hidden"
        parts.append(f'<div class="frame" data-name="{escape(name)}"{hidden}>{picture}</div>')
    return f'<div class="frames" data-label="{escape(label)}">{"".join(parts)}</div>'
