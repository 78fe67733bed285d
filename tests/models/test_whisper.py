"""Whisper's encoder, and folders: what is read, and what is refused by name. test_whisper_parity.py compares its numbers with
transformers'."""

import importlib.util
import json
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
    save_checkpoint,
)
from asrkit.models.prompts import PromptFormat
from asrkit.text import JsonTokenizer
from asrkit.workbench.measure import host_reads

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "golden" / "whisper.json"
spec = importlib.util.spec_from_file_location(
    "whisper_cases", HERE / "whisper_cases.py"
)
known = importlib.util.module_from_spec(spec)
spec.loader.exec_module(known)

SMALL = WhisperEncoderConfig(bins=6, width=8, layers=2, heads=2, most=12)
OPTIONS = {"activation": "gelu", "positions": "learned", "embedding_norm": False, "output_bias": False}  # fmt: skip


@pytest.fixture(autouse=True)
def small_batches(one_thread):
    """Every test of this file starts on one thread."""


def small(dtype=torch.float64, **settings):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 11,
        "bos": 1,
        "eos": 2,
        "pad": 2,
        "encoder": SMALL,
        "width": 8,
        "heads": 2,
        "layers": 2,
    }
    model = AEDModel(AEDConfig(**sizes | OPTIONS | {"most": 16} | settings))
    for weight in model.parameters():
        if weight.dim() == 1:  # biases start small, and norms at one
            torch.nn.init.normal_(weight, mean=float(weight.mean() > 0.5), std=0.3)
    torch.nn.init.normal_(model.positions)
    return model.to(dtype).eval()


def sound(B, T, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * B + T)
    features = torch.randn(B, T, 6, generator=generator, dtype=torch.float64).to(dtype)
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    lengths[0] = T
    return features, lengths


# ---- encoder


@pytest.mark.parametrize("filling", [0.0, 7.0, torch.nan, torch.inf])
def test_neither_padding_nor_the_rest_of_the_batch_matters(filling):
    encoder = small().encoder
    for B, T in ((1, 1), (3, 2), (5, 9), (4, 24)):
        features, lengths = sound(B, T)
        lengths[-1] *= B != 4  # one has no frames
        for b, length in enumerate(lengths):
            features[b, length:] = filling
        with torch.no_grad():
            found, ends = encoder(features, lengths)
            assert found.isfinite().all()
            for b, length in enumerate(lengths):
                if not length:
                    continue
                alone, _ = encoder(features[b : b + 1, :length], lengths[b : b + 1])
                torch.testing.assert_close(
                    found[b, : ends[b]], alone[0], rtol=0, atol=1e-12
                )


def test_no_op_of_the_encoder_waits_for_the_device():
    encoder = small(torch.float32).encoder
    features, lengths = sound(2, 8, torch.float32)
    with torch.no_grad():
        assert not host_reads(lambda: encoder(features, lengths))


# ---- decoder


def test_an_optimized_whisper_computes_the_same():
    model = small(torch.float32)
    features, lengths = sound(3, 9, torch.float32)
    tokens = torch.tensor([[1, 4, 5], [1, 9, 9], [1, 3, 0]])
    with torch.no_grad():
        wanted, _, _ = model(features, lengths, tokens)
        found, _, _ = optimize(model)(features, lengths, tokens)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


# ---- folders


@pytest.fixture
def folder(tmp_path):
    """folder(name): a folder of a case of whisper_cases."""

    def write(name="whisper"):
        shapes = json.loads(GOLDEN.read_text())[name]["shapes"]
        weights = known.fill({key: torch.zeros(shape) for key, shape in shapes.items()})
        known.write_folder(tmp_path / name, known.CASES[name], weights)
        return tmp_path / name

    return write


def edit(path, **changes):
    """Change keys of a JSON file; None takes a key out."""
    values = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in values.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


def change(path, **changes):
    """Change tensors of the weights; None takes one out. Dots are written as __."""
    weights = load_file(path / "model.safetensors")
    weights |= {name.replace("__", "."): value for name, value in changes.items()}
    kept = {name: value for name, value in weights.items() if value is not None}
    save_file(kept, path / "model.safetensors")


def test_the_prompt_is_that_of_the_model(folder):
    ids = known.specials()
    prompt = PromptFormat.from_notes(load_checkpoint(folder()).notes)
    named = [
        ids[f"<|{name}|>"]
        for name in ("startoftranscript", "en", "transcribe", "notimestamps")
    ]
    assert prompt.tokens() == named
    named[1:3] = ids["<|de|>"], ids["<|translate|>"]
    assert prompt.tokens(language="de", task="translate") == named
    prompt = PromptFormat.from_notes(load_checkpoint(folder("whisper-en")).notes)
    assert prompt.tokens() == [ids["<|startoftranscript|>"], ids["<|notimestamps|>"]]
    with pytest.raises(ValueError, match="^language: expected one of 'en', got 'de'"):
        prompt.tokens(language="de")


