"""Records: what is written is what was measured, and comes back unchanged."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from asrkit import files as kept
from asrkit.workbench import machine, records
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


def test_the_last_run_of_a_case_is_found_by_implementation():
    def made(second, commit, impl, **params):
        record = ratio(impl=impl, params=params).record()
        record["code"]["commit"] = commit
        return record | {"captured_at": f"2026-01-01T00:00:0{second}Z"}

    old = made(1, "a", "slow", shape=[2]), made(1, "a", "gone", shape=[2])
    new = made(2, "b", "slow", shape=[2], threads=4), made(3, "b", "fast", shape=[2])
    other = made(4, "c", "slow", shape=[3])
    found = records.newest_run([*old, *new, other], "demo", metric="ratio", shape=[2])
    assert found == {"slow": new[0], "fast": new[1]}
    with pytest.raises(
        ValueError, match="found: expected a record of demo with {'shape': .9.}"
    ):
        records.newest_run(old, "demo", metric="ratio", shape=[9])


def test_a_record_says_which_card_measured_it():
    record = ratio().record()
    record["code"] |= {"commit": "1a2b3c4d5e", "dirty": True}
    record["machine"] |= {"cpu_model": "A CPU", "gpus": []}
    assert records.measured_on(record) == "A CPU, commit 1a2b3c4 with changes"
    record["code"]["dirty"] = False
    record["machine"]["gpus"] = [{"name": "A card"}]
    assert records.measured_on(record) == "A card, commit 1a2b3c4"


@pytest.mark.parametrize("fields", [
    {"value": float("nan")}, {"value": np.float32("inf")}, {"value": "1.5"}, {"value": None}, {"samples": (1.0, float("inf"))},
    {"samples": ("a",)}, {"params": {"T": float("nan")}}, {"params": {"model": object()}}, {"params": {"x": torch.zeros(2)}},
])  # fmt: skip
def test_what_is_no_finite_number_is_refused_at_birth(fields):
    with pytest.raises(ValueError, match="expected"):
        ratio(**fields)


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


def test_gpus_are_listed_their_serials_hashed_and_a_driver_update_keeps_the_id(
    gpu_machine,
):
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


def test_the_command_line_is_kept_without_its_folders(monkeypatch):
    monkeypatch.setattr(
        sys,
        "argv",
        ["/srv/ann lee/bin/asrkit", "--out=/srv/ann/x", r"C:\Users\ann\y.wav", "-q"],
    )
    assert machine.code.__wrapped__()["argv"] == ["asrkit", "--out=x", "y.wav", "-q"]


def test_an_atomic_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with kept.atomic(path) as part:
        assert (
            part.parent == path.parent and part.suffix == ".txt" and not path.exists()
        )
        part.write_text("whole")
    with pytest.raises(RuntimeError), kept.atomic(path) as part:  # noqa: PT012
        part.write_text("half")
        raise RuntimeError
    assert path.read_text() == "whole" and [
        entry.name for entry in path.parent.iterdir()
    ] == ["a.txt"]


def test_a_writer_killed_in_the_middle_leaves_whole_records_only(tmp_path):
    path = tmp_path / "a.jsonl"
    program = "from asrkit.workbench.records import *; m = Measurement('k', 'm', 's', 1.0)\nwhile True: append('a.jsonl', m)"
    writer = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(kept.HERE.parent)},
    )
    deadline = time.monotonic() + 20
    while (
        not path.exists() or path.stat().st_size < 20000
    ) and time.monotonic() < deadline:
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert records.read(path)


def test_a_published_record_is_one_line_to_read_and_a_whole_record_to_collect(
    monkeypatch,
):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    measurement = ratio(impl="fast")
    records.publish(measurement)
    records.publish(measurement.record())
    assert (
        shown
        == [
            {records.MIME: measurement.record(), "text/plain": "demo: ratio 1.5 x fast"}
        ]
        * 2
    )


def test_a_folder_one_holds_is_lent_to_nobody_else_until_it_ends(tmp_path):
    with (
        kept.lock(tmp_path / "out"),
        pytest.raises(
            ValueError, match="out: expected a folder that nobody else writes"
        ),
    ):
        kept.lock(tmp_path / "out").__enter__()
    with kept.lock(tmp_path / "out"):
        assert [path.name for path in (tmp_path / "out").iterdir()] == [kept.LOCK]


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


NO_RECORDS = {  # line -> why it is none
    "{}": "missing field what", "null": "no record", '{"half': "torn", "[" * 100_000: "torn",
    json.dumps(ratio().record() | {"value": "9"}): "no finite number",
    json.dumps(ratio().record() | {"schema": "asrkit.record/9"}): "schema 'asrkit.record/9'",
}  # fmt: skip


@pytest.mark.parametrize("line", NO_RECORDS, ids=range(len(NO_RECORDS)))
def test_a_line_that_is_no_record_is_left_out_with_its_place_and_swallows_nothing(
    tmp_path, line
):
    path = tmp_path / "a.jsonl"
    records.append(path, ratio(), ratio(value=2.0, samples=()))
    with path.open("a") as file:
        file.write(line)  # as a crash leaves it: without a line end
    records.append(path, ratio(what="later").record())
    with pytest.warns(UserWarning, match=f"left out .*a.jsonl:3: .*{NO_RECORDS[line]}"):
        assert [one["what"] for one in records.read(tmp_path)] == [
            "demo",
            "demo",
            "later",
        ]


def test_a_record_holds_quartiles_machine_software_code_and_time():
    record = ratio(warmup=2).record()
    assert record["stats"] == {
        "n": 3,
        "warmup": 2,
        "min": 1.4,
        "p25": 1.45,
        "p50": 1.5,
        "p75": 1.7,
    }
    assert (
        record["machine"]["id"] == machine.this_machine()["id"]
        and record["software"]["torch"]
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["captured_at"])
    assert {*record["code"]} == {"commit", "dirty", "argv"} and records.problem(
        record
    ) == ""
    of_torch = ratio(value=torch.tensor(1.5), samples=(np.float32(1.5),)).record()
    assert type(of_torch["value"]) is float and of_torch["samples"] == [1.5]


@pytest.mark.parametrize(("then", "today"), [
    ("label_looping", "windowed_looping"), ("nested_loops", "label_looping"), ("frame_looping", "frame_looping"),
    ("only_label_looping", "only_windowed_looping"), ("label_looping, graphs=step", "windowed_looping, graphs=step"),
    ("nemo_label_looping", "nemo_label_looping"),
])  # fmt: skip
def test_an_old_record_is_read_with_todays_names_and_its_file_is_left_alone(
    tmp_path, then, today
):
    params = {
        "arms": ["nemo_label_looping", then],
        "ms": {then: 1.5},
        "claim": "label-looping-2x",
    }
    old = ratio(impl=then, params=params).record() | {"schema": records.FIRST_SCHEMA}
    path = tmp_path / "bench.jsonl"
    records.append(path, old)
    before = path.read_bytes()
    (found,) = records.read(path)
    renamed = {**params, "arms": ["nemo_label_looping", today], "ms": {today: 1.5}}
    assert found == {**old, "impl": today, "params": renamed}  # its schema too
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "name, value, why",
    [
        ("samples", None, "samples is no list"),
        ("params", [], "params is no dict"),
        ("machine", {}, "machine lacks id"),
        ("stats", {}, "stats lacks n"),
        ("code", None, "code is no dict"),
        ("what", 3, "what is no str"),
        ("captured_at", None, "captured_at is no str"),
        ("value", 10**400, "is no finite number"),
    ],
)
def test_a_foreign_field_is_named(name, value, why):
    record = records.Measurement("x", "ratio", "1", 1.0).record()
    assert not records.problem(record)
    assert why in records.problem({**record, name: value})
