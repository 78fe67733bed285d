"""`bench all --minutes` in processes of its own: a rehearsal on a bare machine, what dies, what is killed, and what is taken in."""

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from asrkit import files
from asrkit.cli import main
from asrkit.workbench import collect, machine, records
from asrkit.workbench.bench import SUITES
from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.bench.share import (
    journal,
    measuring,
    parts,
    progress,
    supervisor,
    takeover,
    work,
)
from asrkit.workbench.bench.share.parts import ELSEWHERE, PARTS
from asrkit.workbench.bench.suites import claims, ladder

ROOT = Path(files.HERE).parent
FILES = {"bench.jsonl", "checks.jsonl", "log.txt", "manifest.json"}

# Both run in the processes that a share starts, too: those import the file that they were started from.
BARE = """
import importlib.metadata, importlib.util, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED: raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
def find_spec(name, package=None, real=importlib.util.find_spec):
    return None if name.split(".")[0] in BLOCKED else real(name, package)
importlib.util.find_spec = find_spec
def version(name, real=importlib.metadata.version):
    if name == "asrkit": raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
import asrkit
assert asrkit.__path__[0].startswith(HERE), asrkit.__path__
if __name__ == "__main__":
    from asrkit.cli import main
    sys.exit(main())
"""
DOOMED = """
import os, signal, sys, time
from pathlib import Path
import torch
from asrkit.workbench import bench
from asrkit.workbench.bench import checks, guards
from asrkit.workbench.bench.cases import Case, Suite
from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.bench.share import checking, journal, measuring, supervisor as share
from asrkit.workbench.bench.share.parts import Part
from asrkit.workbench import collect, machine, records
told = {**machine.code(), "source": "of a test"}
machine.code = records.code = lambda: told
WAIT = Path(HERE) / "wait"
torch.set_num_threads(1)
def dies(): os.kill(os.getpid(), signal.SIGSEGV)
def hangs(): time.sleep(1000)
def wrong(): raise AssertionError("2 apart")
def lacks(): import nowhere_to_be_found
table = [Check("a", "before", "", int), Check("a", "dies", "^doomed$", dies), Check("a", "after", "", int),
         Check("b", "hangs", "^never$", hangs), Check("c", "wrong", "^slow$", wrong), Check("c", "lacks", "", lacks)]
checks.table = lambda device: table
checking.CHECK_S = 2
measuring.GRACE_S = 1
journal.EVERY_S = 0
LOST = []
def answers(device):  # stands for torch.cuda.synchronize: after an illegal address every call fails
    if LOST: raise RuntimeError("CUDA error: an illegal memory access was encountered\\nand more")
guards.synchronize = answers
def works():
    answers("cpu")
    return (torch.ones(3),)
def poisons(error=RuntimeError):
    LOST.append(1)
    raise error("CUDA error")
def counts(end, calls=[]):
    calls.append(1)
    return (torch.ones(3),) if len(calls) < 6 else end()  # compared, warmed up, and three repeats
def case(name, **arms):
    arms = {arm: (lambda: (torch.ones(3),)) for arm in ("plain", "slow", "fast")} | arms
    return Case(what=name, arms=arms, params={"shape": [3], "dtype": "float32"}, ratios=[("plain", "fast"), ("slow", "fast")])
def waits():
    if WAIT.exists(): (Path(HERE) / "pid").write_text(str(os.getpid()))
    while WAIT.exists(): time.sleep(0.05)
    return (torch.ones(3),)
def good(device, quick):
    yield case("good-1")
    yield case("good-2", fast=lambda: counts(waits))
def dead(device, quick):
    yield case("dead-1")
    dies()
def raises(device, quick):
    yield case("raises-1")
    raise RuntimeError("no such kernel")
def differs(device, quick):
    yield case("differs-1", plain=lambda: (torch.zeros(3),))
    yield case("differs-2")
def hung(device, quick):
    yield case("hung-1")
    hangs()
def poisoned(device, quick):
    yield case("poisoned-1", plain=works)
    yield case("poisoned-2", bad=poisons)
    yield case("poisoned-3", plain=works, bad=lambda: poisons(torch.OutOfMemoryError))
    yield case("poisoned-4", plain=works)
def killed(device, quick):
    yield case("killed-1", fast=lambda: counts(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    yield case("killed-2")
def half():
    yield records.Measurement("half-1", "share", "1", 0.5, params={"device": "cpu"})
    raise RuntimeError("no such kernel")
def halves(device, quick):
    yield Case(what="claims: half-1, half-2", claims=("half-1", "half-2"), measure=half)
    yield case("halves-2")
def lacking(device, quick):
    import nowhere_to_be_found
    yield case("lacking-1")
def hopeless(device, quick):
    for n in range(9):
        yield case(f"hopeless-{n}", plain=dies)
suites = {"good": good, "dead": dead, "raises": raises, "differs": differs, "poisoned": poisoned, "killed": killed,
          "halves": halves, "lacking": lacking, "hopeless": hopeless, "hung": hung}
bench.SUITES.clear()
bench.SUITES.update({name: Suite(name=name, cases=cases) for name, cases in suites.items()})
share.PARTS = tuple(Part(name, 0.1 if name == "hung" else 1, "a test") for name in [*suites, "absent"])
if __name__ == "__main__":
    from asrkit.cli import main
    sys.exit(main())
"""


