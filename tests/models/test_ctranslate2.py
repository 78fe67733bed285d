"""CTranslate2's folders of Whisper, as faster-whisper uses them: what is read, and what is refused by name."""

import json
import struct
import sys
from pathlib import Path

import pytest
import torch

from asrkit.models import load_checkpoint
from asrkit.models.checkpoints import whisper
from asrkit.transcribe.plan import Plan

sys.path.append(str(Path(__file__).resolve().parent))
import ctranslate2_files as files
import whisper_cases as known
from published import edit, refused

EMBEDDING = "decoder/embeddings/weight"
ROW = "encoder/layer_0/ffn/linear_0/weight"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """folder(case, kind): a case of whisper_cases as CTranslate2 writes it."""

    def write(name="whisper", kind="float32"):
        if known.CASES[name]["multilingual"]:  # the size of a vocabulary shows this
            monkeypatch.setattr(whisper, "_MULTILINGUAL", known.vocab_size())
        return files.whisper(tmp_path / f"{name}-{kind}", name, kind)

    return write


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int8", "int16"])
@pytest.mark.parametrize("name", known.CASES)
def test_it_is_the_model_of_the_hugging_face_folder(folder, tmp_path, name, kind):
    known.write_folder(tmp_path / "theirs", known.CASES[name], files.weights_of(name))
    wanted = load_checkpoint(tmp_path / "theirs")
    found = load_checkpoint(folder(name, kind))
    assert found.model.config == wanted.model.config
    assert found.features == wanted.features
    assert found.tokenizer.pieces() == wanted.tokenizer.pieces()
    notes = {"source": "CTranslate2, whisper"}
    times = wanted.notes["whisper"] | {"most_first": 50}  # not in its files
    assert found.notes == wanted.notes | notes | {"whisper": times}
    # half a step of the largest weight of a row; int16 has one scale for all rows
    step = {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8, "int8": 1 / 254, "int16": 2**-11}[kind]  # fmt: skip
    theirs = wanted.model.state_dict()
    for key, value in found.model.state_dict().items():
        error = (value - theirs[key]).abs().max()
        assert error <= 1.01 * step * theirs[key].abs().max(), key


def test_without_feature_settings_the_first_convolution_gives_the_bins(folder):
    path = folder("whisper-en")
    (path / "preprocessor_config.json").unlink()
    features = load_checkpoint(path).features
    assert (features["bins"], features["fill_s"]) == (128, 30.0)


def test_equal_variables_that_the_converter_stores_once_are_read(folder):
    path = folder()
    variables = variables_of()
    same = {
        "encoder/layer_1/ffn/layer_norm/beta": "encoder/layer_0/ffn/layer_norm/beta"
    }
    for name in same:
        del variables[name]
    (path / "model.bin").write_bytes(files.model_bin(variables, files.ALIASES | same))
    layers = load_checkpoint(path).model.encoder.layers
    assert torch.equal(*(one.feed_forward_norm.bias for one in layers))
    (path / "model.bin").write_bytes(files.model_bin(variables | {"decoder/projection/weight": variables[EMBEDDING] + 1}, same))  # fmt: skip
    refused(path, "proj_out.weight: expected the weights of the embedding")


