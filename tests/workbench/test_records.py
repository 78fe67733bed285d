"""Records: what is written is what was measured, comes back unchanged, and says so when it does not."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from asrkit import files as kept
from asrkit.workbench import collect, machine, records, schemas
from asrkit.workbench.records import Measurement


def ratio(**fields):
    given = {
        "what": "demo",
        "metric": "ratio",
        "unit": "x",
        "value": 1.5,
        "samples": (1.4, 1.5, 1.9),
    } | fields
    return Measurement(**given)


def test_a_record_holds_quartiles_machine_software_code_time_and_its_own_hash():
    sealed = ratio(warmup=2).sealed()
    assert sealed["stats"] == {"n": 3, "warmup": 2, "min": 1.4, "p25": 1.45, "p50": 1.5, "p75": 1.7}
    assert sealed["machine"]["id"] == machine.this_machine()["id"] and sealed["software"]["torch"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", sealed["captured_at"])
    body = {key: value for key, value in sealed.items() if key != "content_sha256"}
    assert sealed["content_sha256"] == kept.content_hash(body) and records.problem(sealed) == ""


def test_a_measurement_is_sealed_once_and_its_record_cannot_be_changed_from_outside():
    measurement = ratio()
    first = measurement.sealed()
    first["machine"]["id"] = "other"
    assert measurement.sealed()["machine"]["id"] == machine.this_machine()["id"]
    assert records.problem(measurement.sealed()) == "" and records.problem(first)


@pytest.mark.parametrize("fields", [
    {"value": float("nan")}, {"value": np.float32("inf")}, {"value": "1.5"}, {"value": None}, {"samples": (1.0, float("inf"))},
    {"samples": ("a",)}, {"params": {"T": float("nan")}}, {"params": {"model": object()}}, {"params": {"x": torch.zeros(2)}},
])  # fmt: skip
def test_what_is_no_finite_number_is_refused_at_birth(fields):
    with pytest.raises(ValueError, match="expected"):
        ratio(**fields)


@pytest.mark.parametrize(
    "value", [np.float32(1.5), np.float64(1.5), np.array(1.5), torch.tensor(1.5)]
)
def test_scalars_of_numpy_and_torch_are_numbers(value):
    sealed = ratio(value=value, samples=()).sealed()
    assert type(sealed["value"]) is float and sealed["value"] == 1.5 and sealed["stats"]["n"] == 1


def test_a_notebook_saved_by_a_browser_keeps_the_hash_valid():
    sealed = ratio(value=2.0, samples=(2.0, 2.0)).sealed()
    browser = json.loads(re.sub(r"(?<![\d.])2\.0(?=[,\]}])", "2", json.dumps(sealed)))
    assert browser == sealed and records.problem(browser) == ""
    assert kept.content_hash({"a": 1, "b": [2.0, -0.0]}) == kept.content_hash(
        {"b": [2, 0], "a": 1.0}
    )
    assert kept.content_hash(1.5) != kept.content_hash(1.25)


def test_the_machine_is_named_without_names_of_people_hosts_or_updates():
    found = machine.this_machine()
    text = json.dumps(found)
    assert (
        re.fullmatch("[0-9a-f]{12}", found["id"])
        and 1 <= found["cpu_usable"] <= found["cpu_logical"]
    )
    assert os.uname().nodename not in text and os.uname().release not in text
    assert found["ram_gib"] >= 1 and isinstance(found["gpus"], list)


@pytest.fixture
def gpu_machine(tmp_path, monkeypatch):
    """`machine()` beside a stand-in nvidia-smi that prints the given lines."""

    def build(printed, status=0):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\nprintf '{printed}'\nexit {status}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return machine.this_machine.__wrapped__()

    return build


def test_gpus_are_listed_their_serials_hashed_and_a_driver_update_keeps_the_id(gpu_machine):
    line = "NVIDIA H200, 143771 MiB, 9.0, 700.00 W, {}, GPU-{}\\n"
    found = gpu_machine(line.format("570.1", "a") + line.format("570.1", "b"))
    assert [gpu["name"] for gpu in found["gpus"]] == [
        "NVIDIA H200"
    ] * 2 and "GPU-" not in json.dumps(found)
    assert found["gpus"][0]["uuid"] != found["gpus"][1]["uuid"]
    updated = gpu_machine(line.format("580.2", "a") + line.format("580.2", "c"))
    assert updated["id"] == found["id"] != machine.this_machine()["id"]
    assert (
        gpu_machine(line.format("570.1", "a"))["id"] != found["id"]
    )  # one GPU is another machine than two


def test_an_nvidia_smi_without_a_driver_means_no_gpu(gpu_machine):
    assert gpu_machine("NVIDIA-SMI has failed\\n", 9)["gpus"] == []
    assert gpu_machine("No devices were found\\n")["gpus"] == []


def test_the_command_line_is_kept_without_its_folders(monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["/srv/ann lee/bin/asrkit", "--out=/srv/ann/x", r"C:\Users\ann\y.wav", "-q"]
    )
    assert machine.code.__wrapped__()["argv"] == ["asrkit", "--out=x", "y.wav", "-q"]


def test_an_installed_package_reports_no_commit_of_the_repository_around_it(monkeypatch, tmp_path):
    assert machine.code.__wrapped__()["commit"] or not (kept.HERE.parent / ".git").exists()
    monkeypatch.setattr(kept, "HERE", tmp_path / "asrkit")
    found = machine.code.__wrapped__()
    assert (found["commit"], found["dirty"]) == (None, None)


def test_home_follows_the_environment_and_exists(monkeypatch, tmp_path):
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path / "a" / "b"))
    assert kept.home() == tmp_path / "a" / "b" and kept.home().is_dir()


def test_shipped_finds_data_and_says_what_it_lacks():
    assert kept.shipped("claims.yaml").is_file()
    with pytest.raises(FileNotFoundError, match="ships no 'nothing'"):
        kept.shipped("nothing")


def test_an_atomic_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with kept.atomic(path) as part:
        assert part.parent == path.parent and part.suffix == ".txt" and not path.exists()
        part.write_text("whole")
    with pytest.raises(RuntimeError), kept.atomic(path) as part:  # noqa: PT012
        part.write_text("half")
        raise RuntimeError
    assert path.read_text() == "whole" and [entry.name for entry in path.parent.iterdir()] == [
        "a.txt"
    ]


def test_what_is_appended_is_read_back_and_verifies(tmp_path):
    path = tmp_path / "machine" / "a.jsonl"
    records.append(path, ratio(), ratio(value=2.0, samples=()))
    records.append(path, ratio(what="other").sealed())
    assert [record["what"] for record in records.read(path)] == ["demo", "demo", "other"]
    assert records.read(tmp_path) == records.read(path) and records.verify([tmp_path, path]) == []


def test_a_changed_value_is_detected_left_out_and_cannot_be_appended(tmp_path):
    path = tmp_path / "a.jsonl"
    records.append(path, ratio(), ratio(what="honest"))
    path.write_text(path.read_text().replace('"value": 1.5', '"value": 9.5', 1))
    assert records.verify([path]) == [f"{path}:1: changed after it was sealed"]
    with pytest.warns(UserWarning, match="left out .*a.jsonl:1"):
        assert [record["what"] for record in records.read(path)] == ["honest"]
    with pytest.raises(ValueError, match="changed"):
        records.append(path, ratio().sealed() | {"value": 3})


@pytest.mark.parametrize("line", ["{}", "[]", "3", "null", '{"value": NaN}', '{"half'])
def test_a_line_that_is_no_record_is_reported(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    assert len(records.verify([path])) == 1


def test_a_line_torn_by_a_crash_is_reported_skipped_and_swallows_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    records.append(path, ratio())
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match=":2: torn"):
        assert len(records.read(path)) == 1
    records.append(path, ratio(what="later"))
    assert records.verify([path]) == [f"{path}:2: torn, no whole JSON"]
    with pytest.warns(UserWarning, match="torn"):
        assert [record["what"] for record in records.read(path)] == ["demo", "later"]


def write_many(path, name):
    for _ in range(40):
        records.append(path, ratio(what=name, params={"filler": "x" * 5000}))


def test_processes_that_append_at_once_lose_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(path, f"writer{i}")) for i in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = [record["what"] for record in records.read(path)]
    assert found.count("writer0") == found.count("writer1") == 40 and records.verify([path]) == []


def test_a_writer_killed_in_the_middle_leaves_whole_records_only(tmp_path):
    path = tmp_path / "a.jsonl"
    program = "from asrkit.workbench.records import *; m = Measurement('k', 'm', 's', 1.0)\nwhile True: append('a.jsonl', m)"
    writer = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(kept.HERE.parent)},
    )
    deadline = time.monotonic() + 20
    while (not path.exists() or path.stat().st_size < 20000) and time.monotonic() < deadline:
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert records.read(path) and records.verify([path]) == []


def test_a_published_record_is_one_line_to_read_and_a_whole_record_to_collect(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    measurement = ratio(impl="fast")
    records.publish(measurement)
    records.publish(measurement.sealed())
    assert (
        shown == [{records.MIME: measurement.sealed(), "text/plain": "demo: ratio 1.5 x fast"}] * 2
    )


def test_importing_records_needs_the_standard_library_only_and_runs_nothing():
    program = "import sys, asrkit.workbench.records; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'yaml')))"
    assert subprocess.run([sys.executable, "-c", program], cwd=kept.HERE.parent).returncode == 0


def test_a_line_of_endless_brackets_is_torn_not_a_crash(tmp_path):
    (tmp_path / "a.jsonl").write_text("[" * 100_000 + "\n")
    assert records.verify([tmp_path]) == [f"{tmp_path / 'a.jsonl'}:1: torn, no whole JSON"]


@pytest.fixture
def measured_by(monkeypatch):
    """measured_by(**code): a file's worth of records, measured by such code."""

    def of(path, **code):
        monkeypatch.setattr(
            records,
            "code",
            lambda: {"commit": None, "dirty": None, "argv": [], "source": "", **code},
        )
        records.append(path, ratio(what=f"of {code}"))
        return path

    return of


