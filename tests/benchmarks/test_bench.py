"""The runner: arms that disagree have no records, a failure does not end the suite, records are complete; and the arms of three suites."""

import os
from dataclasses import replace
from itertools import product

import pytest
import torch

from asrkit.decoders import ctc_greedy
from asrkit.losses import rnnt_loss
from asrkit.workbench import machine, records
from asrkit.workbench.lessons.shared.file_recognizer import FileRecognizer
from asrkit.workbench.measure.comparison import check
from asrkit.workbench.tables import three_digits
from benchmarks.harness.cases import Case, Suite
from benchmarks.harness.runner import run as run_suite
from benchmarks.harness.table import table
from benchmarks.suites import SUITES, losses

FAST = ["numba_cpu", "numba_cpu_overwrite"]
LEAN = ["lean", "lean_bfloat16"]
pytestmark = pytest.mark.usefixtures("one_thread")
FLUSHED = "torchaudio_flushed"
LOOPS = [
    ("frame_looping", "windowed_looping"),
    ("label_looping", "windowed_looping"),
    ("frame_looping", "label_looping"),
]
PAIRS = {
    "losses": {
        "rnnt-loss": [("torchaudio", name) for name in ["wavefront", *FAST]],
        "tdt-loss": [("wavefront", name) for name in FAST],
        "rnnt-loss-joint": {
            *product(["torchaudio"], ["overwrite", FLUSHED, *LEAN]),
            *product([FLUSHED], LEAN),
        },
    },
    "decoders": {
        "ctc-greedy-batched": [("sequential", "batched"), ("sequential", "numba_cpu")],
        **dict.fromkeys(["rnnt-greedy", "tdt-greedy"], LOOPS),
        "aed-greedy": [
            ("recomputed", "kept"),
            ("absorbed", "kept"),
            ("kept", "kept_packed"),
            *[("kept", f"draft_{per_cent}") for per_cent in (0, 5, 20)],
        ],
    },
}


@pytest.fixture(scope="module")
def cases():
    """The quick cases of suites."""
    state = torch.get_rng_state()
    cases = {suite: [*SUITES[suite].cases("cpu", True)] for suite in PAIRS}
    assert torch.equal(torch.get_rng_state(), state)
    return cases


@pytest.mark.parametrize("suite", PAIRS)
def test_the_arms_of_a_suite_agree_and_are_paired(cases, suite):
    with_arms = [case for case in cases[suite] if case.arms]
    assert {case.what for case in with_arms} == {*PAIRS[suite]}
    for case in with_arms:
        pairs = {*PAIRS[suite][case.what]}
        if "one_by_one" in case.arms:
            pairs.add(("one_by_one", "windowed_looping"))
        assert {*case.pairs()} == pairs
        assert case.memory == (suite == "losses")
        for name in case.arms:
            params = {
                "dtype": "float32",
                **case.params,
                **case.arm_params.get(name, {}),
            }
            half = name.endswith("bfloat16")
            assert params["dtype"] == ("bfloat16" if half else "float32")
        check(case)


def test_a_rows_least_work_is_that_of_its_arm():
    case = losses.joint_case((2, 20, 6, 12, 16), "cpu")
    product = 2 * 2 * 20 * 6 * 12 * 16
    assert case.params["floor_FLOP"] == 3 * product
    assert case.arm_params["lean"]["floor_FLOP"] == 4 * product
    on_logits = losses.logits_case(rnnt_loss, (1, 12, 6, 9), "cpu")
    assert on_logits.params["floor_B"] == 3 * 4 * 12 * 6 * 9


def test_the_memory_grid_is_measured_as_it_is_counted(cases):
    (grid,) = (case for case in cases["losses"] if case.measure)
    measured = [*grid.measure()]
    assert {m.params["V"] for m in measured} == {28, 1024}
    assert {m.params["dtype"] for m in measured} == {"float32", "bfloat16"}
    for point in measured:
        assert point.value == pytest.approx(point.params["counted"], rel=0.1)
    name, head, *lines = table(point.record() for point in measured)
    assert name == "joint-memory"
    assert head.split() == "B T U1 V dtype measured, MiB counted, MiB".split()
    assert len(lines) == len(measured)
    first = measured[0]
    peak = three_digits(first.value / 2**20)
    counted = three_digits(first.params["counted"] / 2**20)
    assert f"1 20 101 28 float32 {peak} {counted}".split() in map(str.split, lines)


