"""The run of a report: small real notebooks by the real papermill, some of which fail, hang or die; a run that is killed."""

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


def write(folder: Path, name: str, *cells, **settings) -> Path:
    """A notebook of cells, or of the sources of code cells; a first one with ": int" has the tag `parameters`."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [
        new_code_cell(cell) if isinstance(cell, str) else cell.copy() for cell in cells
    ]
    if ": int" in made[0].source:
        made[0].metadata["tags"] = ["parameters"]
    for number, cell in enumerate(made):
        cell["id"] = f"c{number}"
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
def built(tmp_path_factory):
    """Folder of the reports on a notebook that is good, one that fails and one that dies."""
    folder = tmp_path_factory.mktemp("notebooks")
    paths = [
        write(folder, "a_good", *GOOD),
        write(folder, "b_fails", "x = 1", "raise ValueError('on purpose <b>')", "x"),
        write(folder, "d_dies", "import os; os._exit(9)"),
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


def test_what_ran_beside_a_worker_that_died_runs_once_more(tmp_path):
    paths = [
        write(tmp_path, "kills", "import os; os.kill(os.getppid(), 9)"),
        write(tmp_path, "beside", "import time; time.sleep(4)"),
    ]
    kills, beside = run_notebooks(
        jobs_of(paths, {}), tmp_path / "out", at_once=2, progress=False
    )
    assert (kills.status, beside.status) == ("failed", "ran")
    assert kills.error.startswith("BrokenProcessPool")


def test_the_good_notebook_got_its_parameters_and_gave_its_records_and_page(built):
    out, result = built
    assert dict(result.runs[0].parameters) == {"size": 3}
    text = (out / "latest/runs/a_good.ipynb").read_text()
    assert f"size 3 int {sys.executable} True" in text  # no GPU is visible
    (record,) = result.runs[0].records
    assert (record["what"], record["value"]) == ("demo", 2.0)
    assert records.read(out / "latest/records/a_good.jsonl") == [record]
    page = (out / "latest/a_good.html").read_text()
    assert page.count("<math") == 2 and "<code>$x$</code>" in page
    assert 'alt="A single black dot, nothing more"' in page and "data:audio/wav" in page
    assert "<b>live only" not in page and "widget-view" not in page


def test_pages_load_nothing_and_have_one_title_and_words_for_every_picture(built):
    pages = sorted((built[0] / "latest").glob("*.html"))
    assert [page.stem for page in pages] == [
        "a_good", "b_fails", "claims", "d_dies", "figures", "index", "machine"
    ]  # fmt: skip
    for path in pages:
        page = BeautifulSoup(path.read_text(), "html.parser")
        loaded = [tag["src"] for tag in page.find_all(src=True)]
        loaded += [tag["href"] for tag in page.find_all(["link", "base"])]
        assert all(source.startswith("data:") for source in loaded)
        policy = page.find("meta", attrs={"http-equiv": "Content-Security-Policy"})
        assert policy["content"].startswith("default-src 'none'; img-src data:;")
        assert all(image["alt"].strip() for image in page.find_all("img"))
        headings = [heading.name for heading in page.find_all(re.compile("^h[1-6]$"))]
        assert headings[0] == "h1" and headings.count("h1") == 1


def test_latest_moves_to_the_newer_report_and_the_older_stays(tmp_path):
    path = write(tmp_path, "only", new_markdown_cell("# Only?"))
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
    path = write(tmp_path / "notebooks", "a", "print('ran')")
    (run,) = run_notebooks(jobs_of([path], {}), tmp_path / "out", progress=False)
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
        cell = f"FOLDER, NAME = {str(folder)!r}, {name!r}\n{source}"
        paths.append(write(tmp_path, name, cell, untimed=source is MEETS))
    runs = run_notebooks(
        jobs_of(paths, {}), tmp_path / "out", timeout_s=120, progress=False
    )
    assert [(run.status, run.error) for run in runs] == [("ran", "")] * 4


def test_a_hanging_notebook_and_one_that_kills_its_worker_are_stopped_alone(tmp_path):
    # Only these may have a short limit: on a busy machine an import takes longer.
    sources = {
        "hangs": "print('before'); import time; time.sleep(600)",
        "kills": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
        "then": "x = 1",
    }
    jobs = jobs_of([write(tmp_path, *both) for both in sources.items()], {})
    runs = run_notebooks(jobs, tmp_path / "out", at_once=1, timeout_s=6, progress=False)
    assert [run.status for run in runs] == ["failed", "failed", "ran"]
    line = runs[0].line()
    assert "timed out while it was being executed, after 6 seconds" in line
    assert line.endswith("(cell c0)") and "----" not in line
    executed = nbformat.read(tmp_path / "out/hangs.ipynb", 4)
    assert executed.cells[0].outputs[0].text.strip() == "before"


def alive(process: int) -> bool:
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


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="looks for processes in /proc"
)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_report_that_is_stopped_leaves_no_kernel_behind(tmp_path, how):
    cell = "import os, pathlib, time\npathlib.Path('pid').write_text(f'{os.getpid()} ')\ntime.sleep(600)"
    write(tmp_path, "long", cell)
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


def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    waits = (
        "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.1)"
    )
    fails = "import pathlib\nassert pathlib.Path('go').exists(), 'not yet'"
    folder = tmp_path / "notebooks"
    write(folder, "01_done", "size: int = 1  # of it", "print(size)")
    write(folder, "02_fails", fails)
    write(folder, "03_hangs", waits, after=["01_done", "02_fails"])
    asked = ["report", "--jobs", "2", "-p", "size", "5", "--out", "out"]
    environment = os.environ | {"PYTHONPATH": str(files.HERE.parent)}
    log = tmp_path / "said"
    with log.open("w") as said:
        command = [sys.executable, "-m", "asrkit", *asked]
        running = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=said, start_new_session=True
        )
        try:
            wait_until(lambda: [*tmp_path.glob("out/*/runs/03_hangs.ipynb")])
        finally:
            running.send_signal(signal.SIGKILL)
            running.wait()
    (folder,) = (tmp_path / "out").iterdir()  # no `latest`: the site is not whole
    assert not (folder / "manifest.json").exists()
    assert [path.stem for path in folder.glob("runs/*.done")] == ["01_done"]
    lines = {
        "01_done: started",
        "02_fails: AssertionError: not yet (cell c0)",
        "03_hangs: started",
    }
    assert lines <= {*log.read_text().splitlines()}
    before = (folder / "runs/01_done.ipynb").read_bytes()
    (tmp_path / "notebooks/go").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["asrkit", "report", "--resume", "--out", "out"])
    assert main([*sys.argv[1:], "--json"]) == 0
    out, said = capsys.readouterr()
    assert re.findall(r"(\w+): (?:ran.*; (kept)|(started))", said) == [
        ("01_done", "kept", ""), ("02_fails", "", "started"), ("03_hangs", "", "started"),
    ]  # fmt: skip
    assert (folder / "runs/01_done.ipynb").read_bytes() == before
    told = json.loads(out)
    assert (told["notebooks"], told["ran"]) == (3, 3)
    assert (tmp_path / "out/latest").resolve() == folder
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["runs"][0]["parameters"] == {"size": 5}
    typed = (
        "asrkit report --jobs 2 -p size 5 --out out\nasrkit report --resume --out out"
    )
    assert (
        manifest["plan"]["commands"] == typed.splitlines()
        and typed in (folder / "machine.html").read_text()
    )


@pytest.mark.parametrize(
    "change", [{}, {"source": "x = 2"}, {"size": 3}, {"device": "cpu"}]
)
def test_only_a_copy_of_the_same_work_is_kept(tmp_path, change, capsys):
    path = write(tmp_path, "x", "size: int = 1", "x = 1")
    run_notebooks(jobs_of([path], {"size": 2}), tmp_path / "out", progress=False)
    write(tmp_path, "x", "size: int = 1", change.get("source", "x = 1"))
    device = change.get("device", "auto")
    jobs = jobs_of([path], {"size": change.get("size", 2)}, device=device)
    run_notebooks(jobs, tmp_path / "out", resume=True)
    assert ("; kept" in capsys.readouterr().out) == (not change)


@pytest.mark.parametrize(("text", "value"), [
    ("false", False), ("1e-3", 1e-3), ("2026-11-01", "2026-11-01"), ('[1, "x"]', [1, "x"]), ("7", 7), ("digits", "digits"), ("", ""),
])  # fmt: skip
def test_a_parameter_is_what_json_says_or_a_text(text, value):
    assert parse_value(text) == value and type(parse_value(text)) is type(value)


def test_two_runs_do_not_share_a_folder(tmp_path, monkeypatch, capsys):
    fcntl = pytest.importorskip("fcntl")
    folder = tmp_path / "out/1"
    folder.mkdir(parents=True)
    write(tmp_path, "x", "1")
    (folder / "plan.json").write_text(json.dumps({"notebooks": ["../../x.ipynb"]}))
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["report", "--resume", "--out", str(tmp_path / "out")]) == 2
    assert (
        "resume: expected a run that has ended, got one that is running now, 1"
        in capsys.readouterr().err
    )
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(("named", "stems"), [
    ("6 00", "06_loop 00_a"), ("02", "02_joint 02_joint_more"), ("02_joint", "02_joint 02_joint_more"), ("02_joint.ipynb", "02_joint"),
    ("02_joint_", "02_joint_more"), ("elsewhere/mine.ipynb 06_l 6", "mine 06_loop"),
])  # fmt: skip
def test_notebooks_are_chosen_by_number_name_and_beginning(
    tmp_path, monkeypatch, named, stems
):
    monkeypatch.chdir(tmp_path)
    for name in ("00_a", "02_joint", "02_joint_more", "06_loop"):
        write(tmp_path / "notebooks", name, "1")
    write(tmp_path / "elsewhere", "mine", "1")
    assert [path.stem for path in find_notebooks(named.split())] == stems.split()
    assert find_notebooks([]) is None


@pytest.mark.parametrize(("asked", "said"), [
    (["01", "nix"], "notebooks: expected one of 01_one, got 'nix'"), (["--jobs", "0"], "--jobs: expected at least 1, got 0"),
    (["-p", "sise", "1"], "expected one of ['size'], got ['sise']"),
    (["--resume"], "--resume: expected a run in"), (["--timeout", "nan"], "--timeout: expected a number of seconds above 0, got nan"),
    (["--device", "cuda"], "--device: expected cpu or auto where torch finds no GPU, got cuda."),
    (["torn.ipynb"], "notebook torn.ipynb: expected a notebook of nbformat 4"),
    (["twice/01_one.ipynb", "01"], "notebooks: expected different names, none of them index, claims, figures, machine, got ['01_one', '01_one']"),
])  # fmt: skip
def test_what_cannot_run_is_refused_in_one_line_before_a_folder_is_made(
    asked, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    write(tmp_path / "notebooks", "01_one", "size: int = 1  # of it")
    write(tmp_path / "twice", "01_one", "1")
    (tmp_path / "torn.ipynb").write_text('{"cells": [')
    monkeypatch.chdir(tmp_path)
    assert main(["report", *asked]) == 2
    err = capsys.readouterr().err.strip()
    assert said in err and "\n" not in err
    assert not (tmp_path / "reports").exists()


def test_full_size_takes_the_parameters_that_the_notebook_names_and_what_is_typed_wins(
    tmp_path,
):
    full = {"size": 100, "width": 200}
    one = write(tmp_path, "one", "size: int = 1\nwidth: int = 2", full=full)
    two = write(tmp_path, "two", "size: int = 1")

    def given(which, **typed):
        return [job.parameters for job in jobs_of([one, two], typed, which)]

    assert given("quick") == [{}, {}]
    assert given("full") == [full, {}]
    assert given("full", size=7) == [{"size": 7, "width": 200}, {"size": 7}]
