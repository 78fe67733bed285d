"""The report on small real notebooks, run by the real papermill: good ones, and some that fail, hang or die."""

import base64
import hashlib
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

PNG = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe0def46b80000000049454e44ae426082"
    )
).decode()
GOOD = [
    new_markdown_cell(
        "# Does it run?\n\nA formula $\\alpha_t + 1$, code `$x$`, and\n\n$$\\binom{T}{U} = 1$$"
    ),
    new_code_cell("from asrkit.workbench import machine, records\nprint(machine.stamp())"),
    new_code_cell("size: int = 2  # how many", metadata={"tags": ["parameters"]}),
    new_code_cell("import sys; print('size', size, type(size).__name__, sys.executable)"),
    new_code_cell(
        "from IPython.display import display\n"
        f"display({{'image/png': {PNG!r}}}, raw=True, metadata={{'image/png': {{'alt': 'A single black dot, nothing more'}}}})"
    ),
    new_code_cell(
        "records.publish(records.Measurement(what='demo', metric='ratio', unit='1', value=2.0))"
    ),
    new_code_cell("import ipywidgets; ipywidgets.HTML('<b>live only</b>')"),
    new_code_cell("from IPython.display import Audio; Audio([0.0, 0.5, -0.5] * 100, rate=8000)"),
]


LONGEST_S = 600.0  # that a test waits for a process, on however busy a machine
PLAN = {"size": "quick", "device": "auto"}


def write(folder: Path, name: str, cells, after=(), untimed=False) -> Path:
    folder.mkdir(exist_ok=True)
    settings = {"after": list(after), "untimed": untimed}
    notebook = new_notebook(cells=[cell.copy() for cell in cells], metadata={"asrkit": settings})
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"c{number}"
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


class Loads(HTMLParser):
    """Everything a page would load or run, pictures without words, headings, and attributes that the policy blocks."""

    def __init__(self):
        super().__init__()
        self.outside, self.wordless, self.blocked, self.levels, self.inside = (
            [],
            [],
            [],
            [],
            {"style": [], "script": []},
        )

    @classmethod
    def of(cls, text):
        loads = cls()
        loads.feed(text)
        return loads

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        loading = attrs.get("src") or (attrs.get("href") if tag in ("link", "base") else None)
        if loading and not loading.startswith("data:"):
            self.outside.append((tag, loading))
        if tag == "img" and not (attrs.get("alt") or "").strip():
            self.wordless.append(attrs.get("src", "")[:30])
        self.blocked += [(tag, name) for name in attrs if name == "style" or name.startswith("on")]
        self.levels += [int(tag[1]) for _ in re.findall("^h[1-6]$", tag)]
        if tag in self.inside:
            self.inside[tag].append("")

    def handle_data(self, data):
        if self.lasttag in self.inside and self.cdata_elem:
            self.inside[self.lasttag][-1] += data


