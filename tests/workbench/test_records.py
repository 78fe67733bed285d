"""Records are written as measured, and read back unchanged."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from asrkit import files as kept
from asrkit.workbench import machine, records
from asrkit.workbench.records import Measurement


def ratio(samples=(1.4, 1.5, 1.9), value=1.5, **more):
    given = {"what": "demo", "metric": "ratio", "unit": "x"} | more
    return Measurement(value=value, samples=samples, **given)


def test_newest_run_returns_the_last_run_by_implementation():
    def made(second, commit, impl, T=2):
        record = ratio(impl=impl, params={"T": T}).record()
        record["code"]["commit"] = commit
        return record | {"captured_at": f"2026-01-01T00:00:0{second}Z"}

    old = [made(1, "a", "slow"), made(1, "a", "gone"), made(4, "c", "slow", T=3)]
    slow, fast = made(2, "b", "slow"), made(3, "b", "fast")
    last = records.newest_run([*old, slow, fast], "demo", metric="ratio", T=2)
    assert last == {"slow": slow, "fast": fast}
    with pytest.raises(ValueError, match="expected a record of demo with {'T': 9}"):
        records.newest_run(old, "demo", metric="ratio", T=9)


@pytest.mark.parametrize(("dirty", "gpus", "shown"), [
    (True, [], "A CPU, commit 1a2b3c4 with changes"),
    (False, [{"name": "A card"}], "A card, commit 1a2b3c4"),
])  # fmt: skip
def test_a_record_is_shown_with_its_card_and_commit(dirty, gpus, shown):
    record = ratio().record()
    record["code"] |= {"commit": "1a2b3c4d5e", "dirty": dirty}
    record["machine"] |= {"cpu_model": "A CPU", "gpus": gpus}
    assert records.measured_on(record) == shown


@pytest.mark.parametrize("fields", [
    {"value": np.float32("inf")},
    {"value": "1.5"},
    {"value": None},
    {"samples": (1.0, float("nan"))},
    {"params": {"x": torch.zeros(2)}},
])  # fmt: skip
def test_a_measurement_refuses_values_that_are_not_finite(fields):
    with pytest.raises(ValueError, match="expected"):
        ratio(**fields)


def test_the_machine_is_named_without_names_of_people_hosts_or_updates():
    found = machine.this_machine()
    text = json.dumps(found)
    assert re.fullmatch("[0-9a-f]{12}", found["id"])
    assert 1 <= found["cpu_usable"] <= found["cpu_logical"]
    assert os.uname().nodename not in text and os.uname().release not in text


@pytest.fixture
def gpu_machine(tmp_path, monkeypatch):
    """`this_machine()` with a fake nvidia-smi that lists GPUs with this driver."""
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def build(driver, *serials):
        line = f"NVIDIA H200, 143771 MiB, 9.0, 700.00 W, {driver}, GPU-"
        tool.write_text(
            "\n".join(["#!/bin/sh", *(f"echo {line}{one}" for one in serials)])
        )
        tool.chmod(0o755)
        return machine.this_machine.__wrapped__()

    return build


def test_gpus_are_listed_their_serials_hashed_and_a_driver_update_keeps_the_id(
    gpu_machine,
):
    found = gpu_machine("570.1", "a", "b")
    first, second = found["gpus"]
    assert first["name"] == second["name"] == "NVIDIA H200"
    assert first["uuid"] != second["uuid"] and "GPU-" not in json.dumps(found)
    assert gpu_machine("580.2", "a", "c")["id"] == found["id"]
    assert found["id"] != machine.this_machine()["id"]
    assert found["id"] != gpu_machine("570.1", "a")["id"]


def test_the_command_line_is_kept_without_its_folders(monkeypatch):
    typed = ["/srv/ann lee/bin/asrkit", "--out=/srv/ann/x", r"C:\Users\ann\y.wav", "-q"]
    monkeypatch.setattr(sys, "argv", typed)
    assert machine.code.__wrapped__()["argv"] == ["asrkit", "--out=x", "y.wav", "-q"]


def test_an_atomic_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "new/a.txt"
    with kept.atomic(path) as part:
        assert (part.parent, part.suffix) == (path.parent, ".txt")
        assert not path.exists()
        part.write_text("whole")
    with pytest.raises(RuntimeError), kept.atomic(path) as part:  # noqa: PT012
        part.write_text("half")
        raise RuntimeError
    assert path.read_text() == "whole"
    assert [*path.parent.iterdir()] == [path]


def test_a_published_record_is_one_line_to_read_and_a_whole_record_to_collect(
    monkeypatch,
):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    measurement = ratio(impl="fast")
    record = measurement.record()
    for published in (measurement, record):
        records.publish(published)
    assert shown == [{records.MIME: record, "text/plain": "demo: ratio 1.5 x fast"}] * 2


HOLDER = """
import sys, time
from pathlib import Path
from asrkit.files import lock
with lock(Path("out")):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_is_locked_until_its_process_ends_or_is_killed(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(kept.HERE.parent)},
        stdout=subprocess.PIPE,
        text=True,
    )
    folder = tmp_path / "out"
    with holder:
        assert holder.stdout.readline() == "held\n"
        wanted = "out: expected a folder that no other process writes"
        with pytest.raises(ValueError, match=wanted), kept.lock(folder):
            pass
        holder.kill()
    with kept.lock(folder):
        assert [path.name for path in folder.iterdir()] == [kept.LOCK]


