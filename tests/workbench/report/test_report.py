"""The report on small real notebooks, run by the real papermill: good ones, and some that fail, hang or die."""

import base64
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from asrkit import files
from asrkit.workbench import records
from asrkit.workbench.report import (
    NotebookRun,
    ReportResult,
    execute,
    report,
    run_notebooks,
)
from asrkit.workbench.report.notebook_run import outcome
from asrkit.workbench.report.prose import prose
from asrkit.workbench.report.site import build

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
GOOD = [
    new_markdown_cell(
        "# Does it run?\n\nA formula $\\alpha_t + 1$, code `$x$`, and\n\n$$\\binom{T}{U} = 1$$"
    ),
    new_code_cell(
        "from asrkit.workbench import machine, records\nprint(machine.stamp())"
    ),
    new_code_cell("size: int = 2  # how many", metadata={"tags": ["parameters"]}),
    new_code_cell(
        "import os, sys\nprint('size', size, type(size).__name__, sys.executable, os.environ['CUDA_VISIBLE_DEVICES'] == '')"
    ),
    new_code_cell(
        "from IPython.display import display\n"
        f"display({{'image/png': {PNG!r}}}, raw=True, metadata={{'image/png': {{'alt': 'A single black dot, nothing more'}}}})"
    ),
    new_code_cell(
        "records.publish(records.Measurement(what='demo', metric='ratio', unit='1', value=2.0))"
    ),
    new_code_cell("import ipywidgets; ipywidgets.HTML('<b>live only</b>')"),
    new_code_cell(
        "from IPython.display import Audio; Audio([0.0, 0.5, -0.5] * 100, rate=8000)"
    ),
]
LONGEST_S = 600.0  # that a test waits for a process, on however busy a machine
PLAN = {"size": "quick", "device": "auto"}


