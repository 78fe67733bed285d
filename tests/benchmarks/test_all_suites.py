"""`benchmarks all`: each suite in its own process with a time limit, GPU tests first, finished suites skipped."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.__main__ import main
from benchmarks.harness import all_suites
from benchmarks.harness.cases import Suite
from benchmarks.suites import SUITES

sys.path.append(str(Path(__file__).parents[1] / "transcribe"))
from waiting import running, wait_until

SUITE = """
import json, os, subprocess, sys
from pathlib import Path

name, *options = sys.argv[1:]
records = Path(options[options.index("--out") + 1])
with records.open("a") as file:
    print(json.dumps(name), file=file)
print("suite", name)
if name == "hangs":
    sleeping = subprocess.Popen(["sleep", "3600"])
    records.with_name("new").write_text(str(sleeping.pid))
    records.with_name("new").rename(records.with_name("pid"))
    sleeping.wait()
sys.exit(name == "fails")
"""


@pytest.fixture
def suites(monkeypatch, tmp_path):
    """suites(name, ...): `benchmarks all` has only suites of these names; their processes run SUITE."""
    script = tmp_path / "suite.py"
    script.write_text(SUITE)
    monkeypatch.setattr(all_suites, "BENCH", (sys.executable, str(script)))

    def declare(*names, **fields):
        declared = {name: Suite(name=name, cases=iter, **fields) for name in names}
        monkeypatch.setattr(all_suites, "SUITES", declared)

    return declare


def recorded(out):
    return [json.loads(line) for line in (out / "bench.jsonl").read_text().splitlines()]


def test_a_failed_suite_does_not_end_the_run_and_is_measured_again(
    suites, tmp_path, capsys
):
    out = tmp_path / "out"
    command = ["all", "--out", str(out), "--quick"]
    suites("fails", "ends")
    assert main([*command, "--json"]) == 1
    status = json.loads(capsys.readouterr().out)["suites"]
    assert status == {"fails": "failed", "ends": "done"}
    assert (out / "fails.log").read_text() == "suite fails\n"
    assert main(command) == 1
    assert "ends: done before" in capsys.readouterr().err
    suites("ends")
    assert main(command[:-1]) == 0  # other options: not the same command
    assert recorded(out) == ["fails", "ends", "fails", "ends"]


def test_a_suite_with_a_table_of_its_own_is_omitted(suites, tmp_path, capsys):
    suites("ends", rows=list)
    assert main(["all", "--out", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["suites"] == {}


def test_at_its_limit_a_suite_is_killed_with_its_children(
    suites, tmp_path, monkeypatch
):
    pid = tmp_path / "out" / "pid"
    moments = iter([0.0])

    def monotonic():
        """0, then infinity once the suite has begun."""
        for moment in moments:
            return moment
        wait_until(pid.exists)
        return math.inf

    monkeypatch.setattr(all_suites, "time", SimpleNamespace(monotonic=monotonic))
    suites("hangs")
    status = all_suites.run_all(tmp_path / "out", log=bool)
    assert status == {"hangs": "stopped"}
    assert recorded(tmp_path / "out") == ["hangs"]
    wait_until(lambda: not running(pid.read_text()))


def test_suites_divide_the_time_by_their_shares(suites, tmp_path, monkeypatch):
    limits = []
    now = [0.0]

    def run(command, output, end):
        limits.append(end - now[0])
        used = 0.25 if "first" in command else 1.0  # of its limit
        now[0] += used * limits[-1]

    monkeypatch.setattr(all_suites, "_run", run)
    monkeypatch.setattr(all_suites.time, "monotonic", lambda: now[0])
    suites("first", share=3)
    large = all_suites.SUITES
    suites("second", "third")
    monkeypatch.setattr(all_suites, "SUITES", large | all_suites.SUITES)
    status = all_suites.run_all(tmp_path / "out", minutes=1, log=bool)
    # the first leaves three quarters of 36 s to the others; less than 20 s are no time
    assert limits == [36, 25.5, 25.5]
    assert [*status.values()] == ["stopped"] * 3
    status = all_suites.run_all(tmp_path / "out", minutes=0.5, log=bool)
    assert [*status.values()] == ["no time", "no time", "stopped"]


@pytest.mark.parametrize("passes", [True, False])
def test_on_a_gpu_the_tests_of_a_suite_run_first(suites, tmp_path, passes):
    tests = tmp_path / "test_kernel.py"
    marked = "import pytest\n\n@pytest.mark.gpu\ndef test_kernel():\n    "
    tests.write_text(
        f"{marked}assert {passes}\n\ndef test_other():\n    assert False\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    suites("first", "second", gpu_tests=(str(tests),))
    out = tmp_path / "out"
    status = all_suites.run_all(out, device="cuda", log=bool)
    expected = "done" if passes else "done, gpu tests failed"
    assert status == dict.fromkeys(["first", "second"], expected)
    assert recorded(out) == ["first", "second"]
    assert (out / "first.done").exists() == passes
    first = (out / "first.log").read_text()
    assert "1 passed" in first if passes else "1 failed" in first


def test_suites_without_gpu_code_are_left_out_on_a_gpu(suites, tmp_path):
    suites("ends", cpu_only=True)
    assert all_suites.run_all(tmp_path / "out", device="cuda", log=bool) == {}


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
def test_the_gpu_tests_of_all_suites_are_there_on_a_machine_with_torch_and_pytest_alone():
    files = {file for suite in SUITES.values() for file in suite.gpu_tests}
    done = subprocess.run(
        [sys.executable, "-c", BARE, *sorted(files)],
        cwd=all_suites.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{file}::" in done.stdout for file in files)
    first = ["losses", "decoders", "transcription", "training", "ladder"]
    assert [*SUITES][:5] == first


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
        "from benchmarks.harness import all_suites\n"
        "from benchmarks.harness.cases import Suite\n"
        f"all_suites.BENCH = (sys.executable, {str(script)!r})\n"
        "all_suites.SUITES = {'hangs': Suite(name='hangs', cases=iter)}\n"
        f"all_suites.run_all(Path({str(out)!r}))\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.DEVNULL, cwd=all_suites.ROOT
    )
    wait_until((out / "pid").exists)
    run.kill()
    run.wait()
    wait_until(lambda: not running((out / "pid").read_text()))