def test_a_transcript_follows_from_the_weights_of_the_folder(folder):
    path = folder()
    before = Plan(model=path).fingerprint()
    data = bytearray((path / "model.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "model.bin").write_bytes(data)
    assert Plan(model=path).fingerprint() != before


def variables_of():
    return files.case_variables("whisper")


def without(name):
    variables = variables_of()
    del variables[name]
    return variables


def number(name, value):
    return variables_of() | {name: torch.tensor(value, dtype=torch.int8)}


def claims(size):
    """A file whose embedding claims that many rows."""
    data = files.model_bin(variables_of())
    start = data.index(EMBEDDING.encode()) + len(EMBEDDING) + 2
    return data[:start] + struct.pack("<I", size) + data[start + 4 :]


whole = files.model_bin(variables_of())
REFUSED = {
    "old": (lambda: files.model_bin({}, header=(5, "WhisperSpec", 3)), "model.bin: expected a file of CTranslate2, binary version 6, got version 5. Convert the model again: ct2-transformers-converter."),
    "other program": (lambda: b"PK\3\4" + bytes(99), "model.bin: expected a file of CTranslate2, binary version 6, got version 67324752."),
    "other model": (lambda: files.model_bin({}, header=(6, "TransformerSpec", 7)), "model.bin: expected WhisperSpec, revision 3, got TransformerSpec, revision 7."),
    "old layout": (lambda: files.model_bin({}, header=(6, "WhisperSpec", 2)), "model.bin: expected WhisperSpec, revision 3, got WhisperSpec, revision 2."),
    "empty": (lambda: b"", "is damaged (ValueError: cannot mmap an empty file)"),
    "cut in a number": (lambda: whole[:3], "model.bin: expected at least 4 bytes, got 3. Is it whole? Copy it again."),
    "cut in a weight": (lambda: whole[: len(whole) // 2], "model.bin: expected at least"),
    "cut in the aliases": (lambda: whole[:-3], f"model.bin: expected at least {len(whole):,} bytes, got {len(whole) - 3:,}."),
    "claims much": (lambda: claims(2**32 - 1), "model.bin: expected as many bytes as the shape [4294967295, 32] of 'decoder/embeddings/weight' needs, got"),
    "claims variables": (lambda: files.model_bin(variables_of(), {}).replace(struct.pack("<II", 3, len(variables_of())), struct.pack("<II", 3, 2**32 - 1)), "model.bin: expected at least"),
    "type": (lambda: whole.replace(b"decoder/activation\0\0\1", b"decoder/activation\0\0\7"), "model.bin: expected a type below 6 for 'decoder/activation', got 7."),
    "twice": (lambda: whole.replace(b"conv1/bias", b"conv2/bias"), "model.bin: expected one 'encoder/conv2/bias', got two."),
    "alias": (lambda: files.model_bin(variables_of(), {"decoder/projection/weight": "nothing"}), "model.bin: expected a variable to which 'decoder/projection/weight' refers, got no 'nothing'."),
    "activation": (lambda: files.model_bin(number("decoder/activation", 0)), "model.bin.decoder/activation: expected 3, got 0."),
    "unknown": (lambda: files.model_bin(number("decoder/layer_0/rotary_dim", 0)), 'Unexpected key(s) in state_dict: "layers.0.rotary_dim"'),
    "a weight less": (lambda: files.model_bin(without("decoder/layer_1/attention/linear_1/bias")), 'Missing key(s) in state_dict: "layers.1.cross_attention.key_value.bias"'),
    "a feed-forward less": (lambda: files.model_bin(without(ROW)), 'Missing key(s) in state_dict: "encoder.layers.0.feed_forward.0.weight"'),
    "no convolution": (lambda: files.model_bin(without("encoder/conv1/weight")), "is damaged (it has no 'encoder/conv1/weight')"),
    "no heads": (lambda: files.model_bin(without("encoder/num_heads")), "is damaged (it has no 'encoder/num_heads')"),
    "heads": (lambda: files.model_bin(number("encoder/num_heads", 5)), "expected a"),
    "a scale of nothing": (lambda: files.model_bin(variables_of() | {"x_scale": torch.ones(2)}), "is damaged (it has no 'x')"),
    "scales of other rows": (lambda: files.model_bin(files.case_variables("whisper", "int8") | {f"{ROW}_scale": torch.ones(3)}), "is damaged (RuntimeError:"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_no_whole_whisper_is_refused_in_one_line(folder, name):
    make, message = REFUSED[name]
    path = folder()
    (path / "model.bin").write_bytes(make())
    refused(path, message)


def test_missing_files_are_named(folder):
    path = folder()
    (path / "tokenizer.json").unlink()
    refused(path, "is damaged (it has no tokenizer.json)")
    (path / "model.bin").unlink()
    refused(path, "model: expected a model_type in config.json, or")


def test_suppressed_tokens_may_be_missing(folder):
    path = folder()
    edit(path / "config.json", {"suppress_ids": None, "suppress_ids_begin": None})
    assert load_checkpoint(path).notes["suppressed"] == {"always": [], "first": []}
    (path / "config.json").write_text(json.dumps({}))
    assert load_checkpoint(path).notes["suppressed"] == {"always": [], "first": []}