def start(script, text, *arguments, **names):
    """A process that runs `text`, with names that it knows."""
    script.write_text("".join(f"{name} = {value!r}\n" for name, value in names.items()) + text)
    environment = {
        **os.environ,
        "ASRKIT_HOME": str(script.parent / "home"),
        "PYTHONPATH": os.pathsep.join([names["HERE"], str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments), "--json"], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment, cwd=script.parent,
    )  # fmt: skip


def ended(process, timeout=300):
    """What the manifest says of a run, and what the run printed."""
    out, err = process.communicate(timeout=timeout)
    assert "Traceback" not in err, err
    folder = Path(process.args[process.args.index("--out") + 1])
    assert str(folder) in out.splitlines()[-1], out + err
    manifest = json.loads((folder / "manifest.json").read_text())
    parts = {name: part["status"] for name, part in manifest["parts"].items()}
    made = len(records.read(folder / "bench.jsonl"))
    passed = manifest["checks"]["passed"]
    return {"records": made, "passed": passed, "parts": parts}, out, err


def edit(out, **told):
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | told))


def manifest_of(out):
    """The manifest, which is right about the other files."""
    manifest = json.loads((out / "manifest.json").read_text())
    assert {path.name for path in out.iterdir()} == FILES | {files.LOCK}
    for name, told in manifest["files"].items():
        data = (out / name).read_bytes()
        assert (told["bytes"], told["sha256"]) == (len(data), files.content_hash(data))
    assert {*manifest["files"]} == FILES - {"manifest.json"}
    return manifest


def installed_beyond(*names):
    """Packages of this machine that are neither these nor what they need."""
    allowed, todo = set(), list(names)
    while todo:
        name = canonicalize_name(todo.pop())
        if name not in allowed:
            allowed.add(name)
            needed = map(Requirement, requires(name) or ())
            todo += [
                one.name
                for one in needed
                if one.marker is None or one.marker.evaluate({"extra": ""})
            ]
    owners = packages_distributions()
    return {
        top
        for top, several in owners.items()
        if not {canonicalize_name(name) for name in several} & allowed
    } - {"asrkit"}


def test_the_options_of_each_part_are_those_that_its_suite_takes():
    for part in PARTS:
        suite = SUITES[part.suite or part.name].cases
        assert {*part.options} <= {*inspect.signature(suite).parameters}
    assert {part.options["kind"] for part in PARTS if part.suite == "ladder"} == {
        "rnnt",
        "tdt",
        "ctc",
    }
    groups = [name for part in PARTS if part.suite == "claims" for name in part.options["only"]]
    assert sorted(groups) == sorted([*claims.STUDIES, "windows"])


def test_torch_compile_takes_part_in_the_part_of_its_own_alone():
    able = {
        name for name in SUITES if "compiled" in inspect.signature(SUITES[name].cases).parameters
    }
    chosen = {part.name: part.options.get("compiled") for part in PARTS if part.suite_name in able}
    assert chosen == {"jasper": False, "encoder": False, "compiled": True}


def test_every_suite_is_measured_by_a_part_or_stands_among_those_measured_elsewhere():
    assert {part.suite_name for part in PARTS} | parts.ELSEWHERE.keys() == SUITES.keys()
    assert not {part.suite_name for part in PARTS} & parts.ELSEWHERE.keys()


