"""Jasper in the files of others: NVIDIA's `.pt` and NeMo's `.nemo`, written here from a model of ours and read back."""

import contextlib
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from asrkit.features import FeatureConfig, mel_bands
from asrkit.models import (
    CTCConfig,
    CTCModel,
    JasperConfig,
    Stage,
    load_checkpoint,
    presets,
    save_checkpoint,
)
from asrkit.models.checkpoints.jasper import _encoder

sys.path.append(str(Path(__file__).parent))
from parity_cases import JASPER, V, nemo_config, write_nemo

FIRST = Stage(channels=16, kernel=5, repeat=1, stride=2, dense=False)
DENSE = (
    Stage(channels=12, kernel=3, repeat=2),
    Stage(channels=20, kernel=21, dropout=0.3),
)
WIDE = Stage(channels=24, kernel=7, repeat=1, dropout=0.4, dilation=2, dense=False)
LAST = Stage(channels=16, kernel=1, repeat=1, dropout=0.4, dense=False)
SMALL = JasperConfig(bins=8, stages=(FIRST, *DENSE, WIDE, LAST))
X, LENGTHS = (
    torch.linspace(-2, 2, 2 * 41 * 8).sin().view(2, 41, 8),
    torch.tensor([41, 17]),
)


def model_of(encoder, vocab_size=28, seed=0):
    """A model in eval mode whose norms and statistics all differ."""
    torch.manual_seed(seed)
    model = CTCModel(CTCConfig(vocab_size=vocab_size, encoder=encoder)).eval()
    for name, value in model.state_dict().items():
        if value.ndim == 1:
            value += 0.1 * torch.rand_like(value)
        if name.endswith("num_batches_tracked"):
            value.fill_(7)
    return model


def published(
    model,
    layer="encoder.layers.{}.conv.{}",
    branch="encoder.layers.{}.res.{}",
    head="decoder.layers.0",
):
    """Weights by the names of the published code, which NeMo's differ from in a few words."""
    conv = ".conv" if "mconv" in layer else ""
    named = OrderedDict()

    def add(place, norm_place, part):
        named[f"{place}{conv}.weight"] = part.conv.weight.detach()
        for name, value in part.norm.state_dict().items():
            named[f"{norm_place}.{name}"] = value

    for b, stage in enumerate(model.encoder.stages):
        for r, repeat in enumerate(stage.repeats):
            add(layer.format(b, 4 * r), layer.format(b, 4 * r + 1), repeat)
        for p, pane in enumerate(stage.branches):
            add(branch.format(b, p) + ".0", branch.format(b, p) + ".1", pane)
    named[f"{head}.weight"] = model.output.weight.detach()[..., None]
    named[f"{head}.bias"] = model.output.bias.detach()
    return named


