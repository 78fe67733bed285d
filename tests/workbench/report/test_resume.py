"""A run that is killed, and what is asked of the command line: names, sizes, devices."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nbformat import write
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from asrkit import files
from asrkit.cli import main
from asrkit.cli.report import find_notebooks, parse_value
from asrkit.files import content_hash
from asrkit.workbench.report.jobs import jobs_of
from asrkit.workbench.report.notebook_run import kept_run
from asrkit.workbench.report.plan import unfinished


def notebook(path: Path, *sources: str, **told) -> Path:
    """A notebook of code cells; the first has the tag `parameters` if it looks like one."""
    cells = [
        new_code_cell(source, id=f"c{number}") for number, source in enumerate(sources)
    ]
    cells[0].metadata["tags"] = ["parameters"] * (": int" in sources[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    write(
        new_notebook(
            cells=[new_markdown_cell(f"# {path.stem}?", id="title"), *cells],
            metadata={"asrkit": told},
        ),
        path,
    )
    return path


def wait_until(holds, seconds=600.0):
    """Return once `holds()`, fail after `seconds`."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    waits = (
        "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.1)"
    )
    fails = "import pathlib\nassert pathlib.Path('go').exists(), 'not yet'"
    notebook(
        tmp_path / "notebooks/01_done.ipynb", "size: int = 1  # of it", "print(size)"
    )
    notebook(tmp_path / "notebooks/02_fails.ipynb", fails)
    notebook(
        tmp_path / "notebooks/03_hangs.ipynb", waits, after=["01_done", "02_fails"]
    )
    asked = ["report", "--jobs", "2", "-p", "size", "5", "--out", "out"]
    environment = os.environ | {"PYTHONPATH": str(files.HERE.parent)}
    log = tmp_path / "said"
    with log.open("w") as said:
        command = [sys.executable, "-m", "asrkit", *asked]
        running = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=said, start_new_session=True
        )
        try:
            wait_until(lambda: [*tmp_path.glob("out/*/runs/.03_hangs*.part.ipynb")])
        finally:
            running.send_signal(signal.SIGKILL)
            running.wait()
    (folder,) = (tmp_path / "out").iterdir()  # no `latest`: the site is not whole
    assert (
        not (folder / "manifest.json").exists()
        and not (folder / "runs/03_hangs.json").exists()
    )
    (
        folder / "runs/.ipynb_checkpoints"
    ).mkdir()  # as Jupyter leaves it where a copy was opened
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
    assert not [*(folder / "runs").glob(".*.*")]
    told = json.loads(out)
    assert (told["notebooks"], told["ran"]) == (3, 3)
    assert (tmp_path / "out/latest").resolve() == folder
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["runs"][0]["parameters"] == {"size": 5}
    typed = (
        "asrkit report --jobs 2 -p size 5 --out out\nasrkit report --resume --out out"
    )
    assert (
        manifest["command"] == typed and typed in (folder / "machine.html").read_text()
    )


def test_only_a_result_that_is_whole_and_of_the_same_work_is_kept(tmp_path):
    path = notebook(tmp_path / "n/x.ipynb", "size: int = 1  # of it")
    executed, result = tmp_path / "x.ipynb", tmp_path / "x.json"
    executed.write_text("executed")
    (job,) = jobs_of([path], {"size": 2}).values()
    digest = content_hash(b"executed").removeprefix("sha256:")
    run = {"name": "x", "status": "ran", "seconds": 1.0, "parameters": {"size": 2}, "sha256": digest, "source": job.source}  # fmt: skip

    def is_kept(**change):
        result.write_text(json.dumps(run | change))
        return kept_run(tmp_path, "x", job) is not None

    assert is_kept()
    for change in ({"status": "failed"}, {"source": "another"}, {"parameters": {"size": 3}}, {"device": "cpu"}):  # fmt: skip
        assert not is_kept(**change)
    result.write_text(result.read_text()[:50])
    assert kept_run(tmp_path, "x", job) is None
    executed.write_text("execu")
    assert not is_kept()


def test_the_newest_run_is_taken_up_only_where_something_is_left_to_do(tmp_path):
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").touch()
    assert unfinished(tmp_path).name == "2"
    (tmp_path / "latest").symlink_to("2")
    manifest = tmp_path / "2/manifest.json"
    manifest.write_text(json.dumps({"runs": [{"name": "x", "status": "failed"}]}))
    assert unfinished(tmp_path).name == "2"
    manifest.write_text(json.dumps({"runs": [{"name": "x", "status": "ran"}]}))
    with pytest.raises(
        ValueError, match="a run that was cut short or had failures, got 2, which"
    ):
        unfinished(tmp_path)
    (
        tmp_path / "latest"
    ).unlink()  # killed when all was written and `latest` had not moved yet
    assert unfinished(tmp_path).name == "2"


