"""Whisper in the recogniser and in `asrkit transcribe`: languages, timestamps, second tries, refusals. tests/models compares tokens with
those of transformers."""

import importlib.util
import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import soundfile
import torch

from asrkit.cli import main
from asrkit.decoders import Suppressing, aed_greedy
from asrkit.models import load_checkpoint
from asrkit.models.prompts import PromptFormat
from asrkit.transcribe import (
    BeamOptions,
    PipelineConfig,
    PromptOptions,
    Recognizer,
    WindowOptions,
    transcribe,
    whisper,
)

HERE = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location(
    "whisper_cases", HERE / "models" / "whisper_cases.py"
)
known = importlib.util.module_from_spec(spec)
spec.loader.exec_module(known)

WINDOWS = WindowOptions(window_s=2, overlap_s=0.5)
SHORT = ["--window", "2", "--overlap", "0.5"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each case."""
    made = {}
    shapes = json.loads((HERE / "golden" / "whisper.json").read_text())
    for name, case in known.CASES.items():
        made[name] = tmp_path_factory.mktemp("models") / name
        empty = {key: torch.zeros(size) for key, size in shapes[name]["shapes"].items()}
        known.write_folder(made[name], case, known.fill(empty))
    return made


@pytest.fixture(scope="module")
def checkpoint(folders):
    return load_checkpoint(folders["whisper"])


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    """Three files of up to 2 s, of which the multilingual model takes the second one for German."""
    folder = tmp_path_factory.mktemp("sounds")
    waveforms, lengths = known.speech(known.LENGTHS)
    return [
        written(folder / f"{n}.wav", row[:length])
        for n, (row, length) in enumerate(zip(waveforms, lengths, strict=True))
        if length > 400  # else it is too short for a text
    ]


FOUND = ["en", "de", "en"]


def written(path, samples):
    soundfile.write(path, samples.numpy(), 16_000, subtype="FLOAT")
    return path


def samples_of(path):
    return torch.from_numpy(soundfile.read(path, dtype="float32")[0])


def recogniser(checkpoint, search=None, **asked):
    """Without second tries, if nothing else is said."""
    prompt = PromptOptions(**{"fallback": False} | asked)
    config = PipelineConfig(encoder="eager", search=search, prompt=prompt)
    return Recognizer.from_checkpoint(checkpoint, config)


def transcripts(checkpoint, files, timestamps=False, **asked):
    options = replace(WINDOWS, timestamps=timestamps)
    recognizer = recogniser(checkpoint, **asked)
    return [*transcribe(checkpoint, files, options=options, recognizer=recognizer)]


@torch.no_grad()
def by_hand(checkpoint, samples, **asked):
    """The text of one window, by the parts."""
    recognizer = recogniser(checkpoint)
    inputs = recognizer.features(samples[None], torch.tensor([len(samples)]))
    encoded, ends, _ = checkpoint.model.encode(*inputs)
    prompt = PromptFormat.from_notes(checkpoint.notes).tokens(**asked)
    quiet = Suppressing(
        checkpoint.model, **checkpoint.notes["suppressed"], prompt_tokens=len(prompt)
    )
    found = aed_greedy(quiet, encoded, ends, prompt=prompt).tokens()[0]
    size = checkpoint.tokenizer.vocab_size
    return checkpoint.tokenizer.decode([token for token in found if token < size])


def test_a_text_is_in_the_language_asked_for_or_found(checkpoint, sounds):
    for asked, languages in (
        ({}, FOUND),
        ({"language": "de"}, ["de"] * 3),
        ({"language": "de", "task": "translate"}, ["de"] * 3),
        ({"task": "translate"}, FOUND),
    ):
        found = transcripts(checkpoint, sounds, **asked)
        assert [one.language for one in found] == languages
        for one, file in zip(found, sounds, strict=True):
            how = asked | {"language": one.language}
            if one.language == "en":  # there is nothing to translate
                how.pop("task", None)
            assert one.text == by_hand(checkpoint, samples_of(file), **how)


def test_a_recording_has_the_language_of_its_first_window_with_sound(
    checkpoint, sounds, tmp_path
):
    window = 32_000
    padded = [
        torch.nn.functional.pad(part, (0, window - len(part)))
        for part in map(samples_of, sounds)
    ]
    silence = torch.zeros(2 * window)
    orders = {"mixed": (2, 1), "german": (1, 2), "late": (None, 1, 0), "one": (0,)}
    files, wanted = [], []
    for name, order in orders.items():
        parts = [silence if n is None else padded[n] for n in order]
        files.append(written(tmp_path / f"{name}.wav", torch.cat(parts)))
        order = [n for n in order if n is not None]
        language = FOUND[order[0]]
        texts = [by_hand(checkpoint, padded[n], language=language) for n in order]
        wanted.append((language, "".join(texts)))
    options = WindowOptions(window_s=2, overlap_s=0)
    for batch_s in (2, 6, 120):
        found = transcribe(
            checkpoint,
            files,
            options=replace(options, batch_s=batch_s),
            recognizer=recogniser(checkpoint),
        )
        assert [(one.language, one.text) for one in found] == wanted


def test_the_command_says_which_language_it_found(folders, sounds, capsys):
    for name, language in (("whisper", "de"), ("whisper-en", "en")):
        command = ["transcribe", str(sounds[1]), "--model", str(folders[name])]
        assert main([*command, *SHORT, "--no-fallback", "--json"]) == 0
        row = json.loads(capsys.readouterr().out)
        checkpoint = load_checkpoint(folders[name])
        text = by_hand(checkpoint, samples_of(sounds[1]), language=language)
        assert (row["language"], row["text"]) == (language, text)


@pytest.mark.parametrize("name, options, wanted", [
    ("whisper", ["--language", "fr"], "--language: expected one of 'de', 'en', got 'fr'."),
    ("whisper", ["--target-language", "de"], "--target-language: expected 'en'"),
    ("whisper-en", ["--language", "de"], "--language: expected one of 'en', got 'de'."),
    ("whisper-en", ["--task", "translate"], "--target-language: expected another language than language='en'"),
    ("whisper", ["--no-punctuation"], "punctuation: expected none, since the model's prompt has no place for it"),
    ("whisper", ["--window", "30"], "expected at most 2 seconds, as the model has positions, got 30.0."),
])  # fmt: skip
def test_what_a_whisper_cannot_do_is_refused(
    folders, sounds, name, options, wanted, capsys
):
    command = ["transcribe", str(sounds[0]), "--model", str(folders[name])]
    assert main([*command, *SHORT, *options]) == 2
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("name", known.CASES)
@pytest.mark.parametrize("search", [None, BeamOptions(beam=2)])
def test_words_are_within_the_segments_that_timestamps_make(
    folders, sounds, name, search
):
    checkpoint = load_checkpoint(folders[name])
    recognizer = recogniser(checkpoint, search=search)
    plain = recogniser(checkpoint, search=search)
    plain.decode_options = plain.decode_options._replace(texts=None)
    waveforms, lengths = known.speech(known.LENGTHS)
    raw = plain(waveforms, lengths, timestamps=True).tokens()
    found = recognizer(waveforms, lengths, timestamps=True, times=True, confidence=True)
    first = known.specials()["<|0.00|>"]
    for row, tokens in enumerate(raw):
        frames = iter(found.frames[row].tolist())
        stamps = [token - first for token in tokens if token >= first]
        assert stamps == sorted(stamps)
        start, seen = 0, 0
        for token in tokens:
            if token >= first:
                start, seen = token - first, seen + 1
            elif token < checkpoint.tokenizer.vocab_size:
                end = stamps[seen] if seen < len(stamps) else 50 * known.CHUNK_S
                assert start <= next(frames) <= max(start, end - 1)
        assert next(frames, -1) == -1
    for one in transcripts(checkpoint, sounds, timestamps=True, search=search):
        assert one.words and one.text
        for word in one.words:
            assert 0 <= word.start_s <= word.end_s <= one.audio_s + 0.02
            assert 0 <= word.confidence <= 1


def test_a_beam_of_one_is_greedy_decoding(checkpoint, sounds):
    greedy = transcripts(checkpoint, sounds)
    one = transcripts(checkpoint, sounds, search=BeamOptions(beam=1))
    assert [row.text for row in one] == [row.text for row in greedy]


def test_draws_do_not_depend_on_the_rest_of_the_batch(checkpoint):
    waveforms, lengths = known.speech(known.LENGTHS)
    recognizer = recogniser(checkpoint, fallback=True)
    found = recognizer(waveforms, lengths, confidence=True)
    assert found.tokens() == recognizer(waveforms, lengths).tokens()
    assert found.tokens() != recogniser(checkpoint)(waveforms, lengths).tokens()
    for row in range(4):
        part = slice(row, row + 1)
        alone = recognizer(waveforms[part], lengths[part], confidence=True)
        n = int(found.lengths[row])
        assert alone.tokens()[0] == found.tokens()[row]
        torch.testing.assert_close(alone.confidence[0, :n], found.confidence[row, :n])
    assert len({str(row) for row in found.tokens()}) == 4


def test_repetitions_are_decoded_again(checkpoint, monkeypatch):
    """The bound lies between what zlib makes of the four texts."""
    waveforms, lengths = known.speech(known.LENGTHS)
    plain = recogniser(checkpoint)(waveforms, lengths).tokens()
    texts = [checkpoint.tokenizer.decode(row).strip().encode() for row in plain]
    ratios = [len(text) / len(zlib.compress(text)) for text in texts]
    low, high = sorted(ratios)[1:3]
    monkeypatch.setattr(whisper, "LEAST_LOG_PROB", -100.0)
    monkeypatch.setattr(whisper, "MOST_COMPRESSED", (low + high) / 2)
    found = recogniser(checkpoint, fallback=True)(waveforms, lengths).tokens()
    again = [row != before for row, before in zip(found, plain, strict=True)]
    assert again == [ratio > (low + high) / 2 for ratio in ratios]


def test_a_batch_counts_the_silence_that_fills_its_windows(
    checkpoint, sounds, monkeypatch
):
    sizes = []
    features = Recognizer.features

    def counted(self, waveforms, lengths):
        found = features(self, waveforms, lengths)
        sizes.append(found[0].shape[:2])
        return found

    monkeypatch.setattr(Recognizer, "features", counted)
    options = replace(WINDOWS, batch_s=5)  # 4.5 s, but 6 s once they are filled up
    recognizer = recogniser(checkpoint)
    [*transcribe(checkpoint, [sounds[0]] * 3, options=options, recognizer=recognizer)]
    assert sizes == [(2, 200), (1, 200)]


@pytest.mark.parametrize("damaged", [
    {"suppressed": {"always": 5, "first": []}}, {"suppressed": {"always": [400], "first": []}},
    {"whisper": {"no_times": 900, "most_first": None}}, {"whisper": {"no_times": 289, "most_first": "1"}},
], ids=str)  # fmt: skip
def test_notes_that_are_damaged_are_refused(checkpoint, damaged):
    notes = checkpoint.notes | damaged
    with pytest.raises(ValueError, match="^(suppressed|whisper|always|prompt|most_first): expected"):  # fmt: skip
        Recognizer.from_checkpoint(checkpoint._replace(notes=notes))
