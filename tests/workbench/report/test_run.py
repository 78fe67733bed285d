"""The run of a report: small real notebooks by the real papermill, some of which fail, hang or die; a run that is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from asrkit import files
from asrkit.cli import main
from asrkit.cli.report import find_notebooks, parse_value
from asrkit.workbench import records
from asrkit.workbench.report import execute, jobs_of, report, run_notebooks

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
LONGEST_S = 600.0  # that a test waits for a process, on however busy a machine
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


def write(folder, name, *cells, **settings):
    """A notebook of cells, or of sources of code cells; a source with ": int" declares parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for cell in cells:
        made.append(new_code_cell(cell) if isinstance(cell, str) else cell.copy())
        made[-1]["id"] = f"c{len(made) - 1}"
        if ": int" in made[-1].source:
            made[-1].metadata["tags"] = ["parameters"]
    path = folder / f"{name}.ipynb"
    nbformat.write(new_notebook(cells=made, metadata={"asrkit": settings}), path)
    return path


def wait_until(holds):
    """Return once `holds()`."""
    end = time.monotonic() + LONGEST_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory):
    """Folder of a notebook that is good, one that fails and one that dies."""
    folder = tmp_path_factory.mktemp("notebooks")
    write(folder, "a_good", *GOOD)
    write(folder, "b_fails", "x = 1", "raise ValueError('on purpose <b>')", "x")
    write(folder, "d_dies", "import os; os._exit(9)")
    return folder


@pytest.fixture(scope="module")
def built(notebooks, tmp_path_factory):
    """Folder of the reports on the notebooks, where there was an older one, and the result.

    Temporary files go to a folder whose name is too long for a socket, and the user's own profile
    and startup file change what prints.
    """
    out = tmp_path_factory.mktemp("reports")
    (out / "2000").mkdir()
    (out / "latest").symlink_to("2000")
    long = tmp_path_factory.mktemp("x" * 113)
    startup = tmp_path_factory.mktemp("user") / "profile_default/startup/prints.py"
    startup.parent.mkdir(parents=True)
    startup.write_text(
        "import builtins\nplain = print\n"
        "builtins.print = lambda *words: plain('the user was here', *words)"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(startup.parents[2]))
        patch.setenv("PYTHONSTARTUP", str(startup))
        patch.setenv("TMPDIR", str(long))
        patch.setattr("tempfile.tempdir", None)
        asked = {"parameters": {"size": 3}, "device": "cpu", "jobs": 2}
        result = report(sorted(notebooks.iterdir()), out, **asked, progress=False)
    return out, result


def test_one_failing_or_dying_notebook_does_not_stop_the_rest(built):
    latest, result = built[0] / "latest", built[1]
    statuses = ["ran", "failed", "failed"]
    assert [run.status for run in result.runs] == statuses
    assert (result.exit_code, result.facts()["ran"], result.defects) == (1, 1, [])
    line = "b_fails: ValueError: on purpose <b> (cell c1)"
    assert line in result.summary().splitlines()
    index = BeautifulSoup((latest / "index.html").read_text(), "html.parser").get_text()
    assert line in index and "1 of 3 notebooks ran in" in index
    manifest = json.loads((latest / "manifest.json").read_text())
    assert [run["status"] for run in manifest["runs"]] == statuses


def test_latest_moves_to_the_newer_report_and_the_older_stays(built):
    older, newer, latest = sorted(built[0].iterdir())
    assert older.name == "2000" and latest.resolve() == newer


def test_a_copy_with_the_same_fingerprint_is_kept(built, notebooks, capsys):
    jobs = jobs_of([notebooks / "a_good.ipynb"], {"size": 3}, device="cpu")
    (run,) = run_notebooks(jobs, built[0] / "latest/runs", resume=True)
    assert run.status == "ran" and "; kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change", [{"source": "x = 2"}, {"size": 3}, {"device": "cpu"}]
)
def test_another_source_parameter_or_device_changes_the_fingerprint(tmp_path, change):
    def work(source="x = 1", size=2, device="auto"):
        path = write(tmp_path, "x", "size: int = 1", source)
        (job,) = jobs_of([path], {"size": size}, device=device)
        return job.fingerprint()

    assert work() == work() != work(**change)


