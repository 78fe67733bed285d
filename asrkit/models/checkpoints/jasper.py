"""Jasper as others publish it: `.pt` files of NVIDIA's training code, and NeMo's archives.

Source of the names: github.com/NVIDIA/DeepLearningExamples, PyTorch/SpeechRecognition/Jasper
(commit 729963d), and nemo_toolkit 3.0.0.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from asrkit.models.checkpoints import archive
from asrkit.models.checkpoints.nemo_config import Section, short
from asrkit.models.checkpoints.own import Contents
from asrkit.models.jasper import JasperConfig, Stage
from asrkit.models.transducer import CTCConfig
from asrkit.shapes import expect, whole
from asrkit.text import CharTokenizer

ALPHABET = " abcdefghijklmnopqrstuvwxyz'"
# Settings of the published features. Dither is for training; padding has no influence.
FEATURES: dict[str, Any] = {
    "rate_hz": 16_000,
    "window_s": 0.02,
    "hop_s": 0.01,
    "fft": 512,
    "window": "hann",
    "periodic": False,
    "preemphasis": 0.97,
    "guard": "add",
    "log_guard": 1e-20,
    "normalization": "per_feature",
}
STATES = ("ema_state_dict", "state_dict")  # averaged weights are preferred
HEAD = "decoder.layers.0."
FIRST_VERSION = ("jasper_encoder.", "jasper_decoder.", "acoustic_model.", "audio_preprocessor.")
LAYOUT = "a strided convolution, dense blocks, a dilated convolution and one of a single frame"
NAME = re.compile(
    r"encoder\.(?:layers|encoder)\.(?P<stage>\d{1,5})\.(?P<place>m?conv|res)\.(?P<index>\d{1,5})\."
    r"(?:(?P<inner>[01])\.)?(?:conv\.)?(?P<leaf>\w+)"
)
PARTS = ("conv", "norm")


def read(path: Path) -> Contents:
    """Contents of a `.pt` file of the published training code.

    Sizes follow from the shapes of the weights. No shape tells a stride, a dilation or a dropout:
    they are those of the published model, and the stages have to come in its order.

    Raises:
        ValueError: Something is damaged, missing or not supported; it is named.
    """
    saved = archive.saved(path)
    remedy = "Other .pt files are not supported."
    held = isinstance(saved, dict)
    expect(held, path.name, "the state of a training", type(saved).__name__, remedy)
    found = [name for name in STATES if saved.get(name) is not None]
    wanted = f"weights under {' or '.join(STATES)}"
    expect(len(found) > 0, path.name, wanted, short(list(saved)), remedy)
    weights = archive.tensors(saved[found[0]], f"{path.name}: {found[0]}")
    old = [name for name in weights if name.startswith(FIRST_VERSION)]
    remedy = "The published code renames them: load and save the file by it."
    expect(not old, path.name, "names of today's published code", short(old[:3]), remedy)
    config = CTCConfig(vocab_size=_classes(weights) - 1, encoder=_encoder(weights))
    notes = {"source": path.name, "weights": found[0]}
    features = FEATURES | {"bins": config.encoder.bins}
    return config, _renamed(weights), CharTokenizer(ALPHABET), features, notes


def _classes(weights: dict[str, Tensor]) -> int:
    """Characters and blank; ValueError where their number is not the published one."""
    head = weights.get(f"{HEAD}weight")
    classes = len(ALPHABET) + 1
    got: Any = "none"
    if head is not None:
        got = tuple(head.shape)
    fits = head is not None and head.ndim == 3 and got[0] == classes
    expect(fits, f"{HEAD}weight", f"{classes} classes, {ALPHABET!r} and blank", got)
    return classes


def _encoder(weights: dict[str, Tensor]) -> JasperConfig:
    """The config whose shapes those of `weights` are."""
    count = 0
    while f"encoder.layers.{count}.conv.0.weight" in weights:
        count += 1
    expect(count >= 3, "encoder.layers", LAYOUT, f"{count} stages")
    stages = [_stage(weights, number, count) for number in range(count)]
    first = weights["encoder.layers.0.conv.0.weight"]
    return JasperConfig(bins=first.shape[1], stages=stages)


def _stage(weights: dict[str, Tensor], number: int, count: int) -> Stage:
    """Stage `number` of `count`."""
    name = f"encoder.layers.{number}"
    first = weights[f"{name}.conv.0.weight"]
    kind = f"{name}.conv.0.weight"
    expect(first.ndim == 3, kind, "a convolution over time", tuple(first.shape))
    channels, _, kernel = first.shape
    repeat = 1
    while f"{name}.conv.{4 * repeat}.weight" in weights:
        repeat += 1
    branches = 0
    while f"{name}.res.{branches}.0.weight" in weights:
        branches += 1
    is_last = number == count - 1
    is_wide = number == count - 2
    dense = not (number == 0 or is_wide or is_last)
    wanted = f"{LAYOUT}: {number if dense else 0} branches"
    expect(branches == (number if dense else 0), name, wanted, f"{branches} branches")
    expect(dense or repeat == 1, name, f"{LAYOUT}: one convolution", repeat)
    expect(not is_last or kernel == 1, name, f"{LAYOUT}: a kernel of 1", kernel)
    dropout = 0.2
    if dense and kernel >= 21:
        dropout = 0.3
    if is_wide or is_last:
        dropout = 0.4
    return Stage(
        channels=channels,
        kernel=kernel,
        repeat=repeat,
        dropout=dropout,
        stride=2 if number == 0 else 1,
        dilation=2 if is_wide else 1,
        dense=dense,
    )


def our_name(name: str) -> str | None:
    """asrkit's name of an encoder's weight in either publication; None for one it does not know."""
    found = NAME.fullmatch(name)
    if found is None:
        return None
    stage = f"encoder.stages.{int(found['stage'])}"
    index = int(found["index"])
    if found["place"] == "res":
        if found["inner"] is None:
            return None
        return f"{stage}.branches.{index}.{PARTS[int(found['inner'])]}.{found['leaf']}"
    repeat, part = divmod(index, 4)  # ReLU and dropout lie behind convolution and norm
    if found["inner"] is not None or part >= len(PARTS):
        return None
    return f"{stage}.repeats.{repeat}.{PARTS[part]}.{found['leaf']}"


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by asrkit's names, in its shapes."""
    renamed = dict[str, Tensor]()
    for name, value in weights.items():
        ours = our_name(name)
        if name.startswith(HEAD):
            ours = f"output.{name.removeprefix(HEAD)}"
        known = ours is not None and ours not in renamed
        expect(known, "weights", "those of a Jasper, each once", short(name))
        if ours == "output.weight":
            value = value.squeeze(2)  # a convolution of one frame, a linear layer here
        renamed[str(ours)] = value
    return renamed