def test_nine_minutes_reach_what_is_owed_whether_parts_take_what_they_need_or_all_that_they_may():
    owed = [part for part in PARTS if part.owed]
    assert PARTS[: len(owed)] == tuple(owed), "what is owed comes first"
    assert {
        "casts",
        "frontends",
        "loops",
        "windows",
        "ladder-rnnt",
        "ladder-tdt",
        "losses-large",
    } == {part.name for part in owed}
    begins, _ = parts.ends(9 * 60)
    for greedy in (False, True):
        left = begins - parts.CHECKS_SHARE * 9 * 60
        for place, part in enumerate(PARTS):
            budget = parts.budget_s(PARTS[place:], left)
            assert budget >= part.owed_s and budget <= left + 1e-9
            if part.suite == "ladder" and part.owed:
                assert ladder.affordable(part.name, budget) == 32
            left -= budget if greedy else min(budget, part.estimate_s)
        assert left >= -1e-9


def test_with_too_little_time_what_comes_first_gets_it():
    rest = [
        parts.Part("a", 1, "", estimate_s=30, owed=True),
        parts.Part("b", 1, "", estimate_s=30, owed=True),
        parts.Part("c", 1, ""),
    ]
    assert (
        parts.budget_s(rest, 40) == 30
        and parts.budget_s(rest[1:], 10) == 10
        and parts.budget_s(rest, 90) == 30 + 30 / 3
    )
    assert parts.budget_s(rest[2:], 12) == 12


