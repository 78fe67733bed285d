"""The report on small real notebooks, run by the real papermill: one good, one that fails, one that hangs, one that dies."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from asrkit import records
from asrkit.report import report, run_notebooks
from asrkit.report.pages import prose

PNG = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe0def46b80000000049454e44ae426082"
    )
).decode()
GOOD = [
    new_markdown_cell("# Does it run?\n\nA formula $\\alpha_t + 1$, code `$x$`, and\n\n$$\\binom{T}{U} = 1$$"),
    new_code_cell("from asrkit import records\nprint(records.stamp())"),
    new_code_cell("size: int = 2  # how many", metadata={"tags": ["parameters"]}),
    new_code_cell("import sys; print('size', size, type(size).__name__, sys.executable)"),
    new_code_cell(
        "from IPython.display import display\n"
        f"display({{'image/png': {PNG!r}}}, raw=True, metadata={{'image/png': {{'alt': 'A single black dot, nothing more'}}}})"
    ),
    new_code_cell("records.publish(records.Measurement(what='demo', metric='ratio', unit='1', value=2.0))"),
    new_code_cell("import ipywidgets; ipywidgets.HTML('<b>live only</b>')"),
    new_code_cell("from IPython.display import Audio; Audio([0.0, 0.5, -0.5] * 100, rate=8000)"),
]


def write(folder: Path, name: str, cells, after=()) -> Path:
    notebook = new_notebook(cells=[cell.copy() for cell in cells], metadata={"asrkit": {"after": list(after)}})
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"c{number}"
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


class Loads(HTMLParser):
    """Everything a page would load or run, and its pictures without words."""

    def __init__(self):
        super().__init__()
        self.outside, self.wordless, self.tags = [], [], set()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.add(tag)
        loading = attrs.get("src") or (attrs.get("href") if tag in ("link", "base") else None)
        if loading and not loading.startswith("data:"):
            self.outside.append((tag, loading))
        if tag == "img" and not (attrs.get("alt") or "").strip():
            self.wordless.append(attrs.get("src", "")[:30])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    paths = [
        write(folder, "a_good", GOOD),
        write(folder, "b_fails", [new_code_cell("x = 1"), new_code_cell("raise ValueError('on purpose <b>')")], after=["a_good"]),
        write(folder, "c_hangs", [new_code_cell("print('before'); import time; time.sleep(600)")]),
        write(folder, "d_dies", [new_code_cell("import os; os._exit(9)")]),
    ]
    out = tmp_path_factory.mktemp("reports")
    result = report(paths, out, parameters={"size": 3}, jobs=2, timeout_s=6, progress=False)
    return out, result


def test_one_failing_hanging_or_dying_notebook_does_not_stop_the_rest(built):
    _, result = built
    assert {run.name: run.status for run in result.runs} == {
        "a_good": "ran", "b_fails": "failed", "c_hangs": "failed", "d_dies": "failed",
    }  # fmt: skip
    assert result.exit_code == 1
    assert "on purpose" in result.runs[1].error and "\x1b" not in result.runs[1].error
    assert result.runs[2].error and result.runs[3].error


def test_what_a_notebook_did_before_it_failed_is_kept(built):
    out, _ = built
    executed = nbformat.read(out / "latest/runs/c_hangs.ipynb", 4)
    assert executed.cells[0].outputs[0].text.strip() == "before"
    assert "on purpose &lt;b&gt;" in (out / "latest/index.html").read_text()


def test_parameters_arrive_typed_and_the_kernel_is_this_python(built):
    import sys

    out, result = built
    assert dict(result.runs[0].parameters) == {"size": 3}
    text = (out / "latest/runs/a_good.ipynb").read_text()
    assert "size 3 int" in text and sys.executable in text


def test_records_come_out_of_the_notebook_whole(built):
    out, result = built
    (record,) = result.runs[0].records
    assert (record["what"], record["value"]) == ("demo", 2.0) and records.problem(record) == ""
    assert records.read(out / "latest/records/a_good.jsonl") == [record]


def test_pages_load_nothing_and_every_picture_has_words(built):
    out, result = built
    pages = sorted((out / "latest").glob("*.html"))
    assert [page.stem for page in pages] == ["a_good", "b_fails", "c_hangs", "d_dies", "index"]
    for page in pages:
        text = page.read_text()
        loads = Loads()
        loads.feed(text)
        assert loads.outside == [] and loads.wordless == [] and "script" in loads.tags, page
        assert "default-src 'none'" in unescape(text) and '<html lang="en">' in text
    assert result.defects == []


def test_the_good_page_has_formulas_sound_and_picture_and_no_dead_widget(built):
    out, _ = built
    text = (out / "latest/a_good.html").read_text()
    assert text.count("<math") == 2 and "<code>$x$</code>" in text
    assert 'alt="A single black dot, nothing more"' in text and "data:audio/wav" in text
    assert "<b>live only" not in text and "widget-view" not in text


def test_the_index_tells_in_order_what_ran_what_holds_and_what_failed(built):
    out, result = built
    text = (out / "latest/index.html").read_text()
    assert "1 of 4 notebooks ran." in text
    order = [text.index(f'id="{name}"') for name in ("claims", "notebooks", "figures", "machine", "slowest", "failures")]
    assert order == sorted(order)
    manifest = json.loads((out / "latest/manifest.json").read_text())
    assert [run["status"] for run in manifest["runs"]] == ["ran", "failed", "failed", "failed"]
    assert json.loads(result.summary().splitlines()[-1])["ran"] == 1
    assert re.search(r"ValueError: on purpose", result.summary())


def test_latest_moves_to_the_newer_report_and_the_older_stays(built, tmp_path):
    path = write(tmp_path, "only", [new_markdown_cell("# Only?"), new_code_cell("1 + 1")])
    first = report([path], tmp_path / "out", progress=False)
    second = report([path], tmp_path / "out", progress=False)
    assert first.exit_code == second.exit_code == 0
    runs = [entry for entry in (tmp_path / "out").iterdir() if entry.name != "latest"]
    assert len(runs) == 2 and (tmp_path / "out/latest").resolve() in [run.resolve() for run in runs]


def test_a_picture_without_words_is_a_defect(tmp_path):
    cell = new_code_cell(f"from IPython.display import display\ndisplay({{'image/png': {PNG!r}}}, raw=True)")
    result = report([write(tmp_path, "mute", [cell])], tmp_path / "out", progress=False)
    assert result.defects == ["mute: a picture has no alt text"] and result.exit_code == 1


def test_bad_requests_are_refused_before_anything_runs(tmp_path):
    path = write(tmp_path, "x", GOOD[1:3])
    with pytest.raises(ValueError, match=r"parameters: expected one of \['size'\], got \['sise'\]"):
        run_notebooks([path], tmp_path / "out", parameters={"sise": 1}, progress=False)
    with pytest.raises(ValueError, match="notebooks: expected an .ipynb file"):
        run_notebooks([tmp_path / "none.ipynb"], tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match="notebooks: expected at least one"):
        run_notebooks([], tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_formula_that_cannot_be_read_is_a_defect_and_costs_nothing_else(tmp_path):
    path = write(tmp_path, "torn", [new_markdown_cell("# Torn?\n\nIt says $\\frac{1}{$ and $a < b$."), new_code_cell("1")])
    result = report([path], tmp_path / "out", progress=False)
    assert result.defects == ["torn: no LaTeX: $\\frac{1}{$"] and result.exit_code == 1
    assert (tmp_path / "out/latest/torn.html").read_text().count("<math") == 1


def test_a_record_changed_in_the_notebook_is_left_out_and_said(tmp_path):
    cell = new_code_cell(
        "from asrkit import records\n"
        "sealed = records.Measurement('demo', 'ratio', '1', 2.0).sealed()\n"
        "records.publish(sealed | {'value': 9.0})\nrecords.publish(sealed)"
    )
    result = report([write(tmp_path, "forged", [cell])], tmp_path / "out", progress=False)
    assert [record["value"] for record in result.runs[0].records] == [2.0]
    assert result.defects == ["forged: left out a record, changed after it was sealed"] and result.exit_code == 1


def test_pictures_in_text_and_in_html_need_words_and_travel_with_the_page(tmp_path):
    shown = "from IPython.display import HTML\nHTML('<img src=\"data:image/png;base64,AAAA\">')"
    cells = [new_markdown_cell("# Seen?\n\n![a lattice of arcs](../figures/lattice.png)"), new_code_cell(shown)]
    result = report([write(tmp_path, "mute", cells)], tmp_path / "out", progress=False)
    assert result.defects == ["mute: a picture is not inside the page", "mute: a picture has no alt text"]


def alive(process: int) -> bool:
    """Whether `process` still runs; one that has ended and waits for its parent does not."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_report_that_is_stopped_leaves_no_kernel_behind(tmp_path, how):
    cell = new_code_cell("import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)")
    write(tmp_path, "long", [cell])
    program = (
        "import signal\nfrom pathlib import Path\nfrom asrkit.report import run_notebooks\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job would inherit that it is ignored
        "if __name__ == '__main__':\n    run_notebooks([Path('long.ipynb')], Path('out'), progress=False)"
    )
    (tmp_path / "main.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": str(records.HERE.parent)}
    main = subprocess.Popen(
        [sys.executable, "main.py"], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL, start_new_session=True
    )
    told = tmp_path / "pid"
    try:
        wait_until(lambda: told.exists() and told.read_text())
        main.send_signal(how)
        main.wait(30)
        wait_until(lambda: not alive(int(told.read_text())))
    finally:
        main.kill()
        main.wait()
        if told.exists() and alive(int(told.read_text())):
            os.kill(int(told.read_text()), signal.SIGKILL)


def wait_until(holds, seconds=30.0):
    """Return once `holds()`, fail after `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("markdown", "formulas"),
    [
        ("costs $5 and $6", 0),
        ("~~~\n$a$\n~~~", 0),
        ("``$a$ ` $b$``", 0),
        ("`x` $a$ `y` $b$", 2),
        ("$a$, $b$ and $x_1$.", 3),
        ("$a$ and $b$", 2),
        ("costs 5 \\$ or 6 \\$", 0),
        ("`$a$`", 0),
        ("```\n$a$\n```", 0),
        ("$$a$$ then $b$", 2),
    ],
)
def test_formulas_become_mathml_and_code_stays_code(markdown, formulas):
    assert prose(markdown).count("<math") == formulas