def nemo_encoder(section: Section, bins: int) -> JasperConfig:
    """The config of a ConvASREncoder of NeMo that is a Jasper with dense residuals, or without any.

    Args:
        section: The archive's encoder.
        bins: Mel bins of its features.

    Raises:
        ValueError: A key has a value that is not supported.
    """
    section.take("feat_in", of=(bins,))
    section.take("activation", of=("relu",))
    for key, only in {
        "normalization_mode": "batch",
        "residual_mode": "add",
        "conv_mask": True,
        "frame_splicing": 1,
        "quantize": False,
    }.items():
        section.take(key, only, of=(only,))
    blocks = section.take("jasper")
    name = f"{section.name}.jasper"
    several = isinstance(blocks, list) and all(isinstance(block, dict) for block in blocks)
    expect(several, name, "a list of blocks", short(blocks))
    stages = []
    for number, block in enumerate(blocks):
        stages.append(_nemo_stage(Section(f"{name}[{number}]", block, section.root)))
    dense = [stage.dense for stage in stages]
    last = len(dense) - dense[::-1].index(True) if True in dense else 0
    in_a_row = all(dense[dense.index(True) : last]) if last else True
    wanted = "dense blocks in a row (others are not supported)"
    expect(in_a_row, f"{name}[].residual_dense", wanted, short(dense))
    return JasperConfig(bins=bins, stages=stages)


def _nemo_stage(block: Section) -> Stage:
    """One entry of the list `jasper`."""
    for key, only in {
        "groups": 1,
        "separable": False,
        "heads": -1,
        "residual_mode": "add",
        "se": False,
        "kernel_size_factor": 1.0,
        "stride_last": False,
        "future_context": -1,
    }.items():
        block.take(key, only, of=(only,))
    dense = block.take("residual_dense", False, of=(True, False))
    block.take("residual", of=(dense,))
    stage = Stage(
        channels=block.count("filters"),
        kernel=_single(block, "kernel"),
        repeat=block.count("repeat"),
        dropout=block.number("dropout"),
        stride=_single(block, "stride"),
        dilation=_single(block, "dilation"),
        dense=dense,
    )
    return stage


def _single(block: Section, key: str) -> int:
    """The whole number that is alone in the list under `key`."""
    values = block.take(key)
    alone = isinstance(values, list) and len(values) == 1 and whole(values[0], 1, 1000)
    expect(alone, f"{block.name}.{key}", "a list of one number of frames", short(values))
    return values[0]