def test_the_plan_is_printed_with_its_order_and_says_that_it_is_an_estimate(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # a line for each part
    assert main(["bench", "all", "--plan"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "estimates, not measured" in out[0] and [
        line.split()[0] for line in out[3 : -3 - len(ELSEWHERE)]
    ] == [part.name for part in PARTS]
    assert main(["bench", "losses", "--plan"]) == 2 and main(["bench", "all", "--resume", "x"]) == 2
    assert "--resume: expected --minutes beside it" in capsys.readouterr().err


@pytest.mark.slow
def test_a_bare_copy_without_git_checks_and_measures_itself_and_its_records_are_taken_in(tmp_path):
    """What there is no time for is said in the manifest: each part has tests of its own."""
    blocked = installed_beyond("torch", "torchaudio", "numpy", "numba", "triton") - {"numba_cuda"}
    assert {"lhotse", "yaml", "tqdm", "matplotlib"} <= blocked
    copy, out = tmp_path / "copy", tmp_path / "share"
    for name in ("asrkit", "data"):
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "records")
        )
    (copy / "numba_cuda").mkdir()  # there, and broken
    (copy / "numba_cuda" / "__init__.py").write_text(
        "raise RuntimeError('built for another driver')\n"
    )
    arguments = [
        "bench",
        "all",
        "--device",
        "cpu",
        "--minutes",
        "0.75",
        "--threads",
        "1",
        "--out",
        out,
    ]
    run = start(copy / "run.py", BARE, *arguments, BLOCKED=blocked, HERE=str(copy))
    summary, said, err = ended(run)
    manifest, rows = (
        manifest_of(out),
        [json.loads(line) for line in (out / "checks.jsonl").read_text().splitlines()],
    )
    assert (
        manifest["state"] == "ended"
        and manifest["quick"]
        and manifest["seconds"] <= 90
        and run.returncode == 0
    )
    assert manifest["code"]["commit"] is None and manifest["software"]["asrkit"] is not None
    checked = manifest["checks"]
    assert checked["not_passed"] == {} and {*checked["not_checked"].values()} <= {
        "No module named 'tqdm'",
        "no time",
    }
    assert summary["passed"] == checked["passed"] == sum(row["ok"] is True for row in rows) > 0
    statuses = {part["status"] for part in manifest["parts"].values()}
    assert {*manifest["parts"]} == {part.name for part in PARTS} - {"compiled"} and statuses <= {
        "done",
        "stopped",
        "no time",
        "no package",
    }
    lacking = {name for name, row in manifest["parts"].items() if row["status"] == "no package"}
    assert lacking == set()
    found = records.read(out / "bench.jsonl")
    assert (
        len(found)
        == summary["records"]
        == sum(part["records"] for part in manifest["parts"].values())
    )
    assert all(part["records"] for part in manifest["parts"].values() if part["status"] == "done")
    assert all(one["params"].get("quick") for one in found if one["metric"] in ("latency", "ratio"))
    assert " s left] windows, for" in err and "batching" in err
    with pytest.raises(
        ValueError,
        match=r"share: expected a run of whole sizes, got a rehearsal: --quick, or on a CPU\. Nothing was",
    ):
        collect.add([out], tmp_path / "records", dirty=True)
    kept = tmp_path / "records"
    shutil.copytree(ROOT / "data" / "records", kept)
    command = [sys.executable, "-m", "asrkit"]
    added = subprocess.run(
        [
            *command,
            "records",
            "add",
            str(out / "bench.jsonl"),
            "--into",
            str(kept),
            "--dirty",
            "--json",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert json.loads(added.stdout)["added"] == len(found)
    files = map(str, kept.rglob("*.jsonl"))
    verified = subprocess.run(
        [*command, "verify", "--json", *files], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert json.loads(verified.stdout)["problems"] == 0


@pytest.fixture(scope="module")
def doomed(tmp_path_factory):
    """A share in which checks and suites die, hang, raise and differ, and what it printed; it says that it was no rehearsal."""
    folder = tmp_path_factory.mktemp("doomed")
    run = start(
        folder / "run.py",
        DOOMED,
        "bench",
        "all",
        "--minutes",
        "2",
        "--out",
        folder / "out",
        HERE=str(folder),
    )
    done = ended(run)
    assert json.loads((folder / "out" / "manifest.json").read_text())["quick"]
    edit(folder / "out", quick=False)
    return folder, *done, run.returncode


def test_what_dies_hangs_raises_or_differs_does_not_stop_the_rest_and_is_named(doomed):
    folder, summary, said, err, code = doomed
    manifest = manifest_of(folder / "out")
    why = manifest["checks"]["not_passed"]
    assert (
        why.pop("dies") == "the process died of SIGSEGV"
        and why.pop("hangs") == "took longer than 2 s"
    )
    assert why.pop("wrong") == "AssertionError: 2 apart" and not why
    assert manifest["checks"]["not_checked"] == {"lacks": "No module named 'nowhere_to_be_found'"}
    assert summary["passed"] == 2 and code == 1
    parts = {name: (part["status"], part["why"]) for name, part in manifest["parts"].items()}
    assert parts["good"] == ("done", "") and parts["dead"] == (
        "died",
        "the process died of SIGSEGV",
    )
    assert parts["raises"] == ("failed", "RuntimeError: no such kernel")
    assert parts["differs"][0] == "disagreed" and "fast disagrees with plain" in parts["differs"][1]
    assert (
        parts["hung"] == ("stopped", "killed: out of time") and parts["absent"][0] == "not measured"
    ), err
    assert parts["halves"] == ("disagreed", "claims: half-1, half-2: RuntimeError: no such kernel")
    assert parts["lacking"] == ("no package", "No module named 'nowhere_to_be_found'")
    assert manifest["state"] == "ended" and manifest["seconds"] < 120
    for text in ("not passed: wrong: AssertionError: 2 apart", "dead: died, "):
        assert text in err and text in (folder / "out" / "log.txt").read_text()
    assert re.search(r"^hung +stopped", err, re.MULTILINE)  # with --json all text is there
    measured = {one["what"] for one in records.read(folder / "out" / "bench.jsonl")}
    more = {
        "poisoned-1",
        "poisoned-2",
        "poisoned-3",
        "poisoned-4",
        "killed-1",
        "killed-2",
        "half-1",
        "halves-2",
    }
    assert measured == {"good-1", "good-2", "dead-1", "raises-1", "differs-2", "hung-1"} | more


def test_after_an_error_that_poisons_the_device_a_part_is_started_again_without_what_did_it(doomed):
    manifest = manifest_of(doomed[0] / "out")
    gone = "the device is lost: CUDA error: an illegal memory access was encountered"
    lost = [{"case": f"poisoned-{n} 3", "arm": "bad", "why": gone} for n in (2, 3)]
    assert manifest["lost"]["poisoned"] == lost
    part = manifest["parts"]["poisoned"]
    assert (
        part["status"] == "lost"
        and part["why"] == f"bad of poisoned-2 3: {gone}; bad of poisoned-3 3: {gone}"
    )
    assert f"poisoned: {gone}; started again without bad of poisoned-2 3" in doomed[3]
    arms = {one["what"]: set() for one in records.read(doomed[0] / "out" / "bench.jsonl")}
    for one in records.read(doomed[0] / "out" / "bench.jsonl"):
        arms[one["what"]].add(one["impl"])
    assert all(
        arms[f"poisoned-{n}"] == {"plain", "fast"} for n in (1, 2, 3, 4)
    )  # slow failed its check
    times = [
        one
        for one in records.read(doomed[0] / "out" / "bench.jsonl")
        if one["what"] == "poisoned-1"
    ]
    assert len({(one["metric"], one["impl"]) for one in times}) == len(times), "measured again"


def test_a_case_that_is_killed_between_its_repeats_keeps_those_that_it_has(doomed):
    found = [
        one for one in records.read(doomed[0] / "out" / "bench.jsonl") if one["what"] == "killed-1"
    ]
    repeats = {one["impl"]: one["stats"]["n"] for one in found if one["metric"] == "latency"}
    assert (
        repeats.keys() == {"plain", "fast"}
        and min(repeats.values()) == 3
        and all(one["params"]["cut"] for one in found)
    )
    (ratio,) = [one for one in found if one["metric"] == "ratio"]
    slow, fast = (
        next(one for one in found if (one["impl"], one["metric"]) == (arm, "latency"))
        for arm in ("plain", "fast")
    )
    assert ratio["samples"] == [
        a / b for a, b in zip(slow["samples"], fast["samples"], strict=False)
    ]  # both from one run
    manifest = manifest_of(doomed[0] / "out")
    assert manifest["lost"]["killed"] == [
        {"case": "killed-1 3", "arm": "", "why": "the process died of SIGKILL"}
    ]
    assert (
        "of killed-1, cut short: 2 arms, 3 to " in doomed[3]
        and manifest["parts"]["killed"]["status"] == "lost"
    )


def test_a_part_that_dies_of_one_case_after_another_is_not_started_for_ever(doomed):
    manifest = manifest_of(doomed[0] / "out")
    assert [one["case"] for one in manifest["lost"]["hopeless"]] == [
        f"hopeless-{n} 3" for n in range(measuring.RESTARTS + 1)
    ]
    assert {one["arm"] for one in manifest["lost"]["hopeless"]} == {"plain"} and manifest["parts"][
        "hopeless"
    ]["status"] == "died"
    assert manifest["parts"]["hopeless"]["why"] == "the process died of SIGSEGV"


def test_what_failed_its_check_is_not_measured(doomed):
    found = records.read(doomed[0] / "out" / "bench.jsonl")
    assert {one["impl"] for one in found if one["metric"] == "latency"} == {"plain", "fast"}
    assert {tuple(one["params"]["arms"]) for one in found if one["metric"] == "ratio"} == {
        ("plain", "fast")
    }
    assert json.loads((doomed[0] / "out" / "manifest.json").read_text())["left_out"] == [
        "^doomed$",
        "^never$",
        "^slow$",
    ]


def test_a_run_killed_outright_leaves_nothing_behind_and_goes_on_where_it_was(
    tmp_path, monkeypatch
):
    out, arguments = tmp_path / "out", ("bench", "all", "--minutes", "2", "--out", tmp_path / "out")
    (tmp_path / "wait").touch()
    text = DOOMED.replace('[*suites, "absent"]', '["good"]').replace(
        "table = [", "table = [Check('a', 'fine', '', int)] or ["
    )
    run = start(tmp_path / "run.py", text, *arguments, HERE=str(tmp_path))
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int((tmp_path / "pid").read_text())
    with pytest.raises(
        ValueError, match=r"out: expected a folder that nobody else writes to now\."
    ):
        supervisor.share(out, device="cpu", minutes=2)
    run.send_signal(signal.SIGKILL)
    run.communicate(timeout=60)
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
    first = records.read(out / "bench.jsonl")
    assert {one["what"] for one in first} == {"good-1"} and (out / journal.NAME).exists()
    assert json.loads((out / "manifest.json").read_text())["state"] == "running"
    with pytest.raises(
        ValueError,
        match=r"expected a run that has ended\. Run its command again to go on, or add .*bench.jsonl\.$",
    ):
        collect.add([out], tmp_path / "records")
    with (out / "bench.jsonl").open("a") as file:
        file.write('{"schema": "asrkit.rec')  # as a full disk or a lost machine leaves it
    (tmp_path / "wait").unlink()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    earlier, out = (
        out,
        tmp_path / "out2",
    )  # a second lease, which the first one's folder was carried to
    given = ("bench", "all", "--minutes", "2", "--out", out, "--resume", earlier)
    summary, _, err = ended(start(tmp_path / "run.py", text, *given, HERE=str(tmp_path)))
    assert summary["parts"] == {"good": "done"} and "1 passed before" in err and "good, for" in err
    assert {path.name: path.read_bytes() for path in earlier.iterdir()} == before
    assert (
        "torn" in err
        and "of good-2, cut short: 3 arms, 3 to " in err
        and records.verify([out / "bench.jsonl"]) == []
    )
    found = records.read(out / "bench.jsonl")
    assert found[: len(first)] == first and {one["what"] for one in found} == {"good-1", "good-2"}
    assert {one["params"].get("cut", False) for one in found if one["what"] == "good-2"} == {
        True
    }  # three repeats are enough
    (told,) = manifest_of(out)["earlier"]
    assert told["state"] == "running" and told["machine"]["id"] == machine.this_machine()["id"]
    with pytest.raises(
        ValueError,
        match=r"^out: expected a new folder, or one to go on with, got one of another source\. Name another folder\.$",
    ):
        supervisor.share(out, device="cpu", minutes=2)
    said, told = [], {**machine.code(), "source": "of a test"}
    monkeypatch.setattr(records, "code", lambda: told)
    monkeypatch.setattr(machine, "code", lambda: told)
    monkeypatch.setattr(supervisor, "PARTS", (parts.Part("good", 1, ""),))
    monkeypatch.setattr(supervisor.checks, "table", lambda device: [Check("a", "fine", "", int)])
    supervisor.share(out, device="cpu", minutes=2, say=said.append)
    assert said[-1].endswith("good: done before") and records.read(out / "bench.jsonl") == found
    assert manifest_of(out)["state"] == "ended"
    (out / "bench.jsonl").write_bytes((out / "bench.jsonl").read_bytes()[:-9])
    supervisor.share(
        out, device="cpu", minutes=2, say=said.append
    )  # what was lost may be of any part
    assert (
        "good: done before" not in said[-1]
        and records.read(out / "bench.jsonl") == found[:-1]
        and manifest_of(out)
    )


def test_a_check_that_failed_in_an_earlier_run_is_not_done_in_this_one(tmp_path):
    same = {"device": "cpu", "quick": True, "machine": machine.this_machine()}
    same["source"] = machine.code()["source"]
    check = Check("a", "fails", "", int)
    path = tmp_path / "checks.jsonl"
    records.extend(path, work.check_row(check, False, "2 apart", 0.0))
    begun = time.monotonic()
    run = progress.Progress(tmp_path, same, (), minutes=1, begun=begun, say=bool)
    run.read_checks()
    assert run.checks == {}
    records.extend(path, work.check_row(check, False, "3 apart", 0.0))
    run.read_checks()
    assert run.checks["fails"]["why"] == "3 apart" and run.failed("fails")
    again = progress.Progress(tmp_path, same, (), minutes=1, begun=begun, say=bool)
    assert again.checks == {}, "only what passed counts"


def test_what_was_changed_or_torn_on_the_way_is_refused_by_name_and_nothing_is_taken(
    doomed, tmp_path
):
    kept, out = tmp_path / "records", tmp_path / "out"
    lines = (doomed[0] / "out" / "bench.jsonl").read_text().splitlines(keepends=True)
    spoilt = {
        "bench.jsonl: 1: changed": [
            lines[0].replace('"origin": "measured"', '"origin": "Measured"'),
            *lines[1:],
        ],
        f"bench.jsonl:{len(lines)}: torn": [*lines[:-1], lines[-1][:50]],
        "bench.jsonl:2: no record": [lines[0], '{"a": 1}\n', *lines[1:]],
    }
    for said, text in spoilt.items():
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(doomed[0] / "out", out)
        (out / "bench.jsonl").write_text("".join(text))
        with pytest.raises(
            ValueError,
            match=r"bench\.jsonl: expected what the manifest says, \d+ bytes, got others\. Nothing was taken",
        ):
            collect.add([out], kept, dirty=True)
        manifest = json.loads((out / "manifest.json").read_text())
        manifest["files"]["bench.jsonl"]["sha256"] = files.content_hash(
            (out / "bench.jsonl").read_bytes()
        )
        (out / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=said.replace(": 1", ":1")):
            collect.add([out], kept, dirty=True)
    (out / "log.txt").unlink()
    with pytest.raises(ValueError, match=r"log\.txt: expected what the manifest says"):
        collect.add([out], kept, dirty=True)
    assert not kept.exists()
    new = collect.add([doomed[0] / "out", doomed[0] / "out" / "bench.jsonl"], kept, dirty=True)
    assert len(new) == len(lines) and collect.add([doomed[0] / "out"], kept, dirty=True) == []
    (file,) = kept.rglob("*.jsonl")
    assert file.relative_to(
        kept
    ).as_posix() == f"{machine.this_machine()['id']}/bench.jsonl" and file.read_text() == "".join(
        lines
    )


def test_an_earlier_run_is_taken_over_only_if_it_is_of_this_code_and_machine_and_as_its_manifest_says(
    doomed, tmp_path
):
    told = json.loads((doomed[0] / "out" / "manifest.json").read_text())
    same = {key: told[key] for key in ("device", "quick", "machine", "source")}

    def refused(change, said, **other):
        shutil.rmtree(tmp_path / "earlier", ignore_errors=True)
        shutil.copytree(doomed[0] / "out", tmp_path / "earlier")
        change(tmp_path / "earlier")
        (tmp_path / "new").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=said):
            takeover.take_over(tmp_path / "earlier", tmp_path / "new", same | other)
        assert not [*(tmp_path / "new").iterdir()]

    def shorter(folder):
        (folder / "bench.jsonl").write_bytes((folder / "bench.jsonl").read_bytes()[:-9])

    def longer(folder):
        with (folder / "log.txt").open("a") as log:
            log.write("more")

    refused(shorter, "resume: expected bench.jsonl as the manifest says")
    refused(longer, "resume: expected log.txt as the manifest says")
    refused(
        lambda folder: (folder / "manifest.json").unlink(),
        "resume: expected a folder that .* without manifest.json",
    )
    refused(
        lambda folder: (folder / "manifest.json").write_text("{"),
        "resume: .* got another manifest.json",
    )
    refused(lambda folder: None, "resume: .* got one of another source", source="another")
    gpu = {"name": "NVIDIA H100", "memory.total": "81559 MiB", "compute_cap": "9.0"}
    refused(
        lambda folder: None,
        "resume: .* got one of another machine",
        machine={**same["machine"], "gpus": [gpu]},
    )
    host = {
        **same["machine"],
        "id": "another",
        "ram_gib": 1,
    }  # another host with the same GPU is the same kind
    assert takeover.hardware({**host, "gpus": [gpu]}) == takeover.hardware(
        {**same["machine"], "gpus": [gpu]}
    )
    edit(
        tmp_path / "earlier", state="running"
    )  # killed since the manifest was written: files may have grown
    longer(tmp_path / "earlier")
    takeover.take_over(tmp_path / "earlier", tmp_path / "new", same)
    assert (tmp_path / "new" / "log.txt").read_text().endswith("more")
    with pytest.raises(ValueError, match="out: expected an empty folder with --resume"):
        takeover.take_over(tmp_path / "earlier", tmp_path / "new", same)


def test_a_disk_that_is_full_while_an_earlier_run_is_taken_over_leaves_no_half_of_it(
    doomed, tmp_path, monkeypatch
):
    told = json.loads((doomed[0] / "out" / "manifest.json").read_text())
    same = {key: told[key] for key in ("device", "quick", "machine", "source")}
    write = Path.write_bytes

    def full(path, data):
        write(path, data[:10])
        if path.name == "bench.jsonl":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        takeover.take_over(doomed[0] / "out", tmp_path, same)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("content", ["", "[]", '{"parts": [', '{"parts": 1}'])
def test_a_folder_with_a_broken_manifest_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(
        ValueError,
        match="^out: expected a new folder, or one to go on with, got one with a broken manifest.json",
    ):
        supervisor.share(tmp_path, device="cpu", minutes=1, say=bool)
