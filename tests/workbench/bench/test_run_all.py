"""`bench all`: suites in processes of their own, with limits, tests before them on a GPU, and a list of what is finished."""

import json
import subprocess
import sys
import time

import pytest

from asrkit.cli import main
from asrkit.workbench import bench, records
from asrkit.workbench.bench import run_all

SUITE = """
import subprocess, sys, time
from asrkit.cli import main
from asrkit.workbench import bench
from asrkit.workbench.records import Measurement

name, *rest = sys.argv[1:]

def one():
    yield Measurement("measured", "ratio", "1", 1.0, params={"suite": name})
    if name == "hangs":
        subprocess.run(["sleep", "3600"])

def cases(device, quick):
    yield bench.Case(what="first", measure=one)
    if name == "fails":
        yield bench.Case(what="second", refused="second: no such kernel")
        yield bench.Case(what="third", measure=one)

bench.SUITES["losses"] = bench.Suite(name="losses", cases=cases)
sys.exit(main(["bench", "losses", *["cpu" if one == "cuda" else one for one in rest]]))
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
    return [one["params"]["suite"] for one in records.read(out / "bench.jsonl")]


def test_a_suite_that_fails_or_reaches_its_limit_does_not_take_the_others_along(
    suites, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out"
    suites("fails", "hangs", "ends")
    monkeypatch.setattr(run_all, "LIMIT_S", 25.0)
    start = time.monotonic()
    assert main(["bench", "all", "--out", str(out), "--quick", "--json"]) == 1
    assert time.monotonic() - start < 120, "the process behind the suite was waited for"
    found = {one["suite"]: one for one in json.loads(capsys.readouterr().out)["suites"]}
    assert {name: (one["status"], one["records"]) for name, one in found.items()} == {
        "fails": ("failed", 2),
        "hangs": ("stopped", 1),
        "ends": ("done", 1),
    }
    assert recorded(out) == ["fails", "fails", "hangs", "ends"]
    assert "second: no such kernel" in (out / "fails.log").read_text()
    suites("ends", "more")
    assert main(["bench", "all", "--out", str(out), "--quick"]) == 0
    assert recorded(out)[4:] == ["more"]
    assert "[1/2] ends: finished before" in capsys.readouterr().err


def test_half_of_what_is_left_is_a_suites_limit_and_none_begins_without_time(
    suites, tmp_path, monkeypatch
):
    limits, now = [], [0.0]

    def run(command, log, end):
        limits.append(end - now[0])
        now[0] = end

    monkeypatch.setattr(run_all, "_run", run)
    monkeypatch.setattr(run_all.time, "monotonic", lambda: now[0])
    suites(*"abcd")
    outcomes = run_all.run_all(tmp_path / "out", minutes=2, say=bool)
    assert limits == [60, 30] and [one.status for one in outcomes] == [
        "stopped",
        "stopped",
        "no time",
        "no time",
    ]


@pytest.mark.parametrize("passes", [True, False])
def test_on_a_gpu_a_suite_whose_tests_fail_is_not_measured(
    suites, tmp_path, monkeypatch, passes
):
    tests = tmp_path / "test_kernel.py"
    marked = "import pytest\n\n@pytest.mark.gpu\ndef test_kernel():\n    "
    tests.write_text(
        f"{marked}assert {passes}\n\ndef test_other():\n    assert False\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    suites("first", "second", gpu_tests=(str(tests),))
    outcomes = run_all.run_all(tmp_path / "out", device="cuda", say=bool)
    status = "done" if passes else "failed its gpu tests"
    assert [(one.status, one.records) for one in outcomes] == [
        (status, int(passes))
    ] * 2
    assert ("1 failed" in (tmp_path / "out/first.log").read_text()) is not passes
    again = (tmp_path / "out/second.log").read_text()
    assert (" failed" in again) is not passes and "passed" not in again, (
        "a file runs once a folder"
    )


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
    assert [*bench.SUITES][:5] == [
        "transcription",
        "losses",
        "decoders",
        "encoders",
        "ladder",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's prctl")
def test_a_suite_ends_with_the_run_that_started_it_even_by_signal_9(tmp_path):
    script = tmp_path / "suite.py"
    script.write_text(SUITE)
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from asrkit.workbench import bench\nfrom asrkit.workbench.bench import run_all\n"
        f"run_all.BENCH = (sys.executable, {str(script)!r})\n"
        "run_all.SUITES = {'hangs': bench.Suite(name='hangs', cases=iter)}\n"
        f"run_all.run_all(Path({str(tmp_path / 'out')!r}))\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    while not (tmp_path / "out" / "bench.jsonl").exists():
        assert run.poll() is None
        time.sleep(0.1)
    run.kill()
    run.wait()
    for _ in range(100):
        found = subprocess.run(["pgrep", "-f", str(script)], capture_output=True)
        if found.returncode:
            break
        time.sleep(0.1)
    assert found.returncode == 1, "its suite goes on"


def test_other_options_are_other_work(suites, tmp_path, capsys):
    suites("ends")
    command = ["bench", "all", "--out", str(tmp_path / "out")]
    assert main([*command, "--quick"]) == main(command) == main(command) == 0
    assert recorded(tmp_path / "out") == ["ends", "ends"]
    assert capsys.readouterr().err.count("finished before") == 1