def test_only_records_of_code_that_a_commit_here_holds_are_taken_in(measured_by, tmp_path):
    git = ("git", "-C", str(kept.HERE.parent))
    if not (head := machine._output(*git, "rev-parse", "HEAD")):
        pytest.skip("needs a git checkout")
    listed = [
        line.split()
        for line in machine._output(*git, "ls-tree", "-r", head, "--", "asrkit").splitlines()
    ]
    here = machine._source((path, blob) for _, _, blob, path in listed)
    assert machine.commit_of(here) and machine.commit_of("0" * 12) is None
    into, refused = tmp_path / "records", "expected records of"
    good = [{"commit": head, "dirty": False}, {"source": here}]
    bad = [
        {"commit": head, "dirty": True},
        {"commit": "0" * 40, "dirty": False},
        {"source": "0" * 12},
        {},
    ]
    for number, code in enumerate(bad):
        path = measured_by(tmp_path / f"bad-{number}.jsonl", **code)
        with pytest.raises(ValueError, match=refused):
            collect.add([path], into)
        assert not into.exists()
    for number, code in enumerate(good):
        assert len(collect.add([measured_by(tmp_path / f"good-{number}.jsonl", **code)], into)) == 1
    mixed = [
        tmp_path / "bad-0.jsonl",
        measured_by(tmp_path / "more.jsonl", **good[0], argv=["new"]),
    ]
    with pytest.raises(ValueError, match=refused):
        collect.add(mixed, into)
    assert (
        len(records.read(into)) == 2
        and len(collect.add(mixed, into, dirty=True)) == 2
        and len(records.read(into)) == 4
    )


