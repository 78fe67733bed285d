import itertools
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import soundfile
import torch

from asrkit.features import FeatureConfig
from asrkit.models import (
    Checkpoint,
    ConvConfig,
    CTCConfig,
    CTCModel,
    TransducerConfig,
    TransducerModel,
    presets,
    save_checkpoint,
)
from asrkit.text import CharTokenizer
from asrkit.transcribe import Label, Recognizer, WindowOptions, recognize, transcribe
from asrkit.transcribe.words import words

WHOLE = WindowOptions(window_s=3600, overlap_s=0)


def save(path, wave, rate=16_000):
    """`wave` as a file of floats."""
    soundfile.write(str(path), torch.as_tensor(wave).numpy(), rate, subtype="FLOAT")
    return path


def untrained(config=None, **features):
    """A model of random weights that hears something in most frames."""
    torch.manual_seed(0)
    config = config or TransducerConfig(
        vocab_size=28, encoder=ConvConfig(width=16, layers=1)
    )
    model = (CTCModel if isinstance(config, CTCConfig) else TransducerModel)(
        config
    ).eval()
    return Checkpoint(model, CharTokenizer(), asdict(FeatureConfig(**features)), {})


def test_a_trained_model_hears_what_it_learned_when_the_words_are(
    learned, speech, tiny_speech
):
    heard = [*transcribe(learned, speech, options=WindowOptions(timestamps=True))]
    right = sum(
        one.text == text for one, text in zip(heard, tiny_speech.texts, strict=False)
    )
    assert right >= 3  # it learned them three in a row: beginnings and ends are new
    for one, waveform in zip(heard, tiny_speech.waveforms, strict=False):
        assert one.audio_s == len(waveform) / 16_000 and one.text == " ".join(
            word.text for word in one.words
        )
        times = [time for word in one.words for time in word[1:3]]
        assert times == sorted(times) and all(
            0 <= time <= one.audio_s for time in times
        )
        assert all(0 < word.confidence <= 1 for word in one.words)


@pytest.mark.parametrize(
    ("window_s", "overlap_s"), [(30, 4), (10, 4), (9, 3), (6, 2), (4, 2)]
)
def test_windows_of_a_long_file_say_what_one_piece_says_no_word_doubled_or_lost(
    learned, long_file, window_s, overlap_s
):
    (whole,) = transcribe(learned, [long_file], options=replace(WHOLE, timestamps=True))
    (parts,) = transcribe(
        learned,
        [long_file],
        options=WindowOptions(window_s=window_s, overlap_s=overlap_s, timestamps=True),
    )
    assert (
        parts.text == whole.text
        and len(whole.words) > 250
        and parts.audio_s == whole.audio_s > 90
    )
    apart = [
        abs(one.start_s - other.start_s)
        for one, other in zip(whole.words, parts.words, strict=True)
    ]
    assert max(apart) < 0.2


def test_without_overlap_words_at_the_seams_suffer(learned, long_file):
    (whole,) = transcribe(learned, [long_file], options=WHOLE)
    (parts,) = transcribe(
        learned, [long_file], options=WindowOptions(window_s=4, overlap_s=0)
    )
    assert parts.text != whole.text  # or the test above would show nothing


def test_results_come_in_the_order_given_whatever_their_lengths_and_batches(
    learned, speech, long_file
):
    alone = {
        path: next(transcribe(learned, [path], options=WindowOptions(window_s=10))).text
        for path in [*speech, long_file]
    }
    order = [speech[3], long_file, *speech, long_file, speech[0]]
    heard = [
        *transcribe(learned, order, options=WindowOptions(window_s=10, batch_s=25))
    ]
    assert [one.path for one in heard] == order
    assert [one.text for one in heard] == [alone[path] for path in order]
    assert all(one.compute_s > 0 for one in heard)


def test_a_transcript_comes_as_soon_as_it_and_those_before_it_are_heard(
    learned, speech, long_file, monkeypatch
):
    batches = []
    call = Recognizer.__call__
    monkeypatch.setattr(
        Recognizer,
        "__call__",
        lambda *args, **how: (batches.append(1), call(*args, **how))[1],
    )
    options = WindowOptions(window_s=10, overlap_s=0, batch_s=20)
    assert (
        next(transcribe(learned, speech * 20, options=options)).text
        and len(batches) <= 2
    )  # of 17 or more
    batches.clear()
    heard = [
        len(batches) for _ in transcribe(learned, [long_file] * 8, options=options)
    ]
    assert (
        heard[0] <= 6
        and max(after - before for before, after in itertools.pairwise(heard)) <= 6
    )  # 10 windows, 2 a batch


def test_one_path_is_one_file_as_text_and_as_a_path(learned, speech):
    for path in (str(speech[0]), speech[0]):
        (one,) = transcribe(learned, path)
        assert one.path == speech[0] and one.text