KILLS = """
import os, time
from pathlib import Path
while not Path("runs").exists():
    time.sleep(0.01)
Path("part").write_text(str(os.getppid()))
os.rename("part", "worker")
os.kill(os.getppid(), 9)
"""
RUNS = """
import os, time
from pathlib import Path
Path("runs").touch(exist_ok=False)  # it runs once
while not Path("worker").exists():
    time.sleep(0.01)
try:
    while True:  # until the report has seen that the other worker died
        os.kill(int(Path("worker").read_text()), 0)
        time.sleep(0.01)
except ProcessLookupError:
    print("the other worker is gone")
"""


@pytest.mark.live
@pytest.mark.parametrize("names", [("kills", "runs"), ("runs", "kills")])
def test_a_worker_that_dies_is_noticed_at_once_and_ends_no_other_notebook(
    tmp_path, names
):
    sources = {"kills": KILLS, "runs": RUNS}
    jobs = jobs_of([write(tmp_path, name, sources[name]) for name in names], {})
    out = tmp_path / "out"
    runs = run_notebooks(jobs, out, at_once=2, timeout_s=LONGEST_S, progress=False)
    by_name = {run.name: run for run in runs}
    assert (by_name["kills"].status, by_name["runs"].status) == ("failed", "ran")
    assert by_name["kills"].error.startswith("BrokenProcessPool")
    assert "is gone" in (out / "runs.ipynb").read_text()


def test_the_good_notebook_got_its_parameters_and_gave_its_records_and_page(built):
    latest, result = built[0] / "latest", built[1]
    text = (latest / "runs/a_good.ipynb").read_text()
    assert f"size 3 int {sys.executable} True" in text  # no GPU is visible
    run = result.runs[0]
    assert run.parameters == {"size": 3}
    assert [(one["what"], one["value"]) for one in run.records] == [("demo", 2.0)]
    assert records.read(latest / "records/a_good.jsonl") == run.records
    page = (latest / "a_good.html").read_text()
    assert page.count("<math") == 2 and "<code>$x$</code>" in page
    assert 'alt="A single black dot, nothing more"' in page and "data:audio/wav" in page
    assert "<b>live only" not in page and "widget-view" not in page


def test_a_page_owes_nothing_to_the_profile_and_startup_file_of_the_user(built):
    for path in (built[0] / "latest").rglob("*"):
        assert not path.is_file() or b"the user was here" not in path.read_bytes()


def test_pages_load_nothing_and_have_one_title(built):
    pages = {path.stem: path for path in (built[0] / "latest").glob("*.html")}
    site = {*execute.SITE_PAGES} - {"glossary"}  # no file of terms is there
    assert {*pages} == {"a_good", "b_fails", "d_dies", *site}
    for path in pages.values():
        page = BeautifulSoup(path.read_text(), "html.parser")
        assert page.select("[src]:not([src^='data:']), link:not([href^='data:'])") == []
        assert page.base is None
        (policy,) = page.select("meta[http-equiv=Content-Security-Policy]")
        assert policy["content"].startswith("default-src 'none'; img-src data:;")
        assert len(page.find_all("h1")) == 1


def test_neither_the_command_nor_its_workers_load_torch():
    code = "import asrkit.cli, asrkit.workbench.report, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


MEETS = """
import time
from pathlib import Path
Path(f"{NAME}.runs").touch()
while not (Path("b.runs").exists() and Path("c.runs").exists()):
    time.sleep(0.01)  # the limit of the cell ends this
"""
ALONE = """
import time
from pathlib import Path
time.sleep(1)  # in which another one would have begun
assert not [*Path().glob("*.runs")]
"""


def test_only_untimed_notebooks_run_together(tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "this_machine", lambda: {"cpu_usable": 2})
    paths = []
    for name, source in {"a": ALONE, "b": MEETS, "c": MEETS}.items():
        cell = f"NAME = {name!r}\n{source}"
        paths.append(write(tmp_path, name, cell, untimed=source is MEETS))
    runs = run_notebooks(jobs_of(paths, {}), tmp_path / "out", progress=False)
    assert [(run.status, run.error) for run in runs] == [("ran", "")] * 3