def test_the_hash_of_the_code_is_of_what_git_would_hold(tmp_path):
    blobs = {path.name: machine._blob(path.read_bytes()) for path in kept.HERE.glob("*.py")}
    found = subprocess.run(
        ["git", "hash-object", *map(str, sorted(kept.HERE.glob("*.py")))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert found.stdout.split() == [blobs[name] for name in sorted(blobs)]
    one, other = [("a.py", "1"), ("b.py", "2")], [("b.py", "2"), ("a.py", "1"), ("a.nbi", "3")]
    assert (
        machine._source(one)
        == machine._source(other)
        != machine._source([("a.py", "2"), ("b.py", "2")])
    )


def resealed(record, change):
    """A copy of `record` that somebody changed and hashed again: `change` maps a dotted place to a value, ... takes it away."""
    made = json.loads(json.dumps(record))
    for place, value in change.items():
        *path, last = place.split(".")
        inner = made
        for key in path:
            inner = inner[key]
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
    body = {key: item for key, item in made.items() if key != "content_sha256"}
    return body | {"content_sha256": kept.content_hash(body)}


POISON = [
    {"schema": "asrkit.record/9"}, {"what": None}, {"what": ["x"]}, {"what": "a\x1b[31m\nb: 9"}, {"value": "x"}, {"value": True},
    {"value": 10**400}, {"params": None}, {"params": []}, {"params.arms": 5}, {"params.arms": [5]}, {"samples": {}},
    {"samples": [""]}, {"machine.isa": 5},
    {"stats": {}}, {"stats": None}, {"stats.n": "3"}, {"stats.p25": ...}, {"captured_at": ...}, {"captured_at": "yesterday"},
    {"machine": "x"}, {"machine": None}, {"machine.id": 5}, {"machine.id": "../../elsewhere"}, {"machine.id": "0123456789ab\n"},
    {"machine.gpus": ...}, {"machine.gpus": [{}]}, {"machine.gpus": ["H200"]}, {"machine.cpu_model": ...},
    {"software": ...}, {"software": "x"}, {"code": ...}, {"code": "x"}, {"code.dirty": ...}, {"code.commit": "--help"},
    {"code.commit": "HEAD"}, {"code.source": ["x"]},
]  # fmt: skip


@pytest.mark.parametrize("change", POISON, ids=lambda change: "-".join(change))
def test_what_is_sealed_but_no_record_is_never_read_appended_or_taken_in(tmp_path, change):
    path, bad = tmp_path / "a.jsonl", resealed(ratio().sealed(), change)
    assert records.problem(bad).startswith("no record: " + next(iter(change)).split(".")[0])
    path.write_text(json.dumps(bad) + "\n")
    assert len(records.verify([path])) == 1
    with pytest.warns(UserWarning, match="left out"):
        assert records.read(path) == []
    for take in (
        lambda: records.append(tmp_path / "b.jsonl", bad),
        lambda: collect.add([path], tmp_path / "in", dirty=True),
    ):
        with pytest.raises(ValueError, match="no record"):
            take()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_record_of_before_and_one_of_a_gpu_are_records():
    gpu = {"name": "H200", "memory.total": "143771 MiB", "driver_version": "570.1"}
    for change in (
        {"code.source": ...},
        {"code.commit": None},
        {"machine.gpus": [gpu]},
        {"samples": []},
        {"software.torch": None},
    ):
        assert records.problem(resealed(ratio().sealed(), change)) == ""


def test_no_number_that_json_has_not_is_a_reason_to_raise():
    assert records.problem({**ratio().sealed(), "params": {"x": float("nan")}}).startswith(
        "no record"
    )


def adding(tmp_path, paths, before):
    """A process that adds `paths` to tmp_path/in after it has run `before`."""
    program = f"import os, sys, time\nfrom pathlib import Path\nfrom asrkit.workbench import collect, records\n{before}\n"
    program += "print(len(collect.add(sys.argv[1:], Path('in'), dirty=True)))"
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, paths)], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(kept.HERE.parent)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def measured(path, *machines, times=1, **fields):
    """A file of records, `times` of each machine."""
    with path.open("w") as file:
        for number, machine in enumerate(machines * times):
            made = resealed(
                ratio(what=f"{path.stem}-{number}", **fields).sealed(), {"machine.id": machine}
            )
            file.write(json.dumps(made) + "\n")
    return path


