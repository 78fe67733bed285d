"""Folders of transformers' Parakeet models: what is read from them, wherever it stands, and what is refused, by name."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asrkit.features import FeatureConfig
from asrkit.models import CTCModel, TransducerModel, load_checkpoint, save_checkpoint
from asrkit.transcribe import recognize

HERE = Path(__file__).resolve().parent
spec = importlib.util.spec_from_file_location("parity_cases", HERE / "parity_cases.py")
known = importlib.util.module_from_spec(spec)
spec.loader.exec_module(known)
V = known.V


@pytest.fixture
def folder(tmp_path):
    """folder(kind): a folder as transformers writes it, of a tiny model with the weights of tests/golden."""

    def write(kind="ctc"):
        shapes = json.loads((HERE.parent / "golden/transformers.json").read_text())[
            kind
        ]["shapes"]
        weights = known.fill(
            {name: torch.zeros(shape) for name, shape in shapes.items()}
        )
        known.write_folder(
            tmp_path / kind, known.folder_config(known.golden_cases()[kind]), weights
        )
        return tmp_path / kind

    return write


def edit(path, **changes):
    """Change keys of a JSON file, nested ones as section__key; None takes a key out."""
    contents = json.loads(path.read_text())
    for name, value in changes.items():
        *sections, key = name.split("__")
        section = contents
        for part in sections:
            section = section[part]
        section[key] = value
        if value is None:
            del section[key]
    path.write_text(json.dumps(contents))


def change(folder, **changes):
    """Change tensors of the folder's weights; None takes one out. Dots are written as __."""
    weights = load_file(folder / "model.safetensors") | {
        name.replace("__", "."): value for name, value in changes.items()
    }
    save_file(
        {name: value for name, value in weights.items() if value is not None},
        folder / "model.safetensors",
    )


def features(B=2, T=60):
    """Features and lengths that suit the tiny models."""
    return torch.from_numpy(known.draws("features", (B, T, 80))).float(), torch.tensor(
        [T, T - 25]
    )


@pytest.mark.parametrize("kind", ["ctc", "rnnt", "tdt"])
def test_what_the_config_says_is_in_ours(folder, kind):
    checkpoint, how = (
        load_checkpoint(folder(kind)),
        known.ENCODER | known.golden_cases()[kind],
    )
    encoder = checkpoint.model.config.encoder
    read = (
        encoder.width,
        encoder.heads,
        encoder.subsampling_channels,
        encoder.bias,
        encoder.scale_input,
        encoder.dropout_input,
    )
    assert read == (
        how["width"],
        how["heads"],
        how["channels"],
        how["bias"],
        how["scale"],
        0.1,
    )
    assert isinstance(checkpoint.model, CTCModel if kind == "ctc" else TransducerModel)
    assert not checkpoint.model.training
    assert checkpoint.model.blank == checkpoint.tokenizer.vocab_size == V
    assert FeatureConfig(**checkpoint.features) == FeatureConfig()
    if kind != "ctc":
        assert checkpoint.model.durations == tuple(how["durations"])
        assert checkpoint.model.config.predictor.layers == how["lstm"]
        assert checkpoint.model.ctc_head is None


def test_what_is_read_is_saved_as_a_checkpoint_of_ours(folder, tmp_path):
    first = load_checkpoint(folder("tdt"))
    save_checkpoint(tmp_path / "own.safetensors", first)
    second = load_checkpoint(tmp_path / "own.safetensors")
    assert second.model.config == first.model.config
    assert (second.tokenizer, second.features, second.notes) == first[1:]
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


def test_how_many_labels_a_frame_may_have_is_read_and_heeded(folder):
    path, wave = (
        folder("rnnt"),
        torch.randn(1, 16_000, generator=torch.Generator().manual_seed(0)),
    )
    for most in (1, 3):
        edit(path / "config.json", max_symbols_per_step=most)
        checkpoint = load_checkpoint(path)
        with torch.no_grad():
            checkpoint.model.output.bias[
                checkpoint.model.blank
            ] = -100.0  # a label at every turn
        frames = recognize(checkpoint, wave, torch.tensor([16_000])).frames[0].tolist()
        assert (
            checkpoint.notes["max_symbols"]
            == most
            == frames.count(0)
            == frames.count(5)
        )


def test_a_key_that_is_left_out_has_transformers_default(folder):
    path = folder("rnnt")
    edit(
        path / "config.json",
        encoder_config__conv_kernel_size=None,
        encoder_config__dropout=None,
        hidden_act=None,
    )
    config = load_checkpoint(path).model.config
    assert (config.encoder.kernel, config.encoder.dropout_input, config.activation) == (
        9,
        0.1,
        "relu",
    )


def test_an_extractor_may_have_no_preemphasis(folder):
    path = folder()
    settings = json.loads((path / "preprocessor_config.json").read_text())
    settings["preemphasis"] = None
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert load_checkpoint(path).features["preemphasis"] == 0.0