TORN = """
import os
from pathlib import Path
copy = Path("out/torn.ipynb")
copy.write_text(copy.read_text()[:100])  # as after a full disk or a kill
os.kill(os.getppid(), 9)
"""


@pytest.mark.live
def test_an_incomplete_copy_only_loses_its_own_page(tmp_path):
    paths = [write(tmp_path, "torn", TORN), write(tmp_path, "runs", "1")]
    torn, runs = run_notebooks(jobs_of(paths, {}), tmp_path / "out", progress=False)
    assert (torn.status, runs.status) == ("failed", "ran")
    assert not (tmp_path / "out/torn.ipynb").exists()  # so it has no page


@pytest.mark.live
def test_a_hanging_notebook_is_stopped(tmp_path):
    hangs = write(tmp_path, "hangs", "print('before'); import time; time.sleep(600)")
    jobs = jobs_of([hangs], {})
    (run,) = run_notebooks(jobs, tmp_path / "out", timeout_s=6, progress=False)
    line = run.line()
    assert "timed out while it was being executed, after 6 seconds" in line
    assert line.endswith("(cell c0)") and "----" not in line
    assert "before" in (tmp_path / "out/hangs.ipynb").read_text()


def alive(process):
    """Whether `process` still runs; one that has ended and waits for its parent does not."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


MAIN = """
import signal
from pathlib import Path
from asrkit.workbench.report import jobs_of, run_notebooks
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would inherit that it is ignored
if __name__ == '__main__':
    run_notebooks(jobs_of([Path('long.ipynb')], {}), Path('out'), progress=False)
"""


@contextmanager
def running(folder, *arguments):
    """A process of this Python in `folder`, which has ended afterwards."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(files.HERE.parent)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.live
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_report_that_is_stopped_leaves_no_kernel_behind(tmp_path, how):
    tells = "import os, pathlib; pathlib.Path('part').write_text(str(os.getpid()))"
    waits = "import time; os.rename('part', 'pid'); time.sleep(600)"
    write(tmp_path, "long", tells, waits)
    (tmp_path / "main.py").write_text(MAIN)
    with running(tmp_path, "main.py") as main:
        wait_until((tmp_path / "pid").exists)
        main.send_signal(how)
        main.wait(LONGEST_S)
        kernel = int((tmp_path / "pid").read_text())
        wait_until(lambda: not alive(kernel))


@pytest.mark.live
def test_a_killed_run_can_be_resumed(tmp_path, monkeypatch, capsys):
    notebooks = tmp_path / "notebooks"
    is_there = "import os, time\ngoes_on = lambda: os.path.exists('go')"
    hangs = "while not goes_on(): time.sleep(0.1)"
    write(notebooks, "01_done", "size: int = 1  # of it", "print(size)")
    write(notebooks, "02_fails", is_there, "assert goes_on()")
    write(notebooks, "03_hangs", is_there, hangs, after=["01_done", "02_fails"])
    typed = "report --jobs 2 -p size 5 --out out"
    with running(tmp_path, "-m", "asrkit", *typed.split()):
        wait_until(lambda: [*tmp_path.glob("out/*/runs/03_hangs.ipynb")])
    (folder,) = (tmp_path / "out").iterdir()  # no `latest`: the site is not complete
    assert not (folder / "manifest.json").exists()
    assert [path.stem for path in folder.glob("runs/*.done")] == ["01_done"]

    (notebooks / "go").touch()
    resumed = "report --resume --out out"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["asrkit", *resumed.split()])
    assert main(sys.argv[1:]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"(\w+): (?:ran.*; (kept)|(started))", printed) == [
        ("01_done", "kept", ""),
        ("02_fails", "", "started"),
        ("03_hangs", "", "started"),
    ]
    assert (tmp_path / "out/latest").resolve() == folder
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [run["status"] for run in manifest["runs"]] == ["ran"] * 3
    assert manifest["runs"][0]["parameters"] == {"size": 5}
    assert manifest["plan"]["commands"] == [f"asrkit {typed}", f"asrkit {resumed}"]


