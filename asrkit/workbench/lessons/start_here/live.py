"""A curve that is drawn again while a model is trained."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from asrkit.workbench.plots.canvas import as_html, canvas
from asrkit.workbench.plots.speech import training_curve


def live_training_curve(every_s: float = 4.0) -> Callable[[Sequence[Any]], None]:
    """Display an empty picture, and return a function that draws the history so far into it.

    Args:
        every_s: Seconds between two drawings; calls in between do nothing.
    """
    import ipywidgets
    from IPython.display import display

    shown = ipywidgets.HTML()
    display(shown)
    next_at = time.monotonic() + every_s

    def draw(history: Sequence[Any]) -> None:
        nonlocal next_at
        if time.monotonic() < next_at:
            return
        next_at = time.monotonic() + every_s
        figure, _ = canvas("Training loss so far")
        training_curve(history, figure.axes[0])
        shown.value = as_html(figure, "Loss per label so far, falling")

    return draw
