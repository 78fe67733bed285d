"""`asrkit transcribe` with encoder-decoder models: prompts, windows, times, refusals."""

import json
import sys
from pathlib import Path

import pytest
import soundfile
import torch

from asrkit.cli import main
from asrkit.decoders import aed_greedy
from asrkit.models import AEDModel, Checkpoint, load_checkpoint, presets
from asrkit.models.prompts import PromptFormat
from asrkit.text import CharTokenizer
from asrkit.transcribe import (
    BeamOptions,
    PipelineConfig,
    PromptOptions,
    Recognizer,
    WindowOptions,
    transcribe,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
from canary_files import archive
from parity_cases import LENGTHS, speech

ASKED = {"language": "de", "task": "translate", "punctuation": False}


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    """A Canary of random weights, as NeMo publishes them."""
    return archive(tmp_path_factory.mktemp("canary") / "canary.nemo")


@pytest.fixture(scope="module")
def checkpoint(canary):
    return load_checkpoint(canary)


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    """A second and a half of sound."""
    path = tmp_path_factory.mktemp("talk") / "talk.wav"
    waveforms, lengths = speech(LENGTHS)
    soundfile.write(str(path), waveforms[0, : lengths[0]].numpy(), 16_000)
    return path


@torch.no_grad()
def by_hand(checkpoint, **asked):
    """Tokens of four utterances, stage by stage, without those that have no text."""
    recognizer = Recognizer.from_checkpoint(checkpoint)
    encoded, ends = recognizer.encode(*recognizer.features(*speech(LENGTHS)))
    prompt = PromptFormat.from_notes(checkpoint.notes).tokens(**asked)
    rows = aed_greedy(recognizer.model, encoded, ends, prompt=prompt).tokens()
    size = checkpoint.tokenizer.vocab_size
    return [[token for token in row if token < size] for row in rows]


def recognised(checkpoint, **config):
    recognizer = Recognizer.from_checkpoint(checkpoint, PipelineConfig(**config))
    return recognizer(*speech(LENGTHS))


def test_the_recogniser_says_what_the_decoder_says_behind_the_prompt_asked_for(
    checkpoint,
):
    asked = recognised(checkpoint, prompt=PromptOptions(**ASKED)).tokens()
    assert asked == by_hand(checkpoint, **ASKED)
    assert recognised(checkpoint).tokens() == by_hand(checkpoint) != asked
    assert any(asked)


def test_ways_to_decode_agree(checkpoint):
    wanted = recognised(checkpoint).tokens()
    assert recognised(checkpoint, strategy="batched").tokens() == wanted
    assert recognised(checkpoint, search=BeamOptions(beam=1)).tokens() == wanted
    assert recognised(checkpoint, search=BeamOptions(beam=4)).impl.startswith(
        "attention, beam"
    )


def test_tokens_without_a_text_are_left_out_with_their_frames_and_confidences():
    """Of tiny_aed the last three tokens are special, and a model of random weights says them too."""
    torch.manual_seed(1)
    model = AEDModel(presets.tiny_aed(31)).eval()
    for weight in model.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    model.output_bias.data[model.eos] -= 20  # else it says nothing
    checkpoint = Checkpoint(
        model, CharTokenizer(), {"bins": model.config.encoder.bins}, {}
    )
    recognizer = Recognizer.from_checkpoint(checkpoint)
    plain = Recognizer(model)
    waveforms, lengths = speech(LENGTHS)
    kept = recognizer(waveforms, lengths, confidence=True, times=True)
    every = plain(waveforms, lengths, confidence=True, times=True)
    assert int(every.labels.max()) >= 28 > int(kept.labels.max())
    for row in range(len(LENGTHS)):
        keep = (every.labels[row] >= 0) & (every.labels[row] < 28)
        n = int(kept.lengths[row])
        assert n == int(keep.sum())
        for name in ("labels", "frames", "confidence"):
            mine, theirs = getattr(kept, name)[row], getattr(every, name)[row]
            assert torch.equal(mine[:n], theirs[keep]) and (mine[n:] == -1).all()


def test_what_is_asked_for_reaches_the_decoder_from_the_command_line(
    checkpoint, canary, talk, capsys
):
    texts = []
    for options in (
        [],
        ["--language", "de", "--task", "translate", "--no-punctuation"],
    ):
        assert (
            main(
                [
                    "transcribe",
                    "--dtype",
                    "float32",
                    str(talk),
                    "--model",
                    str(canary),
                    *options,
                ]
            )
            == 0
        )
        texts.append(capsys.readouterr().out.rstrip("\n").partition("\t")[2])
    wanted = [
        checkpoint.tokenizer.decode(by_hand(checkpoint, **asked)[0])
        for asked in ({}, ASKED)
    ]
    assert texts == wanted
    assert texts[0] != texts[1]


def test_words_have_times_that_never_go_back_and_confidences(canary, talk, capsys):
    assert (
        main(
            [
                "transcribe",
                "--dtype",
                "float32",
                str(talk),
                "--model",
                str(canary),
                "--json",
                "--timestamps",
            ]
        )
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert said["words"]
    last = 0.0
    for word in said["words"]:
        assert last <= word["start_s"] <= word["end_s"] <= said["audio_s"]
        assert 0 <= word["confidence"] <= 1
        last = word["start_s"]


def test_a_long_file_goes_through_windows(checkpoint, tmp_path):
    waveforms, lengths = speech(LENGTHS)
    piece = waveforms[0, : lengths[0]]
    path = tmp_path / "long.wav"
    soundfile.write(str(path), torch.cat([piece] * 6).numpy(), 16_000)
    (one,) = transcribe(
        checkpoint,
        path,
        options=WindowOptions(window_s=3.0, overlap_s=1.0, timestamps=True),
    )
    assert one.error == ""
    assert one.audio_s == pytest.approx(6 * int(lengths[0]) / 16_000)
    starts = [word.start_s for word in one.words]
    assert starts == sorted(starts)
    assert starts[-1] > 5.0  # the last window has its share


@pytest.mark.parametrize("options, message", [
    (["--language", "fr"], "--language: expected one of 'en', 'de', got 'fr'."),
    (["--target-language", "xx"], "--target-language: expected one of 'en', 'de', got 'xx'."),
    (["--task", "translate"], "--target-language: expected another language than language='en' to translate into, got 'en'. Name the language of the text."),
    (["--beam", "4", "--label-bonus", "1"], "--label-bonus: expected none for an AEDModel, got 1.0."),
])  # fmt: skip
def test_what_the_model_cannot_do_is_refused_in_one_line(
    canary, talk, options, message, capsys
):
    assert (
        main(
            [
                "transcribe",
                "--dtype",
                "float32",
                str(talk),
                "--model",
                str(canary),
                *options,
            ]
        )
        == 2
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"asrkit transcribe: {message}")
    assert err.count("\n") == 1