def test_the_times_of_labels_are_frames_of_the_encoder_and_durations_count(
    learned, tmp_path
):
    tdt = untrained(presets.tiny(vocab_size=28))
    generator = torch.Generator().manual_seed(0)
    path = save(tmp_path / "a.wav", 0.1 * torch.randn(32_000, generator=generator))
    (one,) = transcribe(tdt, [path], options=WindowOptions(timestamps=True))
    found = recognize(
        tdt,
        torch.from_numpy(soundfile.read(str(path), dtype="float32")[0])[None],
        torch.tensor([32_000]),
    )
    N = int(found.lengths[0])
    rows = [
        *zip(
            *(
                part[0, :N].tolist()
                for part in (found.labels, found.frames, found.durations)
            ),
            strict=True,
        )
    ]

    def timed(length):
        return words(
            [
                Label(t, f * 0.08, min((f + length(jump)) * 0.08, 2.0), 1.0)
                for t, f, jump in rows
            ],
            tdt.tokenizer,
        )

    wanted = timed(lambda jump: max(jump, 1))
    assert one.text == tdt.tokenizer.decode(found.tokens()[0]) and wanted != timed(
        lambda jump: 1
    ) != timed(lambda jump: jump)
    for heard, word in zip(one.words, wanted, strict=True):
        assert (
            heard.text == word.text
            and heard[1:3] == pytest.approx(word[1:3])
            and 0 < heard.confidence < 1
        )


def test_silence_a_sample_and_less_than_a_frame_have_no_text_and_are_no_error(tmp_path):
    tones = {
        "silent": torch.zeros(32_000),
        "one": torch.full((1,), 0.5),
        "short": torch.full((399,), 0.5),
        "frame": torch.rand(400),
    }
    paths = [save(tmp_path / f"{name}.wav", wave) for name, wave in tones.items()]
    eager = untrained()
    with torch.no_grad():
        eager.model.output.bias[-1] = -10  # never blank
    silent, one, short, frame = transcribe(eager, paths)
    assert {silent.text, one.text, short.text} == {
        ""
    } and not silent.error + one.error + short.error + frame.error
    assert frame.text and [one.audio_s, silent.audio_s] == [1 / 16_000, 2.0]


def test_a_bad_file_is_one_error_in_its_place_and_the_rest_goes_on(
    learned, speech, tmp_path
):
    bad = tmp_path / "nan.wav"
    save(bad, torch.cat([torch.rand(16_000 * 90), torch.tensor([float("nan")])]))
    order = [speech[0], tmp_path / "none.wav", bad, speech[1], tmp_path]
    (tmp_path / "text.wav").write_text("hello")
    heard = [*transcribe(learned, order, options=WindowOptions(batch_s=5))]
    assert [bool(one.error) for one in heard] == [False, True, True, False, True, True]
    assert (
        "NaN or infinity at 90.000 s of nan.wav" in heard[2].error and not heard[2].text
    )
    assert (
        heard[0].text and heard[3].text == next(transcribe(learned, [speech[1]])).text
    )


def test_a_batch_without_memory_is_halved_and_what_does_not_fit_alone_is_reported(
    learned, speech, long_file, monkeypatch
):
    wanted = [one.text for one in transcribe(learned, speech)]
    tried = []
    call = Recognizer.__call__

    def little_memory(self, waveforms, lengths, **how):
        tried.append(waveforms.numel())
        if waveforms.numel() > 6 * 16_000:
            raise torch.OutOfMemoryError("no memory for\nthat")
        return call(self, waveforms, lengths, **how)

    monkeypatch.setattr(Recognizer, "__call__", little_memory)
    heard = [*transcribe(learned, [*speech, long_file, *speech])]
    assert [one.text for one in heard] == [*wanted, "", *wanted]
    assert heard[len(speech)].error == "no memory for that" and max(tried) > 6 * 16_000


def test_scores_that_are_nan_are_an_error_of_the_file(speech):
    broken = untrained()
    with torch.no_grad():
        broken.model.output.weight[0, 0] = float("nan")
    assert (
        "got NaN or infinity in torch.float32" in next(transcribe(broken, speech)).error
    )


MEMORY = """
import resource, sys
from asrkit.models import load_checkpoint
from asrkit.transcribe import transcribe
checkpoint = load_checkpoint(sys.argv[1])
short, = transcribe(checkpoint, [sys.argv[2]])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
long, = transcribe(checkpoint, [sys.argv[3]])
print(long.audio_s, len(long.text) > 1000, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
def test_a_file_of_three_hours_needs_no_more_memory_than_its_windows(tmp_path):
    hearing = untrained(
        CTCConfig(
            vocab_size=28, encoder=ConvConfig(bins=8, width=8, layers=0, subsampling=8)
        ),
        bins=8,
    )
    save_checkpoint(tmp_path / "m.safetensors", hearing)
    minute = (
        0.1 * torch.randn(8_000 * 60, generator=torch.Generator().manual_seed(0))
    ).numpy()
    for name, minutes in (("short", 1), ("long", 180)):
        with soundfile.SoundFile(str(tmp_path / f"{name}.wav"), "w", 8_000, 1) as file:
            for _ in range(minutes):
                file.write(minute)
    files = [
        str(tmp_path / name) for name in ("m.safetensors", "short.wav", "long.wav")
    ]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *files],
        capture_output=True,
        text=True,
        check=True,
    )
    audio_s, spoke, more_mib = done.stdout.split()
    assert float(audio_s) == 10_800 and spoke == "True"
    assert float(more_mib) < 500  # its samples at 16 kHz alone are 660 MiB
