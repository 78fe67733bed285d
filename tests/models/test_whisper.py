"""Whisper's folders: what is read, and what is refused by name. test_whisper_parity.py compares numbers with transformers'."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asrkit.models import (
    AEDConfig,
    AEDModel,
    WhisperEncoderConfig,
    load_checkpoint,
    optimize,
    whisper,
)
from asrkit.models.prompts import PromptFormat

sys.path.append(str(Path(__file__).resolve().parent))
import whisper_cases as known
from published import (
    GONE,
    change_weights,
    edit,
    expect_a_copy_to_be_the_same,
    golden,
    refused,
    zeros,
)


@pytest.fixture(autouse=True)
def small_batches(one_thread):
    """Every test of this file starts on one thread."""


def small():
    torch.manual_seed(0)
    sizes = {"width": 8, "heads": 2, "layers": 2}
    config = AEDConfig(
        vocab_size=11, bos=1, eos=2, pad=2, most=16, activation="gelu",
        positions="learned", embedding_norm=False, output_bias=False,
        encoder=WhisperEncoderConfig(bins=6, most=12, **sizes), **sizes,
    )  # fmt: skip
    model = AEDModel(config)
    for weight in model.parameters():
        if weight.dim() == 1:  # biases start small, and norms at one
            torch.nn.init.normal_(weight, mean=float(weight.mean() > 0.5), std=0.3)
    torch.nn.init.normal_(model.positions)
    return model.eval()


@torch.no_grad()
def test_an_utterance_without_frames_is_finite_and_an_optimized_whisper_the_same():
    model = small()
    features = torch.randn(3, 9, 6)
    lengths = torch.tensor([9, 0, 4])
    tokens = torch.tensor([[1, 4, 5], [1, 9, 9], [1, 3, 0]])
    wanted, _, _ = model(features, lengths, tokens)
    assert wanted.isfinite().all()
    found, _, _ = optimize(model)(features, lengths, tokens)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.fixture
def folder(tmp_path):
    """folder(name): a folder of a case of whisper_cases."""

    def write(name="whisper"):
        weights = known.fill(zeros(golden("whisper")[name]["shapes"]))
        known.write_folder(tmp_path / name, known.CASES[name], weights)
        return tmp_path / name

    return write


def test_the_prompt_is_that_of_the_model(folder):
    ids = known.specials()
    prompt = PromptFormat.from_notes(load_checkpoint(folder()).notes)
    named = "<|startoftranscript|> <|de|> <|translate|> <|notimestamps|>".split()
    tokens = prompt.tokens(language="de", task="translate")
    assert tokens == [ids[name] for name in named]
    prompt = PromptFormat.from_notes(load_checkpoint(folder("whisper-en")).notes)
    assert prompt.tokens() == [ids[named[0]], ids[named[-1]]]
    with pytest.raises(ValueError, match="^language: expected one of 'en', got 'de'"):
        prompt.tokens(language="de")


def test_an_older_folder_without_tokenizer_json_is_read(folder):
    path = folder()
    wanted = load_checkpoint(path)
    (path / "tokenizer.json").unlink()
    merges = "\n".join(["#version: 0.2", *known.MERGES, ""])
    (path / "vocab.json").write_text(json.dumps(known.base()), "utf-8")
    (path / "added_tokens.json").write_text(json.dumps(known.specials()))
    (path / "merges.txt").write_text(merges, "utf-8")
    found = load_checkpoint(path)
    assert found.notes == wanted.notes
    assert found.tokenizer.pieces() == wanted.tokenizer.pieces()
    text = "The other, and the naïve one."
    assert found.tokenizer.encode(text) == wanted.tokenizer.encode(text)
    (path / "merges.txt").unlink()
    refused(path, "model: whisper is damaged (it has no merges.txt)")


def test_a_vocabulary_that_repeats_the_end_among_its_texts_is_read(folder):
    path = folder()
    end = {"model.vocab.<|endoftext|>": 280}  # as published ones do
    edit(path / "tokenizer.json", end)
    assert load_checkpoint(path).tokenizer.vocab_size == 280


def test_without_a_generation_config_the_models_config_counts(folder):
    path = folder()
    (path / "generation_config.json").unlink()
    suppressed = {"suppress_tokens": [5], "begin_suppress_tokens": [6, 7]}
    edit(path / "config.json", suppressed)
    notes = load_checkpoint(path).notes
    assert notes["suppressed"] == {"always": [5], "first": [6, 7]}
    assert notes["whisper"]["most_first"] is None
    # fewer tokens than a multilingual vocabulary has
    assert len(PromptFormat.from_notes(notes).tokens()) == 2


def test_a_checkpoint_of_our_own_keeps_all_of_it(folder, tmp_path):
    expect_a_copy_to_be_the_same(load_checkpoint(folder()), tmp_path)


def test_an_output_that_is_the_embedding_is_left_out_and_another_refused(folder):
    path = folder()
    weights = load_file(path / "model.safetensors")
    embedding = weights["model.decoder.embed_tokens.weight"]
    change_weights(path, {"proj_out.weight": embedding.clone()})
    assert load_checkpoint(path).model.config.layers == 2
    change_weights(path, {"proj_out.weight": embedding + 1})
    refused(path, "proj_out.weight: expected the weights of the embedding")


def test_the_output_may_replace_the_embedding_and_names_may_lack_a_prefix(folder):
    path = folder()
    wanted = load_checkpoint(path).model.state_dict()
    weights = load_file(path / "model.safetensors")
    weights["proj_out.weight"] = weights.pop("model.decoder.embed_tokens.weight")
    for names in (
        weights,
        {name.removeprefix("model."): one for name, one in weights.items()},
    ):
        save_file(names, path / "model.safetensors", metadata={"format": "pt"})
        found = load_checkpoint(path).model.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], one) for name, one in wanted.items())


ADDED = [
    token
    for token in known.tokenizer_json()["added_tokens"]
    if token["content"] != "<|translate|>"
]
FILES = [
    ("config.json", {"activation_function": "relu"}, "config.json.activation_function: expected 'gelu', got 'relu'."),
    ("config.json", {"max_source_positions": 50}, "size mismatch for encoder.positions"),
    ("config.json", {"encoder_layers": 10**4}, "model: expected at most 75 layers, the number of its tensors, got 10000."),
    ("preprocessor_config.json", {"sampling_rate": 8_000, "hop_length": 80}, "preprocessor_config.json.sampling_rate: expected"),
    ("tokenizer.json", {"added_tokens": ADDED}, "prompt: expected a token for each of its places, got none for"),
]  # fmt: skip


@pytest.mark.parametrize("file, changes, message", FILES)
def test_unsupported_settings_are_refused_by_name(folder, file, changes, message):
    path = folder()
    edit(path / file, changes)
    refused(path, message)


@pytest.mark.parametrize("name, message", [
    ("model.decoder.layer_norm.bias", 'Missing key(s) in state_dict: "norm.bias"'),
    ("model.encoder.layers.0.self_attn.q_proj.bias", 'Missing key(s) in state_dict: "encoder.layers.0.qkv.bias"'),
])  # fmt: skip
def test_a_missing_weight_is_named(folder, name, message):
    path = folder()
    change_weights(path, {name: GONE})
    refused(path, message)


@torch.inference_mode()
def test_attention_by_head_is_as_exact_as_torchs():
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 2, 3, 517, 64).unbind(0)
    exact = torch.nn.functional.scaled_dot_product_attention(
        queries.double(), keys.double(), values.double()
    )
    halves = [part.bfloat16() for part in (queries, keys, values)]
    rival = torch.nn.functional.scaled_dot_product_attention(*halves)
    found = whisper.attention_by_head(*halves)
    assert whisper.attends_by_head(halves[0], 0.0)
    assert (found - exact).norm() <= 2 * (rival - exact).norm()
