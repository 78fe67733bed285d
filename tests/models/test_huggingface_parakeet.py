"""Folders of transformers' Parakeet models: what is read from them, and what is refused by name."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asrkit.features import FeatureConfig
from asrkit.models import CTCModel, FastConformerConfig, load_checkpoint
from asrkit.transcribe import recognize

sys.path.append(str(Path(__file__).resolve().parent))
import parity_cases as known
from parity_cases import V
from published import (
    GONE,
    change_weights,
    edit,
    expect_a_copy_to_be_the_same,
    golden,
    refused,
    zeros,
)


@pytest.fixture
def folder(tmp_path):
    """folder(kind): a folder as transformers writes it, of a tiny model with the weights of tests/golden."""

    def write(kind="ctc"):
        weights = known.fill(zeros(golden("transformers")[kind]["shapes"]))
        config = known.folder_config(known.golden_cases()[kind])
        return known.write_folder(tmp_path / kind, config, weights)

    return write


@pytest.mark.parametrize("kind", ["ctc", "rnnt", "tdt"])
def test_settings_of_the_config_are_in_our_model_and_its_copy(folder, kind, tmp_path):
    checkpoint = load_checkpoint(folder(kind))
    how = known.ENCODER | known.golden_cases()[kind]
    model = checkpoint.model
    assert model.config.encoder == FastConformerConfig(
        width=16, layers=2, heads=2, subsampling_channels=4, bias=how["bias"],
        scale_input=how["scale"], dropout_attention=0.1, dropout_input=0.1,
    )  # fmt: skip
    assert not model.training
    assert model.blank == checkpoint.tokenizer.vocab_size == V
    assert FeatureConfig(**checkpoint.features) == FeatureConfig()
    assert isinstance(model, CTCModel) == (kind == "ctc")
    if kind != "ctc":
        assert model.durations == tuple(how["durations"])
        assert model.config.predictor.layers == how["lstm"]
        assert model.ctc_head is None
    expect_a_copy_to_be_the_same(checkpoint, tmp_path)


def test_the_limit_of_labels_per_frame_is_read_and_kept(folder):
    path = folder("rnnt")
    wave = torch.randn(1, 16_000, generator=torch.Generator().manual_seed(0))
    edit(path / "config.json", {"max_symbols_per_step": 3})
    checkpoint = load_checkpoint(path)
    with torch.no_grad():  # a label in every step
        checkpoint.model.output.bias[checkpoint.model.blank] = -100.0
    frames = recognize(checkpoint, wave, torch.tensor([16_000])).frames[0].tolist()
    assert checkpoint.notes["max_symbols"] == frames.count(0) == frames.count(5) == 3


def test_a_missing_key_has_the_default_of_transformers(folder):
    path = folder("rnnt")
    names = "encoder_config.conv_kernel_size encoder_config.dropout hidden_act"
    edit(path / "config.json", dict.fromkeys(names.split(), GONE))
    edit(path / "preprocessor_config.json", {"preemphasis": None})
    checkpoint = load_checkpoint(path)
    config = checkpoint.model.config
    assert (config.encoder.kernel, config.encoder.dropout_input) == (9, 0.1)
    assert config.activation == "relu"
    assert checkpoint.features["preemphasis"] == 0.0


def test_a_processor_config_has_the_extractors_keys_too(folder):
    path = folder()
    extractor = path / "preprocessor_config.json"
    values = json.loads(extractor.read_text()) | {"hop_length": 128}
    extractor.unlink()
    refused(path, "or a feature_extractor in processor_config.json, got neither")
    processor = json.dumps({"feature_extractor": values})
    (path / "processor_config.json").write_text(processor)
    assert load_checkpoint(path).features["hop_s"] == 128 / 16_000


def test_shards_are_read_as_one_file_is(folder):
    path = folder("rnnt")
    whole = load_checkpoint(path).model
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    places = {name: f"model-{len(name) % 2}.safetensors" for name in weights}
    for file in set(places.values()):
        part = {name: weights[name] for name in weights if places[name] == file}
        save_file(part, path / file)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    sharded = load_checkpoint(path).model.state_dict()
    for name, value in whole.state_dict().items():
        assert torch.equal(sharded[name], value), name
    (path / "model-1.safetensors").rename(path.parent / "outside.safetensors")
    refused(path, "expected model-1.safetensors, got none in rnnt")
    index.write_text(json.dumps({"weight_map": {"x": "../outside.safetensors"}}))
    refused(path, "expected ../outside.safetensors, got none in rnnt")


def test_pickled_weights_are_not_read(folder):
    path = folder()
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused(path, "got none in ctc. Pickled weights (.bin, .pt) are not read.")


CONFIG = [
    ({"model_type": "wav2vec2"}, "model_type: expected one of ['parakeet_ctc', 'parakeet_rnnt', 'parakeet_tdt', 'canary', 'whisper'], got 'wav2vec2'."),
    ({"encoder_config.hidden_act": "relu"}, "encoder_config.hidden_act: expected 'silu', got 'relu'."),
    ({"encoder_config.num_hidden_layers": 10**4}, "model: expected at most 86 layers, the number of its tensors, got 10000."),
    ({"pad_token_id": 90}, "config.json.pad_token_id: expected 31, got 90."),
    ({"encoder_config": GONE}, "ctc is damaged (it has no 'encoder_config')"),
]  # fmt: skip
WEIGHTS = [
    ({"ctc_head.bias": GONE}, 'Missing key(s) in state_dict: "output.bias"'),
    ({"encoder.layers.0.self_attn.k_proj.bias": GONE}, "ctc is damaged (it has no 'encoder.blocks.0.attention.k.bias')"),
    ({"encoder.adapter": torch.zeros(2)}, 'Unexpected key(s) in state_dict: "encoder.adapter"'),
    ({"ctc_head.bias": torch.zeros(2)}, "size mismatch for output.bias"),
]  # fmt: skip


@pytest.mark.parametrize("changes, message", CONFIG)
def test_an_unsupported_config_is_refused(folder, changes, message):
    path = folder()
    edit(path / "config.json", changes)
    refused(path, message)


@pytest.mark.parametrize("changes, message", WEIGHTS)
def test_weights_that_are_missing_unknown_or_others_are_named(folder, changes, message):
    path = folder()
    change_weights(path, changes)
    refused(path, message)


@pytest.mark.parametrize("name, message", [
    ("config.json", "ctc is damaged"), ("preprocessor_config.json", "ctc is damaged"),
    ("tokenizer.json", "tokenizer: "), ("model.safetensors", "it is not a whole .safetensors file"),
])  # fmt: skip
def test_a_file_that_is_cut_is_refused(folder, name, message):
    path = folder()
    whole = (path / name).read_bytes()
    (path / name).write_bytes(whole[: len(whole) // 2])
    refused(path, message)


def test_a_tokenizer_of_another_size_or_none_is_refused(folder):
    path = folder()
    edit(path / "tokenizer.json", {"model.vocab": {"<unk>": 0, "▁a": 1}})
    refused(path, "tokenizer: ")
    (path / "tokenizer.json").unlink()
    refused(path, "model: ctc is damaged (it has no tokenizer.json")
