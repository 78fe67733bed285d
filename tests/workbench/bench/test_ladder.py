"""The ladder: every rung says what the script says; wrong order, lengths, numbers and lost batches are seen; records fit."""

import contextlib
import io
from dataclasses import replace

import pytest
import torch

from asrkit.cli import main
from asrkit.models import execution
from asrkit.models.encoders import halve
from asrkit.models.execution import rounded
from asrkit.transcribe import PipelineConfig, Recognizer, pipeline
from asrkit.workbench import records
from asrkit.workbench.bench import ladder_pipeline
from asrkit.workbench.bench.agreement import check
from asrkit.workbench.bench.ladder_pipeline import FileRecognizer
from asrkit.workbench.bench.suites import ladder
from asrkit.workbench.bench.suites.ladder import BASELINE

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
        code = main(
            ["bench", "ladder", "--quick", "--threads", "1", "--out", str(file)]
        )
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
    left_out = LEFT_OUT - (
        ladder.TRANSDUCER_RUNGS if what == "ladder-ctc-tiny" else set()
    )
    assert {*said} == {
        f"{rung.replace('_', ' ')} is left out: needs a GPU" for rung in left_out
    }
    check(ladder.case(what, one, arms, {}, quick=True))


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
    assert (
        "to_optimized_encoder is left out: the labels are not those that are known"
        in said
    )
    assert (
        "to_optimized_encoder" not in arms
        and arms[LAST].recognizer().tokens() == one.labels
    )


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
    monkeypatch.setattr(
        FileRecognizer, "__call__", lambda self: plain(self, only=slice(0, -1))
    )


def _not_a_number(monkeypatch):
    plain = Recognizer.encode

    def encode(self, features, frames):
        encoded, ends = plain(self, features, frames)
        encoded[-1, :8] = float("nan")
        return encoded, ends

    monkeypatch.setattr(Recognizer, "encode", encode)


def _not_normalised(monkeypatch):
    monkeypatch.setattr(
        pipeline, "normalize_sequential", lambda features, frames: features
    )


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
    arms = {
        "baseline": ladder.LadderArm(FileRecognizer(one.task, BASELINE), "", "baseline")
    }
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
    with pytest.raises(
        AssertionError, match="baseline finds other labels than planted"
    ):
        ladder.case("ladder-tdt-tiny", one, arms, {}, quick=True)


def test_the_quick_suite_records_every_rung_both_ways(suite, made):
    found, out, err = suite
    seen = {
        what: [arm.recognizer.config for arm in ladder.climb(one.task).values()]
        for what, one in made.items()
    }
    for what in KINDS:
        of = [record for record in found if record["what"] == what]
        arms = {
            record["impl"]: record for record in of if record["metric"] == "latency"
        }
        rtfx = {
            record["impl"]: record["value"]
            for record in of
            if record["metric"] == "rtfx"
        }
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
        ratios = {
            tuple(record["params"]["arms"])
            for record in of
            if record["metric"] == "ratio"
        }
        assert ratios >= {("baseline", name) for name in arms if name != "baseline"}
        assert ("to_autocast", "to_bfloat16") in ratios
        for name, record in arms.items():
            params = record["params"]
            assert (
                params["utterances"] == 4
                and params["labels"] > 5
                and params["audio_s"] == pytest.approx(8, abs=0.5)
            )
            assert (
                params["how"]
                == {"b": "baseline", "t": "cumulative", "o": "alone"}[name[0]]
            )
            assert PipelineConfig(**params["pipeline"]) in seen[what]
            assert (
                params["least_ms"] > 0
                and params["floor_FLOP"] > 0
                and params["device"] == "cpu"
            )
            assert rtfx[name] == pytest.approx(
                1e3 * params["audio_s"] / record["value"]
            )
    assert "ladder-rnnt-tiny: graph whole is left out: needs a GPU" in err
    assert "only_by_length" in out


@pytest.mark.gpu
@pytest.mark.parametrize("what", KINDS)
def test_every_rung_says_what_the_script_says_on_a_gpu(tmp_path, what):
    made = ladder.scripted(
        KINDS[what],
        [16_000, 40_000, 25_001, 33_333, 8_000],
        tmp_path,
        batch=2,
        device="cuda",
    )
    arms = ladder.climb(made.task, say=print)
    assert {"to_graphed_encoder", "to_optimized_encoder"} <= {*arms}
    assert ("to_graph_whole" in arms) == (what != "ladder-ctc-tiny")
    for name, arm in arms.items():
        for _ in range(2):  # graphs are captured, then replayed
            assert arm.recognizer().tokens() == made.labels, name


def test_graphs_of_an_encoder_have_aligned_rows_and_little_padding():
    frames = sorted(
        (samples // ladder.HOP + 1 for samples in ladder.lengths(512)), reverse=True
    )
    longest = frames[::16]  # of each batch of 16
    sizes = [rounded(T) for T in longest]
    encoded = torch.tensor(sizes)
    for _ in range(3):
        encoded = halve(encoded)
    assert (encoded % 16 == 0).all()  # 32 bytes in half precision
    assert all(size >= T for T, size in zip(longest, sizes, strict=True))
    assert sum(sizes) < 1.1 * sum(longest)
    assert len({*sizes}) <= 16
