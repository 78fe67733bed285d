"""The ladder: every rung says what the script says; wrong order, lengths, numbers and lost batches are seen; records fit."""

import math
from dataclasses import replace

import pytest
import torch

from asrkit.cli import main
from asrkit.models.encoders import strided
from asrkit.models.inference import GRAPH_FRAMES
from asrkit.transcribe import Recognizer
from asrkit.workbench import records
from asrkit.workbench.bench import file_recognizer
from asrkit.workbench.bench.agreement import check
from asrkit.workbench.bench.file_recognizer import FileRecognizer, Way, WayRecognizer
from asrkit.workbench.bench.scripted import HOP, lengths, scripted
from asrkit.workbench.bench.suites import ladder
from asrkit.workbench.bench.suites.ladder import BASELINE

KINDS = {
    what: ladder.config_of("tiny", durations)
    for what, durations in ladder.KINDS.items()
}
SAMPLES = [16_000, 40_000, 25_001, 33_333, 8_000]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Five scripted utterances a kind of model, in batches of two."""
    return {
        what: scripted(config, SAMPLES, tmp_path_factory.mktemp(what), batch=2)
        for what, config in KINDS.items()
    }


@pytest.mark.parametrize("what", KINDS)
def test_every_rung_says_what_the_script_says(tasks, what):
    task, said = tasks[what], []
    arms = ladder.climb(task, say=said.append)
    assert sum(map(len, task.labels)) > 10
    for name, arm in arms.items():
        assert arm().tokens() == task.labels, name
    assert said == [
        f"{rung.replace('_', ' ')} is left out: needs a GPU"
        for rung in ladder.GPU_RUNGS
    ]
    check(ladder.case(what, task, arms, {}, quick=True))


def test_files_in_memory_are_read_once_when_the_recogniser_is_made(tasks, monkeypatch):
    task = replace(tasks["ladder-rnnt"], in_memory=True)
    recognizer = FileRecognizer(task, BASELINE)
    monkeypatch.setattr(file_recognizer, "read_wav", None)
    assert recognizer().tokens() == task.labels
    assert {*recognizer.stage_ms()} == {*file_recognizer.STAGES}


def _swapped(monkeypatch):
    plain = FileRecognizer.__init__

    def init(self, task, how):
        plain(self, task, how)
        self.plan[0] = self.plan[0][::-1]  # the rows of the script stay

    monkeypatch.setattr(FileRecognizer, "__init__", init)


def _unsorted(monkeypatch):
    plain = file_recognizer._gathered

    def gathered(batches, ends, rows):
        return plain(batches, ends, rows.sort().values)

    monkeypatch.setattr(file_recognizer, "_gathered", gathered)


def _longer(monkeypatch):
    plain = WayRecognizer.features

    def features_of(self, *given):
        features, frames = plain(self, *given)
        return features, (frames + 1).clamp(max=features.shape[1])

    monkeypatch.setattr(WayRecognizer, "features", features_of)


def _frame_short(monkeypatch):
    plain = Recognizer.encode

    def encode(self, features, frames):
        encoded, ends = plain(self, features, frames)
        return encoded, ends - 1

    monkeypatch.setattr(Recognizer, "encode", encode)


def _dropped(monkeypatch):
    plain = FileRecognizer.__init__

    def init(self, task, how):
        plain(self, task, how)
        del self.plan[-1]

    monkeypatch.setattr(FileRecognizer, "__init__", init)


def _not_a_number(monkeypatch):
    plain = Recognizer.encode

    def encode(self, features, frames):
        encoded, ends = plain(self, features, frames)
        encoded[-1, :8] = float("nan")
        return encoded, ends

    monkeypatch.setattr(Recognizer, "encode", encode)


def _not_normalised(monkeypatch):
    monkeypatch.setattr(
        file_recognizer, "normalize_sequential", lambda features, frames: features
    )


def _cut_short(monkeypatch):
    plain = file_recognizer.read_wav
    monkeypatch.setattr(file_recognizer, "read_wav", lambda path: plain(path)[:-801])


def _one_coarser(monkeypatch):
    plain = Recognizer.encode

    def encode(self, features, frames):
        return plain(self, (features * 4).round() / 4, frames)

    monkeypatch.setattr(Recognizer, "encode", encode)


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("spoil", [
    _swapped, _unsorted, _longer, _frame_short, _dropped, _not_a_number, _not_normalised, _cut_short, _one_coarser,
], ids=lambda spoil: spoil.__name__)  # fmt: skip
def test_a_pipeline_with_a_mistake_is_not_measured(tasks, what, spoil, monkeypatch):
    task = tasks[what]
    fast = replace(BASELINE, order="by_length", strategy="windowed_looping")
    plain = FileRecognizer(task, BASELINE)
    case = ladder.case(what, task, {"baseline": plain}, {}, quick=True)
    right = plain()
    spoil(monkeypatch)
    wrong = FileRecognizer(task, BASELINE if spoil is _not_normalised else fast)
    with pytest.raises(AssertionError, match="disagrees with right"):
        check(replace(case, arms={"right": lambda: right, "wrong": wrong}, ratios=[]))


def test_the_script_catches_a_mistake_that_all_arms_share(tasks, monkeypatch):
    task = tasks["ladder-tdt"]
    arms = ladder.climb(task)
    _cut_short(monkeypatch)
    with pytest.raises(
        AssertionError, match="baseline finds other labels than planted"
    ):
        ladder.case("ladder-tdt", task, arms, {}, quick=True)


def test_the_quick_suite_records_every_rung(tasks, tmp_path, capsys):
    out = tmp_path / "records.jsonl"
    command = ["bench", "ladder", "--quick", "--threads", "1", "--out", str(out)]
    assert main(command) == 0
    written = capsys.readouterr()
    assert "ladder-rnnt-tiny: graph whole is left out: needs a GPU" in written.err
    assert "to_by_length" in written.out
    found = records.read(out)
    for what, task in tasks.items():
        configs = {name: arm.config for name, arm in ladder.climb(task).items()}
        of = [record for record in found if record["what"] == f"{what}-tiny"]
        arms = {one["impl"]: one for one in of if one["metric"] == "latency"}
        rtfx = {one["impl"]: one["value"] for one in of if one["metric"] == "rtfx"}
        assert [*arms] == [*rtfx] == [*configs]
        ratios = [
            tuple(one["params"]["arms"]) for one in of if one["metric"] == "ratio"
        ]
        assert {*ratios} >= {("baseline", name) for name in arms if name != "baseline"}
        assert ("to_autocast", "to_bfloat16") in ratios
        for name, record in arms.items():
            params = record["params"]
            assert params["utterances"] == 4 and params["labels"] > 5
            assert params["audio_s"] == pytest.approx(8, abs=0.5)
            assert Way(**params["pipeline"]) == configs[name]
            assert params["least_ms"] > 0 and params["floor_FLOP"] > 0
            assert rtfx[name] == pytest.approx(
                1e3 * params["audio_s"] / record["value"]
            )


@pytest.mark.gpu
@pytest.mark.parametrize("what", KINDS)
def test_every_rung_says_what_the_script_says_on_a_gpu(tmp_path, what):
    task = scripted(KINDS[what], SAMPLES, tmp_path, batch=2, device="cuda")
    for name, arm in ladder.climb(task).items():
        for _ in range(2):  # graphs are captured, then replayed
            assert arm().tokens() == task.labels, name


def test_graphs_of_an_encoder_have_aligned_rows_and_little_padding():
    frames = sorted((samples // HOP + 1 for samples in lengths(512)), reverse=True)
    longest = frames[::16]  # of each batch of 16
    sizes = [math.ceil(T / GRAPH_FRAMES) * GRAPH_FRAMES for T in longest]
    encoded = torch.tensor(sizes)
    for _ in range(3):
        encoded = strided(encoded, 2)
    assert (encoded % 16 == 0).all()  # 32 bytes in half precision
    assert all(size >= T for T, size in zip(longest, sizes, strict=True))
    assert sum(sizes) < 1.1 * sum(longest)
    assert len({*sizes}) <= 16
