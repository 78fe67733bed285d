"""Executed notebooks and records to one folder of static pages: no script, no request, readable offline."""

import datetime
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any

import jinja2
import nbformat
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from pygments.formatters import HtmlFormatter

from asrkit import ledger
from asrkit import records as store
from asrkit.report.run import NotebookRun, run_notebooks

HERE = Path(__file__).parent
CSP = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
WIDGET = "application/vnd.jupyter.widget-view+json"
NO_TEX = '<code class="no-tex">'
FORMULA = (  # code first, so that a dollar inside it is never seen
    r"(?s)(?P<code>(?P<fence>```|~~~).*?(?P=fence)|(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`))"
    r"|(?<!\\)\$\$(?P<block>.+?)\$\$|(?<![\\$])\$(?P<line>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)"
)


@dataclass(frozen=True, kw_only=True)
class ReportResult:
    """Where the report is and how the run went; exit_code is 0 only if every notebook ran and every picture has words."""

    path: Path
    runs: Sequence[NotebookRun]
    sentence: str
    seconds: float
    defects: Sequence[str]

    @property
    def exit_code(self) -> int:
        """0 or 1."""
        return int(any(run.status != "ran" for run in self.runs) or bool(self.defects))

    def summary(self) -> str:
        """Sentence, path and one JSON line."""
        ran = sum(run.status == "ran" for run in self.runs)
        line = {"notebooks": len(self.runs), "ran": ran, "records": sum(len(r.records) for r in self.runs),
                "seconds": round(self.seconds, 1), "defects": len(self.defects), "path": str(self.path)}  # fmt: skip
        problems = [f"{run.name}: {run.error.strip().splitlines()[-1]}" for run in self.runs if run.error] + [*self.defects]
        return "\n".join([*problems, self.sentence, str(self.path), json.dumps(line)])


def report(
    notebooks: Sequence[Path] | None = None, out: Path = Path("reports"), *, parameters: Mapping[str, Any] | None = None,
    workers: int | None = None, timeout_s: float = 600.0, progress: bool = True,
) -> ReportResult:  # fmt: skip
    """Run `notebooks` (default: notebooks/*.ipynb) and build `out`/<time>/index.html; `out`/latest points to it.

    The folder holds runs/ (executed copies), records/, the pages and manifest.json. It is built whole before `latest`
    moves, so a run that is cut short leaves the last report in place.
    """
    start = time.perf_counter()
    folder = Path(out) / f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}Z-{os.getpid()}"
    paths = sorted(Path("notebooks").glob("*.ipynb")) if notebooks is None else list(notebooks)
    runs = run_notebooks(paths, folder / "runs", parameters=parameters, workers=workers, timeout_s=timeout_s, progress=progress)
    for run in runs:
        if run.records:
            store.append(folder / "records" / f"{run.name}.jsonl", *run.records)
    sentence, defects = build(folder, runs, time.perf_counter() - start)
    latest = Path(out) / "latest"
    link = latest.with_name(f".latest-{os.getpid()}")
    try:
        link.symlink_to(folder.name, target_is_directory=True)
        if latest.is_dir() and not latest.is_symlink():
            shutil.rmtree(latest)
        os.replace(link, latest)
    except OSError:  # a file system without links
        link.unlink(missing_ok=True)
        shutil.rmtree(latest, ignore_errors=True)
        shutil.copytree(folder, latest)
    path, seconds = latest / "index.html", time.perf_counter() - start
    return ReportResult(path=path, runs=runs, sentence=sentence, seconds=seconds, defects=defects)


def build(folder: Path, runs: Sequence[NotebookRun], seconds: float) -> tuple[str, list[str]]:
    """Write index.html, a page a notebook and manifest.json into `folder`; the summary sentence, and defects found."""
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE / "templates"), autoescape=True)
    css = (HERE / "templates/style.css").read_text("utf-8") + HtmlFormatter(style="default").get_style_defs(".highlight")
    figures, defects = [], []
    for run in runs:
        executed = folder / "runs" / f"{run.name}.ipynb"
        title, body = page(executed) if executed.is_file() else (run.name, "")
        wrong = [*run.defects, *(f"no LaTeX: {unescape(text)}" for text in re.findall(f"{NO_TEX}(.*?)</code>", body, re.DOTALL))]
        for image in re.findall(r"<img\b[^>]*>", body):
            told = {key: unescape(text) for key, _, text in re.findall(r"""\b(alt|src)=(["'])(.*?)\2""", image)}
            alt = told.get("alt", "").replace("No description has been provided for this image", "")
            wrong += ["a picture has no alt text"] * (not alt)
            wrong += ["a picture is not inside the page"] * (not told.get("src", "").startswith("data:"))
            figures += [{**told, "notebook": run.name}] * bool(alt)
        defects += [f"{run.name}: {what}" for what in wrong]
        text = templates.get_template("notebook.html.j2").render(title=title, body=body, run=run, css=css, csp=CSP)
        (folder / f"{run.name}.html").write_text(text, "utf-8")
    shipped = store.read(store.shipped("records")) if any(store.shipped("records").rglob("*.jsonl")) else []
    rows = ledger.table(ledger.load_claims(), [*shipped, *(record for run in runs for record in run.records)])
    others = {r["machine"]["id"]: r for r in shipped if r["machine"]["id"] != store.machine()["id"]}
    ran = sum(run.status == "ran" for run in runs)
    sentence = f"{ran} of {len(runs)} notebooks ran. {ledger.summary(rows)}"
    context = {
        "sentence": sentence, "rows": rows, "runs": runs, "figures": figures, "defects": defects, "seconds": seconds,
        "machine": store.machine(), "software": store.software(), "code": store.code(), "others": list(others.values())[:3],
        "slowest": sorted(((s, cell, run.name) for run in runs for cell, s in run.slowest), reverse=True)[:8],
        "records": [record for run in runs for record in run.records], "css": css, "csp": CSP,
        "now": f"{datetime.datetime.now(datetime.UTC):%F %H:%M} UTC",
    }  # fmt: skip
    listed = [{**asdict(run), "records": len(run.records)} for run in runs]
    manifest = json.dumps({"sentence": sentence, "runs": listed, "code": store.code()}, indent=1)
    (folder / "manifest.json").write_text(manifest, "utf-8")
    (folder / "index.html").write_text(templates.get_template("index.html.j2").render(**context), "utf-8")
    return sentence, defects


def page(executed: Path) -> tuple[str, str]:
    """Title and HTML body of an executed notebook, made safe for a page without scripts."""
    notebook = nbformat.read(executed, 4)
    texts = (cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    title = next((text.splitlines()[0][2:] for text in texts if text.startswith("# ")), executed.stem)
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = mathml(cell.source)
        elif cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if WIDGET not in out.get("data", {})]
    exporter = HTMLExporter(template_name="basic", embed_images=False, exclude_input_prompt=True, exclude_output_prompt=True)
    body, _ = exporter.from_notebook_node(notebook)
    return title, re.sub(r'<a class="anchor-link"[^>]*>[^<]*</a>', "", body)


def mathml(markdown: str) -> str:
    """`$…$` and `$$…$$` outside code as MathML, which browsers draw without a script; prices like $5 stay text."""

    def draw(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        try:
            return convert((found["block"] or found["line"]).strip(), display="block" if found["block"] else "inline")
        except Exception:  # latex2mathml has no common base; one bad formula must not cost the report
            return f"{NO_TEX}{escape(found[0])}</code>"

    return re.sub(FORMULA, draw, markdown)