@pytest.mark.parametrize(("text", "value"), [
    ("false", False),
    ("1e-3", 1e-3),
    ('[1, "x"]', [1, "x"]),
    ("7", 7),
    ("False", False),
    ("None", None),
    (".5", 0.5),
    ("inf", float("inf")),
    ("2026-11-01", "2026-11-01"),
    ("", ""),
])  # fmt: skip
def test_a_parameter_is_what_json_or_papermill_says_or_a_text(text, value):
    assert parse_value(text) == value


def test_two_runs_do_not_share_a_folder(tmp_path, capsys):
    folder = tmp_path / "out/1"
    write(tmp_path, "x", "1")
    with files.lock(folder):
        (folder / "plan.json").write_text('{"notebooks": ["../../x.ipynb"]}')
        assert main(["report", "--resume", "--out", str(folder.parent)]) == 2
    wanted = "resume: expected a run that has ended, got one that is running now, 1"
    assert wanted in capsys.readouterr().err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(("named", "stems"), [
    ("6 00", "06_loop 00_a"),
    ("02", "02_joint 02_joint_more"),
    ("02_joint.ipynb", "02_joint"),
    ("elsewhere/mine.ipynb 06_l 6", "mine 06_loop"),
])  # fmt: skip
def test_notebooks_are_chosen_by_number_name_and_beginning(
    tmp_path, monkeypatch, named, stems
):
    monkeypatch.chdir(tmp_path)
    for name in ("00_a", "02_joint", "02_joint_more", "06_loop"):
        write(tmp_path / "notebooks", name, "1")
    write(tmp_path / "elsewhere", "mine", "1")
    assert [path.stem for path in find_notebooks(named.split())] == stems.split()


@pytest.mark.parametrize(("arguments", "message"), [
    (["01", "nix"], "notebooks: expected one of 01_one, got 'nix'"),
    (["--jobs", "0"], "--jobs: expected at least 1, got 0"),
    (["-p", "sise", "1"], "expected one of ['size'], got ['sise']"),
    (["--resume"], "--resume: expected a run in"),
    (["--timeout", "nan"], "--timeout: expected a number of seconds above 0, got nan"),
    (["--device", "cuda"], "--device: expected cpu or auto where torch finds no GPU, got cuda."),
    (["bad_\udcc3.ipynb"], "and without undecodable bytes, got ['bad_\\udcc3']. For such bytes, set LC_ALL=C.UTF-8."),
    (["torn.ipynb"], "notebook torn.ipynb: expected a notebook of nbformat 4"),
    (["twice/01_one.ipynb", "01"], "notebooks: expected different names, none of them index, claims, figures, glossary, machine, got ['01_one', '01_one']"),
])  # fmt: skip
def test_what_cannot_run_is_refused_in_one_line_before_a_folder_is_made(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    write(tmp_path / "notebooks", "01_one", "size: int = 1  # of it")
    write(tmp_path / "twice", "01_one", "1")
    (tmp_path / "torn.ipynb").write_text('{"cells": [')
    (tmp_path / "bad_\udcc3.ipynb").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["report", *arguments]) == 2
    err = capsys.readouterr().err.strip()
    assert message in err and "\n" not in err
    assert not (tmp_path / "reports").exists()


@pytest.mark.parametrize(("size", "typed", "given"), [
    ("quick", {}, [{}, {}]),
    ("full", {}, [{"size": 100, "width": 200}, {}]),
    ("full", {"size": 7}, [{"size": 7, "width": 200}, {"size": 7}]),
])  # fmt: skip
def test_full_size_takes_what_the_notebook_names_and_what_is_typed_wins(
    tmp_path, size, typed, given
):
    full = {"size": 100, "width": 200}
    one = write(tmp_path, "one", "size: int = 1\nwidth: int = 2", full=full)
    two = write(tmp_path, "two", "size: int = 1")
    assert [job.parameters for job in jobs_of([one, two], typed, size)] == given