def test_a_processor_config_has_the_extractors_keys_too(folder):
    path = folder()
    extractor = json.loads((path / "preprocessor_config.json").read_text()) | {
        "hop_length": 128
    }
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(
        ValueError,
        match="preprocessor_config.json or a feature_extractor in processor_config.json, got neither",
    ):
        load_checkpoint(path)
    (path / "processor_config.json").write_text(
        json.dumps({"feature_extractor": extractor})
    )
    assert load_checkpoint(path).features["hop_s"] == 128 / 16_000


def test_shards_are_read_as_one_file_is(folder):
    path = folder("rnnt")
    whole = load_checkpoint(path).model
    weights = load_file(path / "model.safetensors")
    names = sorted(weights)
    parts = {"model-1.safetensors": names[:20], "model-2.safetensors": names[20:]}
    for file, some in parts.items():
        save_file({name: weights[name] for name in some}, path / file)
    (path / "model.safetensors").unlink()
    index = {
        "weight_map": {name: file for file, some in parts.items() for name in some}
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded = load_checkpoint(path).model
    x = features()
    assert torch.equal(whole.encode(*x)[0], sharded.encode(*x)[0])
    part = path / "model-2.safetensors"
    part.rename(path.parent / part.name)
    edit(path / "model.safetensors.index.json", weight_map={"x": f"../{part.name}"})
    with pytest.raises(
        ValueError, match="expected ../model-2.safetensors, got none in rnnt"
    ):
        load_checkpoint(path)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match="expected model-2.safetensors, got none in rnnt"
    ):
        load_checkpoint(path)


def test_pickled_weights_are_not_read(folder):
    path = folder()
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(
        ValueError,
        match=r"got none in ctc. Pickled weights \(.bin, .pt\) are not read.",
    ):
        load_checkpoint(path)


CONFIG = [
    ({"model_type": "wav2vec2"}, "model_type: expected one of ['parakeet_ctc', 'parakeet_rnnt', 'parakeet_tdt', 'canary', 'whisper'], got 'wav2vec2'."),
    ({"encoder_config__hidden_act": "relu"}, "encoder_config.hidden_act: expected 'silu', got 'relu'."),
    ({"encoder_config__subsampling_conv_stride": 3}, "encoder_config.subsampling_conv_stride: expected 2, got 3."),
    ({"encoder_config__scale_input": "false"}, "scale_input: expected bool, got 'false'."),
    ({"encoder_config__subsampling_factor": 16}, "subsampling: expected 2, 4 or 8, got 16."),
    ({"encoder_config__num_hidden_layers": 10**4}, "model: expected at most 86 layers, the number of its tensors, got 10000."),
    ({"vocab_size": 10**7}, "config.json.pad_token_id: expected 9999999, got 31."),
    ({"pad_token_id": 90}, "config.json.pad_token_id: expected 31, got 90."),
    ({"encoder_config": None}, "ctc is damaged (it has no 'encoder_config')"),
]  # fmt: skip


@pytest.mark.parametrize(
    "changes, message", CONFIG, ids=[next(iter(changes)) for changes, _ in CONFIG]
)
def test_a_config_that_asrkit_does_not_do_is_refused_by_name(folder, changes, message):
    path = folder()
    edit(path / "config.json", **changes)
    with pytest.raises(ValueError) as refused:
        load_checkpoint(path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


WEIGHTS = [
    ({"ctc_head__bias": None}, 'Missing key(s) in state_dict: "output.bias"'),
    ({"encoder__layers__0__self_attn__k_proj__bias": None}, "ctc is damaged (it has no 'encoder.blocks.0.attention.k.bias')"),
    ({"encoder__adapter": torch.zeros(2)}, 'Unexpected key(s) in state_dict: "encoder.adapter"'),
    ({"joint__head__bias": torch.zeros(2)}, "two for output.bias"),
    ({"ctc_head__bias": torch.zeros(2)}, "size mismatch for output.bias"),
]  # fmt: skip


@pytest.mark.parametrize(
    "changes, message", WEIGHTS, ids=[message for _, message in WEIGHTS]
)
def test_weights_that_are_missing_unknown_or_of_another_shape_are_named(
    folder, changes, message
):
    path = folder()
    change(path, **changes)
    with pytest.raises(ValueError) as refused:
        load_checkpoint(path)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "name",
    ["config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors"],
)
@pytest.mark.parametrize("damage", ["cut", "noise", "list"])
def test_a_damaged_file_is_refused_in_one_line(folder, name, damage):
    path = folder()
    whole = (path / name).read_bytes()
    damaged = {
        "cut": whole[: len(whole) // 2],
        "noise": bytes(range(256)),
        "list": b"[1, 2]",
    }[damage]
    (path / name).write_bytes(damaged)
    with pytest.raises(ValueError, match="^(model|tokenizer): ") as refused:
        load_checkpoint(path)
    assert "\n" not in str(refused.value)
    assert name in str(refused.value) or "ctc is damaged" in str(refused.value)


def test_a_tokenizer_of_another_size_is_refused(folder):
    path = folder()
    edit(path / "tokenizer.json", model__type="BPE", model__vocab={"<unk>": 0, "▁a": 1})
    with pytest.raises(
        ValueError,
        match="tokenizer: ",
    ):
        load_checkpoint(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(
        ValueError, match="model: ctc is damaged .it has no tokenizer.json"
    ):
        load_checkpoint(path)
