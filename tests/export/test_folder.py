"""The exported folder: tokens, what is refused, and that nothing is half-written."""

import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from asrkit.cli import main
from asrkit.export import export, load_exported
from asrkit.export.engines import EngineEncoder
from asrkit.export.folder import DECODING, write_tokens
from asrkit.export.writing import PACKAGES
from asrkit.features import FeatureConfig
from asrkit.files import new_folder
from asrkit.models import (
    Checkpoint,
    CTCConfig,
    LSTMEncoderConfig,
    make_model,
    optimize,
    presets,
    save_checkpoint,
)
from asrkit.models.checkpoints import own
from asrkit.text import CharTokenizer

FEATURES = asdict(FeatureConfig())
SMALL = CTCConfig(vocab_size=28)


def checkpoint_of(config):
    return Checkpoint(make_model(config).eval(), CharTokenizer(), FEATURES, {})


@pytest.fixture
def exported(tmp_path):
    """A folder whose graph is not a graph."""
    path = tmp_path / "exported"
    path.mkdir()
    (path / "model.onnx").write_bytes(b"not a graph")
    own.write(path / DECODING, (SMALL, {}, CharTokenizer(), FEATURES, {}))
    return path


def test_tokens_are_a_piece_and_its_number_a_line_and_blank_is_last(tmp_path):
    write_tokens(tmp_path / "tokens.txt", CharTokenizer(" ab"))
    assert (tmp_path / "tokens.txt").read_bytes() == b"  0\na 1\nb 2\n<blk> 3\n"


@pytest.mark.parametrize("alphabet", ["ab\n", "aba"])
def test_tokens_that_the_file_cannot_hold_are_refused(tmp_path, alphabet):
    with pytest.raises(ValueError, match="^tokenizer: expected pieces "):
        write_tokens(tmp_path / "tokens.txt", CharTokenizer(alphabet))


def test_a_folder_that_is_damaged_or_not_exported_is_one_line(exported):
    decoding = exported / DECODING
    decoding.write_bytes(decoding.read_bytes()[:-1])
    damaged = "^model: expected an export that openvino reads, got .* Export it again: "
    with pytest.raises(ValueError, match=damaged):
        load_exported(exported, "openvino")
    decoding.unlink()
    with pytest.raises(ValueError, match="^model: expected a folder of asrkit export"):
        load_exported(exported, "openvino")


def answering(signal, lengths):
    """An engine that returns numbers for any input."""
    frames = np.ones((len(signal), signal.shape[2] // 2, 3), np.float32)
    return frames, lengths // 2


def test_features_that_are_not_finite_become_frames_that_are_not():
    features = torch.zeros(4, 8, 5)
    features[1, 3, 2] = torch.nan
    features[2, 0, 0] = torch.inf
    encoder = EngineEncoder(answering, time_last=False)
    encoded, lengths = encoder(features, torch.tensor([8, 8, 8, 6]))
    assert lengths.tolist() == [4, 4, 4, 3]
    assert encoded.isnan().all(2).all(1).tolist() == [False, True, True, False]
    assert encoded[[0, 3]].isfinite().all()


def test_an_error_of_the_engine_is_one_line():
    def failing(signal, lengths):
        raise MemoryError("no\nroom")

    encoder = EngineEncoder(failing, time_last=False)
    with pytest.raises(RuntimeError, match=r"engine cannot run it \(no room\)\.$"):
        encoder(torch.zeros(1, 8, 5), torch.tensor([8]))


LSTMS = LSTMEncoderConfig(width=8)
TINY = presets.tiny()


@pytest.mark.parametrize(
    ("config", "head", "message"),
    [
        (presets.tiny_aed(), None, "model: expected a CTC model or a transducer, got AEDModel. No layout"),
        (SMALL, "transducer", "head: expected ctc of this model, got transducer"),
        (replace(SMALL, encoder=LSTMS), None, "model: expected an encoder without LSTMs, got LSTMEncoder"),
        (replace(TINY, ctc=False), "ctc", "head: expected transducer of this model, got ctc"),
        (replace(TINY, durations=(0, 1, 2, 4)), None, "model: expected durations 0, 1, 2, "),
    ],
)  # fmt: skip
def test_models_without_a_layout_are_refused(tmp_path, config, head, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        export(checkpoint_of(config), tmp_path / "out", format="onnx", head=head)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "found"),
    [(lambda model: model.bfloat16(), "torch.bfloat16"), (optimize, "Prepacked")],
)
def test_a_model_that_is_not_in_float32_as_it_was_trained_is_refused(
    tmp_path, changed, found
):
    checkpoint = checkpoint_of(presets.tiny())
    checkpoint = checkpoint._replace(model=changed(checkpoint.model.eval()))
    with pytest.raises(ValueError, match=f"expected float32 weights, .*{found}"):
        export(checkpoint, tmp_path / "out", format="onnx")


def test_a_folder_is_written_completely_or_not_at_all(tmp_path):
    target = tmp_path / "deep" / "new"
    with pytest.raises(FileNotFoundError), new_folder(target) as folder:
        (folder / "no" / "half").write_text("x")
    assert [*target.parent.iterdir()] == []
    with new_folder(target) as folder:
        (folder / "whole").write_text("x")
    with pytest.raises(
        ValueError, match="^out: expected a folder that does not exist yet "
    ):
        new_folder(target).__enter__()
    assert [*target.parent.rglob("*")] == [target, target / "whole"]


@pytest.fixture
def small(tmp_path):
    """A CTC model as a file."""
    path = tmp_path / "small.safetensors"
    save_checkpoint(path, checkpoint_of(SMALL))
    return path


@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_export_without_its_packages_says_so_and_writes_nothing(
    small, tmp_path, capsys, monkeypatch, format
):
    for name in PACKAGES[format]:
        monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "out"
    command = ["export", "--model", small, "--format", format, "--out", out]
    assert main([*map(str, command)]) == 2
    all_of_them = ", ".join(PACKAGES[format])
    remedy = f"Install them: pip install {' '.join(PACKAGES[format])}."
    wanted = f"packages: expected {all_of_them}, got no {all_of_them}. {remedy}"
    assert capsys.readouterr().err == f"asrkit export: {wanted}\n"
    assert not out.exists()


@pytest.mark.parametrize("model, options, message", [
    ("exported", "", "--engine: expected onnxruntime or openvino for this --model, got torch."),
    ("small.safetensors", "--engine openvino", "--model: expected a folder of asrkit export, got "),
    ("exported", "--engine openvino --dtype float16", "--dtype: expected float32 or bfloat16 with openvino, got float16"),
])  # fmt: skip
def test_transcribe_refuses_what_an_engine_cannot_do(
    exported, small, model, options, message, capsys
):
    command = ["transcribe", "talk.wav", "--model", str(exported.with_name(model))]
    assert main([*command, *options.split()]) == 2
    assert capsys.readouterr().err.startswith(f"asrkit transcribe: {message}")
