"""Jasper in files of other programs: NVIDIA's `.pt` and NeMo's `.nemo`, written here and read back."""

import contextlib
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from asrkit.features import FeatureConfig
from asrkit.models import (
    CTCConfig,
    CTCModel,
    JasperConfig,
    Stage,
    load_checkpoint,
    presets,
)
from asrkit.models.checkpoints.jasper import _encoder
from asrkit.models.checkpoints.weights import saved

sys.path.append(str(Path(__file__).parent))
from parity_cases import JASPER, V, nemo_config, write_nemo
from published import expect_a_copy_to_be_the_same, featurizer, refused

FIRST = Stage(channels=16, kernel=5, repeat=1, stride=2, dense=False)
DENSE = (
    Stage(channels=12, kernel=3, repeat=2),
    Stage(channels=20, kernel=21, dropout=0.3),
)
WIDE = Stage(channels=24, kernel=7, repeat=1, dropout=0.4, dilation=2, dense=False)
LAST = Stage(channels=16, kernel=1, repeat=1, dropout=0.4, dense=False)
SMALL = JasperConfig(bins=8, stages=(FIRST, *DENSE, WIDE, LAST))


def model_of(encoder, vocab_size=28, seed=0):
    """A model in eval mode whose norms and statistics all differ."""
    torch.manual_seed(seed)
    model = CTCModel(CTCConfig(vocab_size=vocab_size, encoder=encoder)).eval()
    for name, value in model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            value.fill_(7)
        elif value.ndim == 1:
            value += 0.1 * torch.rand_like(value)
    return model


