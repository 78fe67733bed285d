"""`bench all`: suites in processes of their own, with limits, tests before them on a GPU, and a list of what is finished."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from asrkit.cli import main
from asrkit.workbench import bench
from asrkit.workbench.bench import run_all

sys.path.append(str(Path(__file__).parents[2] / "transcribe"))
from waiting import running, wait_until

SUITE = """
import json, os, subprocess, sys
from pathlib import Path

name, *options = sys.argv[1:]
records = Path(options[options.index("--out") + 1])
with records.open("a") as file:
    print(json.dumps(name), file=file)
print("as asked:", name)
if name == "hangs":
    sleeping = subprocess.Popen(["sleep", "3600"])
    records.with_name("new").write_text(str(sleeping.pid))
    records.with_name("new").rename(records.with_name("pid"))
    sleeping.wait()
sys.exit(name == "fails")
"""


@pytest.fixture
def suites(monkeypatch, tmp_path):
    """suites(name, ...): `bench all` has suites of these names only; their processes run SUITE."""
    script = tmp_path / "suite.py"
    script.write_text(SUITE)
    monkeypatch.setattr(run_all, "BENCH", (sys.executable, str(script)))

    def declare(*names, **fields):
        made = {name: bench.Suite(name=name, cases=iter, **fields) for name in names}
        monkeypatch.setattr(run_all, "SUITES", made)

    return declare


def recorded(out):
    return [json.loads(line) for line in (out / "bench.jsonl").read_text().splitlines()]


def test_a_suite_that_fails_does_not_take_the_others_along_and_is_measured_again(
    suites, tmp_path, capsys
):
    out = tmp_path / "out"
    command = ["bench", "all", "--out", str(out), "--quick"]
    suites("fails", "ends")
    assert main([*command, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["suites"]
    assert [(one["suite"], one["status"], one["records"]) for one in found] == [
        ("fails", "failed", 1),
        ("ends", "done", 1),
    ]
    assert (out / "fails.log").read_text() == "as asked: fails\n"
    assert main(command) == 1
    assert "[2/2] ends: finished before" in capsys.readouterr().err
    suites("ends")
    assert main(command[:-1]) == 0  # other options are other work
    assert recorded(out) == ["fails", "ends", "fails", "ends"]


def test_a_suite_that_reaches_its_limit_ends_with_all_that_it_started(
    suites, tmp_path, monkeypatch
):
    pid = tmp_path / "out" / "pid"
    moments = iter([0.0])

    def monotonic():
        """0, then a moment behind every limit, once the suite has begun."""
        for moment in moments:
            return moment
        wait_until(pid.exists)
        return math.inf

    monkeypatch.setattr(run_all, "time", SimpleNamespace(monotonic=monotonic))
    suites("hangs")
    (outcome,) = run_all.run_all(tmp_path / "out", say=bool)
    assert outcome.status == "stopped"
    assert outcome.records == 1
    wait_until(lambda: not running(pid.read_text()))


def test_half_of_what_is_left_is_a_suites_limit_and_none_begins_without_time(
    suites, tmp_path, monkeypatch
):
    limits = []
    now = [0.0]

    def run(command, log, end):
        limits.append(end - now[0])
        now[0] = end

    monkeypatch.setattr(run_all, "_run", run)
    monkeypatch.setattr(run_all.time, "monotonic", lambda: now[0])
    suites(*"abcd")
    outcomes = run_all.run_all(tmp_path / "out", minutes=2, say=bool)
    assert limits == [60, 30]
    assert [one.status for one in outcomes] == ["stopped"] * 2 + ["no time"] * 2


@pytest.mark.parametrize("passes", [True, False])
def test_on_a_gpu_a_suite_whose_tests_fail_is_not_measured(suites, tmp_path, passes):
    tests = tmp_path / "test_kernel.py"
    marked = "import pytest\n\n@pytest.mark.gpu\ndef test_kernel():\n    "
    tests.write_text(
        f"{marked}assert {passes}\n\ndef test_other():\n    assert False\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    suites("first", "second", gpu_tests=(str(tests),))
    out = tmp_path / "out"
    outcomes = run_all.run_all(out, device="cuda", say=bool)
    status = "done" if passes else "failed its gpu tests"
    assert [one[1::2] for one in outcomes] == [(status, int(passes))] * 2
    first, again = ((out / f"{name}.log").read_text() for name in ("first", "second"))
    assert "1 passed" in first if passes else "1 failed" in first
    assert "passed" not in again, "a file that passes runs once a folder"


def test_suites_without_gpu_code_are_left_out_on_a_gpu(suites, tmp_path):
    suites("ends", cpu_only=True)
    assert run_all.run_all(tmp_path / "out", device="cuda", say=bool) == []


BARE = """
import importlib.util, os, sys

gone = "hypothesis lhotse papermill nbformat matplotlib pandas jiwer IPython tqdm".split()
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in gone else find(name, *rest)

class Bare:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in gone:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Bare())
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
import pytest
options = ["-q", "-p", "no:cacheprovider", "--collect-only", "-m", "gpu"]
sys.exit(pytest.main([*options, *sys.argv[1:]]))
"""


@pytest.mark.live
def test_the_gpu_tests_of_run_all_are_there_on_a_machine_with_torch_and_pytest_alone():
    files = {file for suite in bench.SUITES.values() for file in suite.gpu_tests}
    done = subprocess.run(
        [sys.executable, "-c", BARE, *sorted(files)],
        cwd=run_all.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{file}::" in done.stdout for file in files)
    first = ["transcription", "losses", "decoders", "encoders", "ladder"]
    assert [*bench.SUITES][:5] == first


@pytest.mark.live
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's prctl")
def test_a_suite_ends_with_the_run_that_started_it_even_by_signal_9(tmp_path):
    script = tmp_path / "suite.py"
    out = tmp_path / "out"
    script.write_text(f"""
import os, time
from pathlib import Path

new = Path({str(out)!r}) / "new"
new.write_text(str(os.getpid()))
new.rename(new.with_name("pid"))
time.sleep(3600)
""")
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from asrkit.workbench import bench\nfrom asrkit.workbench.bench import run_all\n"
        f"run_all.BENCH = (sys.executable, {str(script)!r})\n"
        "run_all.SUITES = {'hangs': bench.Suite(name='hangs', cases=iter)}\n"
        f"run_all.run_all(Path({str(out)!r}))\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    wait_until((out / "pid").exists)
    run.kill()
    run.wait()
    wait_until(lambda: not running((out / "pid").read_text()))
