"""Whisper in the recogniser and in `asrkit transcribe`: languages, timestamps, fallback, refusals. tests/models compares tokens with
those of transformers."""

import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import soundfile
import torch
import whisper_cases as known

from asrkit.decoders import Hypotheses, aed_greedy
from asrkit.decoders.attention import Timestamps
from asrkit.models import load_checkpoint
from asrkit.models.prompts import PromptFormat
from asrkit.transcribe import (
    BeamOptions,
    PipelineConfig,
    PromptOptions,
    Recognizer,
    WindowOptions,
    parts,
    transcribe,
    whisper,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "whisper.json"
WINDOWS = WindowOptions(window_s=2, overlap_s=0.5)
SHORT = "--window 2 --overlap 0.5"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each case."""
    made = {}
    golden = json.loads(GOLDEN.read_text())
    for name, case in known.CASES.items():
        made[name] = tmp_path_factory.mktemp("models") / name
        shapes = golden[name]["shapes"]
        empty = {key: torch.zeros(size) for key, size in shapes.items()}
        known.write_folder(made[name], case, known.fill(empty))
    return made


@pytest.fixture(scope="module")
def checkpoint(folders):
    return load_checkpoint(folders["whisper"])


SPEECH = known.speech(known.LENGTHS)
# The third is too short for a text. The multilingual model takes the second for German.
SAMPLES = [row[:n] for row, n in zip(*SPEECH, strict=True) if n > 400]
FOUND = ["en", "de", "en"]


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    """Three files of up to 2 s."""
    folder = tmp_path_factory.mktemp("sounds")
    return [written(folder / f"{n}.wav", part) for n, part in enumerate(SAMPLES)]


def written(path, samples):
    soundfile.write(path, samples.numpy(), 16_000, subtype="FLOAT")
    return path


def recogniser(checkpoint, search=None, **options):
    """A recogniser without fallback by default."""
    prompt = PromptOptions(**{"fallback": False} | options)
    config = PipelineConfig(encoder="eager", search=search, prompt=prompt)
    return Recognizer.from_checkpoint(checkpoint, config)


def transcripts(checkpoint, files, timestamps=False, **options):
    windows = replace(WINDOWS, timestamps=timestamps)
    recognizer = recogniser(checkpoint, **options)
    return [*transcribe(checkpoint, files, options=windows, recognizer=recognizer)]


@torch.no_grad()
def by_hand(checkpoint, samples, **options):
    """The text of one window, decoded stage by stage."""
    model, notes = checkpoint.model, checkpoint.notes
    recognizer = recogniser(checkpoint)
    inputs = recognizer.features(samples[None], torch.tensor([len(samples)]))
    encoded, ends, _ = model.encode(*inputs)
    *prompt, _ = PromptFormat.from_notes(notes).tokens(
        **options
    )  # without <|notimestamps|>
    rules = {**notes["suppressed"], **notes["whisper"], "prompt_tokens": len(prompt)}
    timed = Timestamps(model, **rules)
    (found,) = aed_greedy(timed, encoded, ends, prompt=prompt).tokens()
    size = checkpoint.tokenizer.vocab_size
    return checkpoint.tokenizer.decode([token for token in found if token < size])


@pytest.mark.parametrize("options, languages", [
    ({}, FOUND),
    ({"language": "de"}, ["de"] * 3),
    ({"language": "de", "task": "translate"}, ["de"] * 3),
    ({"task": "translate"}, FOUND),
])  # fmt: skip
def test_a_text_is_in_the_requested_or_detected_language(
    checkpoint, sounds, options, languages, monkeypatch
):
    monkeypatch.setattr(parts, "_sounds", lambda *_: False)  # one window each
    found = transcripts(checkpoint, sounds, **options)
    assert [one.language for one in found] == languages
    for one, samples in zip(found, SAMPLES, strict=True):
        how = options | {"language": one.language}
        if one.language == "en":  # there is nothing to translate
            how.pop("task", None)
        assert one.text == by_hand(checkpoint, samples, **how)


def test_the_decoder_gets_the_end_of_sound_in_each_window(
    checkpoint, tmp_path, monkeypatch
):
    """Two windows of a part without a pause: a segment may be cut off at the end of the first one."""
    untils = []
    decode = whisper.WhisperDecoder.__call__

    def noted(self, frames, lengths, options):
        untils.extend(options.until)
        return decode(self, frames, lengths, options)

    monkeypatch.setattr(whisper.WhisperDecoder, "__call__", noted)
    loud = torch.rand(5 * 16_000, generator=torch.Generator().manual_seed(0)) - 0.5
    loud *= (torch.arange(len(loud)) / 1600).sin().abs()  # not steady
    transcripts(checkpoint, [written(tmp_path / "a.wav", loud)])
    frame_s = 0.02
    assert untils[0] == 0
    assert any(0 < until * frame_s <= WINDOWS.window_s for until in untils[1:])


def test_a_recording_has_the_language_of_its_first_window_with_sound(
    checkpoint, tmp_path
):
    """German, then English, and the reverse, after silence; independent of the batch."""
    silence = torch.zeros(32_000)
    german, english = (torch.cat([SAMPLES[n], silence])[:32_000] for n in (1, 2))
    orders = [(english, german), (german, english)] * 2
    files = [
        written(tmp_path / f"{n}.wav", torch.cat([silence] * n + [*order]))
        for n, order in enumerate(orders)
    ]
    texts = []
    for batch_s in (2, 6, 120):
        options = WindowOptions(window_s=2, overlap_s=0, batch_s=batch_s)
        how = {"options": options, "recognizer": recogniser(checkpoint)}
        found = [*transcribe(checkpoint, files, **how)]
        assert [one.language for one in found] == ["en", "de"] * 2
        texts.append([one.text for one in found])
    assert all(texts[0])
    assert texts[1:] == texts[:1] * 2


@pytest.fixture
def prompts(checkpoint, monkeypatch):
    """The prompts of each batch."""
    given = []
    model = type(checkpoint.model)
    step = model.step

    def noted(self, tokens, *rest, **how):
        if tokens.shape[1] > 1 and self.bos in tokens[0]:
            given.append(tokens.tolist())
        return step(self, tokens, *rest, **how)

    monkeypatch.setattr(model, "step", noted)
    return given


def test_windows_get_the_previous_text_one_by_one_if_that_is_requested(
    checkpoint, tmp_path, prompts
):
    begins = known.specials()["<|startofprev|>"]
    parts = SAMPLES + SAMPLES[:1]
    files = [
        written(tmp_path / f"{n}.wav", torch.cat(parts[n : n + 3])) for n in range(2)
    ]
    for shown in (False, True):
        prompts.clear()
        options = replace(WINDOWS, previous_text=shown)
        how = {"options": options, "recognizer": recogniser(checkpoint)}
        found = [*transcribe(checkpoint, files, **how)]
        assert all(one.text and not one.error for one in found)
        counts = [len(rows) for rows in prompts]
        assert (max(counts) == 1) == shown
        assert any(begins in row for rows in prompts for row in rows) == shown
    ((first,), (second,)), text = prompts[:2], found[0].text
    assert begins not in first
    assert second[0] == begins
    assert second[-len(first) :] == first
    before = checkpoint.tokenizer.decode(second[1 : -len(first)]).strip(" \ufffd")
    assert len(before) > 3
    assert before in text


@pytest.mark.parametrize("name, language", [("whisper", "de"), ("whisper-en", "en")])
def test_the_command_reports_the_detected_language(
    folders, sounds, typed, name, language
):
    how = ("--model", folders[name], SHORT, "--no-fallback --json")
    _, out, _ = typed(sounds[1], *how)
    row = json.loads(out)
    text = by_hand(load_checkpoint(folders[name]), SAMPLES[1], language=language)
    assert (row["language"], row["text"]) == (language, text)


@pytest.mark.parametrize("name, options, wanted", [
    ("whisper", "--language fr", "--language: expected one of 'de', 'en', got 'fr'."),
    ("whisper-en", "--task translate", "--target-language: expected another language than language='en'"),
    ("whisper", "--no-punctuation", "punctuation: expected none, since the model's prompt has no place for it"),
    ("whisper", "--window 30", "expected at most 2 seconds, as the model has positions, got 30.0."),
])  # fmt: skip
def test_options_that_a_whisper_does_not_support_are_refused(
    folders, sounds, name, options, wanted, typed
):
    code, _, err = typed(sounds[0], "--model", folders[name], SHORT, options)
    assert code == 2
    assert wanted in err


def test_labels_keep_within_the_segments_that_timestamps_make():
    """Tokens from 10 on are times: a segment from 0 to 4, and one from 5 that has no end."""
    labels = torch.tensor([[10, 1, 2, 14, 15, 3, 4, -1]])
    frames = torch.tensor([[2, 7, 2, 0, 9, 1, 9, -1]])
    parts = {"lengths": torch.tensor([7]), "scores": torch.zeros(1), "impl": "said"}
    found = Hypotheses(labels=labels, frames=frames, durations=frames, **parts)
    kept = whisper.within_segments(found, no_times=9, T=8)
    assert kept.frames.tolist() == [[0, 3, 2, 4, 5, 5, 7, -1]]


@pytest.mark.parametrize("name", known.CASES)
@pytest.mark.parametrize("search", [None, BeamOptions(beam=2)])
def test_words_have_times_and_confidences(folders, sounds, name, search):
    checkpoint = load_checkpoint(folders[name])
    for one in transcripts(checkpoint, sounds, timestamps=True, search=search):
        assert one.words
        assert one.text
        for word in one.words:
            assert 0 <= word.start_s <= word.end_s <= one.audio_s + 0.02
            assert 0 <= word.confidence <= 1


def test_a_beam_of_one_is_greedy_decoding(checkpoint, sounds):
    greedy = transcripts(checkpoint, sounds)
    one = transcripts(checkpoint, sounds, search=BeamOptions(beam=1))
    assert [row.text for row in one] == [row.text for row in greedy]


def test_sampled_texts_do_not_depend_on_the_rest_of_the_batch(checkpoint, monkeypatch):
    every = lambda self, drawn, found, rows: torch.ones_like(rows).bool()  # noqa: E731
    monkeypatch.setattr(whisper.WhisperDecoder, "_better", every)
    waveforms, lengths = SPEECH
    recognizer = recogniser(checkpoint, fallback=True)
    found = recognizer(waveforms, lengths, confidence=True)
    assert found.tokens() != recogniser(checkpoint)(waveforms, lengths).tokens()
    for row, n in enumerate(found.lengths.tolist()):
        alone = recognizer(
            waveforms[row : row + 1], lengths[row : row + 1], confidence=True
        )
        assert alone.tokens() == [found.tokens()[row]]
        torch.testing.assert_close(alone.confidence[0, :n], found.confidence[row, :n])
    assert len({*map(str, found.tokens())}) == 4


def test_repetitions_are_decoded_again(checkpoint, monkeypatch):
    """The bound is between zlib's factors for the four texts."""
    plain = recogniser(checkpoint)(*SPEECH).tokens()
    texts = [checkpoint.tokenizer.decode(row).strip().encode() for row in plain]
    ratios = [len(text) / len(zlib.compress(text)) for text in texts]
    bound = sum(sorted(ratios)[1:3]) / 2
    monkeypatch.setattr(whisper, "LEAST_LOG_PROB", -100.0)
    monkeypatch.setattr(whisper, "MOST_COMPRESSED", bound)
    monkeypatch.setattr(whisper, "NONSENSE", -100.0)  # draws of a random model are
    found = recogniser(checkpoint, fallback=True)(*SPEECH).tokens()
    again = [row != before for row, before in zip(found, plain, strict=True)]
    assert again == [ratio > bound for ratio in ratios]


def test_a_batch_counts_the_padding_of_its_windows(checkpoint, sounds, monkeypatch):
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


@pytest.mark.parametrize("seconds", [2.4, 3.1])
def test_a_torn_file_has_the_text_of_its_readable_part(
    checkpoint, tmp_path, monkeypatch, seconds
):
    """Also if the last part has more than one window left."""
    count = round(16_000 * seconds)
    samples = torch.cat([*SAMPLES, *SAMPLES])[:count]
    whole = written(tmp_path / "whole.wav", samples)
    torn = written(tmp_path / "torn.wav", torch.cat([samples, samples]))
    torn.write_bytes(torn.read_bytes()[: -4 * count])
    windows = []
    after_window = parts.after_window
    monkeypatch.setattr(
        "asrkit.transcribe.windows.after_window",
        lambda *given: windows.append(given) or after_window(*given),
    )
    wanted, found = (
        transcripts(checkpoint, [whole])[0],
        transcripts(checkpoint, [torn])[0],
    )
    assert len(windows) > 2
    assert wanted.text
    assert (found.text, found.audio_s) == (wanted.text, wanted.audio_s)
    assert not wanted.error
    assert f"cannot be read beyond {seconds:.2f} s" in found.error