def state(model, average=None):
    """What the published training code saves."""
    return {
        "epoch": 3, "step": 1000, "best_wer": float("inf"), "state_dict": published(model),
        "ema_state_dict": None if average is None else published(average),
        "optimizer": {"state": {0: {"step": 9, "exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.01, "betas": (0.95, 0)}]},
        "scaler": {"scale": 4096.0},
    }  # fmt: skip


def written(path, contents):
    torch.save(contents, path)
    return path


def refused(path, match):
    with pytest.raises(ValueError, match=match) as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@torch.no_grad()
def assert_same(loaded, model):
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert torch.equal(loaded(X, LENGTHS)[0], model(X, LENGTHS)[0])


def test_a_file_of_the_published_code_becomes_the_model_it_was_made_of(tmp_path):
    model = model_of(SMALL)
    loaded = load_checkpoint(
        written(tmp_path / "Jasper_epoch3_checkpoint.pt", state(model))
    )
    assert loaded.model.config == model.config
    assert not loaded.model.training
    assert_same(loaded.model, model)
    assert loaded.tokenizer.decode([1, 2, 3, 0, 26, 27]) == "abc z'"
    assert loaded.notes == {
        "source": "Jasper_epoch3_checkpoint.pt",
        "weights": "state_dict",
    }
    assert FeatureConfig(**loaded.features) == FeatureConfig(
        window_s=0.02, bins=8, log_guard=1e-20
    )
    save_checkpoint(tmp_path / "ours.safetensors", loaded)
    again = load_checkpoint(tmp_path / "ours.safetensors")
    assert again[1:] == loaded[1:]
    assert_same(again.model, model)


def test_averaged_weights_are_preferred_and_the_notes_say_so(tmp_path):
    model, average = model_of(SMALL), model_of(SMALL, seed=1)
    loaded = load_checkpoint(written(tmp_path / "a.pt", state(model, average)))
    assert_same(loaded.model, average)
    assert loaded.notes["weights"] == "ema_state_dict"


def test_weights_do_not_change_with_their_file(tmp_path):
    model = model_of(SMALL)
    path = written(tmp_path / "a.pt", state(model))
    loaded = load_checkpoint(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert_same(loaded.model, model)


def test_the_shapes_of_the_published_model_give_the_preset():
    with torch.device("meta"):
        model = CTCModel(presets.jasper_10x5dr())
    assert _encoder(published(model)) == presets.jasper_10x5dr().encoder


def without(*names):
    def change(saved):
        weights = saved["state_dict"]
        return saved | {
            "state_dict": {
                name: weights[name] for name in weights if not name.startswith(names)
            }
        }

    return change


def replaced(name, value):
    return lambda saved: saved | {"state_dict": {**saved["state_dict"], name: value}}


HEAD = "decoder.layers.0.weight"
BLOCK = "encoder.layers.1"
WRONG = {
    "another training": (lambda saved: {"model": saved["state_dict"]}, "weights under ema_state_dict or state_dict, got .'model'"),
    "a list": (lambda saved: [1], "^a.pt: expected the keys of a training, got list"),
    "a number for a weight": (replaced("encoder.x", 1), "^encoder.x: expected a dense tensor, got int"),
    "no head": (without(HEAD), "damaged .it has no 'output.weight'"),
    "another alphabet": (replaced(HEAD, torch.zeros(32, 16, 1)), "size mismatch for output.weight"),
    "no encoder": (without("encoder"), "damaged .it has no 'encoder.layers.0.conv.0.weight'"),
    "an even kernel": (replaced("encoder.layers.0.conv.0.weight", torch.zeros(16, 8, 4)), "^kernel: expected an odd number"),
    "a last stage of seven frames": (lambda saved: state(model_of(JasperConfig(bins=8, stages=(FIRST, *DENSE, WIDE, WIDE)))), "^encoder.layers.4: expected a strided convolution, dense blocks, .* got 24 channels of 7 frames 1 times in stage 4 of 5"),
    "two stages": (lambda saved: state(model_of(JasperConfig(bins=8, stages=(FIRST, LAST)))), "^encoder.layers.0: expected a strided .* in stage 0 of 2"),
    "residuals that are not dense": (without("encoder.layers.2.res.1"), "Missing key.*encoder.stages.2.branches.1.conv.weight"),
    "a missing norm": (without(f"{BLOCK}.conv.1.bias"), "Missing key.*encoder.stages.1.repeats.0.norm.bias"),
    "an unknown weight": (replaced("encoder.other.weight", torch.zeros(1)), "Unexpected key.*encoder.other.weight"),
    "a weight twice": (replaced(f"{BLOCK}.conv.00.weight", torch.zeros(1)), "weights of one model, got two for"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_another_pt_file_is_refused_in_one_line(case, tmp_path):
    change, said = WRONG[case]
    refused(written(tmp_path / "a.pt", change(state(model_of(SMALL)))), said)


class Code:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_code_in_a_pt_file_does_not_run(tmp_path):
    saved = state(model_of(SMALL)) | {"x": Code(tmp_path / "ran")}
    refused(written(tmp_path / "a.pt", saved), "^a.pt cannot be read as tensors alone")
    assert not (tmp_path / "ran").exists()


def test_a_pt_file_cut_anywhere_or_with_damaged_bytes_is_refused_or_read(tmp_path):
    whole = written(tmp_path / "a.pt", state(model_of(SMALL))).read_bytes()
    damaged, draw = tmp_path / "b.pt", torch.Generator().manual_seed(0)
    for cut in torch.randint(0, len(whole), (8,), generator=draw).tolist():
        damaged.write_bytes(whole[:cut])
        refused(damaged, "b.pt")
    for _ in range(30):
        changed = bytearray(whole)
        for place in torch.randint(0, len(whole), (20,), generator=draw).tolist():
            changed[place] ^= 1 + place % 255
        damaged.write_bytes(changed)
        with contextlib.suppress(ValueError):  # damaged numbers are numbers
            load_checkpoint(damaged)


NEMO = {"kind": "ctc", "bins": 64, "width": 24, "jasper": JASPER}


def nemo_encoder():
    """The config that NEMO describes, built the other way."""
    stages = []
    for channels, repeat, kernel, stride, dilation, dense in JASPER:
        stages.append(
            Stage(
                channels=channels,
                repeat=repeat,
                kernel=kernel,
                stride=stride,
                dilation=dilation,
                dense=dense,
            )
        )
    return JasperConfig(bins=64, stages=stages)


def nemo_archive(path, model, **changes):
    """An archive as NeMo writes it. `changes` are values at keys of the encoder; block.KEY: of its fourth block."""
    config = nemo_config(NEMO)
    for key, value in changes.items():
        section = config["encoder"]
        if key.startswith("block."):
            section, key = section["jasper"][3], key.removeprefix("block.")
        section[key] = value
    names = (
        "encoder.encoder.{}.mconv.{}",
        "encoder.encoder.{}.res.{}",
        "decoder.decoder_layers.0",
    )
    weights = published(model, *names)
    weights["preprocessor.featurizer.window"] = torch.hann_window(400, periodic=False)
    weights["preprocessor.featurizer.fb"] = (
        mel_bands(FeatureConfig(bins=64)).T[None].contiguous()
    )
    return write_nemo(path, config, weights)


@torch.no_grad()
def test_an_archive_of_nemos_jasper_becomes_the_model_it_was_made_of(tmp_path):
    model = model_of(nemo_encoder(), vocab_size=V)
    loaded = load_checkpoint(nemo_archive(tmp_path / "a.nemo", model))
    assert loaded.model.config == model.config
    features, lengths = torch.randn(2, 50, 64), torch.tensor([50, 31])
    assert torch.equal(loaded.model(features, lengths)[0], model(features, lengths)[0])


UNSUPPORTED = [
    ("activation", "selu"), ("residual_mode", "stride_add"), ("conv_mask", False), ("frame_splicing", 2), ("quantize", True),
    ("block.residual", False), ("block.residual_mode", "max"), ("block.kernel_size_factor", 0.5),
    ("block.stride_last", True), ("block.future_context", 0), ("block.repeat", 0), ("block.dropout", 2.0),
]  # fmt: skip


@pytest.mark.parametrize(
    "key, value", UNSUPPORTED, ids=[f"{key}={value}" for key, value in UNSUPPORTED]
)
def test_what_asrkit_does_not_compute_of_a_conv_encoder_is_refused_by_its_key(
    key, value, tmp_path
):
    model = model_of(nemo_encoder(), vocab_size=V)
    path = nemo_archive(tmp_path / "a.nemo", model, **{key: value})
    refused(path, key.removeprefix("block."))


def test_a_dense_block_of_nemo_that_is_missing_in_its_config_is_refused(tmp_path):
    model = model_of(nemo_encoder(), vocab_size=V)
    path = nemo_archive(
        tmp_path / "a.nemo",
        model,
        **{"block.residual": False, "block.residual_dense": False},
    )
    refused(path, "Unexpected key")  # a dense block less: its branches are unknown