A, B = "a" * 12, "b" * 12
FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
SLOW = "sync = os.fsync; os.fsync = lambda file: (time.sleep({}), sync(file))"


def waited(ready, seconds=20):
    deadline = time.monotonic() + seconds
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.01)
    return ready()


def test_a_disk_that_is_full_is_an_error_and_nothing_is_half_taken(tmp_path):
    path = measured(tmp_path / "a.jsonl", A, times=12, params={"filler": "x" * 3000})
    with path.open("a") as file:
        file.write(json.dumps(resealed(ratio().sealed(), {"machine.id": B})) + "\n")
    added = adding(tmp_path, [path], FULL)
    assert "OSError" in added.communicate(timeout=60)[1] and added.returncode
    assert not [*(tmp_path / "in").rglob("*.jsonl")]
    added = adding(
        tmp_path, [path], FULL + "\nrecords.append('out.jsonl', *records.read(sys.argv[1]))"
    )
    assert "OSError" in added.communicate(timeout=60)[1] and added.returncode


def test_two_that_add_at_once_lose_nothing(tmp_path):
    slow = adding(tmp_path, [measured(tmp_path / "a.jsonl", A)], SLOW.format(1))
    assert waited(lambda: [*(tmp_path / "in").rglob(".bench-*")])
    assert len(collect.add([measured(tmp_path / "b.jsonl", A)], tmp_path / "in", dirty=True)) == 1
    assert slow.communicate(timeout=60)[0] == "1\n"
    assert [record["what"] for record in records.read(tmp_path / "in")] == ["a-0", "b-0"]


