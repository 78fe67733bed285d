"""Draw `label_looping.png`: `python figures/label_looping.py`, about ten seconds.

It runs the cells of notebook 06 that watch a decoder and draw who waits, on a batch with as many
labels a second as subwords in speech: the planted model that the notebook times. (The notebook
itself draws a batch of characters, which are denser.)
"""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from asrkit.decoders import transducer_greedy
from asrkit.workbench.bench.planted import planted

HERE = Path(__file__).resolve().parent
NOTEBOOK = HERE.parent / "notebooks" / "06_label_looping.ipynb"
UTTERANCES = 10
FRAMES = 100  # of the longest utterance: 8 s
PANELS = {
    "frame_looping": "frame_looping",
    "label_looping": "label_looping, as published",
    "windowed_looping": "windowed_looping, asrkit's default",
}


def run_cell(name: str, names: dict[str, Any]) -> None:
    """Run the cell of notebook 06 that has this id, without what it prints."""
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    (source,) = ["".join(cell["source"]) for cell in cells if cell["id"] == name]
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(source, f"{NOTEBOOK.name}, cell {name}", "exec"), names)


def draw() -> tuple[Figure, list[str]]:
    """The figure and the titles of its panels, which count calls and rows."""
    names: dict[str, Any] = {}
    run_cell("imports", names)
    run_cell("parameters", names)
    plan = planted(UTTERANCES, FRAMES, V=names["tokens"], width=names["width"])
    names |= {"model": plan.model, "encoded": plan.encoded, "lengths": plan.lengths}
    names |= {"B": UTTERANCES, "ticks": range(UTTERANCES)}
    names["reference"] = transducer_greedy(
        plan.model, plan.encoded, plan.lengths, strategy="one_by_one"
    )
    run_cell("watch", names)
    run_cell("divergence", names)
    titles = []
    for ax, (name, panel) in zip(names["axes"], PANELS.items(), strict=True):
        joint_calls, predictor_calls = names["watched"][name]
        rows = sum(len(steps) for call in joint_calls for steps in call)
        joint = f"{len(joint_calls)} calls of the joint ({rows:,} rows)"
        titles.append(f"{panel}: {joint}, {predictor_calls} of the predictor")
        ax.set_title(titles[-1], fontsize=9, loc="left")
    return names["figure"], titles


if __name__ == "__main__":
    figure, titles = draw()
    figure.savefig(HERE / "label_looping.png", dpi=110)
    print(*titles, sep="\n")
