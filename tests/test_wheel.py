"""An installed wheel, outside of any checkout: every command works, or names what is missing."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.live

WORK = {  # command: what it prints
    "cost": "p4de.24xlarge",
    "ledger --document 004": " more in the appendix.",
    "doctor": "make peers, in a checkout",
    "data lengths librispeech_eval --out table.csv": "11,126 utterances, 21.25 hours: table.csv",
    "data lengths ami_segments --out ami.csv": "ami.csv", "data stats ami_segments": "82,973 utterances",
}  # fmt: skip
JSON = ["cost --json", "doctor --json", "ledger --json", "data stats ami_segments --json",
        "data lengths ami_segments --out ami.csv --json"]  # fmt: skip
REFUSED = {
    "bench losses": "asrkit bench is now `python -m benchmarks`, in a checkout",
    "report": "notebooks: expected at least one, got none. Name some, or run in a folder that holds notebooks/",
    "report 02": "notebooks: expected a file, as there is no folder notebooks/ here, got '02'",
    "transcribe x.wav": "--model: expected the demo of notebook 00",
}  # fmt: skip
RUN_ALL = """
import contextlib, io, json, sys
from asrkit.cli import main
if __name__ == "__main__":
    done = {}
    for command in json.loads(sys.argv[1]):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(command.split())
        done[command] = (code, out.getvalue(), err.getvalue())
    print(json.dumps(done))
"""


def pip(*arguments):
    command = [
        sys.executable,
        "-m",
        "pip",
        "-q",
        "--disable-pip-version-check",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A function that runs Python with asrkit from a wheel, in an empty folder."""
    folder = tmp_path_factory.mktemp("wheel")
    pip(
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        str(ROOT),
        "-w",
        str(folder / "built"),
    )
    (wheel,) = (folder / "built").glob("*.whl")
    pip("install", "--no-deps", "--target", str(folder / "site"), str(wheel))
    (folder / "here").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1",
                   "ASRKIT_HOME": str(folder / "home"), "ASRKIT_WEIGHTS": "none"}  # fmt: skip

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder / "here",
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", "import asrkit; print(asrkit.__file__)").startswith(
        str(folder / "site")
    )
    return run


@pytest.fixture(scope="module")
def done(python):
    """Exit code, stdout and stderr by command, all run in one process, for torch loads slowly."""
    return json.loads(python("-c", RUN_ALL, json.dumps([*WORK, *JSON, *REFUSED])))


def test_the_module_runs_as_a_program(python):
    assert "recognise speech:" in python("-m", "asrkit", "--help")


@pytest.mark.parametrize("command", WORK)
def test_a_command_works_without_a_checkout(done, command):
    code, out, err = done[command]
    assert (code, WORK[command] in out) == (0, True), err


@pytest.mark.parametrize("command", JSON)
def test_with_json_stdout_is_one_document(done, command):
    code, out, err = done[command]
    assert code == 0 and isinstance(json.loads(out), dict), err


@pytest.mark.parametrize("command", REFUSED)
def test_what_needs_a_checkout_or_a_model_says_so_in_one_line(done, command):
    code, out, err = done[command]
    assert (code, out, err.count("\n")) == (2, "", 1) and REFUSED[command] in err


def test_the_installed_package_is_marked_as_typed(python):
    code = "import importlib.resources as r; print(r.files('asrkit').joinpath('py.typed').is_file())"
    assert python("-c", code) == "True\n"


def test_the_recorded_speech_is_installed(python):
    code = "from asrkit.data import recorded_speech as r; print(sum(one.path.is_file() for one in r()))"
    assert python("-c", code) == "17\n"


def test_a_source_archive_holds_what_a_checkout_does(tmp_path):
    build = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "sdist",
        "-d",
        str(tmp_path),
    ]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    files = [
        path.name for path in ROOT.iterdir() if path.is_file() and path.name[0] != "."
    ]
    assert (
        {"CONTRIBUTING.md", "CITATION.cff", "requirements-peers.txt"}
        <= {*files}
        <= held
    )
    assert {"asrkit/py.typed", "docs/commands.md"} <= held
