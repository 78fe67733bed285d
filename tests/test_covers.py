"""The covers of the notebooks: figures/covers.py, and what it has written."""

import json
import runpy
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from asrkit.workbench import plots

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SCRIPT = runpy.run_path(str(ROOT / "figures/covers.py"))
code_of, write = SCRIPT["code_of"], SCRIPT["write"]
RUN = {
    "runs": [{"name": "01_why", "status": "ran"}],
    "machine": {"cpu_model": "A <CPU>", "id": "0123"},
    "code": {"commit": "c0ffee" * 7, "dirty": False},
}


def test_each_notebook_has_a_light_cover_that_its_present_code_drew():
    listed = json.loads((ROOT / "figures/covers.json").read_text("utf-8"))
    today = {path.stem: code_of(path) for path in NOTEBOOKS}
    drawn = {name: cover["code"] for name, cover in listed.items()}
    older = sorted({name for name, _ in today.items() ^ drawn.items()})
    assert not older, f"run `make figures`, which draws {', '.join(older)} again"
    for name in listed:
        picture = (ROOT / f"figures/{name}.svg").read_text("utf-8")
        assert (
            "prefers-color-scheme" not in picture
            and len(picture) <= SCRIPT["MOST_BYTES"]
        )


@pytest.fixture
def folder(tmp_path):
    """A notebook, and a report that ran it."""
    figure, ax = plots.canvas("Two bars")
    ax.bar([1, 2], [1, 2])
    shown = {"text/html": plots.as_html(figure, "Two bars, the second higher")}
    output = new_output("display_data", data=shown)
    cells = [
        new_markdown_cell("# Why?"),
        new_code_cell("draw()", id="bars", outputs=[output]),
        new_code_cell("answer = None", metadata={"tags": ["exercise"]}),
    ]
    (tmp_path / "runs").mkdir()
    for place in (tmp_path, tmp_path / "runs"):
        nbformat.write(new_notebook(cells=cells), place / "01_why.ipynb")
    (tmp_path / "manifest.json").write_text(json.dumps(RUN))
    return tmp_path


def test_a_cover_is_light_and_names_its_machine_and_commit(folder):
    (folder / "covers.json").write_text('{"00_other": {}}')
    nbformat.write(new_notebook(), folder / "00_other.ipynb")
    assert [*write(folder, folder, folder)] == ["01_why"]
    listed = json.loads((folder / "covers.json").read_text())
    assert listed["00_other"] == {} and listed["01_why"] == {
        "cell": "bars",
        "code": code_of(folder / "01_why.ipynb"),
        "commit": "c0ffeec0f",
        "machine": "A <CPU>, 0123",
    }
    picture = (folder / "01_why.svg").read_text()
    assert "<title>Two bars, the second higher</title>" in picture
    assert "on A &lt;CPU&gt;, 0123, commit c0ffeec0f</desc>" in picture
    assert "dark" not in picture and "color-scheme:light}" in picture


@pytest.mark.parametrize("number, is_older", [(0, False), (1, True), (2, False)])
def test_a_cover_is_older_after_a_change_of_code_that_draws(folder, number, is_older):
    notebook = nbformat.read(folder / "01_why.ipynb", 4)
    notebook.cells[number].source += " # changed"
    nbformat.write(notebook, folder / "01_why.ipynb")
    if is_older:
        with pytest.raises(ValueError, match="complete run of the present 01_why"):
            write(folder, folder, folder)
    else:
        write(folder, folder, folder)
