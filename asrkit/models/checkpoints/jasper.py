"""Jasper as others publish it: `.pt` files of NVIDIA's training code, and NeMo's archives.

Source of the names: github.com/NVIDIA/DeepLearningExamples, PyTorch/SpeechRecognition/Jasper
(commit 729963d), and nemo_toolkit 3.0.0.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from asrkit.models.checkpoints import archive
from asrkit.models.checkpoints.own import Contents
from asrkit.models.checkpoints.renaming import renamed
from asrkit.models.checkpoints.settings import expect_only, followed
from asrkit.models.jasper import JasperConfig, Stage
from asrkit.models.transducer import CTCConfig
from asrkit.shapes import expect
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
LAYOUT = "a strided convolution, dense blocks, a dilated convolution and one of a single frame"
HEAD = "decoder.layers.0."
NAME = re.compile(
    r"encoder\.(?:layers|encoder)\.(?P<stage>\d{1,5})\.(?P<place>m?conv|res)\.(?P<index>\d{1,5})\."
    r"(?:(?P<inner>[01])\.)?(?:conv\.)?(?P<leaf>\w+)"
)
PARTS = ("conv", "norm")
# Keys of NeMo's config whose other values no shape of a weight shows.
NEMO_ENCODER: dict[str, Any] = {
    "activation": "relu",
    "residual_mode": "add",
    "conv_mask": True,
    "frame_splicing": 1,
    "quantize": False,
}
NEMO_BLOCK: dict[str, Any] = {
    "residual_mode": "add",
    "kernel_size_factor": 1.0,
    "stride_last": False,
    "future_context": -1,
}


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
    expect(len(found) > 0, path.name, wanted, f"{[*saved]!r:.120}", remedy)
    weights = archive.tensors(saved[found[0]], f"{path.name}: {found[0]}")
    config = CTCConfig(vocab_size=len(ALPHABET), encoder=_encoder(weights))
    notes = {"source": path.name, "weights": found[0]}
    features = FEATURES | {"bins": config.encoder.bins}
    ours = renamed(weights, _pt_name)
    ours["output.weight"] = ours["output.weight"].flatten(1)  # a convolution of one frame
    return config, ours, CharTokenizer(ALPHABET), features, notes


def _pt_name(name: str) -> str:
    """asrkit's name of a weight of the published code; one that it does not know keeps its own."""
    if name.startswith(HEAD):
        return f"output.{name.removeprefix(HEAD)}"
    return our_name(name) or name


def _encoder(weights: dict[str, Tensor]) -> JasperConfig:
    """The config whose shapes those of `weights` are."""
    count = 0
    while f"encoder.layers.{count}.conv.0.weight" in weights:
        count += 1
    stages = [_stage(weights, number, count) for number in range(count)]
    first = weights["encoder.layers.0.conv.0.weight"]
    return JasperConfig(bins=first.shape[1], stages=stages)


def _stage(weights: dict[str, Tensor], number: int, count: int) -> Stage:
    """Stage `number` of `count`."""
    name = f"encoder.layers.{number}"
    shape = weights[f"{name}.conv.0.weight"].shape
    repeat = 1
    while f"{name}.conv.{4 * repeat}.weight" in weights:
        repeat += 1
    dense = 0 < number < count - 2
    is_last = number == count - 1
    is_wide = number == count - 2
    fits = count > 2 and (dense or repeat == 1) and (not is_last or shape[-1] == 1)
    got = f"{tuple(shape)} {repeat} times in stage {number} of {count}"
    expect(fits, name, LAYOUT, got, "Other .pt files are not supported.")
    dropout = 0.2
    if dense and shape[-1] >= 21:
        dropout = 0.3
    if is_wide or is_last:
        dropout = 0.4
    return Stage(
        channels=shape[0],
        kernel=shape[-1],
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


def nemo_encoder(values: dict[str, Any], config: dict[str, Any], bins: int) -> JasperConfig:
    """The config of a ConvASREncoder of NeMo that is a Jasper with dense residuals, or without any.

    Args:
        values: The archive's encoder.
        config: All of its config, which values may refer to.
        bins: Mel bins of its features.

    Raises:
        ValueError: A key has a value that is not supported.
    """
    expect_only({"activation": None, **values}, NEMO_ENCODER, "encoder")
    stages = []
    for block in values["jasper"]:
        stages.append(_nemo_stage(followed(block, config)))
    dense = "".join(str(int(stage.dense)) for stage in stages)
    in_a_row = "0" not in dense.strip("0")
    wanted = "dense blocks in a row (others are not supported)"
    expect(in_a_row, "encoder.jasper[].residual_dense", wanted, dense)
    return JasperConfig(bins=bins, stages=stages)


def _nemo_stage(block: dict[str, Any]) -> Stage:
    """One entry of the list `jasper`."""
    dense = block.get("residual_dense", False)
    expect_only({"residual": True, **block}, NEMO_BLOCK | {"residual": dense}, "encoder.jasper[]")
    return Stage(
        channels=block["filters"],
        kernel=block["kernel"][0],
        repeat=block["repeat"],
        dropout=block["dropout"],
        stride=block["stride"][0],
        dilation=block["dilation"][0],
        dense=dense,
    )