def changed(**fields):
    """The line of a record with other fields."""
    return json.dumps(ratio().record() | fields)


NOT_RECORDS = [
    ("{}", "'what' is not a str"),
    ("null", "not a record"),
    ('{"half', "incomplete JSON"),
    ("[" * 100_000, "incomplete JSON"),
    (changed(value="9"), "not a finite number"),
    (changed(value=10**400), "not a finite number"),
    (changed(schema="asrkit.record/9"), "'schema' is 'asrkit.record/9'"),
    (changed(samples=None), "'samples' is not a list"),
    (changed(stats={"n": 3, "p25": None, "p50": 1, "p75": 1}), "None is not a finite number"),
    (changed(stats={"n": 3, "p25": float("nan"), "p50": 1, "p75": 1}), "nan is not a finite number"),
    (changed(machine={}), "'machine' has no 'id'"),
    (changed(machine={"id": "x", "gpus": []}), "'machine' has no 'cpu_model'"),
    (changed(what=3), "'what' is not a str"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "why"), NOT_RECORDS, ids=range(len(NOT_RECORDS)))
def test_a_line_that_is_not_a_record_is_left_out_with_its_place_and_the_next_one_is_read(
    tmp_path, line, why
):
    path = tmp_path / "a.jsonl"
    records.append(path, ratio(), ratio(value=2.0, samples=()))
    with path.open("a") as file:
        file.write(line)  # as after a crash: without a line end
    records.append(path, ratio(what="later").record())
    # and a file left over from a killed writer
    records.append(tmp_path / ".a-01234567.jsonl", ratio())
    with pytest.warns(UserWarning, match=f"left out .*a.jsonl:3: .*{why}"):
        found = records.read(tmp_path)
    assert [one["what"] for one in found] == ["demo", "demo", "later"]


def test_a_record_holds_quartiles_machine_software_code_and_time():
    record = ratio(warmup=2).record()
    quartiles = {"p25": 1.45, "p50": 1.5, "p75": 1.7}
    assert record["stats"] == {"n": 3, "warmup": 2, "min": 1.4, **quartiles}
    assert record["machine"] == machine.this_machine() and record["software"]["torch"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["captured_at"])
    assert {*record["code"]} == {"commit", "dirty", "argv"}
    assert records.problem(record) == ""


def test_numbers_of_torch_and_numpy_are_plain_numbers_in_a_record():
    record = ratio(value=torch.tensor(1.5), samples=(np.float32(1.5),)).record()
    assert type(record["value"]) is float and record["samples"] == [1.5]


@pytest.mark.parametrize(("then", "today"), [
    ("nested_loops", "label_looping"),
    ("only_label_looping", "only_windowed_looping"),
    ("label_looping, graphs=step", "windowed_looping, graphs=step"),
    ("nemo_label_looping", "nemo_label_looping"),
])  # fmt: skip
def test_an_old_record_is_read_with_current_names_and_its_file_is_not_changed(
    tmp_path, then, today
):
    def named(name):
        params = {"arms": ["nemo_label_looping", name], "ms": {name: 1.5}}
        return {"impl": name, "params": params | {"claim": "label-looping-2x"}}

    old = ratio().record() | named(then) | {"schema": records.FIRST_SCHEMA}
    path = tmp_path / "bench.jsonl"
    records.append(path, old)
    before = path.read_bytes()
    assert records.read(path) == [{**old, **named(today)}]
    assert path.read_bytes() == before