def published(
    model,
    layer="encoder.layers.{}.conv.{}",
    branch="encoder.layers.{}.res.{}",
    head="decoder.layers.0",
):
    """Weights by the names of the published code; NeMo's names differ in a few words."""
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
    """The contents of a file of the published training code."""
    return {
        "epoch": 3, "step": 1000, "best_wer": float("inf"), "state_dict": published(model),
        "ema_state_dict": None if average is None else published(average),
        "optimizer": {"state": {0: {"step": 9, "exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.01, "betas": (0.95, 0)}]},
        "scaler": {"scale": 4096.0},
    }  # fmt: skip


def written(path, contents):
    torch.save(contents, path)
    return path


def expect_the_weights_of(loaded, model):
    found = loaded.model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name


def test_a_file_of_the_published_code_becomes_the_model_it_was_made_of(tmp_path):
    model = model_of(SMALL)
    loaded = load_checkpoint(written(tmp_path / "epoch3.pt", state(model)))
    assert loaded.model.config == model.config
    assert not loaded.model.training
    expect_the_weights_of(loaded, model)
    assert loaded.tokenizer.decode([1, 2, 3, 0, 26, 27]) == "abc z'"
    assert loaded.notes == {"source": "epoch3.pt", "weights": "state_dict"}
    features = FeatureConfig(window_s=0.02, bins=8, log_guard=1e-20)
    assert FeatureConfig(**loaded.features) == features
    expect_a_copy_to_be_the_same(loaded, tmp_path)


def test_averaged_weights_are_preferred_and_the_notes_say_so(tmp_path):
    model = model_of(SMALL)
    average = model_of(SMALL, seed=1)
    loaded = load_checkpoint(written(tmp_path / "a.pt", state(model, average)))
    expect_the_weights_of(loaded, average)
    assert loaded.notes["weights"] == "ema_state_dict"


def test_weights_do_not_change_with_their_file(tmp_path):
    model = model_of(SMALL)
    path = written(tmp_path / "a.pt", state(model))
    loaded = load_checkpoint(path)
    path.write_bytes(bytes(path.stat().st_size))
    expect_the_weights_of(loaded, model)


@pytest.mark.parametrize("kind", ["as written", "stored", "deflated", "legacy", "big"])
def test_tensors_are_found_wherever_a_file_has_them(kind, tmp_path):
    numbers = torch.randn(4, 6)
    tensors = {
        "w": numbers,
        "view": numbers.T,
        "count": torch.tensor(3),
        "no": torch.empty(0),
    }
    path = tmp_path / "a.pt"
    torch.save(tensors, path, _use_new_zipfile_serialization=kind != "legacy")
    if kind in ("stored", "deflated", "big"):
        entries = {}
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                entries[name] = archive.read(name)
        how = zipfile.ZIP_DEFLATED if kind == "deflated" else zipfile.ZIP_STORED
        with zipfile.ZipFile(path, "w", how) as archive:
            for name, content in entries.items():
                big = kind == "big" and name.endswith("byteorder")
                archive.writestr(name, b"big" if big else content)
    found = saved(path, "a.pt", path)
    for name, expected in torch.load(path, weights_only=True).items():
        assert torch.equal(found[name], expected), name


def test_the_shapes_of_the_published_model_give_the_preset():
    with torch.device("meta"):
        model = CTCModel(presets.jasper_10x5dr())
    assert _encoder(published(model)) == presets.jasper_10x5dr().encoder


def without(name):
    def change(saved):
        weights = saved["state_dict"]
        kept = {key: weights[key] for key in weights if not key.startswith(name)}
        return saved | {"state_dict": kept}

    return change


def replaced(name, value):
    return lambda saved: saved | {"state_dict": {**saved["state_dict"], name: value}}


FIRST_CONV = "encoder.layers.0.conv.0.weight"
WRONG = [
    (lambda saved: {"model": saved["state_dict"]}, "weights under ema_state_dict or state_dict, got ['model']"),
    (without("decoder"), "damaged (it has no 'output.weight'"),
    (replaced(FIRST_CONV, torch.zeros(16, 8, 4)), "kernel: expected an odd number"),
    (replaced("decoder.layers.0.weight", torch.zeros(32, 16, 1)), "size mismatch for output.weight"),
    (lambda saved: state(model_of(JasperConfig(bins=8, stages=(FIRST, LAST)))), "encoder.layers.0: expected a strided convolution, dense blocks, a dilated convolution and one of a single frame"),
    (without("encoder.layers.2.res.1"), 'Missing key(s) in state_dict: "encoder.stages.2.branches.1.conv.weight"'),
]  # fmt: skip


@pytest.mark.parametrize("change, message", WRONG)
def test_another_pt_file_is_refused_in_one_line(change, message, tmp_path):
    refused(written(tmp_path / "a.pt", change(state(model_of(SMALL)))), message)


class Code:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_code_in_a_pt_file_does_not_run(tmp_path):
    saved = state(model_of(SMALL)) | {"x": Code(tmp_path / "ran")}
    refused(written(tmp_path / "a.pt", saved), "a.pt cannot be read as tensors alone")
    assert not (tmp_path / "ran").exists()


def test_a_pt_file_cut_anywhere_or_with_damaged_bytes_is_refused_or_read(tmp_path):
    whole = written(tmp_path / "a.pt", state(model_of(SMALL))).read_bytes()
    damaged = tmp_path / "b.pt"
    damaged.touch()
    refused(damaged, "b.pt is damaged (it is empty, or ends too early)")
    draw = torch.Generator().manual_seed(0)
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
NAMES = ("channels", "repeat", "kernel", "stride", "dilation", "dense")
STAGES = [Stage(**dict(zip(NAMES, block, strict=True))) for block in JASPER]


def nemo_archive(path, changes=None):
    """An archive as NeMo writes it, and the model that it was made of; changes: at keys of its fourth block."""
    config = nemo_config(NEMO)
    config["encoder"]["jasper"][3] |= changes or {}
    model = model_of(JasperConfig(bins=64, stages=STAGES), vocab_size=V)
    layers = "encoder.encoder.{}.mconv.{}", "encoder.encoder.{}.res.{}"
    weights = published(model, *layers, "decoder.decoder_layers.0")
    weights |= featurizer(config["preprocessor"])
    return write_nemo(path, config, weights), model


def test_an_archive_of_nemos_jasper_becomes_the_model_it_was_made_of(tmp_path):
    path, model = nemo_archive(tmp_path / "a.nemo")
    loaded = load_checkpoint(path)
    assert loaded.model.config == model.config
    expect_the_weights_of(loaded, model)


UNSUPPORTED = [
    ({"residual": False}, "residual: expected True, got False"),
    ({"residual_mode": "max"}, "residual_mode: expected 'add', got 'max'"),
    ({"stride_last": True}, "stride_last: expected False, got True"),
    ({"residual": False, "residual_dense": False}, "Unexpected key"),  # a dense block less
]  # fmt: skip


@pytest.mark.parametrize("changes, message", UNSUPPORTED)
def test_unsupported_settings_of_a_nemo_jasper_are_refused(changes, message, tmp_path):
    path, _ = nemo_archive(tmp_path / "a.nemo", changes)
    refused(path, message)
