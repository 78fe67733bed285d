import itertools
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from asrkit.decoders import Hypotheses
from asrkit.features import FeatureConfig
from asrkit.models import (
    Checkpoint,
    ConvConfig,
    CTCConfig,
    CTCModel,
    save_checkpoint,
)
from asrkit.sound_files import Sound
from asrkit.text import CharTokenizer
from asrkit.transcribe import Recognizer, WindowOptions, transcribe
from asrkit.transcribe.parts import Part, Span
from asrkit.transcribe.pauses import windows
from asrkit.transcribe.windows import POOL, Transcriber, plan_batches

WHOLE = WindowOptions(window_s=3600, overlap_s=0, timestamps=True)


def save(path, wave):
    """`wave` as a file of floats."""
    soundfile.write(str(path), torch.as_tensor(wave).numpy(), 16_000, subtype="FLOAT")
    return path


def transcriber_of(checkpoint, **options):
    recognizer = Recognizer.from_checkpoint(checkpoint)
    return Transcriber(recognizer, CharTokenizer(), WindowOptions(**options))


def untrained():
    """A small model of random weights that writes few blanks."""
    torch.manual_seed(0)
    encoder = ConvConfig(bins=8, width=8, layers=0, subsampling=8)
    model = CTCModel(CTCConfig(vocab_size=28, encoder=encoder)).eval()
    model.output.bias.data[-1] = -10
    return Checkpoint(model, CharTokenizer(), asdict(FeatureConfig(bins=8)), {})


@pytest.mark.parametrize("model", ["learned", "learned_transducer"])
def test_windows_of_a_long_file_have_the_text_of_one_piece_no_word_doubled_or_lost(
    request, long_file, tiny_speech, model
):
    learned = request.getfixturevalue(model)
    (whole,) = transcribe(learned, str(long_file), options=WHOLE)
    assert sum(map(whole.text.count, tiny_speech.texts)) > 20  # of 60 spoken ones
    for window_s, overlap_s in ((30, 4), (9, 3), (4, 2)):
        cut = replace(WHOLE, window_s=window_s, overlap_s=overlap_s)
        (parts,) = transcribe(learned, long_file, options=cut)
        assert parts.text == whole.text
        assert parts.audio_s == whole.audio_s
        pairs = zip(whole.words, parts.words, strict=True)
        assert max(abs(one.start_s - other.start_s) for one, other in pairs) < 0.2
    (apart,) = transcribe(learned, long_file, options=replace(cut, overlap_s=0))
    assert apart.text != whole.text  # else this would show nothing


def test_results_come_in_the_order_given_whatever_their_lengths_and_batches(
    learned, speech, long_file
):
    transcriber = transcriber_of(learned, window_s=10, batch_s=25)
    order = [speech[3], long_file, *speech, long_file, speech[0]]
    sounds = [*map(Sound, order)]
    alone = [next(transcriber.recordings([sound])).text for sound in sounds]
    advances = []
    for found in (
        [*transcriber.recordings(iter(sounds), advances.append)],
        [*transcriber.recordings(sounds, batches=POOL)],
    ):
        assert [one.path for one in found] == order
        assert [one.text for one in found] == alone
        assert sum(one.audio_s for one in found) == pytest.approx(sum(advances))


@pytest.fixture
def batches(monkeypatch):
    """Samples of each attempted batch; batches of more than `limit` run out of memory."""
    tried = []
    call = Recognizer.__call__

    def counted(self, waveforms, lengths, **how):
        tried.append(waveforms.numel())
        if waveforms.numel() > counted.limit:
            raise torch.OutOfMemoryError("no memory for\nthat")
        return call(self, waveforms, lengths, **how)

    counted.limit = float("inf")
    monkeypatch.setattr(Recognizer, "__call__", counted)
    return tried, counted


def test_a_transcript_comes_as_soon_as_it_and_those_before_it_are_done(
    learned, speech, long_file, batches
):
    tried, _ = batches
    options = WindowOptions(window_s=10, overlap_s=0, batch_s=20)
    assert next(transcribe(learned, speech * 20, options=options)).text
    assert len(tried) <= 2  # of 17 or more
    tried.clear()
    found = transcribe(learned, [long_file] * 8, options=options)
    when = [0, *(len(tried) for _ in found)]
    assert max(b - a for a, b in itertools.pairwise(when)) <= 6  # 10 windows, 2 a batch


def test_a_batch_without_memory_is_halved_and_what_does_not_fit_alone_is_reported(
    learned, speech, long_file, batches
):
    wanted = [one.text for one in transcribe(learned, speech)]
    tried, call = batches
    call.limit = 6 * 16_000
    found = [*transcribe(learned, [*speech, long_file, *speech])]
    assert [one.text for one in found] == [*wanted, "", *wanted]
    assert found[len(speech)].error == "no memory for that"


class Scripted(Recognizer):
    """A recogniser that always returns these hypotheses."""

    def __call__(self, waveforms, lengths, **how):
        return Hypotheses(
            labels=torch.tensor([[2, 0, 3, 9]]),
            lengths=torch.tensor([3]),
            frames=torch.tensor([[0, 2, 5, 9]]),
            durations=torch.tensor([[3, 0, 99, 9]]),
            scores=torch.zeros(1),
            confidence=torch.tensor([[0.9, 0.8, 0.7, 0.6]]),
            impl="said",
        )