def write(folder: Path, name: str, cells, after=(), untimed=False) -> Path:
    folder.mkdir(exist_ok=True)
    settings = {"after": list(after), "untimed": untimed}
    notebook = new_notebook(
        cells=[cell.copy() for cell in cells], metadata={"asrkit": settings}
    )
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"c{number}"
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder of the reports on a notebook that is good, one that fails and one that dies."""
    folder = tmp_path_factory.mktemp("notebooks")
    fails = [
        new_code_cell("x = 1"),
        new_code_cell("raise ValueError('on purpose <b>')"),
    ]
    paths = [
        write(folder, "a_good", GOOD),
        write(folder, "b_fails", fails, after=["a_good"]),
        write(folder, "d_dies", [new_code_cell("import os; os._exit(9)")]),
    ]
    out = tmp_path_factory.mktemp("reports")
    result = report(
        paths, out, parameters={"size": 3}, device="cpu", jobs=2, progress=False
    )
    return out, result


def test_one_failing_or_dying_notebook_does_not_stop_the_rest(built):
    out, result = built
    assert [run.status for run in result.runs] == ["ran", "failed", "failed"]
    assert result.exit_code == 1 and result.facts()["ran"] == 1 and result.defects == []
    assert result.runs[2].error and "\x1b" not in result.runs[1].error
    line = "b_fails: ValueError: on purpose <b> (cell c1)"
    assert line in result.summary().splitlines()
    index = BeautifulSoup((out / "latest/index.html").read_text(), "html.parser")
    assert line in index.get_text() and "1 of 3 notebooks ran in" in index.get_text()
    manifest = json.loads((out / "latest/manifest.json").read_text())
    assert [run["status"] for run in manifest["runs"]] == ["ran", "failed", "failed"]


def test_parameters_arrive_typed_the_kernel_is_this_python_and_no_gpu_is_visible(built):
    out, result = built
    assert dict(result.runs[0].parameters) == {"size": 3}
    text = (out / "latest/runs/a_good.ipynb").read_text()
    assert f"size 3 int {sys.executable} True" in text


def test_records_come_out_of_the_notebook_whole(built):
    out, result = built
    (record,) = result.runs[0].records
    assert (record["what"], record["value"]) == ("demo", 2.0) and records.problem(
        record
    ) == ""
    assert records.read(out / "latest/records/a_good.jsonl") == [record]


def test_pages_load_nothing_allow_only_what_they_hold_and_every_picture_has_words(
    built,
):
    pages = sorted((built[0] / "latest").glob("*.html"))
    assert [page.stem for page in pages] == [
        "a_good", "b_fails", "d_dies", "figures", "index", "ledger", "machine", "records"
    ]  # fmt: skip
    for path in pages:
        page = BeautifulSoup(path.read_text(), "html.parser")
        assert page.html["lang"] == "en"
        loaded = [tag["src"] for tag in page.find_all(src=True)]
        loaded += [tag["href"] for tag in page.find_all(["link", "base"])]
        assert all(source.startswith("data:") for source in loaded)
        assert not page.find_all(style=True)
        assert not page.find_all(
            lambda tag: any(name.startswith("on") for name in tag.attrs)
        )
        assert all(image["alt"].strip() for image in page.find_all("img"))
        policy = page.find("meta", attrs={"http-equiv": "Content-Security-Policy"})[
            "content"
        ]
        assert policy.startswith("default-src 'none'; ") and "img-src data:;" in policy
        assert "unsafe" not in policy
        for kind in ("style", "script"):
            (inside,) = page.find_all(kind)
            digest = base64.b64encode(
                hashlib.sha256(inside.string.encode()).digest()
            ).decode()
            assert f"{kind}-src 'sha256-{digest}'" in policy
        levels = [
            int(heading.name[1]) for heading in page.find_all(re.compile("^h[1-6]$"))
        ]
        assert levels[0] == levels.count(1) == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_the_good_page_has_formulas_sound_and_picture_and_no_dead_widget(built):
    text = (built[0] / "latest/a_good.html").read_text()
    assert text.count("<math") == 2 and "<code>$x$</code>" in text
    assert 'alt="A single black dot, nothing more"' in text and "data:audio/wav" in text
    assert "<b>live only" not in text and "widget-view" not in text


def test_latest_moves_to_the_newer_report_and_the_older_stays(tmp_path):
    path = write(tmp_path, "only", [new_markdown_cell("# Only?")])
    results = [report([path], tmp_path / "out", progress=False) for _ in range(2)]
    assert [result.exit_code for result in results] == [0, 0]
    first, second, latest = sorted((tmp_path / "out").iterdir())
    assert latest.resolve() == second.resolve() and (first / "index.html").is_file()


def test_neither_the_command_nor_its_workers_load_torch():
    code = "import asrkit.cli, asrkit.workbench.report, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_long_name_of_the_folder_for_temporary_files_is_no_matter(
    tmp_path, monkeypatch
):
    long = tmp_path / ("x" * 113)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr("tempfile.tempdir", None)
    path = write(tmp_path / "notebooks", "a", [new_code_cell("print('ran')")])
    (run,) = run_notebooks([path], tmp_path / "out", progress=False, timeout_s=120)
    assert (run.status, run.error) == ("ran", "")
    assert list(long.iterdir()) == []


MEETS = """
import os, time
from pathlib import Path
running = Path(FOLDER)
(running / NAME).touch()
(running / f"{NAME}.began").touch()
while not ((running / "b.began").exists() and (running / "c.began").exists()):
    time.sleep(0.01)  # the limit of the notebook ends this
