"""`asrkit transcribe --workers` as a command: what it says, refuses, resumes and leaves behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asrkit.cli import main
from asrkit.models import save_checkpoint
from asrkit.runtime import usable_cores
from asrkit.transcribe import transcribe

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="this system forks no process"
)
ENOUGH_S = 60.0
# Recordings named `slow`, or $SLOW_NAME, take a while to open.
SLOW = """
import os, signal, sys, time
import soundfile
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
plain = soundfile.SoundFile

def open_slowly(file, *args, **how):
    if os.environ.get("SLOW_NAME", "slow") in os.fsdecode(file):
        time.sleep(float(os.environ.get("SLOW_S", "0.5")))
    return plain(file, *args, **how)

soundfile.SoundFile = open_slowly
from asrkit.cli import main
sys.exit(main(sys.argv[1:]))
"""
two_cores = pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")


@pytest.fixture
def model(learned, tmp_path):
    """The trained model as a file."""
    save_checkpoint(tmp_path / "model.safetensors", learned)
    return str(tmp_path / "model.safetensors")


@pytest.fixture
def talks(speech, tmp_path):
    """A folder of twelve recordings, and one that cannot be read."""
    folder = tmp_path / "talks"
    folder.mkdir()
    for copy in range(2):
        for path in speech:
            shutil.copy(path, folder / f"{copy}-slow-{path.name}")
    (folder / "0-text.wav").write_text("no sound")
    return folder


def command(talks, model, *more):
    """Arguments of the command with two processes of a thread each."""
    small = ["--batch-seconds", "2", "--readers", "1", "--no-progress"]
    return [
        "transcribe",
        "--dtype",
        "float32",
        str(talks),
        "--model",
        model,
        "--threads",
        "1",
        *small,
        *more,
    ]


def children(pid):
    """Processes that a process has started."""
    folder = Path(f"/proc/{pid}/task/{pid}/children")
    return (
        [int(child) for child in folder.read_text().split()] if folder.exists() else []
    )


def running(pid):
    """Whether a process is there and has not ended: a zombie has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def written(out):
    """When each transcript was written; what a killed run was writing is hidden, and none."""
    paths = [path for path in out.glob("*.txt") if not path.name.startswith(".")]
    return {path.name: path.stat().st_mtime_ns for path in paths}


def wait_until(condition):
    """What the condition returns as soon as that is true, but not for ever."""
    deadline = time.monotonic() + ENOUGH_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@two_cores
def test_stdout_is_that_of_one_process_and_stderr_says_what_was_chosen(
    talks, model, capsys
):
    assert main(command(talks, model)) == 1
    one = capsys.readouterr()
    assert main(command(talks, model, "--workers", "2")) == 1
    two = capsys.readouterr()
    assert two.out == one.out and two.out.count("\n") == 12
    chosen, broken, last = two.err.splitlines()
    assert chosen.startswith("2 workers (as asked), 1 thread each, ")
    assert chosen.endswith("; float32")
    assert broken == one.err.splitlines()[0]
    assert last.startswith("12 of 13 files transcribed, 1 failed; ")


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (["--workers", "two"], "--workers: expected auto, or 1 to "),
        (["--workers", "1", "--threads", "1000"], "--threads: expected 1 to "),
    ],
)
def test_nonsense_is_one_line(talks, model, capsys, more, wanted):
    assert main(command(talks, model, *more)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"asrkit transcribe: {wanted}")


@two_cores
def test_a_folder_goes_on_where_a_killed_run_stopped_and_ends_as_one_process_does(
    talks, model, learned, tmp_path, capsys
):
    out = tmp_path / "text"
    arguments = command(talks, model, "--workers", "2", "--out", str(out))
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments], stderr=subprocess.DEVNULL
    )
    wait_until(lambda: len(written(out)) >= 2)
    workers = children(process.pid)
    process.kill()
    assert process.wait() == -signal.SIGKILL and len(workers) == 2
    wait_until(lambda: not any(map(running, workers)))
    kept = written(out)
    assert 2 <= len(kept) < 12
    assert main(arguments) == 1
    assert f"{len(kept)} done before" in capsys.readouterr().out
    found = {path.stem: path.read_text() for path in out.glob("*.txt")}
    assert found == {
        one.path.stem: f"{one.text}\n" for one in transcribe(learned, talks) if one.text
    }
    assert (
        kept.items()
        <= {path.name: path.stat().st_mtime_ns for path in out.glob("*")}.items()
    )
    assert main([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["skipped"] == 12


@two_cores
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_all_processes(talks, model, how):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *command(talks, model, "--workers", "2")],
        # far from its end when the signal comes, which is soon
        env={**os.environ, "SLOW_NAME": "1-slow", "SLOW_S": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline()
    workers = children(process.pid)
    assert len(workers) == 2
    if how == signal.SIGINT:  # a terminal sends it to all of them
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    _, err = process.communicate(timeout=ENOUGH_S)
    wait_until(lambda: not any(map(running, workers)))
    if how == signal.SIGINT:
        assert process.returncode == 130 and err.endswith(
            "asrkit transcribe: stopped\n"
        )
        assert "Traceback" not in err
    else:
        assert process.returncode == -how
