"""Encoder-decoder models in the recogniser and in `asrkit transcribe`: prompts, beams joint with CTC, times, refusals."""

from dataclasses import replace

import pytest
import soundfile
import torch
from canary_files import archive
from parity_cases import LENGTHS, speech

from asrkit.decoders import aed_beam, aed_greedy, attention_frames, ctc_alignment
from asrkit.models import AEDModel, Checkpoint, load_checkpoint, presets
from asrkit.models.prompts import PromptFormat
from asrkit.text import CharTokenizer
from asrkit.transcribe import BeamOptions, PipelineConfig, PromptOptions, Recognizer

OPTIONS = {"language": "de", "task": "translate", "punctuation": False}


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


def random_model(ctc=True, most=128, width=48):
    """A model of random weights with some text, whose decoder is wider than its encoder."""
    torch.manual_seed(1)
    model = AEDModel(
        replace(presets.tiny_aed(31), width=width, ctc=ctc, most=most)
    ).eval()
    for weight in model.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    model.output_bias.data[model.eos] -= 20  # else it writes nothing
    return model


def recognised(model, times=False, **config):
    config = PipelineConfig(encoder="eager", **config)
    if isinstance(model, Checkpoint):
        recognizer = Recognizer.from_checkpoint(model, config)
    else:
        recognizer = Recognizer(model, config)
    return recognizer(*speech(LENGTHS), times=times)


@torch.no_grad()
def encoded(model):
    """Frames for the decoder, their lengths, and the scores of the CTC head."""
    return model.encode(*Recognizer(model).features(*speech(LENGTHS)))


def by_hand(checkpoint, **options):
    """Tokens of four utterances, stage by stage, without those that have no text."""
    frames, ends, _ = encoded(checkpoint.model)
    prompt = PromptFormat.from_notes(checkpoint.notes).tokens(**options)
    rows = aed_greedy(checkpoint.model, frames, ends, prompt=prompt).tokens()
    size = checkpoint.tokenizer.vocab_size
    return [[token for token in row if token < size] for row in rows]


def test_a_text_is_decoded_after_the_requested_prompt(checkpoint, canary, talk, typed):
    plain, german = by_hand(checkpoint), by_hand(checkpoint, **OPTIONS)
    assert recognised(checkpoint, prompt=PromptOptions(**OPTIONS)).tokens() == german
    assert recognised(checkpoint).tokens() == plain != german
    assert recognised(checkpoint, search=BeamOptions(beam=1)).tokens() == plain
    options = "--language de --task translate --no-punctuation"
    _, out, _ = typed(talk, "--model", canary, options)
    assert out.rstrip("\n").partition("\t")[2] == checkpoint.tokenizer.decode(german[0])


def test_tokens_without_a_text_are_left_out_with_their_frames_and_confidences():
    """The last three tokens of tiny_aed are special, and random weights write them too."""
    model = random_model(width=presets.tiny_aed(31).width)
    options = {"confidence": True, "times": True}
    every = Recognizer(model)(*speech(LENGTHS), **options)
    kept = Recognizer(model, tokenizer=CharTokenizer())(*speech(LENGTHS), **options)
    has_text = (every.labels >= 0) & (every.labels < 28)
    assert torch.equal(kept.lengths, has_text.sum(1))
    assert every.labels.max() >= 28
    filled = kept.labels >= 0
    for name in ("labels", "frames", "confidence"):
        mine, theirs = getattr(kept, name), getattr(every, name)
        assert torch.equal(mine[filled], theirs[has_text])
        assert (mine[~filled] == -1).all()


@pytest.mark.parametrize("options, message", [
    ("--language fr", "--language: expected one of 'en', 'de', got 'fr'."),
    ("--task translate", "--target-language: expected another language than language='en' to translate into, got 'en'. Name the language of the text."),
    ("--beam 4 --label-bonus 1", "--label-bonus: expected none for AEDModel"),
])  # fmt: skip
def test_unsupported_prompts_and_beams_are_refused(
    canary, talk, options, message, typed
):
    code, _, err = typed(talk, "--model", canary, options)
    assert code == 2
    assert err.startswith(f"asrkit transcribe: {message}")


# ---- the CTC head


@pytest.mark.parametrize("head, given, weight", [(True, 0.3, 0.3), (True, 0.8, 0.8), (True, 0, 0.0), (False, 0.3, 0.0)])  # fmt: skip
def test_a_beam_of_a_model_with_a_ctc_head_uses_attention_and_ctc(head, given, weight):
    model = random_model(ctc=head)
    frames, ends, ctc = encoded(model)
    if not weight:
        ctc = None
    found = recognised(model, search=BeamOptions(beam=3, ctc_weight=given))
    wanted = aed_beam(model, frames, ends, width=3, ctc=ctc, ctc_weight=weight)
    alone = aed_beam(model, frames, ends, width=3)
    assert found.tokens() == wanted.tokens()
    assert any(found.tokens())
    assert (found.tokens() == alone.tokens()) == (weight == 0)
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-4, atol=1e-3)
    assert found.impl == wanted.impl


def test_labels_have_the_times_of_the_ctc_head_if_the_text_fits():
    """Seven labels, which are too many for the shorter two of four utterances."""
    model = random_model(most=8)
    found = recognised(model, times=True)
    frames, ends, ctc = encoded(model)
    aligned = ctc_alignment(ctc, ends, found)
    attended = attention_frames(model, frames, ends, found)
    assert aligned.scores.isfinite().tolist() == [True, True, False, False]
    assert torch.equal(found.frames[:2], aligned.frames[:2])
    assert torch.equal(found.frames[2:], attended[2:])
    assert not torch.equal(found.frames[:2], attended[:2])
    assert torch.equal(found.durations[:2], aligned.durations[:2])
    assert (found.durations[2:] <= 0).all()


def test_a_beam_has_the_times_of_the_ctc_head_unless_its_weight_is_0():
    model = random_model(most=8)
    frames, ends, ctc = encoded(model)
    joint = recognised(model, times=True, search=BeamOptions(beam=3))
    assert torch.equal(joint.frames, ctc_alignment(ctc, ends, joint).frames)
    alone = recognised(model, times=True, search=BeamOptions(beam=3, ctc_weight=0))
    assert torch.equal(alone.frames, attention_frames(model, frames, ends, alone))


def test_a_beams_confidence_is_the_probability_of_each_label_given_those_before_it():
    model = random_model(ctc=False)
    frames, ends, _ = encoded(model)
    recognizer = Recognizer(model, PipelineConfig(search=BeamOptions(beam=1)))
    found = recognizer(*speech(LENGTHS), confidence=True)
    greedy = aed_greedy(model, frames, ends, confidence=True)
    torch.testing.assert_close(found.confidence, greedy.confidence, rtol=0, atol=1e-4)