def policy(text: str) -> dict[str, str]:
    """The directives of a page's Content-Security-Policy."""
    (content,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    return dict(one.strip().split(" ", 1) for one in unescape(content).split(";"))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    paths = [
        write(folder, "a_good", GOOD),
        write(
            folder,
            "b_fails",
            [new_code_cell("x = 1"), new_code_cell("raise ValueError('on purpose <b>')")],
            after=["a_good"],
        ),
        write(folder, "d_dies", [new_code_cell("import os; os._exit(9)")]),
    ]
    out = tmp_path_factory.mktemp("reports")
    result = report(paths, out, parameters={"size": 3}, jobs=2, progress=False)
    return out, result


def test_one_failing_or_dying_notebook_does_not_stop_the_rest(built):
    out, result = built
    assert {run.name: run.status for run in result.runs} == {
        "a_good": "ran", "b_fails": "failed", "d_dies": "failed",
    }  # fmt: skip
    assert result.exit_code == 1
    assert "on purpose" in result.runs[1].error and "\x1b" not in result.runs[1].error
    assert result.runs[2].error
    assert "on purpose &lt;b&gt;" in (out / "latest/index.html").read_text()


def test_neither_the_command_nor_its_workers_load_torch():
    code = "import asrkit.cli, asrkit.workbench.report, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_long_name_of_the_folder_for_temporary_files_is_no_matter(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 113)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr("tempfile.tempdir", None)
    path = write(tmp_path / "notebooks", "a", [new_code_cell("print('ran')")])
    (run,) = run_notebooks([path], tmp_path / "out", progress=False, timeout_s=120)
    assert (run.status, run.error) == ("ran", "")
    assert list(long.iterdir()) == []


def test_notebooks_are_run_one_after_the_other_by_one_process_and_by_another_if_it_dies(tmp_path):
    asks = """
import os
folders = os.environ["JUPYTER_PATH"].split(os.pathsep)
print(os.getppid(), [folder for folder in folders if not os.path.isdir(folder)])
"""
    kills = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
    sources = {"a": asks, "b": asks, "c": kills, "d": asks}
    paths = [write(tmp_path, name, [new_code_cell(source)]) for name, source in sources.items()]
    runs = run_notebooks(paths, tmp_path / "out", jobs=1, progress=False)
    assert [run.status for run in runs] == ["ran", "ran", "failed", "ran"]
    assert "BrokenProcessPool" in runs[2].error or "terminated abruptly" in runs[2].error
    first, second, other = (
        nbformat.read(tmp_path / f"out/{name}.ipynb", 4).cells[0].outputs[0].text.strip()
        for name in "abd"
    )
    assert first == second != other
    assert first.endswith(" []"), "the kernel is found in folders that are there"


def test_only_notebooks_that_measure_no_time_run_beside_others(tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "this_machine", lambda: {"cpu_usable": 2})
    meets = """
import os, time
from pathlib import Path
running = Path(FOLDER)
(running / NAME).touch()
(running / f"{NAME}.began").touch()
while not ((running / "b.began").exists() and (running / "c.began").exists()):
    time.sleep(0.01)  # the limit of the notebook ends this
(running / NAME).unlink()
"""
    alone = """
import time
from pathlib import Path
running = Path(FOLDER)
(running / NAME).touch()
time.sleep(1)  # in which another one would have begun
beside = sorted(path.name for path in running.iterdir() if not path.suffix)
assert beside == [NAME], beside
(running / NAME).unlink()
"""
    folder = tmp_path / "running"
    folder.mkdir()
    paths = []
    for name, source in {"a": alone, "b": meets, "c": meets, "d": alone}.items():
        known = f"FOLDER, NAME = {str(folder)!r}, {name!r}"
        cells = [new_code_cell(f"{known}\n{source}")]
        paths.append(write(tmp_path, name, cells, untimed=source is meets))
    runs = run_notebooks(paths, tmp_path / "out", timeout_s=120, progress=False)
    assert [run.error for run in runs] == [""] * 4
    assert [run.status for run in runs] == ["ran"] * 4


def test_output_that_a_busy_machine_holds_back_is_waited_for(tmp_path):
    """The kernel answers that a cell has ended, and its output comes 6 s later."""
    hold_back = """
import asyncio
kernel = get_ipython().kernel
session = kernel.session
send = session.send
def late(stream, msg_or_type, *args, **kwargs):
    kind = getattr(msg_or_type, 'get', lambda _: msg_or_type)('msg_type')
    if kind == 'status' and (args and args[0] or {}).get('execution_state') == 'idle':
        asyncio.get_event_loop().call_later(6, lambda: send(stream, msg_or_type, *args, **kwargs))
        return None
    return send(stream, msg_or_type, *args, **kwargs)
session.send = late
"""
    path = write(tmp_path, "a", [new_code_cell(hold_back), new_code_cell("print('ran')")])
    (run,) = run_notebooks([path], tmp_path / "out", progress=False, timeout_s=120)
    assert (run.status, run.error) == ("ran", "")


def test_a_hanging_notebook_is_stopped_and_what_it_did_before_is_kept(tmp_path):
    # Only these may have a short limit: on a busy machine an import takes longer.
    hangs = [new_code_cell("print('before'); import time; time.sleep(600)")]
    paths = [write(tmp_path, "hangs", hangs), write(tmp_path, "then", [new_code_cell("x = 1")])]
    runs = run_notebooks(paths, tmp_path / "out", jobs=1, timeout_s=6, progress=False)
    assert [run.status for run in runs] == ["failed", "ran"]
    line = runs[0].line()
    assert "timed out while it was being executed, after 6 seconds" in line
    assert line.endswith("(cell c0)") and "----" not in line
    (executed,) = (tmp_path / "out").rglob("hangs.ipynb")
    assert nbformat.read(executed, 4).cells[0].outputs[0].text.strip() == "before"


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
    assert [page.stem for page in pages] == [
        "a_good", "b_fails", "d_dies", "figures", "index", "ledger", "machine", "records"
    ]  # fmt: skip
    for page in pages:
        text = page.read_text()
        loads, allowed = Loads.of(text), policy(text)
        assert (
            loads.outside == loads.wordless == loads.blocked == [] and '<html lang="en">' in text
        ), page
        assert (
            allowed["default-src"] == "'none'"
            and allowed["img-src"] == "data:"
            and "unsafe" not in str(allowed)
        )
        for kind, inside in loads.inside.items():
            (only,) = inside
            assert (
                allowed[f"{kind}-src"]
                == f"'sha256-{base64.b64encode(hashlib.sha256(only.encode()).digest()).decode()}'"
            )
        assert loads.levels[0] == loads.levels.count(1) == 1, page
        assert all(
            after - before <= 1
            for before, after in zip(loads.levels, loads.levels[1:], strict=False)
        ), page
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
    assert "1 of 3 notebooks ran in" in text
    assert text.index('id="notebooks"') < text.index('id="failures"')
    machine = (out / "latest/machine.html").read_text()
    order = [
        machine.index(f'id="{name}"') for name in ("machine", "slowest", "notebooks", "command")
    ]
    assert order == sorted(order)
    manifest = json.loads((out / "latest/manifest.json").read_text())
    assert [run["status"] for run in manifest["runs"]] == ["ran", "failed", "failed"]
    assert result.facts()["ran"] == 1
    assert "b_fails: ValueError: on purpose <b> (cell c1)" in result.summary().splitlines()
    assert "b_fails: ValueError: on purpose &lt;b&gt; (cell c1)" in text


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """One small notebook reported twice into one folder, on the CPU only, with another parameter the second time."""
    folder = tmp_path_factory.mktemp("twice")
    cells = [
        new_markdown_cell("# Only?"),
        new_code_cell(
            "size: float = 1.0  # of what is measured", metadata={"tags": ["parameters"]}
        ),
        new_code_cell(
            "import os\nfrom asrkit.workbench import records\nprint(repr(os.environ.get('CUDA_VISIBLE_DEVICES')))"
        ),
    ]
    path = write(folder, "only", cells)
    return folder / "out", [
        report([path], folder / "out", parameters={"size": size}, device="cpu", progress=False)
        for size in (1.0, 2.0)
    ]


def test_latest_moves_to_the_newer_report_and_the_older_stays(twice):
    out, (first, second) = twice
    assert first.exit_code == second.exit_code == 0
    runs = sorted(entry for entry in out.iterdir() if entry.name != "latest")
    assert len(runs) == 2 and (out / "latest").resolve() == runs[1].resolve()


def test_with_device_cpu_no_gpu_is_visible_to_a_notebook(twice):
    assert (
        nbformat.read(twice[0] / "latest/runs/only.ipynb", 4).cells[3].outputs[0].text == "''\n"
    )  # after what papermill injects


def test_what_is_wrong_with_a_page_is_a_defect_and_costs_nothing_else(tmp_path):
    sound = records.Measurement("demo", "ratio", "1", 2.0).record()
    found = [
        new_output("display_data", data={records.MIME: record})
        for record in (sound | {"value": "9"}, sound)
    ]
    dot = new_output("display_data", data={"image/png": PNG})
    shown = new_output("display_data", data={"text/html": '<img src="data:image/png;base64,AAAA">'})
    cells = [
        new_markdown_cell(
            "# Torn?\n\nIt says $\\frac{1}{$ and $a < b$, 2 GB<!-- no-such-claim --> and 3<!-- code: fine -->."
        ),
        new_markdown_cell("![a lattice of arcs](../figures/lattice.png)"),
        new_code_cell("1", outputs=[dot, *found, shown]),
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
    assert (tmp_path / "wrong.html").read_text().count("<math") == 1
    assert (
        ReportResult(path=tmp_path, runs=[run], sentence="", seconds=1.0, defects=defects).exit_code
        == 1
    )


def test_bad_requests_are_refused_before_anything_runs(tmp_path):
    path = write(tmp_path, "x", GOOD[1:3])
    with pytest.raises(ValueError, match=r"parameters: expected one of \['size'\], got \['sise'\]"):
        run_notebooks([path], tmp_path / "out", parameters={"sise": 1}, progress=False)
    with pytest.raises(ValueError, match="notebooks: expected an .ipynb file"):
        run_notebooks([tmp_path / "none.ipynb"], tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match="notebooks: expected at least one"):
        run_notebooks([], tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def alive(process: int) -> bool:
    """Whether `process` still runs; one that has ended and waits for its parent does not."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_report_that_is_stopped_leaves_no_kernel_behind(tmp_path):
    cell = "import os, pathlib, time\npathlib.Path(f'pid-{out}').write_text(str(os.getpid()))\ntime.sleep(600)"
    write(
        tmp_path,
        "long",
        [new_code_cell("out: str = ''", metadata={"tags": ["parameters"]}), new_code_cell(cell)],
    )
    program = (
        "import signal, sys\nfrom pathlib import Path\nfrom asrkit.workbench.report import run_notebooks\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job would inherit that it is ignored
        "if __name__ == '__main__':\n"
        "    run_notebooks([Path('long.ipynb')], Path(sys.argv[1]), parameters={'out': sys.argv[1]}, progress=False)"
    )
    (tmp_path / "main.py").write_text(program)
    how = {"interrupted": signal.SIGINT, "killed": signal.SIGKILL}
    told = {name: tmp_path / f"pid-{name}" for name in how}
    begin = {
        "cwd": tmp_path,
        "env": os.environ | {"PYTHONPATH": str(files.HERE.parent)},
        "start_new_session": True,
    }
    mains = {
        name: subprocess.Popen(
            [sys.executable, "main.py", name], stderr=subprocess.DEVNULL, **begin
        )
        for name in how
    }
    try:
        wait_until(lambda: all(path.exists() and path.read_text() for path in told.values()))
        for name, main in mains.items():
            main.send_signal(how[name])
            main.wait(LONGEST_S)
        wait_until(lambda: not any(alive(int(path.read_text())) for path in told.values()))
    finally:
        for name, main in mains.items():
            main.kill()
            main.wait()
            if told[name].exists() and alive(int(told[name].read_text())):
                os.kill(int(told[name].read_text()), signal.SIGKILL)


def wait_until(holds, seconds=LONGEST_S):
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