(running / NAME).unlink()
"""
ALONE = """
import time
from pathlib import Path
running = Path(FOLDER)
(running / NAME).touch()
time.sleep(1)  # in which another one would have begun
beside = sorted(path.name for path in running.iterdir() if not path.suffix)
assert beside == [NAME], beside
(running / NAME).unlink()
"""


def test_only_notebooks_that_measure_no_time_run_beside_others(tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "this_machine", lambda: {"cpu_usable": 2})
    folder = tmp_path / "running"
    folder.mkdir()
    paths = []
    for name, source in {"a": ALONE, "b": MEETS, "c": MEETS, "d": ALONE}.items():
        cell = new_code_cell(f"FOLDER, NAME = {str(folder)!r}, {name!r}\n{source}")
        paths.append(write(tmp_path, name, [cell], untimed=source is MEETS))
    runs = run_notebooks(paths, tmp_path / "out", timeout_s=120, progress=False)
    assert [(run.status, run.error) for run in runs] == [("ran", "")] * 4


def test_a_hanging_notebook_and_one_that_kills_its_worker_are_stopped_alone(tmp_path):
    # Only these may have a short limit: on a busy machine an import takes longer.
    sources = {
        "hangs": "print('before'); import time; time.sleep(600)",
        "kills": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
        "then": "x = 1",
    }
    paths = [
        write(tmp_path, name, [new_code_cell(source)])
        for name, source in sources.items()
    ]
    runs = run_notebooks(paths, tmp_path / "out", jobs=1, timeout_s=6, progress=False)
    assert [run.status for run in runs] == ["failed", "failed", "ran"]
    line = runs[0].line()
    assert "timed out while it was being executed, after 6 seconds" in line
    assert line.endswith("(cell c0)") and "----" not in line
    executed = nbformat.read(tmp_path / "out/hangs.ipynb", 4)
    assert executed.cells[0].outputs[0].text.strip() == "before"


def test_what_is_wrong_with_a_page_is_a_defect_and_costs_nothing_else(tmp_path):
    sound = records.Measurement("demo", "ratio", "1", 2.0).record()
    shown = [
        {"image/png": PNG},
        {records.MIME: sound | {"value": "9"}},
        {records.MIME: sound},
        {"text/html": '<img src="data:image/png;base64,AAAA">'},
    ]
    outputs = [new_output("display_data", data=data) for data in shown]
    text = "# Torn?\n\nIt says $\\frac{1}{$ and $a < b$, 2 GB<!-- no-such-claim --> and 3<!-- code: fine -->."
    cells = [
        new_markdown_cell(text),
        new_markdown_cell("![a lattice of arcs](../figures/lattice.png)"),
        new_code_cell("1", outputs=outputs),
    ]
    executed = write(tmp_path / "runs", "wrong", cells)
    run = NotebookRun(name="wrong", parameters={}, **outcome(executed, None))
    assert [record["value"] for record in run.records] == [2.0]
    _, defects = build(tmp_path, [run], 1.0, PLAN)
    assert defects == [
        "wrong: left out a record, no record: value '9' is no finite number",
        "wrong: no LaTeX: $\\frac{1}{$",
        "wrong: no claim: no-such-claim",
        "wrong: a picture is not inside the page",
        "wrong: a picture has no alt text",
        "wrong: a picture has no alt text",
    ]
    result = ReportResult(
        path=tmp_path, runs=[run], sentence="", seconds=1.0, defects=defects
    )
    assert result.exit_code == 1


def alive(process: int) -> bool:
    """Whether `process` still runs; one that has ended and waits for its parent does not."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(holds, seconds=LONGEST_S):
    """Return once `holds()`, fail after `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


MAIN = """
import signal
from pathlib import Path
from asrkit.workbench.report import run_notebooks
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would inherit that it is ignored
if __name__ == '__main__':
    run_notebooks([Path('long.ipynb')], Path('out'), progress=False)
"""


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="looks for processes in /proc"
)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_report_that_is_stopped_leaves_no_kernel_behind(tmp_path, how):
    cell = "import os, pathlib, time\npathlib.Path('pid').write_text(f'{os.getpid()} ')\ntime.sleep(600)"
    write(tmp_path, "long", [new_code_cell(cell)])
    (tmp_path / "main.py").write_text(MAIN)
    told = tmp_path / "pid"
    main = subprocess.Popen(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(files.HERE.parent)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: told.exists() and told.read_text().endswith(" "))
        main.send_signal(how)
        main.wait(LONGEST_S)
        wait_until(lambda: not alive(int(told.read_text())))
    finally:
        main.kill()
        main.wait()
        if told.exists() and alive(int(told.read_text())):
            os.kill(int(told.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(("markdown", "formulas"), [
    ("costs $5 and $6", 0), ("costs 5 \\$ or 6 \\$", 0), ("~~~\n$a$\n~~~", 0), ("``$a$ ` $b$``", 0), ("`$a$`", 0),
    ("`x` $a$ `y` $b$", 2), ("$a$, $b$ and $x_1$.", 3), ("$$a$$ then $b$", 2),
])  # fmt: skip
def test_formulas_become_mathml_and_code_stays_code(markdown, formulas):
    assert prose(markdown).count("<math") == formulas


def test_comments_that_are_no_claims_are_left_out():
    named = []
    assert (
        prose("1<!-- code: a.py --> 2<!-- = 1 + 1 --> 3<!-- joint-x -->", {}, named)
        == "1 2 3"
    )
    assert named == ["joint-x"]