@pytest.mark.parametrize(
    "before",
    [
        SLOW.format(60),
        "move = os.replace; os.replace = lambda *at: (move(*at), os.kill(os.getpid(), 9))",
    ],
)
def test_an_addition_that_is_killed_is_finished_by_the_next(tmp_path, before):
    path, into = measured(tmp_path / "a.jsonl", A, B), tmp_path / "in"
    killed = adding(tmp_path, [path], before)
    assert waited(lambda: [*into.rglob(".bench-*")]) or killed.poll() is not None
    if "sleep" in before:
        killed.kill()
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    had = len(records.read(into))
    assert (
        had == (0 if "sleep" in before else 1)
        and [*into.rglob(".bench-*")]
        and records.verify([into]) == []
    )
    assert len(collect.add([path], into, dirty=True)) == 2 - had
    assert sorted(record["machine"]["id"] for record in records.read(into)) == [A, B] and not [
        *into.rglob(".bench-*")
    ]


@pytest.mark.parametrize(
    "hinder",
    [lambda at: (at / B / "bench.jsonl").mkdir(parents=True), lambda at: (at / B).write_text("x")],
)
def test_where_one_machine_cannot_be_written_none_is(tmp_path, hinder):
    path, into = measured(tmp_path / "a.jsonl", A, B, A), tmp_path / "in"
    into.mkdir()
    hinder(into)
    with pytest.raises((ValueError, OSError), match=B):
        collect.add([path], into, dirty=True)
    assert (
        records.read(into) == [] and records.verify([into]) == [] and not [*into.rglob(".bench-*")]
    )


def test_a_folder_one_holds_is_lent_to_nobody_else_until_it_ends(tmp_path):
    with (
        kept.lock(tmp_path / "out"),
        pytest.raises(ValueError, match="out: expected a folder that nobody else writes"),
    ):
        kept.lock(tmp_path / "out").__enter__()
    with kept.lock(tmp_path / "out"):
        assert [path.name for path in (tmp_path / "out").iterdir()] == [kept.LOCK]


def test_a_folder_that_cannot_be_locked_is_named(tmp_path):
    (tmp_path / kept.LOCK).mkdir()  # an error for every account, root too
    for folder in (tmp_path, "/proc/none"):
        with (
            pytest.raises(OSError, match=f"^{folder}: expected a folder that can be written to"),
            kept.lock(Path(folder)),
        ):
            pass