def test_a_folder_of_before_tokenizer_json_is_read_too(folder):
    path = folder()
    wanted = load_checkpoint(path)
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text(json.dumps(known.base()), encoding="utf-8")
    (path / "added_tokens.json").write_text(json.dumps(known.specials()))
    merges = "\n".join(["#version: 0.2", *known.MERGES, ""])
    (path / "merges.txt").write_text(merges, encoding="utf-8")
    found = load_checkpoint(path)
    assert found.notes == wanted.notes
    assert found.tokenizer.pieces() == wanted.tokenizer.pieces()
    text = "The other, and the naïve one."
    assert found.tokenizer.encode(text) == wanted.tokenizer.encode(text)
    (path / "merges.txt").unlink()
    refused(path, "model: whisper is damaged (it has no merges.txt)")


def test_a_vocabulary_that_repeats_the_end_among_its_texts_is_read(folder):
    path = folder()
    contents = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    contents["model"]["vocab"]["<|endoftext|>"] = 280  # as published ones do
    (path / "tokenizer.json").write_text(json.dumps(contents), encoding="utf-8")
    assert load_checkpoint(path).tokenizer.vocab_size == 280


def test_without_a_generation_config_the_models_config_counts(folder):
    path = folder()
    (path / "generation_config.json").unlink()
    edit(path / "config.json", suppress_tokens=[5], begin_suppress_tokens=[6, 7])
    notes = load_checkpoint(path).notes
    assert notes["suppressed"] == {"always": [5], "first": [6, 7]}
    assert notes["whisper"]["most_first"] is None
    # fewer tokens than a multilingual vocabulary has
    assert len(PromptFormat.from_notes(notes).tokens()) == 2


def test_a_checkpoint_of_our_own_keeps_all_of_it(folder, tmp_path):
    checkpoint = load_checkpoint(folder())
    save_checkpoint(tmp_path / "ours.safetensors", checkpoint)
    again = load_checkpoint(tmp_path / "ours.safetensors")
    assert again.model.config == checkpoint.model.config
    assert again.tokenizer == checkpoint.tokenizer
    assert isinstance(again.tokenizer, JsonTokenizer)
    assert (again.features, again.notes) == (checkpoint.features, checkpoint.notes)
    for name, value in checkpoint.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


def test_an_output_that_is_the_embedding_is_left_out_and_another_refused(folder):
    path = folder()
    embedding = load_file(path / "model.safetensors")[
        "model.decoder.embed_tokens.weight"
    ]
    change(path, proj_out__weight=embedding.clone())
    assert load_checkpoint(path).model.config.layers == 2
    change(path, proj_out__weight=embedding + 1)
    with pytest.raises(
        ValueError, match="^proj_out.weight: expected the weights of the embedding"
    ):
        load_checkpoint(path)


CONFIG = [
    ({"activation_function": "relu"}, "config.json.activation_function: expected 'gelu', got 'relu'."),
    ({"max_source_positions": 50}, "size mismatch for encoder.positions"),
    ({"encoder_layers": 10**4}, "model: expected at most 75 layers, the number of its tensors, got 10000."),
    ({"d_model": "wide"}, "is damaged (TypeError"),
]  # fmt: skip


@pytest.mark.parametrize(
    "changes, message", CONFIG, ids=[str(changes) for changes, _ in CONFIG]
)
def test_a_config_that_asrkit_does_not_do_is_refused_by_name(folder, changes, message):
    path = folder()
    edit(path / "config.json", **changes)
    refused(path, message)


@pytest.mark.parametrize("key, value", [("sampling_rate", 8_000), ("dither", 1e-5)])
def test_features_that_asrkit_does_not_compute_are_refused(folder, key, value):
    path = folder()
    other = {"hop_length": 80} if key == "sampling_rate" else {}
    edit(path / "preprocessor_config.json", **{key: value}, **other)
    refused(path, f"preprocessor_config.json.{key}: expected")


def refused(path, message):
    """Assert that the folder is refused in one line that holds `message`."""
    with pytest.raises(ValueError) as said:
        load_checkpoint(path)
    assert message in str(said.value)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("changes, message", [
    ({"model__decoder__layer_norm__bias": None}, 'Missing key(s) in state_dict: "norm.bias"'),
    ({"model__encoder__layers__0__self_attn__q_proj__bias": None}, 'Missing key(s) in state_dict: "encoder.layers.0.qkv.bias"'),
    ({"proj_out__weight": torch.zeros(2)}, "proj_out.weight: expected the weights of the embedding"),
])  # fmt: skip
def test_weights_that_are_missing_unknown_or_of_another_shape_are_named(
    folder, changes, message
):
    path = folder()
    change(path, **changes)
    refused(path, message)


def test_a_tokenizer_without_whispers_tokens_is_refused(folder):
    path = folder()
    added = known.tokenizer_json()["added_tokens"]
    kept = [token for token in added if token["content"] != "<|translate|>"]
    edit(path / "tokenizer.json", added_tokens=kept)
    refused(path, "prompt: expected a token for each of its places, got none for")
    edit(path / "tokenizer.json", added_tokens=[])
    refused(path, "is damaged (it has no '<|startoftranscript|>')")
