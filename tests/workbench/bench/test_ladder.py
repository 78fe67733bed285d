"""The ladder: every rung says what the script says; wrong order, lengths, numbers and lost batches are seen; records fit."""

import contextlib
import io
import itertools
import threading
from dataclasses import asdict, replace

import pytest
import torch

from asrkit.cli import main
from asrkit.models import execution
from asrkit.models.encoders import halve
from asrkit.models.execution import rounded
from asrkit.models.packed import PackedLinear
from asrkit.models.packed_conformer import PackedFastConformer
from asrkit.transcribe import PipelineConfig, Recognizer, decoding, pipeline
from asrkit.workbench import records
from asrkit.workbench.bench import ladder_pipeline
from asrkit.workbench.bench.agreement import check
from asrkit.workbench.bench.ladder_pipeline import FileRecognizer, read_wav, write_wav
from asrkit.workbench.bench.suites import ladder
from asrkit.workbench.bench.suites.ladder import BASELINE
from asrkit.workbench.ledger import Claim, verdict

KINDS = {what: config for what, config, _ in ladder.configs("tiny")}
FASTEST = {
    "ladder-rnnt-tiny": "windowed_looping",
    "ladder-tdt-tiny": "windowed_looping",
    "ladder-ctc-tiny": "batched",
}
LAST = "to_overlapped"
LEFT_OUT = {"graphed_encoder", "graph_of_steps", "graph_whole"}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Five scripted utterances a kind of model, in batches of two."""
    samples = [16_000, 40_000, 25_001, 33_333, 8_000]
    return {
        what: ladder.scripted(config, samples, tmp_path_factory.mktemp(what), batch=2)
        for what, config in KINDS.items()
    }


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """(records, stdout, stderr) of the quick suite through the command line."""
    out, err, file = (
        io.StringIO(),
        io.StringIO(),
        tmp_path_factory.mktemp("ladder") / "records.jsonl",
    )
    threads = torch.get_num_threads()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["bench", "ladder", "--quick", "--threads", "1", "--out", str(file)])
    torch.set_num_threads(threads)
    assert code == 0, err.getvalue()
    return records.read(file), out.getvalue(), err.getvalue()


@pytest.mark.parametrize("what", KINDS)
def test_every_rung_says_what_the_script_says(made, what):
    one, said = made[what], []
    arms = ladder.climb(one.task, say=said.append)
    assert sum(map(len, one.labels)) > 10
    for name, arm in arms.items():
        assert arm.recognizer().tokens() == one.labels, name
    left_out = LEFT_OUT - (ladder.TRANSDUCER_RUNGS if what == "ladder-ctc-tiny" else set())
    assert {*said} == {f"{rung.replace('_', ' ')} is left out: needs a GPU" for rung in left_out}
    check(ladder.case(what, one, arms, {}, quick=True))


def test_each_rung_changes_what_it_is_named_after_and_the_last_has_them_all(made):
    arms = ladder.climb(made["ladder-rnnt-tiny"].task)
    last, first = asdict(arms["to_overlapped"].recognizer.config), asdict(BASELINE)
    assert {name for name in last if last[name] == first[name]} == {
        "encoder_graphs",
        "graphs",
        "max_symbols",
        "search",
        "prompt",
    }
    climbed = [arm for arm in arms.values() if arm.position != "alone"]
    for below, arm in itertools.pairwise(climbed):
        assert arm.recognizer.config == replace(below.recognizer.config, **ladder.RUNGS[arm.rung])
    for arm in arms.values():
        if arm.position == "alone":
            assert arm.recognizer.config == replace(BASELINE, **ladder.RUNGS[arm.rung])


def test_a_rung_that_fails_when_it_is_tried_is_left_out_and_the_next_goes_on_without(
    made, monkeypatch
):
    def fail(self):
        raise torch.OutOfMemoryError("no room for this\nand more")

    monkeypatch.setattr(FileRecognizer, "probe", fail)
    said = list[str]()
    arms = ladder.climb(made["ladder-ctc-tiny"].task, say=said.append, probe=True)
    assert "to_optimized_encoder is left out: no room for this" in said and not [
        name for name in arms if "optimized" in name
    ]
    assert arms[LAST].recognizer.config == replace(
        BASELINE,
        normalization="batched",
        strategy="batched",
        precision="bfloat16",
        order="by_length",
        loading="overlapped",
    )


def test_a_rung_that_hears_something_else_when_it_is_tried_is_left_out_and_those_above_stay_right(
    made, monkeypatch
):
    one = made["ladder-rnnt-tiny"]

    def spoiled(model):
        part = model.encoder.subsampling.out
        part.weight = torch.nn.Parameter(-part.weight)
        return model

    monkeypatch.setattr(execution, "optimize", spoiled)
    said = list[str]()
    arms = ladder.climb(replace(one.task), say=said.append, probe=True)
    assert "to_optimized_encoder is left out: the labels are not those that are known" in said
    assert "to_optimized_encoder" not in arms and arms[LAST].recognizer().tokens() == one.labels


def test_graphs_of_an_encoder_are_not_those_of_another(made):
    task = made["ladder-rnnt-tiny"].task
    ways = [
        BASELINE,
        replace(BASELINE, encoder="optimized"),
        replace(BASELINE, precision="bfloat16"),
    ]
    kept = [task.variants.graphs_for(how, lambda *given: given) for how in (*ways, *ways)]
    assert len({id(one) for one in kept}) == 3 and kept[0] is kept[3]


def test_a_graph_is_decoded_by_the_turn_that_its_rung_names(made, monkeypatch):
    asked = []
    decode = decoding.transducer_greedy

    def watched(*given, strategy, max_symbols, **how):
        asked.append(how)
        return decode(*given, strategy=strategy)

    monkeypatch.setattr(decoding, "transducer_greedy", watched)
    one = FileRecognizer(made["ladder-rnnt-tiny"].task, BASELINE)
    plain = one.recognizer.decode_options._replace(strategy="windowed_looping")
    for how in ({}, {"graphs": "step"}, {"graphs": "full"}):
        one.recognizer.decode_options = plain._replace(**how)
        one()
    wanted = [
        {"graphs": "off"},
        {"graphs": "step"},
        {"graphs": "full"},
    ]
    assert asked[::3] == wanted and len(asked) == 9


def test_a_ladder_may_leave_out_the_slowest_arms(made):
    task = made["ladder-rnnt-tiny"].task
    few = {name: arm.recognizer.config for name, arm in ladder.climb(task, few=True).items()}
    assert [name for name in few if name.startswith("only_")] == [
        "only_batched_decoder",
        "only_windowed_looping",
    ]
    assert [name for name, how in few.items() if how.strategy == "one_by_one"] == [
        "baseline",
        "to_batched_frontend",
    ]


def test_a_kind_of_ladder_that_cannot_be_made_does_not_take_the_others_along(monkeypatch):
    plain = ladder.scripted

    def scripted(config, *given, **how):
        if config == KINDS["ladder-rnnt-tiny"]:
            raise AssertionError("no script")
        return plain(config, *given, **how)

    monkeypatch.setattr(ladder, "scripted", scripted)
    cases = [*ladder.suite("cpu", True)]
    said = [(case.what, bool(case.refused)) for case in cases]
    assert said == [
        ("ladder-rnnt-tiny", True),
        ("ladder-tdt-tiny", False),
        ("ladder-ctc-tiny", False),
    ]
    assert cases[-1].params["utterances"] == 4 and cases[-1].params["audio_s"] <= 8


def test_each_field_of_a_pipeline_reaches_what_it_is_about(made, monkeypatch):
    for what, decoders in {
        "ladder-ctc-tiny": {"one_by_one": "sequential", "batched": "numba_cpu"},
        "ladder-rnnt-tiny": {
            "one_by_one": "one_by_one",
            "batched": "frame_looping",
            "windowed_looping": "windowed_looping",
        },
    }.items():
        task = made[what].task
        for decoder, impl in decoders.items():
            one = FileRecognizer(task, replace(BASELINE, strategy=decoder))
            assert one.recognizer.decode(task.script[:1], torch.tensor([2])).impl == impl
        for arithmetic, dtype in {
            "float32": torch.float32,
            "autocast": torch.bfloat16,
            "bfloat16": torch.bfloat16,
        }.items():
            one = FileRecognizer(task, replace(BASELINE, precision=arithmetic))
            assert one.recognizer.encode(*one._features(one._load([0])))[0].dtype == dtype
            assert next(one.recognizer.model.parameters()).dtype == (
                dtype if arithmetic != "autocast" else torch.float32
            )
        optimized = FileRecognizer(task, replace(BASELINE, encoder="optimized"))
        parts = [*optimized.recognizer.model.encoder.modules()]
        assert all(
            any(isinstance(part, kind) for part in parts)
            for kind in (PackedLinear, PackedFastConformer)
        )
        assert not any(
            isinstance(part, PackedLinear | PackedFastConformer) for part in task.model.modules()
        ), "the baseline's was changed"
    threads, loops, read, loop = (
        list[str](),
        list[int](),
        ladder_pipeline.read_wav,
        pipeline.normalize_sequential,
    )
    monkeypatch.setattr(
        ladder_pipeline,
        "read_wav",
        lambda path: threads.append(threading.current_thread().name) or read(path),
    )
    monkeypatch.setattr(
        pipeline, "normalize_sequential", lambda *given: loops.append(1) or loop(*given)
    )
    for loading, frontend, looped in (("before", "batched", 0), ("overlapped", "one_by_one", 3)):
        threads.clear()
        FileRecognizer(task, replace(BASELINE, loading=loading, normalization=frontend))()
        assert (
            (threading.main_thread().name in threads) == (loading == "before")
            and len(threads) == 5
            and len(loops) == looped
        )
    assert FileRecognizer(task, replace(BASELINE, order="by_length")).plan == [[1, 3], [2, 0], [4]]


def test_half_precision_and_padding_reach_the_decoder(made):
    one = made["ladder-rnnt-tiny"]
    plain, half = (
        FileRecognizer(one.task, replace(BASELINE, precision=name))()
        for name in ("float32", "bfloat16")
    )
    assert not torch.equal(plain.likelihoods, half.likelihoods)
    assert [*plain.ends] == [-(-(S // 160) // 8) for S in one.task.samples]
    assert torch.equal(plain.frames, half.frames)


def _swapped(monkeypatch):
    plain = FileRecognizer.__init__

    def init(self, task, how):
        plain(self, task, how)
        self.plan[0] = self.plan[0][::-1]  # the rows of the script stay

    monkeypatch.setattr(FileRecognizer, "__init__", init)


def _unsorted(monkeypatch):
    plain = ladder_pipeline._gathered

    def gathered(batches, ends, rows):
        return plain(batches, ends, rows.sort().values)

    monkeypatch.setattr(ladder_pipeline, "_gathered", gathered)


def _longer(monkeypatch):
    plain = Recognizer.features

    def features_of(self, *given):
        features, frames = plain(self, *given)
        return features, (frames + 1).clamp(max=features.shape[1])

    monkeypatch.setattr(Recognizer, "features", features_of)


def _frame_short(monkeypatch):
    plain = Recognizer.encode

    def encode(self, features, frames):
        encoded, ends = plain(self, features, frames)
        return encoded, ends - 1

    monkeypatch.setattr(Recognizer, "encode", encode)


def _dropped(monkeypatch):
    plain = FileRecognizer.__call__
    monkeypatch.setattr(FileRecognizer, "__call__", lambda self: plain(self, only=slice(0, -1)))


def _not_a_number(monkeypatch):
    plain = Recognizer.encode

    def encode(self, features, frames):
        encoded, ends = plain(self, features, frames)
        encoded[-1, :8] = float("nan")
        return encoded, ends

    monkeypatch.setattr(Recognizer, "encode", encode)


def _not_normalised(monkeypatch):
    monkeypatch.setattr(pipeline, "normalize_sequential", lambda features, frames: features)


def _cut_short(monkeypatch):
    plain = ladder_pipeline.read_wav
    monkeypatch.setattr(ladder_pipeline, "read_wav", lambda path: plain(path)[:-161])


def _one_coarser(monkeypatch):
    plain = Recognizer.encode

    def encode(self, features, frames):
        return plain(self, (features * 4).round() / 4, frames)

    monkeypatch.setattr(Recognizer, "encode", encode)


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("spoil", [
    _swapped, _unsorted, _longer, _frame_short, _dropped, _not_a_number, _not_normalised, _cut_short, _one_coarser,
], ids=lambda spoil: spoil.__name__)  # fmt: skip
def test_a_pipeline_with_a_mistake_is_not_measured(made, what, spoil, monkeypatch):
    one = made[what]
    how = replace(BASELINE, order="by_length", strategy=FASTEST[what])
    arms = {"baseline": ladder.LadderArm(FileRecognizer(one.task, BASELINE), "", "baseline")}
    case = ladder.case(what, one, arms, {}, quick=True)
    spoil(monkeypatch)
    spoiled = FileRecognizer(one.task, BASELINE if spoil is _not_normalised else how)
    plain = FileRecognizer(one.task, BASELINE)
    monkeypatch.undo()
    right = plain()
    spoil(monkeypatch)

    def wrong():
        return spoiled()

    with pytest.raises(AssertionError, match="disagrees with right"):
        check(replace(case, arms={"right": lambda: right, "wrong": wrong}, ratios=[]))


def test_the_script_catches_a_mistake_that_all_arms_share(made, monkeypatch):
    one = made["ladder-tdt-tiny"]
    arms = ladder.climb(one.task)
    _cut_short(monkeypatch)
    with pytest.raises(AssertionError, match="baseline finds other labels than planted"):
        ladder.case("ladder-tdt-tiny", one, arms, {}, quick=True)


def test_the_quick_suite_records_every_rung_both_ways(suite, made):
    found, out, err = suite
    seen = {
        what: [arm.recognizer.config for arm in ladder.climb(one.task).values()]
        for what, one in made.items()
    }
    for what in KINDS:
        of = [record for record in found if record["what"] == what]
        arms = {record["impl"]: record for record in of if record["metric"] == "latency"}
        rtfx = {record["impl"]: record["value"] for record in of if record["metric"] == "rtfx"}
        assert (
            arms.keys()
            == rtfx.keys()
            >= {
                "baseline",
                "to_batched_frontend",
                "only_bfloat16",
                "only_overlapped",
                "to_overlapped",
            }
        )
        assert ("only_windowed_looping" in arms) == (what != "ladder-ctc-tiny")
        ratios = {tuple(record["params"]["arms"]) for record in of if record["metric"] == "ratio"}
        assert ratios >= {("baseline", name) for name in arms if name != "baseline"}
        assert ("to_autocast", "to_bfloat16") in ratios
        for name, record in arms.items():
            params = record["params"]
            assert (
                params["utterances"] == 4
                and params["labels"] > 5
                and params["audio_s"] == pytest.approx(8, abs=0.5)
            )
            assert params["how"] == {"b": "baseline", "t": "cumulative", "o": "alone"}[name[0]]
            assert PipelineConfig(**params["pipeline"]) in seen[what]
            assert params["least_ms"] > 0 and params["floor_FLOP"] > 0 and params["device"] == "cpu"
            assert rtfx[name] == pytest.approx(1e3 * params["audio_s"] / record["value"])
    assert "ladder-rnnt-tiny: graph whole is left out: needs a GPU" in err
    assert "only_by_length" in out


def test_the_ledger_takes_the_whole_ladder_as_one_ratio(suite):
    source = dict.fromkeys(("document", "title", "url", "section"), "x")
    told = {
        "text": "x",
        "source": source,
        "kind": "ratio",
        "metric": "ratio",
        "unit": "1",
        "quoted": 10,
        "notebook": "13_ten_x",
    }
    claim = Claim(id="ladder-rnnt-tiny", arms=["baseline", LAST], noise=100, **told)
    assert verdict(claim, suite[0]).measured is None, "toy sizes settle something"
    found = [
        {**one, "params": {name: told for name, told in one["params"].items() if name != "quick"}}
        for one in suite[0]
    ]
    assert verdict(claim, found).measured == next(
        record["value"] for record in found
        if record["what"] == "ladder-rnnt-tiny" and record["params"].get("arms") == ["baseline", LAST]
    )  # fmt: skip


def test_the_stages_of_a_call_add_up(made):
    spent = FileRecognizer(
        made["ladder-ctc-tiny"].task, replace(BASELINE, loading="overlapped")
    ).stage_ms()
    assert [*spent] == ["loading", "frontend", "encoder", "decoder"] and min(spent.values()) >= 0


@pytest.mark.parametrize(("how", "said"), [
    ({"normalization": "fast"}, "normalization: expected one of 'batched', 'one_by_one', got 'fast'."),
    ({"precision": "int4"}, "precision: expected one of 'as_loaded', 'float32', 'tf32', 'autocast', 'bfloat16', 'float16', 'int8'"),
    ({"graphs": "step"}, "graphs: expected 'auto' or 'off' with strategy='one_by_one'"),
])  # fmt: skip
def test_a_pipeline_that_cannot_be_is_refused(how, said):
    with pytest.raises(ValueError, match=said):
        replace(BASELINE, **how)


def test_what_a_task_or_a_device_cannot_do_is_refused_in_one_line(made, tmp_path):
    task = made["ladder-ctc-tiny"].task
    for how, said in (
        (replace(BASELINE, encoder_graphs="per_shape"), "encoder_graphs: expected 'off' on a CPU"),
        (
            replace(BASELINE, strategy="windowed_looping"),
            "strategy: expected one of 'fastest', 'batched', 'one_by_one' for a CTCModel",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            FileRecognizer(task, how)
    with pytest.raises(ValueError, match="batch: expected at least 1"):
        replace(task, batch=0)
    with pytest.raises(ValueError, match="files, samples: expected as many of each"):
        replace(task, samples=task.samples[1:])
    with pytest.raises(ValueError, match="utterances: expected at least 1"):
        ladder.lengths(0)
    path = write_wav(tmp_path / "a.wav", read_wav(task.files[0]))
    assert read_wav(path).tolist() == read_wav(task.files[0]).tolist()
    raw = bytearray(path.read_bytes())
    raw[22], raw[32] = 2, 4  # the header's channels, and bytes of a frame
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="WAV with one channel of 2 bytes, got 2 of 2 in a.wav"):
        read_wav(path)


@pytest.mark.gpu
@pytest.mark.parametrize("what", KINDS)
def test_every_rung_says_what_the_script_says_on_a_gpu(tmp_path, what):
    made = ladder.scripted(
        KINDS[what], [16_000, 40_000, 25_001, 33_333, 8_000], tmp_path, batch=2, device="cuda"
    )
    arms = ladder.climb(made.task, say=print)
    assert {"to_graphed_encoder", "to_optimized_encoder"} <= {*arms}
    assert ("to_graph_whole" in arms) == (what != "ladder-ctc-tiny")
    for name, arm in arms.items():
        for _ in range(2):  # graphs are captured, then replayed
            assert arm.recognizer().tokens() == made.labels, name


def test_graphs_of_an_encoder_have_aligned_rows_and_little_padding():
    frames = sorted((samples // ladder.HOP + 1 for samples in ladder.lengths(512)), reverse=True)
    longest = frames[::16]  # of each batch of 16
    sizes = [rounded(T) for T in longest]
    encoded = torch.tensor(sizes)
    for _ in range(3):
        encoded = halve(encoded)
    assert (encoded % 16 == 0).all()  # 32 bytes in half precision
    assert all(size >= T for T, size in zip(longest, sizes, strict=True))
    assert sum(sizes) < 1.1 * sum(longest)
    assert len({*sizes}) <= 16