def test_decoders_are_listed_with_their_calls(cases):
    case = next(
        case
        for case in cases["decoders"]
        if case.what == "tdt-greedy" and "one_by_one" in case.arms
    )
    calls = case.arm_params
    # the definition calls each once per step of the path
    assert calls["one_by_one"]["join"] == case.params["path_joints"]
    assert calls["one_by_one"]["predict"] == case.params["labels"] + 1
    assert calls["windowed_looping"]["join"] < calls["frame_looping"]["join"]
    for counts in calls.values():
        assert counts["syncs"] > 0
        assert counts["launches"] > counts["join"]


def answer(value=1.0):
    return (torch.full((3,), value),)


def fails():
    raise RuntimeError("no such graph")


def small(**arms):
    arms = {"plain": answer, "slow": answer, "fast": answer} | arms
    return Case(
        what="small",
        arms=arms,
        params={"shape": [3], "dtype": "float32", "audio_s": 6.0},
        ratios=[("plain", "fast"), ("slow", "fast")],
    )


@pytest.fixture
def suite(monkeypatch):
    """suite(case, ...): a suite "own" of these cases."""

    def declare(*cases):
        declared = Suite(name="own", cases=lambda device, quick, **_: iter(cases))
        monkeypatch.setitem(SUITES, "own", declared)

    return declare


def run(**options):
    return run_suite("own", quick=True, **options)


def test_records_of_a_case_are_complete_and_ratios_are_taken_repeat_by_repeat(
    suite, tmp_path
):
    suite(replace(small(), memory=True))
    lines = []
    out = tmp_path / "records.jsonl"
    found = run(out=out, log=lines.append)
    assert records.read(out) == found
    assert lines == ["small 3: plain, slow, fast"]
    by = {
        (record["impl"], record["metric"]): record
        for record in found
        if record["metric"] != "ratio"
    }
    metrics = ("latency", "rtfx", "cpu_time", "peak_memory")
    assert {*by} == {*product(["plain", "slow", "fast"], metrics)}
    for record in found:
        assert {"threads", "device", "shape", "quick"} <= {*record["params"]}
    plain = by["plain", "latency"]["value"]
    assert by["plain", "rtfx"]["value"] == pytest.approx(6e3 / plain)
    ratios = [record for record in found if record["metric"] == "ratio"]
    assert [record["params"]["arms"][0] for record in ratios] == ["plain", "slow"]
    for record in ratios:
        slow, fast = (
            by[name, "latency"]["samples"] for name in record["params"]["arms"]
        )
        parts = [a / b for a, b in zip(slow, fast, strict=True)]
        assert record["samples"] == pytest.approx(parts)
        assert record["stats"]["n"] >= 3


def test_a_rounded_arm_agrees_only_within_its_own_tolerance():
    ones = torch.ones(4)
    arms = {"exact": lambda: (ones,), "rounded": lambda: (1.01 * ones,)}
    own = {"rounded": {"tolerance": 0.02}}
    case = Case(what="x", arms=arms, params={}, arm_params=own)
    check(case)
    with pytest.raises(
        AssertionError,
        match="rounded disagrees with exact.* of 2; the tolerance is 0.005",
    ):
        check(replace(case, arm_params={}, tolerance=0.005))
    arms = {"nan": lambda: (ones * float("nan"),), "exact": lambda: (ones,)}
    with pytest.raises(AssertionError, match="exact disagrees with nan"):
        check(replace(case, arms=arms))


@pytest.mark.parametrize("field", ["labels", "scores"])
def test_hypotheses_that_differ_in_labels_or_scores_disagree(field):
    found = ctc_greedy(torch.zeros(1, 1, 2), torch.tensor([1]))
    wrong = replace(found, **{field: getattr(found, field) + 1})
    arms = {"right": lambda: found, "wrong": lambda: wrong}
    with pytest.raises(
        AssertionError, match="wrong disagrees with right, so it was not"
    ):
        check(Case(what="x", arms=arms, params={}))


@pytest.mark.parametrize("wrong, message", [
    (lambda: answer(2.0), "small: slow disagrees with plain"),
    (fails, "^small: slow fails: no such graph$"),
])  # fmt: skip
def test_an_arm_that_differs_or_raises_does_not_end_the_others(
    suite, tmp_path, wrong, message
):
    out = tmp_path / "out.jsonl"
    suite(small(slow=wrong), replace(small(), what="next"))
    with pytest.raises(AssertionError, match=message):
        run(out=out)
    assert {(record["what"], record["impl"]) for record in records.read(out)} == {
        *product(["small"], ["plain", "fast"]),
        *product(["next"], ["plain", "slow", "fast"]),
    }