def test_the_times_of_labels_are_frames_of_the_encoder_and_durations_count(
    learned, tmp_path
):
    path = save(tmp_path / "a.wav", torch.rand(4_000))
    scripted = Scripted.from_checkpoint(learned)
    options = WindowOptions(timestamps=True)
    (one,) = transcribe(learned, path, options=options, recognizer=scripted)
    first, second = one.words
    assert one.text == f"{first.text} {second.text}"
    times = [0.0, 0.12, 0.9, 0.2, 0.25, 0.7]
    assert [*first[1:4], *second[1:4]] == pytest.approx(times)


def test_silence_a_sample_and_less_than_a_frame_have_no_text_and_are_no_error(
    tmp_path,
):
    waves = (torch.zeros(32_000), torch.ones(1), torch.ones(399), torch.rand(400))
    paths = [save(tmp_path / f"{n}.wav", wave) for n, wave in enumerate(waves)]
    found = [*transcribe(untrained(), paths)]
    assert [bool(one.text) for one in found] == [False, False, False, True]
    assert [one.audio_s * 16_000 for one in found] == [*map(len, waves)]
    assert not any(one.error for one in found)


def test_a_bad_file_is_one_error_in_its_place_and_the_rest_is_transcribed(
    learned, speech, tmp_path
):
    bad = save(tmp_path / "nan.wav", torch.full((16_000,), float("nan")))
    good = [one.text for one in transcribe(learned, speech[:2])]
    order = [speech[0], tmp_path / "none.wav", bad, speech[1]]
    found = [*transcribe(learned, order, options=WindowOptions(batch_s=5))]
    assert [one.text for one in found] == [good[0], "", "", good[1]]
    assert [bool(one.error) for one in found] == [False, True, True, False]
    assert "nan.wav cannot be read beyond 0.00 s (NaN or infinity)" in found[2].error


def test_scores_that_are_nan_are_an_error_of_the_file(speech):
    broken = untrained()
    broken.model.output.weight.data[0, 0] = float("nan")
    (one,) = transcribe(broken, speech[0])
    assert "got NaN or infinity in torch.float32" in one.error


@given(st.integers(1, 99), st.integers(0, 5), st.integers(1, 120))
def test_windows_cover_every_sample_share_the_overlap_and_mark_the_last(
    total, overlap, chunk
):
    signal = torch.arange(float(total))
    found = [*windows(signal.split(chunk), 10, overlap)]
    for n, (start, part, last) in enumerate(found, 1):
        assert start == (n - 1) * (10 - overlap)
        assert last == (n == len(found))
        assert torch.equal(part, signal[start : None if last else start + 10])
    assert len(found) == 1 or overlap < len(part) <= 10


@pytest.mark.parametrize(
    ("budget", "most_padding", "plan"),
    [
        (250, 4, [[0, 4], [1, 5, 2, 3]]),
        (250, 3, [[0, 4], [1, 5, 2], [3]]),
        (60, 4, [[0, 4], [1, 5], [2, 3]]),
        (20, 4, [[0, 4], [1], [2], [3], [5]]),
    ],
)
def test_a_batch_ends_before_another_utterance_adds_too_much_padding(
    budget, most_padding, plan
):
    lengths = dict(enumerate([10, 30, 29, 27, 9, 30]))
    assert plan_batches(lengths, budget, most_padding) == plan


def test_among_equally_long_windows_those_that_others_depend_on_are_decoded_first():
    transcriber = transcriber_of(untrained(), window_s=10, batch_s=30)
    seconds = {0: [10], 1: [9], 2: [10], 3: [25], 4: [10, 3], 5: [10]}
    parts = {}
    for number, spans in seconds.items():
        todo = [Span(0, round(s * transcriber.rate_hz)) for s in spans]
        nothing = torch.zeros(0)
        parts[number] = Part(
            Path("a"), 0, 0, True, nothing, nothing.bool(), tuple(todo)
        )
    plan = transcriber._batches({5, 4, 3, 2, 1, 0}, parts)
    assert plan == [[3, 4, 0], [2, 5, 1]]


MEMORY = """
import resource, sys
from asrkit.models import load_checkpoint
from asrkit.transcribe import transcribe
checkpoint = load_checkpoint(sys.argv[1])
short, = transcribe(checkpoint, [sys.argv[2]])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
long, = transcribe(checkpoint, [sys.argv[3]])
more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(long.audio_s, len(long.text) > 1000, more / 1024)
"""


@pytest.mark.live
def test_a_file_of_three_hours_needs_no_more_memory_than_its_windows(tmp_path):
    save_checkpoint(tmp_path / "m.safetensors", untrained())
    minute = 0.1 * torch.randn(8_000 * 60, generator=torch.Generator().manual_seed(0))
    run = [sys.executable, "-c", MEMORY, str(tmp_path / "m.safetensors")]
    for minutes in (1, 180):
        run.append(str(tmp_path / f"{minutes}.wav"))
        with soundfile.SoundFile(run[-1], "w", 8_000, 1) as file:
            for _ in range(minutes):
                file.write(minute.numpy())
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    audio_s, spoke, more_mib = done.stdout.split()
    assert float(audio_s) == 10_800
    assert spoke == "True"
    assert float(more_mib) < 500  # its samples at 16 kHz alone are 660 MiB
