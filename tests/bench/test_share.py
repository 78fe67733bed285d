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

from asrkit import records
from asrkit.bench import SUITES, share
from asrkit.bench.checks import Check
from asrkit.bench.share import PARTS

ROOT = Path(records.HERE).parent
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
from asrkit import bench
from asrkit.bench import checks, share
from asrkit.bench.cases import Case
from asrkit.bench.checks import Check
from asrkit.bench.share import Part
from asrkit import records
told = {**records.code(), "source": "of a test"}
records.code = lambda: told
WAIT = Path(HERE) / "wait"
torch.set_num_threads(1)
def dies(): os.kill(os.getpid(), signal.SIGSEGV)
def hangs(): time.sleep(1000)
def wrong(): raise AssertionError("2 apart")
def lacks(): import nowhere_to_be_found
table = [Check("a", "before", "", int), Check("a", "dies", "^doomed$", dies), Check("a", "after", "", int),
         Check("b", "hangs", "^never$", hangs), Check("c", "wrong", "^slow$", wrong), Check("c", "lacks", "", lacks)]
checks.table = lambda device: table
share.CHECK_S = 2
share.GRACE_S = 1
def case(name, **arms):
    arms = {arm: (lambda: (torch.ones(3),)) for arm in ("plain", "slow", "fast")} | arms
    return Case(what=name, arms=arms, params={"shape": [3], "dtype": "float32"}, ratios=[("plain", "fast"), ("slow", "fast")])
def good(device, quick):
    yield case("good-1")
    (Path(HERE) / "pid").write_text(str(os.getpid()))
    while WAIT.exists(): time.sleep(0.05)
    yield case("good-2")
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
suites = {"good": good, "dead": dead, "raises": raises, "differs": differs, "hung": hung}
bench.SUITES.clear()
bench.SUITES.update(suites)
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
        "PYTHONPATH": names.get("HERE", ""),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment, cwd=script.parent,
    )  # fmt: skip


def ended(process, timeout=300):
    out, err = process.communicate(timeout=timeout)
    assert "Traceback" not in err, err
    assert out, err
    return json.loads(out.splitlines()[-1]), out, err


def edit(out, **told):
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | told))


def manifest_of(out):
    """The manifest, which is right about the other files."""
    manifest = json.loads((out / "manifest.json").read_text())
    assert {path.name for path in out.iterdir()} == FILES
    for name, told in manifest["files"].items():
        data = (out / name).read_bytes()
        assert (told["bytes"], told["sha256"]) == (len(data), records.content_hash(data))
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
            todo += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    owners = packages_distributions()
    return {top for top, several in owners.items() if not {canonicalize_name(name) for name in several} & allowed} - {"asrkit"}


def test_the_options_of_each_part_are_those_that_its_suite_takes():
    for part in PARTS:
        suite = SUITES[part.suite or part.name]
        assert {*part.options} <= {*inspect.signature(suite).parameters}
    assert {part.options["kind"] for part in PARTS if part.suite == "ladder"} == {"rnnt", "tdt", "ctc"}