def test_a_first_arm_a_study_and_a_case_that_fail_do_not_end_the_suite(suite, tmp_path):
    out = tmp_path / "out.jsonl"
    refused = Case.refused("y", ValueError("y: too long"))
    study = Case(what="claims: x", measure=fails)
    suite(small(plain=fails), study, refused, replace(small(), what="last"))
    wanted = (
        "small 3: RuntimeError: no such graph claims: x: RuntimeError: no such graph"
        " y: ValueError: y: too long"
    )
    with pytest.raises(AssertionError, match=f"^{wanted}$"):
        run(out=out)
    assert {record["what"] for record in records.read(out)} == {"last"}


def test_only_the_cases_whose_title_contains_the_text_are_measured(suite):
    suite(small(), replace(small(), what="next"))
    assert {record["what"] for record in run(only="next")} == {"next"}
    with pytest.raises(
        ValueError, match="only: expected text of a title: small 3; next 3, got"
    ):
        run(only="later")


def test_the_error_of_a_full_disk_names_the_file_without_its_folder(
    suite, tmp_path, monkeypatch
):
    def full(path, *records):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records, "append", full)
    suite(small())
    wanted = r"^\[Errno 28\] No space left on device: 'out\.jsonl'$"
    with pytest.raises(OSError, match=wanted):
        run(out=tmp_path / "out.jsonl")


def test_a_table_shows_shares_with_their_interval_rates_with_their_peak_and_calls():
    shared = {"what": "x", "impl": "y"}
    spread = {"case": "9 words", "low": 0.2, "high": 0.3}
    work = {"floor_FLOP": 4e9, "peak_FLOP": 8e12, "floor_B": 6e6, "join": 7, "syncs": 2}
    found = [
        shared | {"metric": "wer", "unit": "fraction", "value": 0.25, "params": spread},
        shared | {"metric": "latency", "unit": "ms", "value": 2.0, "params": work},
        shared
        | {"metric": "ratio", "unit": "1", "value": 5.0, "params": {"arms": "zy"}},
    ]
    found[1]["stats"] = {"p25": 1.0, "p75": 3.0}
    case, head, line, *_, last = (line.replace("\u00a0", " ") for line in table(found))
    assert case == "x 9 words"
    assert line[head.index("wer") :] == "25.00 % [20.00 %, 30.00 %]"
    assert "2,000 GFLOP/s (25 %), 3 GB/s" in last
    assert "7 joint, 2 waits" in last
    assert "z 5" in last


@pytest.fixture(scope="module")
def transcription():
    """The quick cases of whole recognisers, whose first arm finds the planted labels."""
    return [*SUITES["transcription"].cases("cpu", True)]


def test_transcription_goes_from_samples_to_the_planted_labels_in_every_arm(
    transcription,
):
    found = [(case.what, case.params["batch"]) for case in transcription]
    assert found == [*product(["headline-full", "headline-speech"], [1, 4])]
    for case in transcription:
        assert [*case.arms] == ["eager", "optimized"]
        assert case.params["labels"] > 0
        assert case.params["audio_s"] > 0
        observed = check(case)
        assert observed["eager"].params["ran"].startswith("windowed_looping")


def test_an_arm_of_transcription_whose_encoder_goes_wrong_is_refused(
    transcription, monkeypatch
):
    plain = FileRecognizer.encode

    def wrong(self, features, frames, number):
        encoded, ends = plain(self, features, frames, number)
        if self.config.encoder == "optimized":
            encoded = encoded.roll(1, 1)
        return encoded, ends

    monkeypatch.setattr(FileRecognizer, "encode", wrong)
    wanted = "headline-full: optimized disagrees with eager"
    with pytest.raises(AssertionError, match=wanted):
        check(transcription[0])


def test_the_state_of_gpus_is_read_from_one_query(tmp_path, monkeypatch):
    line = "1980 MHz, 2619 MHz, 312.31 W, 55, 0x0000000000000000"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{line}'\necho '[N/A]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (state,) = machine.gpu_state()
    assert state["power.draw"] == "312.31 W"
    assert state["clocks.sm"] == "1980 MHz"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert machine.gpu_state() is None
