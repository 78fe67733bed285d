"""Joint decoding by attention and CTC in the recogniser and in `asrkit transcribe`, and times by CTC."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import soundfile
import torch

from asrkit.cli import main
from asrkit.decoders import aed_beam, attention_frames, ctc_alignment
from asrkit.models import AEDModel, Checkpoint, presets, save_checkpoint
from asrkit.text import CharTokenizer
from asrkit.transcribe import BeamOptions, PipelineConfig, Recognizer

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
from parity_cases import LENGTHS, speech


def random_model(ctc=True, most=128):
    """A model of random weights that says something, whose decoder is wider than its encoder."""
    torch.manual_seed(1)
    model = AEDModel(replace(presets.tiny_aed(31), width=48, ctc=ctc, most=most)).eval()
    for weight in model.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    model.output_bias.data[model.eos] -= 20  # else it says nothing
    return model


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """The model and a second and a half of sound, as files."""
    folder = tmp_path_factory.mktemp("joint")
    features = {"bins": model.config.encoder.bins}
    save_checkpoint(
        folder / "aed.safetensors", Checkpoint(model, CharTokenizer(), features, {})
    )
    waveforms, lengths = speech(LENGTHS)
    soundfile.write(
        str(folder / "talk.wav"), waveforms[0, : lengths[0]].numpy(), 16_000
    )
    return folder


def recognised(model, **config):
    return Recognizer(model, PipelineConfig(**config))(*speech(LENGTHS))


@torch.no_grad()
def encoded(model):
    """Frames that the decoder reads, their lengths, and what the CTC head says."""
    return model.encode(*Recognizer(model).features(*speech(LENGTHS)))


@pytest.mark.parametrize(
    "given, weight", [(None, 0.3), (0.3, 0.3), (0.8, 0.8), (1, 1.0)]
)
def test_a_beam_of_a_model_with_a_ctc_head_asks_both(model, given, weight):
    frames, ends, ctc = encoded(model)
    found = recognised(model, search=BeamOptions(beam=3, ctc_weight=given))
    wanted = aed_beam(model, frames, ends, width=3, ctc=ctc, ctc_weight=weight)
    assert (
        found.tokens()
        == wanted.tokens()
        != aed_beam(model, frames, ends, width=3).tokens()
    )
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-4, atol=1e-3)
    assert found.impl == wanted.impl
    assert f"with CTC ({weight:g})" in found.impl


def test_a_weight_of_nothing_is_a_beam_by_attention_alone(model):
    frames, ends, _ = encoded(model)
    found = recognised(model, search=BeamOptions(beam=3, ctc_weight=0))
    wanted = aed_beam(model, frames, ends, width=3)
    assert found.tokens() == wanted.tokens()
    assert found.impl == wanted.impl
    assert "CTC" not in found.impl


def test_a_model_without_a_head_has_its_beam_by_attention_alone():
    model = random_model(ctc=False)
    frames, ends, _ = encoded(model)
    found = recognised(model, search=BeamOptions(beam=3))
    assert found.tokens() == aed_beam(model, frames, ends, width=3).tokens()
    assert any(found.tokens())


@pytest.fixture(scope="module")
def brief():
    """A model that writes seven labels: the shorter two of four utterances have no room for them."""
    return random_model(most=8)


def timed(model, **config):
    recognizer = Recognizer(model, PipelineConfig(encoder="eager", **config))
    return recognizer(*speech(LENGTHS), times=True)


def test_labels_have_the_times_of_the_ctc_head_where_the_text_fits(brief):
    found = timed(brief)
    frames, ends, ctc = encoded(brief)
    aligned = ctc_alignment(ctc, ends, found)
    attended = attention_frames(brief, frames, ends, found)
    fits = aligned.scores.isfinite().tolist()
    assert fits == [True, True, False, False]
    for row, by_ctc in enumerate(fits):
        wanted = aligned.frames if by_ctc else attended
        assert torch.equal(found.frames[row], wanted[row])
        assert by_ctc == (not torch.equal(found.frames[row], attended[row]))
    assert torch.equal(found.durations[:2], aligned.durations[:2])
    assert (found.durations[2:] <= 0).all()


def test_a_joint_beam_has_its_times_from_the_ctc_head(brief):
    found = timed(brief, search=BeamOptions(beam=3))
    frames, ends, ctc = encoded(brief)
    aligned = ctc_alignment(ctc, ends, found)
    assert (
        aligned.scores.isfinite().all()
    )  # CTC had a say in the texts, so that they fit
    assert torch.equal(found.frames, aligned.frames)
    assert not torch.equal(found.frames, attention_frames(brief, frames, ends, found))


def test_a_beam_that_is_not_to_ask_the_ctc_head_has_its_times_by_attention(brief):
    found = timed(brief, search=BeamOptions(beam=3, ctc_weight=0))
    frames, ends, _ = encoded(brief)
    assert torch.equal(found.frames, attention_frames(brief, frames, ends, found))


def test_the_command_decodes_jointly_unless_told_otherwise(model, saved, capsys):
    said = {}
    for name, options in {"default": [], "told": ["0.3"], "none": ["0"]}.items():
        command = [
            "transcribe",
            "--dtype",
            "float32",
            str(saved / "talk.wav"),
            "--model",
            str(saved / "aed.safetensors"),
        ]
        weight = ["--ctc-weight", *options] if options else []
        assert main([*command, "--beam", "3", *weight]) == 0
        said[name] = capsys.readouterr().out.rstrip("\n").partition("\t")[2]
    assert said["default"] == said["told"] != said["none"]
    waveforms, lengths = speech(LENGTHS[:1])
    recognizer = Recognizer(model, PipelineConfig(search=BeamOptions(beam=3)))
    [row] = recognizer(waveforms, lengths).tokens()
    letters = [token for token in row if token < CharTokenizer().vocab_size]
    assert said["default"] == CharTokenizer().decode(letters)


def test_a_beam_of_attention_has_no_confidences_and_so_no_formats_with_times(
    saved, tmp_path, capsys
):
    command = [
        "transcribe",
        "--dtype",
        "float32",
        str(saved / "talk.wav"),
        "--model",
        str(saved / "aed.safetensors"),
    ]
    assert (
        main([*command, "--beam", "3", "--out", str(tmp_path), "--format", "srt"]) == 2
    )
    wanted = "--timestamps: expected greedy decoding of this model, got a beam search. "
    assert wanted in capsys.readouterr().err