@pytest.mark.slow
def test_a_bare_copy_without_git_checks_and_measures_itself_and_its_records_are_taken_in(tmp_path):
    """All parts are done long before the minutes are over; on a slow machine the manifest says which are not."""
    blocked = installed_beyond("torch", "torchaudio", "numpy", "numba", "triton")
    assert {"lhotse", "yaml", "tqdm", "matplotlib"} <= blocked
    copy, out = tmp_path / "copy", tmp_path / "share"
    for name in ("asrkit", "data"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "records"))
    arguments = ["bench", "all", "--device", "cpu", "--minutes", "2", "--threads", "1", "--out", out]
    run = start(copy / "run.py", BARE, *arguments, BLOCKED=blocked, HERE=str(copy))
    summary, said, err = ended(run)
    manifest, rows = manifest_of(out), [json.loads(line) for line in (out / "checks.jsonl").read_text().splitlines()]
    assert manifest["state"] == "ended" and manifest["quick"] and manifest["seconds"] <= 120 and run.returncode == 0
    assert manifest["code"]["commit"] is None and manifest["software"]["asrkit"] is not None
    checked = manifest["checks"]
    assert checked["not_passed"] == {} and {*checked["not_checked"].values()} <= {"No module named 'tqdm'", "no time"}
    assert summary["passed"] == checked["passed"] == sum(row["ok"] is True for row in rows) > 0
    statuses = {part["status"] for part in manifest["parts"].values()}
    assert {*manifest["parts"]} == {part.name for part in PARTS} - {"compiled"} and statuses <= {"done", "stopped", "no time"}
    found = records.read(out / "bench.jsonl")
    assert len(found) == summary["records"] == sum(part["records"] for part in manifest["parts"].values())
    assert all(part["records"] for part in manifest["parts"].values() if part["status"] == "done")
    assert all(one["params"].get("quick") for one in found if one["metric"] in ("latency", "ratio"))
    assert " s left] claims" in err and "batching" in said
    with pytest.raises(
        ValueError, match=r"share: expected a run of whole sizes, got a rehearsal: --quick, or on a CPU\. Nothing was"
    ):
        records.add([out], tmp_path / "records", dirty=True)
    kept = tmp_path / "records"
    shutil.copytree(ROOT / "data" / "records", kept)
    command = [sys.executable, "-m", "asrkit.cli"]
    added = subprocess.run(
        [*command, "records", "add", str(out / "bench.jsonl"), "--into", str(kept), "--dirty"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert json.loads(added.stdout.splitlines()[-1])["added"] == len(found)
    files = map(str, kept.rglob("*.jsonl"))
    verified = subprocess.run([*command, "verify", *files], capture_output=True, text=True, cwd=ROOT, check=True)
    assert json.loads(verified.stdout.splitlines()[-1])["problems"] == 0


@pytest.fixture(scope="module")
def doomed(tmp_path_factory):
    """A share in which checks and suites die, hang, raise and differ, and what it printed; it says that it was no rehearsal."""
    folder = tmp_path_factory.mktemp("doomed")
    run = start(folder / "run.py", DOOMED, "bench", "all", "--minutes", "2", "--out", folder / "out", HERE=str(folder))
    done = ended(run)
    assert json.loads((folder / "out" / "manifest.json").read_text())["quick"]
    edit(folder / "out", quick=False)
    return folder, *done, run.returncode


def test_what_dies_hangs_raises_or_differs_does_not_stop_the_rest_and_is_named(doomed):
    folder, summary, said, err, code = doomed
    manifest = manifest_of(folder / "out")
    why = manifest["checks"]["not_passed"]
    assert why.pop("dies") == "the process died of SIGSEGV" and why.pop("hangs") == "took longer than 2 s"
    assert why.pop("wrong") == "AssertionError: 2 apart" and not why
    assert manifest["checks"]["not_checked"] == {"lacks": "No module named 'nowhere_to_be_found'"}
    assert summary["passed"] == 2 and code == 1
    parts = {name: (part["status"], part["why"]) for name, part in manifest["parts"].items()}
    assert parts["good"] == ("done", "") and parts["dead"] == ("died", "the process died of SIGSEGV")
    assert parts["raises"] == ("failed", "RuntimeError: no such kernel")
    assert parts["differs"][0] == "disagreed" and "fast disagrees with plain" in parts["differs"][1]
    assert parts["hung"] == ("died", "killed: out of time") and parts["absent"][0] == "not measured", err
    assert manifest["state"] == "ended" and manifest["seconds"] < 120
    for text in ("not passed: wrong: AssertionError: 2 apart", "dead: died, "):
        assert text in err and text in (folder / "out" / "log.txt").read_text()
    assert re.search(r"^hung +died", said, re.MULTILINE)
    measured = {one["what"] for one in records.read(folder / "out" / "bench.jsonl")}
    assert measured == {"good-1", "good-2", "dead-1", "raises-1", "differs-2", "hung-1"}


def test_what_failed_its_check_is_not_measured(doomed):
    found = records.read(doomed[0] / "out" / "bench.jsonl")
    assert {one["impl"] for one in found} == {"plain", "fast"}
    assert {tuple(one["params"]["arms"]) for one in found if one["metric"] == "ratio"} == {("plain", "fast")}
    assert json.loads((doomed[0] / "out" / "manifest.json").read_text())["left_out"] == ["^doomed$", "^never$", "^slow$"]


def test_a_run_killed_outright_leaves_nothing_behind_and_goes_on_where_it_was(tmp_path, monkeypatch):
    out, arguments = tmp_path / "out", ("bench", "all", "--minutes", "2", "--out", tmp_path / "out")
    (tmp_path / "wait").touch()
    text = DOOMED.replace('[*suites, "absent"]', '["good"]').replace("table = [", "table = [Check('a', 'fine', '', int)] or [")
    run = start(tmp_path / "run.py", text, *arguments, HERE=str(tmp_path))
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int((tmp_path / "pid").read_text())
    with pytest.raises(ValueError, match=r"out: expected a folder that nobody else writes to now\."):
        share.share(out, device="cpu", minutes=2)
    run.send_signal(signal.SIGKILL)
    run.communicate(timeout=60)
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
    first = records.read(out / "bench.jsonl")
    assert {one["what"] for one in first} == {"good-1"} and json.loads((out / "manifest.json").read_text())["state"] == "running"
    with pytest.raises(
        ValueError, match=r"expected a run that has ended\. Run its command again to go on, or add .*bench.jsonl\.$"
    ):
        records.add([out], tmp_path / "records")
    with (out / "bench.jsonl").open("a") as file:
        file.write('{"schema": "asrkit.rec')  # as a full disk or a lost machine leaves it
    (tmp_path / "wait").unlink()
    summary, _, err = ended(start(tmp_path / "run.py", text, *arguments, HERE=str(tmp_path)))
    assert summary["parts"] == {"good": "done"} and "1 passed before" in err and "good, for" in err
    assert f"left out bench.jsonl:{len(first) + 1}: torn" in err and records.verify([out / "bench.jsonl"]) == []
    found = records.read(out / "bench.jsonl")
    assert found[: len(first)] == first and len(found) == 2 * len(first)
    assert {one["what"] for one in found} == {"good-1", "good-2"}
    with pytest.raises(
        ValueError, match=r"^out: expected a new folder, or one to go on with, got one of another source\. Name another folder\.$"
    ):
        share.share(out, device="cpu", minutes=2)
    said, told = [], {**records.code(), "source": "of a test"}
    monkeypatch.setattr(records, "code", lambda: told)
    monkeypatch.setattr(share, "PARTS", (share.Part("good", 1, ""),))
    monkeypatch.setattr(share.checks, "table", lambda device: [Check("a", "fine", "", int)])
    share.share(out, device="cpu", minutes=2, say=said.append)
    assert said[-1].endswith("good: done before") and records.read(out / "bench.jsonl") == found
    assert manifest_of(out)["state"] == "ended"
    (out / "bench.jsonl").write_bytes((out / "bench.jsonl").read_bytes()[:-9])
    share.share(out, device="cpu", minutes=2, say=said.append)  # what was lost may be of any part
    assert "good: done before" not in said[-1] and records.read(out / "bench.jsonl") == found[:-1] and manifest_of(out)


def test_what_was_changed_or_torn_on_the_way_is_refused_by_name_and_nothing_is_taken(doomed, tmp_path):
    kept, out = tmp_path / "records", tmp_path / "out"
    lines = (doomed[0] / "out" / "bench.jsonl").read_text().splitlines(keepends=True)
    spoilt = {
        "bench.jsonl: 1: changed": [lines[0].replace('"origin": "measured"', '"origin": "Measured"'), *lines[1:]],
        f"bench.jsonl:{len(lines)}: torn": [*lines[:-1], lines[-1][:50]],
        "bench.jsonl:2: no record": [lines[0], '{"a": 1}\n', *lines[1:]],
    }
    for said, text in spoilt.items():
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(doomed[0] / "out", out)
        (out / "bench.jsonl").write_text("".join(text))
        with pytest.raises(
            ValueError, match=r"bench\.jsonl: expected what the manifest says, \d+ bytes, got others\. Nothing was taken"
        ):
            records.add([out], kept, dirty=True)
        manifest = json.loads((out / "manifest.json").read_text())
        manifest["files"]["bench.jsonl"]["sha256"] = records.content_hash((out / "bench.jsonl").read_bytes())
        (out / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ValueError, match=said.replace(": 1", ":1")):
            records.add([out], kept, dirty=True)
    (out / "log.txt").unlink()
    with pytest.raises(ValueError, match=r"log\.txt: expected what the manifest says"):
        records.add([out], kept, dirty=True)
    assert not kept.exists()
    new = records.add([doomed[0] / "out", doomed[0] / "out" / "bench.jsonl"], kept, dirty=True)
    assert len(new) == len(lines) and records.add([doomed[0] / "out"], kept, dirty=True) == []
    (file,) = kept.rglob("*.jsonl")
    assert file.relative_to(kept).as_posix() == f"{records.machine()['id']}/bench.jsonl" and file.read_text() == "".join(lines)
