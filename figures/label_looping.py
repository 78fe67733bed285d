"""Draw `label_looping.png`: `python figures/label_looping.py`, about ten seconds.

It runs the cells of notebook 06 that make a batch, watch a decoder and draw who waits.
"""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
NOTEBOOK = HERE.parent / "notebooks" / "06_label_looping.ipynb"


def run_cell(name: str, names: dict[str, Any]) -> None:
    """Run the cell of notebook 06 that has this id, without what it prints."""
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    (source,) = ["".join(cell["source"]) for cell in cells if cell["id"] == name]
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(source, f"{NOTEBOOK.name}, cell {name}", "exec"), names)


def draw() -> tuple[Figure, list[str]]:
    """The figure and the titles of its panels, which count calls and rows."""
    names: dict[str, Any] = {}
    for cell in ("imports", "parameters", "batch", "watch", "divergence"):
        run_cell(cell, names)
    return names["figure"], [ax.get_title(loc="left") for ax in names["axes"]]


if __name__ == "__main__":
    figure, titles = draw()
    figure.savefig(HERE / "label_looping.png", dpi=110)
    print(*titles, sep="\n")
