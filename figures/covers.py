"""Write the cover of each notebook to figures/: `make figures`.

A cover is the figure that the report's index shows for a notebook, here in its light colours.
`covers.json` has, for each, the machine, the commit and a hash of the code that drew it; a test
compares that hash with the notebook's.
"""

import argparse
import base64
import json
import re
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from asrkit.files import content_hash
from asrkit.shapes import expect
from asrkit.workbench.report import report
from asrkit.workbench.report.notebook import render

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 40_000
DARK = re.compile(r"@media screen and \(prefers-color-scheme:dark\)\{svg\{[^}]*\}\}")


def code_of(notebook: Path) -> str:
    """Hash of a notebook's code without its exercises, whose answers change no figure."""
    cells = [
        "".join(cell["source"])
        for cell in json.loads(notebook.read_text("utf-8"))["cells"]
        if cell["cell_type"] == "code" and "exercise" not in cell["metadata"].get("tags", [])
    ]
    return content_hash(cells)


def light(picture: str, title: str, origin: str) -> str:
    """An SVG of the report with its light colours only, a title and where it comes from."""
    picture = DARK.sub("", picture).replace("color-scheme:light dark", "color-scheme:light")
    words = f"<title>{escape(title)}</title><desc>{escape(origin)}</desc>"
    return re.sub(r"<svg[^>]*>", lambda opened: opened[0] + words, picture, count=1)


def write(folder: Path, notebooks: Path, out: Path) -> dict[str, Any]:
    """Write the covers of the notebooks of a report, and their entries of `covers.json`.

    Args:
        folder: A finished report, which ran the notebooks with their own parameters.
        notebooks: Folder of the notebooks.
        out: Folder of the covers.

    Returns:
        The entries that were written, by name of the notebook.

    Raises:
        ValueError: A notebook failed, has other code or parameters than in the report, no figure,
            or one that is too large.
    """
    run = json.loads((folder / "manifest.json").read_text("utf-8"))
    machine = f"{run['machine']['cpu_model']}, {run['machine']['id']}"
    changed = " with uncommitted changes" if run["code"]["dirty"] else ""
    written, pictures = {}, {}
    for one in run["runs"]:
        name = one["name"]
        executed = folder / "runs" / f"{name}.ipynb"
        code = code_of(notebooks / f"{name}.ipynb")
        ran = one["status"] == "ran" and code == code_of(executed)
        expect(ran, "report", f"a complete run of the present {name}", "another")
        cover = render(executed, {}).cover
        expect(cover is not None, "report", f"a figure in {name}", "none")
        entry = {"cell": cover["cell"], "machine": machine, "code": code}
        entry["commit"] = f"{str(run['code']['commit'])[:9]}{changed}"
        origin = f"Cell {cover['cell']} of {name}.ipynb on {machine}, commit {entry['commit']}"
        drawn = base64.b64decode(cover["src"].partition(",")[2]).decode()
        pictures[name] = light(drawn, cover["alt"], origin)
        size = len(pictures[name].encode())
        expect(size <= MOST_BYTES, "report", f"a cover of {name} below {MOST_BYTES} bytes", size)
        written[name] = entry
    for name, picture in pictures.items():
        (out / f"{name}.svg").write_text(picture, "utf-8", newline="\n")
    listed = out / "covers.json"
    before = json.loads(listed.read_text("utf-8")) if listed.exists() else {}
    present = {name: before[name] for name in before if (notebooks / f"{name}.ipynb").exists()}
    lines = json.dumps(present | written, indent=1, sort_keys=True)
    listed.write_text(f"{lines}\n", "utf-8", newline="\n")
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    source = "take the covers from a finished report, such as reports/latest"
    parser.add_argument("--from", dest="folder", type=Path, metavar="REPORT", help=source)
    folder = parser.parse_args().folder
    if folder is None:
        paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
        folder = report(paths, ROOT / "reports").path.parent
    for name in write(folder, ROOT / "notebooks", ROOT / "figures"):
        print(f"figures/{name}.svg")