HOLDER = """
import sys, time
from pathlib import Path
from asrkit.files import lock
with lock(Path("out")):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_ends_with_its_process_even_when_that_is_killed(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(kept.HERE.parent)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(ValueError, match="in use"),
            kept.lock(tmp_path / "out", refused="in use"),
        ):
            pass
        holder.kill()
    with kept.lock(tmp_path / "out"):
        pass


def test_a_bare_machine_reads_its_records_and_refuses_to_verify_or_add_any(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    monkeypatch.setitem(sys.modules, "fastjsonschema", None)
    schemas.record_validator.cache_clear()
    try:
        records.append(path, ratio())
        assert len(records.read(path)) == 1
        assert records.problem(ratio().sealed() | {"value": 9.0}) == "changed after it was sealed"
        assert records.problem([]) == "no record"
        for check in (
            records.verify,
            lambda paths: collect.add(paths, tmp_path / "in", dirty=True),
        ):
            with pytest.raises(ValueError, match="expected the package fastjsonschema"):
                check([path])
    finally:
        schemas.record_validator.cache_clear()


def test_an_atomic_file_replaces_a_file_and_nothing_else(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with (
            pytest.raises(ValueError, match=f"{name}: expected a file"),
            kept.atomic(tmp_path / name) as part,
        ):
            part.write_text("x")
    assert (tmp_path / "pipe").is_fifo() and len([*tmp_path.iterdir()]) == 2


def delivered(folder, lines, **change):
    """A folder as a share leaves it, its manifest changed."""
    folder.mkdir()
    for name in records.FILES:
        (folder / name).write_bytes(lines if name == "bench.jsonl" else b"")
    held = {name: (folder / name).read_bytes() for name in records.FILES}
    told = {
        name: {"bytes": len(data), "sha256": kept.content_hash(data)} for name, data in held.items()
    }
    manifest = {
        "schema": "asrkit.share/1",
        "state": "ended",
        "quick": False,
        "files": told,
    } | change
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    "text", ["[]", "null", '"x"', '{"state": "end', "\udcff", "[" * 100_000, "{}"]
)
def test_a_folder_without_a_whole_manifest_is_refused_by_name(tmp_path, text):
    folder = delivered(tmp_path / "out", b"")
    (folder / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(
        ValueError, match=r"out/manifest\.json: expected what `bench all --minutes` wrote"
    ):
        collect.add([folder], tmp_path / "in")


def test_a_manifest_names_its_own_files_and_each_with_its_hash(tmp_path):
    line = json.dumps(ratio().sealed()).encode() + b"\n"
    told = json.loads((delivered(tmp_path / "good", line) / "manifest.json").read_text())["files"]
    assert len(collect.add([tmp_path / "good"], tmp_path / "in", dirty=True)) == 1
    os.mkfifo(tmp_path / "secret")  # to open it would wait for ever
    lies = [
        None,
        ["bench.jsonl"],
        {**told, "bench.jsonl": {}},
        {**told, "log.txt": "x"},
        {**told, "log.txt": {"bytes": 0, "sha256": 5}},
    ]
    for number, files in enumerate([*lies, {**told, "log.txt": ...}]):
        files = (
            {name: one for name, one in files.items() if one is not ...}
            if isinstance(files, dict)
            else files
        )
        with pytest.raises(ValueError, match=r"manifest\.json: expected .* another files"):
            collect.add(
                [delivered(tmp_path / f"bad-{number}", line, files=files)],
                tmp_path / "in",
                dirty=True,
            )
    other = delivered(
        tmp_path / "other",
        line,
        files={**told, "../secret": {"bytes": 1, "sha256": "sha256:" + "0" * 64}},
    )
    assert collect.add([other], tmp_path / "in", dirty=True) == []


# ---- records from before label_looping became the published algorithm's name


def sealed_before_the_renaming(**fields):
    """A record of schema 1, sealed as it was then."""
    body = {key: part for key, part in ratio(**fields).sealed().items() if key != "content_sha256"}
    body["schema"] = records.FIRST_SCHEMA
    return body | {"content_sha256": kept.content_hash(body)}


def read_back(path, record):
    records.append(path, record)
    before = path.read_bytes()
    (found,) = records.read(path)
    assert path.read_bytes() == before and records.verify([path]) == []
    return found


@pytest.mark.parametrize(("then", "today"), [
    ("label_looping", "windowed_looping"), ("nested_loops", "label_looping"), ("frame_looping", "frame_looping"),
    ("label_looping_full_plain", "windowed_looping_full_plain"), ("only_label_looping", "only_windowed_looping"),
    ("to_label_looping", "to_windowed_looping"), ("label_looping, graphs=step, fused", "windowed_looping, graphs=step, fused"),
    ("nemo_label_looping", "nemo_label_looping"), ("nemo_label_looping_graphs", "nemo_label_looping_graphs"),
])  # fmt: skip
def test_an_old_record_is_read_with_todays_names_and_its_file_is_left_alone(tmp_path, then, today):
    params = {"arms": ["nemo_label_looping", then], "ms": {then: 1.5}, "claim": "label-looping-2x"}
    old = sealed_before_the_renaming(impl=then, params=params)
    found = read_back(tmp_path / "bench.jsonl", old)
    assert found["impl"] == today
    assert found["params"] == {
        "arms": ["nemo_label_looping", today],
        "ms": {today: 1.5},
        "claim": "label-looping-2x",
    }
    same = {key: part for key, part in old.items() if key not in ("impl", "params")}
    assert {key: found[key] for key in same} == same  # its schema and hash too


def test_names_are_replaced_once_however_often_it_is_asked_for(tmp_path):
    for name in ("nested_loops", "label_looping"):
        found = read_back(tmp_path / name, sealed_before_the_renaming(impl=name))
        assert records.with_current_names(found) == found


@pytest.mark.parametrize("name", ["label_looping", "windowed_looping", "nemo_label_looping"])
def test_a_record_of_today_is_read_as_it_was_sealed(tmp_path, name):
    sealed = ratio(impl=name, params={"arms": [name, "frame_looping"]}).sealed()
    assert sealed["schema"] == records.SCHEMA
    assert read_back(tmp_path / "bench.jsonl", sealed) == sealed


def test_an_old_record_is_added_as_it_was_sealed_and_only_once(tmp_path):
    old = sealed_before_the_renaming(impl="label_looping")
    source, into = tmp_path / "old.jsonl", tmp_path / "records"
    records.append(source, old)
    assert [one["content_sha256"] for one in collect.add([source], into, dirty=True)] == [
        old["content_sha256"]
    ]
    assert collect.add([source], into, dirty=True) == []
    (line,) = (into / old["machine"]["id"] / "bench.jsonl").read_text().splitlines()
    assert json.loads(line) == old
