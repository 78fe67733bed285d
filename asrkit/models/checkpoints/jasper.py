"""Published Jaspers: `.pt` files of NVIDIA's training code, and NeMo's archives.

Source of the names: github.com/NVIDIA/DeepLearningExamples, PyTorch/SpeechRecognition/Jasper
(commit 729963d), and nemo_toolkit 3.0.0.
"""

import re
from pathlib import Path

from asrkit.models.checkpoints.folders import expect_only
from asrkit.models.checkpoints.own import Contents, Values, Weights
from asrkit.models.checkpoints.weights import renamed, saved
from asrkit.models.ctc import CTCConfig
from asrkit.models.jasper import JasperConfig, Stage
from asrkit.shapes import expect
from asrkit.text import CharTokenizer

ALPHABET = " abcdefghijklmnopqrstuvwxyz'"
# Settings of the published features that differ from FeatureConfig's defaults, except `bins`.
FEATURES = {"window_s": 0.02, "log_guard": 1e-20}
LAYOUT = "a strided convolution, dense blocks, a dilated convolution and one of a single frame"
NAME = re.compile(
    r"encoder\.(?:layers|encoder)\.(\d{1,5})\."
    r"(?:m?conv\.(\d{1,5})|res\.(\d{1,5})\.([01]))\.(?:conv\.)?(\w+)"
)
PARTS = ("conv", "norm")
# Keys of NeMo's config whose values the shapes of the weights do not reveal, and what is supported.
NEMO_ENCODER = {
    "activation": "relu",
    "residual_mode": "add",
    "conv_mask": True,
    "frame_splicing": 1,
    "quantize": False,
}
NEMO_BLOCK = {
    "residual_mode": "add",
    "kernel_size_factor": 1.0,
    "stride_last": False,
    "future_context": -1,
}


def read(path: Path) -> Contents:
    """Contents of a `.pt` file of the published training code.

    Sizes follow from the shapes of the weights. The shapes do not reveal strides, dilations and
    dropouts: they are those of the published model, and the stages have to be in its order.

    Raises:
        ValueError: Something is damaged, missing or not supported; the message names it.
    """
    training = saved(path, path.name, path)
    expect(isinstance(training, dict), path.name, "the keys of a training", type(training).__name__)
    averaged = training.get("ema_state_dict") is not None
    state = "ema_state_dict" if averaged else "state_dict"
    expect(
        state in training, path.name, "weights under ema_state_dict or state_dict", [*training][:5]
    )
    weights = training[state]
    config = CTCConfig(vocab_size=len(ALPHABET), encoder=_encoder(weights))
    features = FEATURES | {"bins": config.encoder.bins}
    ours = renamed(weights, our_name)
    ours["output.weight"] = ours["output.weight"].flatten(1)  # from a convolution of one frame
    return config, ours, CharTokenizer(ALPHABET), features, {"source": path.name, "weights": state}


def _encoder(weights: Weights) -> JasperConfig:
    """The config that fits the shapes of `weights`."""
    count = 0
    while f"encoder.layers.{count}.conv.0.weight" in weights:
        count += 1
    stages = [_stage(weights, number, count) for number in range(count)]
    first = weights["encoder.layers.0.conv.0.weight"]
    return JasperConfig(bins=first.shape[1], stages=stages)


def _stage(weights: Weights, number: int, count: int) -> Stage:
    """Stage `number` of `count`."""
    name = f"encoder.layers.{number}"
    channels, _, kernel = weights[f"{name}.conv.0.weight"].shape
    repeat = 1
    while f"{name}.conv.{4 * repeat}.weight" in weights:
        repeat += 1
    dense = 0 < number < count - 2
    is_wide = number == count - 2
    is_last = number == count - 1
    fits = count > 2 and (dense or repeat == 1) and (not is_last or kernel == 1)
    expect(
        fits,
        name,
        LAYOUT,
        f"{channels} channels of {kernel} frames {repeat} times in stage {number} of {count}",
        "Other .pt files are not supported.",
    )
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


def our_name(name: str) -> str:
    """asrkit's name of a weight in either publication, or an unknown name itself."""
    match = NAME.fullmatch(name)
    if match is None:
        return name.replace("decoder.layers.0.", "output.")
    stage, index, branch, part, leaf = match.groups()
    parent = f"branches.{branch}"
    if branch is None:
        repeat, part = divmod(int(index), 4)  # a convolution, its norm, ReLU and dropout
        parent = f"repeats.{repeat}"
    return f"encoder.stages.{stage}.{parent}.{PARTS[int(part)]}.{leaf}"


def nemo_encoder(values: Values, bins: int) -> JasperConfig:
    """The config of NeMo's ConvASREncoder, if it is a Jasper with dense residuals or without any.

    Args:
        values: Section `encoder` of the archive's config.
        bins: Mel bins of the features.

    Raises:
        ValueError: A key has a value that is not supported.
    """
    expect_only({"activation": None, **values}, NEMO_ENCODER, "encoder")
    stages = []
    for block in values["jasper"]:
        dense = block.get("residual_dense", False)
        expect_only(
            {"residual": True, **block}, NEMO_BLOCK | {"residual": dense}, "encoder.jasper[]"
        )
        stages.append(
            Stage(
                channels=block["filters"],
                kernel=block["kernel"][0],
                repeat=block["repeat"],
                dropout=block["dropout"],
                stride=block["stride"][0],
                dilation=block["dilation"][0],
                dense=dense,
            )
        )
    return JasperConfig(bins=bins, stages=stages)