@pytest.mark.parametrize(
    "plan",
    ["null", "{}", '{"notebooks": [5]}', '{"notebooks": ["x.ipynb"'],
)
def test_a_plan_that_is_torn_or_anothers_is_refused_by_name(plan, tmp_path, capsys):
    (tmp_path / "out/1").mkdir(parents=True)
    (tmp_path / "out/1/plan.json").write_text(plan)
    assert main(["report", "--resume", "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err.strip()
    assert (
        "--resume: expected a plan of asrkit report in" in err
        and "1/plan.json" in err
        and "\n" not in err
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("false", False),
        ("1e-3", 1e-3),
        ("2026-11-01", "2026-11-01"),
        ("[1, x]", [1, "x"]),
        ("7", 7),
        ("", None),
    ],
)
def test_a_parameter_is_what_yaml_says_but_days_stay_text(text, value):
    assert parse_value("x", text) == value and type(parse_value("x", text)) is type(
        value
    )


def test_two_runs_do_not_share_a_folder(tmp_path, monkeypatch, capsys):
    fcntl = pytest.importorskip("fcntl")
    folder = tmp_path / "out/1"
    folder.mkdir(parents=True)
    notebook(tmp_path / "x.ipynb", "1")
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
    ("6 00", "06_loop 00_a"), ("02", "02_joint 02_joint_more"), ("02_joint", "02_joint"), ("02_joint.ipynb", "02_joint"),
    ("02_joint_", "02_joint_more"), ("elsewhere/mine.ipynb 06_l 6", "mine 06_loop"),
])  # fmt: skip
def test_notebooks_are_chosen_by_number_name_and_beginning(
    tmp_path, monkeypatch, named, stems
):
    monkeypatch.chdir(tmp_path)
    for name in ("00_a", "02_joint", "02_joint_more", "06_loop", "../elsewhere/mine"):
        notebook(tmp_path / f"notebooks/{name}.ipynb", "1")
    assert [path.stem for path in find_notebooks(named.split())] == stems.split()
    assert find_notebooks([]) is None


@pytest.mark.parametrize(("asked", "said"), [
    (["--notebooks", "01,nix"], "notebooks: expected one of 01_one, got 'nix'"), (["--jobs", "0"], "--jobs: expected at least 1, got 0"),
    (["-p", "sise", "1"], "expected one of ['size'], got ['sise']"), (["-p", "size", "[1"], "parameter size: expected a value in YAML, got '[1'"),
    (["--resume"], "--resume: expected a run in"), (["--timeout", "nan"], "--timeout: expected a number of seconds above 0, got nan"),
    (["--device", "cuda"], "--device: expected cpu or auto where torch finds no GPU, got cuda."),
    (["torn.ipynb"], "notebook torn.ipynb: expected a notebook of nbformat 4"), (["five.ipynb"], "notebook five.ipynb: expected a notebook of nbformat 4"),
    (["one.ipynb", "two.ipynb"], "notebooks: expected an order in which each can run, got a circle among ['one', 'two']"),
])  # fmt: skip
def test_what_cannot_run_is_refused_in_one_line_before_a_folder_is_made(
    asked, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    notebook(tmp_path / "notebooks/01_one.ipynb", "size: int = 1  # of it")
    (tmp_path / "torn.ipynb").write_text('{"cells": [')
    write(new_notebook(metadata={"asrkit": 5}), tmp_path / "five.ipynb")
    for name, other in (("one", "two"), ("two", "one")):
        notebook(tmp_path / f"{name}.ipynb", "1", after=[other])
    monkeypatch.chdir(tmp_path)
    assert main(["report", *asked]) == 2
    err = capsys.readouterr().err.strip()
    assert said in err and "\n" not in err
    assert not (tmp_path / "reports").exists()


def test_full_size_takes_the_parameters_that_the_notebook_names_and_what_is_typed_wins(
    tmp_path,
):
    one = notebook(
        tmp_path / "one.ipynb",
        "size: int = 1\nwidth: int = 2",
        full={"size": 100, "width": 200},
    )
    two = notebook(tmp_path / "two.ipynb", "size: int = 1")

    def given(which, **typed):
        return [job.parameters for job in jobs_of([one, two], typed, which).values()]

    assert given("quick") == [{}, {}]
    assert given("full") == [{"size": 100, "width": 200}, {}]
    assert given("full", size=7) == [{"size": 7, "width": 200}, {"size": 7}]
    wrong = notebook(tmp_path / "wrong.ipynb", "size: int = 1", full={"sise": 2})
    with pytest.raises(
        ValueError,
        match=r"wrong, metadata asrkit.full: expected names among \['size'\], got \['sise'\]",
    ):
        jobs_of([wrong], {}, "full")
