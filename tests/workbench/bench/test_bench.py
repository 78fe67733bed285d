"""The suites at their smallest: all run, all arms agree, records are whole, and a wrong arm leaves no record."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from asrkit.decoders import ctc_greedy
from asrkit.features import normalize, normalize_sequential
from asrkit.losses import rnnt_loss
from asrkit.workbench import bench, machine, records
from asrkit.workbench.bench.file_recognizer import FileRecognizer
from asrkit.workbench.bench.suites import losses

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


@pytest.mark.parametrize("suite", PAIRS)
def test_a_quick_suite_measures_every_arm_and_pairs_what_it_compares(suite, tmp_path):
    state, lines = torch.get_rng_state(), []
    out = tmp_path / "records.jsonl"
    found = bench.run(suite, out=out, quick=True, say=lines.append)
    assert torch.equal(torch.get_rng_state(), state)
    assert records.read(out) == found
    by_case = {}
    for record in found:
        assert {"threads", "device", "shape"} <= {*record["params"]}
        assert record["params"]["dtype"] == (
            "bfloat16" if record["impl"].endswith("bfloat16") else "float32"
        )
        assert record["impl"].startswith("draft_") or any(
            key.startswith("floor_") for key in record["params"]
        )
        by_case.setdefault((record["what"], str(record["params"]["shape"])), []).append(
            record
        )
    assert len(lines) == len(by_case)
    assert {what for what, _ in by_case} == {*PAIRS[suite]}
    for (what, _), case in by_case.items():
        arms = {one["impl"]: one for one in case if one["metric"] == "latency"}
        assert {one["impl"] for one in case if one["metric"] == "cpu_time"} == {*arms}
        if suite == "losses":
            assert {
                one["impl"]
                for one in case
                if one["metric"] == "peak_memory" and one["value"] > 0
            } == {*arms}
        ratios = [one for one in case if one["metric"] == "ratio"]
        alone = {("one_by_one", "windowed_looping")} if "one_by_one" in arms else set()
        assert {tuple(one["params"]["arms"]) for one in ratios} == {
            *PAIRS[suite][what]
        } | alone
        for one in ratios:
            slow, fast = (arms[name]["samples"] for name in one["params"]["arms"])
            assert one["samples"] == pytest.approx(
                [a / b for a, b in zip(slow, fast, strict=True)]
            )
            assert one["stats"]["n"] >= 3


def test_a_rows_least_work_is_that_of_its_arm():
    case = losses.joint_case((2, 20, 6, 12, 16), "cpu")
    product = 2 * 2 * 20 * 6 * 12 * 16
    assert (
        case.params["floor_FLOP"] == 3 * product
        and case.arm_params["lean"]["floor_FLOP"] == 4 * product
    )
    given = losses.logits_case(rnnt_loss, (1, 12, 6, 9), "cpu")
    assert given.params["floor_B"] == 3 * 4 * 12 * 6 * 9


def test_a_rounded_arm_is_let_pass_within_its_own_tolerance_only():
    one = torch.ones(4)
    arms = {"exact": lambda: (one,), "rounded": lambda: (1.01 * one,)}
    case = bench.Case(
        what="x", arms=arms, params={}, arm_params={"rounded": {"tolerance": 0.02}}
    )
    bench.check(case)
    with pytest.raises(
        AssertionError, match="rounded disagrees with exact.* of 2; 0.005"
    ):
        bench.check(replace(case, arm_params={}, tolerance=0.005))
    with pytest.raises(AssertionError, match="exact disagrees with nan"):
        bench.check(
            replace(
                case,
                arms={"nan": lambda: (one * float("nan"),), "exact": lambda: (one,)},
            )
        )


def test_arms_that_disagree_are_not_measured(tmp_path, monkeypatch):
    good = next(iter(bench.SUITES["decoders"].cases("cpu", True)))
    found = ctc_greedy(torch.zeros(1, 1, 2), torch.tensor([1]))
    for field, wrong in (("labels", found.labels + 1), ("scores", found.scores + 1)):
        bad = replace(
            good,
            arms={
                "right": lambda: found,
                "wrong": lambda f=field, w=wrong: replace(found, **{f: w}),
            },
        )
        declared = bench.Suite(
            name="bad", cases=lambda device, quick, bad=bad: iter([bad])
        )
        monkeypatch.setitem(bench.SUITES, "bad", declared)
        with pytest.raises(
            AssertionError, match="wrong disagrees with right, so it was not measured"
        ):
            bench.run("bad", out=tmp_path / "none.jsonl", quick=True)
    assert not (tmp_path / "none.jsonl").exists()


def test_one_arm_that_differs_or_raises_does_not_take_the_others_along_unless_it_is_the_first(
    suite, tmp_path
):
    def fails():
        raise RuntimeError("no such graph")

    for wrong, said in (
        (lambda: answer(2.0), "small: slow disagrees with plain"),
        (fails, "^small: slow fails: no such graph$"),
    ):
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        suite(small(slow=wrong), replace(small(), what="next"))
        with pytest.raises(AssertionError, match=said):
            bench.run("own", quick=True, out=tmp_path / "out.jsonl")
        found = {
            (one["what"], one["impl"]) for one in records.read(tmp_path / "out.jsonl")
        }
        assert found == {
            *product(["small"], ["plain", "fast"]),
            *product(["next"], ["plain", "slow", "fast"]),
        }
    suite(small(plain=fails))
    with pytest.raises(AssertionError, match="^small 3: RuntimeError: no such graph$"):
        bench.run("own", quick=True)


def test_a_study_that_raises_or_a_case_that_could_not_be_made_does_not_end_the_suite(
    suite, tmp_path
):
    def raises():
        raise RuntimeError("no such kernel")

    refused = bench.Case(what="y", refused="y: ValueError: y: too long")
    suite(bench.Case(what="claims: x", measure=raises), refused, small())
    with pytest.raises(
        AssertionError,
        match="^claims: x: RuntimeError: no such kernel y: ValueError: y: too long$",
    ):
        bench.run("own", quick=True, out=tmp_path / "out.jsonl")
    assert {one["what"] for one in records.read(tmp_path / "out.jsonl")} == {"small"}


@pytest.fixture
def found(monkeypatch):
    """Records of a case of two arms."""
    mel = torch.randn(8, 200, 80, generator=torch.Generator().manual_seed(0))
    lengths = torch.linspace(200, 100, 8).long()
    case = bench.Case(
        what="feature-norm-batched",
        arms={
            "sequential": lambda: (normalize_sequential(mel, lengths),),
            "batched": lambda: (normalize(mel, lengths),),
        },
        params={"shape": [8, 200, 80], "floor_B": 2 * mel.nbytes},
    )
    suite = bench.Suite(name="own", cases=lambda device, quick: iter([case]))
    monkeypatch.setitem(bench.SUITES, "own", suite)
    return bench.run("own", quick=True)


def test_the_table_of_a_case_has_a_line_an_arm_in_aligned_columns(found):
    shown = [line.replace("\u00a0", " ") for line in bench.table(found, width=100)]
    case, head, *lines = shown
    assert case == "feature-norm-batched 8×200×80"
    assert len(found) == 5 and len(lines) == 2
    by = {(one["impl"], one["metric"]): f"{one['value']:.3g}" for one in found}
    for line, name in zip(lines, ("sequential", "batched"), strict=True):
        assert line.startswith(name) and "GB/s" in line
        assert line[head.index("time  ") :].startswith(f"{by[name, 'latency']} ms")
        assert line[head.index("CPU time") :].startswith(f"{by[name, 'cpu_time']} ms")
    ratios = [line[head.index("times as fast as") :] for line in lines]
    assert ratios == ["", f"sequential {by['batched', 'ratio']}"]


def test_a_table_has_a_column_for_each_metric_and_shares_with_their_interval():
    shared = {"what": "x", "impl": "y", "value": 0.25}
    rate = {**shared, "metric": "wer", "unit": "fraction"}
    rate["params"] = {"case": "9 words", "low": 0.2, "high": 0.3}
    memory = {
        **shared,
        "metric": "peak_memory",
        "unit": "B",
        "params": {"case": "9 words"},
    }
    lines = bench.table([rate, {**memory, "value": 3 * 2**20}], width=80)
    assert [line.replace("\u00a0", " ") for line in lines] == [
        "x 9 words",
        "   wer                         memory",
        "y  25.00 % [20.00 %, 30.00 %]  3 MiB",
    ]


def test_the_least_work_is_shown_as_rates_and_shares_of_the_peaks():
    record = {"what": "x", "impl": "y", "metric": "latency", "unit": "ms", "value": 2.0}
    record["stats"] = {"p25": 1.0, "p75": 3.0}
    record["params"] = {"floor_FLOP": 4e9, "peak_FLOP": 8e12, "floor_B": 6e6}
    (*_, line) = bench.table([record])
    assert line.replace("\u00a0", " ").endswith("2,000 GFLOP/s (25 %), 3 GB/s")


def test_decoders_are_listed_with_their_calls_and_the_least_work_of_the_path():
    cases = bench.SUITES["decoders"].cases("cpu", True)
    case = next(
        one for one in cases if one.what == "tdt-greedy" and "one_by_one" in one.arms
    )
    counted, (_, _, D, V) = case.arm_params, case.params["shape"]
    # a call each: what the plan needs is what the definition does
    assert counted["one_by_one"]["join"] == case.params["path_joints"]
    assert counted["one_by_one"]["predict"] == case.params["labels"] + 1
    assert counted["windowed_looping"]["join"] < counted["frame_looping"]["join"]
    assert all(
        one["syncs"] > 0 and one["launches"] > one["join"] for one in counted.values()
    )
    step = 2 * (8 * D * D + D * D)
    joints = case.params["path_joints"] * 2 * D * (V + 5)
    assert case.params["floor_FLOP"] == joints + case.params["labels"] * step
    params = {**case.params, **counted["windowed_looping"], "device": "cpu"}
    record = {"what": "x", "metric": "latency", "unit": "ms", "value": 2.0, "impl": "y"}
    (*_, line) = bench.table(
        [{**record, "params": params, "stats": {"p25": 1.0, "p75": 3.0}}]
    )
    calls = f"{params['join']} joint, {params['predict']} predictor, {params['launches']} launches"
    assert calls in line


def test_an_unknown_suite_is_one_line():
    with pytest.raises(ValueError) as error:
        bench.run("speed")
    assert (
        str(error.value)
        == f"suite: expected one of {', '.join(map(repr, bench.SUITES))}, got 'speed'."
    )


def answer(value=1.0):
    return (torch.full((3,), value),)


def small(**arms):
    arms = {"plain": answer, "slow": answer, "fast": answer} | arms
    return bench.Case(
        what="small",
        arms=arms,
        params={"shape": [3], "dtype": "float32", "size": 1},
        ratios=[("plain", "fast"), ("slow", "fast")],
    )


@pytest.fixture
def suite(monkeypatch):
    """suite(case, ...): a suite "own" of these cases."""

    def declare(*cases):
        declared = bench.Suite(name="own", cases=lambda device, quick, **_: iter(cases))
        monkeypatch.setitem(bench.SUITES, "own", declared)

    return declare


def test_a_disk_that_is_full_in_the_middle_of_a_run_is_named_with_the_file_and_no_folder(
    suite, tmp_path, monkeypatch
):
    def full(path, *records):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records, "append", full)
    suite(small())
    with pytest.raises(
        OSError, match=r"^\[Errno 28\] No space left on device: 'out\.jsonl'$"
    ):
        bench.run("own", quick=True, out=tmp_path / "out.jsonl")


def test_transcription_goes_from_samples_to_the_planted_labels_in_every_arm():
    found = bench.run("transcription", quick=True)
    times = [one for one in found if one["metric"] == "latency"]
    assert {(one["what"], one["params"]["batch"], one["impl"]) for one in times} == {
        *product(["headline-full", "headline-speech"], [1, 4], ["eager", "optimized"])
    }
    for one in times:
        assert one["params"]["labels"] > 0 and one["params"]["floor_FLOP"] > 0
        assert one["params"]["least_ms"] < one["value"]
        assert one["params"]["ran"].startswith("windowed_looping")
    rates = [one for one in found if one["metric"] == "rtfx"]
    assert len(rates) == len(times) and all(one["value"] > 1 for one in rates)


def test_an_arm_of_transcription_whose_encoder_goes_wrong_is_refused(monkeypatch):
    plain = FileRecognizer.encode

    def wrong(self, features, frames, number):
        encoded, ends = plain(self, features, frames, number)
        if self.config.encoder == "optimized":
            encoded = encoded.roll(1, 1)
        return encoded, ends

    monkeypatch.setattr(FileRecognizer, "encode", wrong)
    with pytest.raises(
        AssertionError, match="headline-full: optimized disagrees with eager"
    ):
        bench.run("transcription", quick=True)


def test_the_state_of_gpus_is_read_from_one_query(monkeypatch):
    lines = "1980 MHz, 2619 MHz, 312.31 W, 55, 0x0000000000000000\n[N/A]"
    monkeypatch.setattr(machine, "_output", lambda *command: lines)
    (state,) = machine.gpu_state()
    assert state["power.draw"] == "312.31 W" and state["clocks.sm"] == "1980 MHz"
    monkeypatch.setattr(machine, "_output", lambda *command: "")
    assert machine.gpu_state() is None
