"""Files and models whose labels are known before: what the ladder's recognisers transcribe.

Weights of the encoder are random, those of predictor and joint planted
(asrkit.workbench.bench.planted). So that tokens depend on all that was computed, the decoder reads
frames + script. The script is what the decoder should read, less the frames that the encoder gave
for that utterance alone, one at a time, in float32. The frames are `LOUD` times as large as what
the labels differ by, and cancel only where a pipeline computed the same: another utterance's,
another length's, or a NaN drowns the labels. A CTC head reads likewise.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from asrkit.features import FeatureConfig, log_mel
from asrkit.files import shipped
from asrkit.models import (
    CTCConfig,
    CTCModel,
    FastConformer,
    FastConformerConfig,
    LSTMConfig,
    TransducerConfig,
    TransducerModel,
)
from asrkit.models.execution import tf32
from asrkit.shapes import expect, whole
from asrkit.workbench.bench.ladder_pipeline import Task, read_wav, write_wav
from asrkit.workbench.bench.planted import LOGIT, Planted, planted
from asrkit.workbench.bench.suites.encoders import random_transducer

Config = TransducerConfig | CTCConfig
RATE_HZ = 16_000
HOP = 160  # samples between feature frames
BEEP = 1280  # samples of a tone: one encoder frame
LOUD = 6.0  # deviation of the encoder's part of a frame, where labels are signs of 1
HEARD = 0.7  # a CTC label's part of a frame: its norm over the deviation of the encoder's part


class Scripted(NamedTuple):
    """A task whose tokens are known."""

    task: Task
    labels: list[list[int]]  # of each file
    joints: int  # that the paths to these labels take; 0 for CTC
    decoder_flops: int  # least operations after the encoder


class ScriptLines(NamedTuple):
    """What a model's decoder is to read and to say."""

    frames: Sequence[Tensor]  # (T, D) of each utterance: what it reads without the script
    wanted: Tensor  # (N, T, D): what it should read
    labels: list[list[int]]  # of each file
    joints: int  # that the paths to these labels take
    decoder_flops: int  # least operations after the encoder


class ScriptKind(NamedTuple):
    """How a kind of model is made to say what is known before; a line of SCRIPT_KINDS each."""

    sizes: Callable[[Any], dict[str, Any]]  # of a config: keywords of `planted`
    model: Callable[[Any, Planted], Any]  # of random weights, for a plan
    lines: Callable[[Any, Planted, Sequence[Tensor]], ScriptLines]  # of a model


def lengths(N: int, *, seed: int = 0) -> list[int]:
    """Samples of N utterances, distributed like LibriSpeech's dev and test sets, in random order.

    Args:
        N: utterances; each has the median length of one of N equal parts of these sets.
        seed: of the order.
    """
    expect(whole(N, 1), "utterances", "at least 1", N)
    file = shipped("lengths") / "librispeech_eval.csv.gz"
    rows = np.loadtxt(file, delimiter=",", skiprows=1)
    seconds = np.sort(rows[:, 0])
    middles = (np.arange(N) + 0.5) / N * len(seconds)
    medians = seconds[middles.astype(int)]
    random = np.random.default_rng(seed)
    samples = random.permutation(medians) * RATE_HZ
    return samples.astype(int).tolist()


def beeps(S: int, seed: int) -> np.ndarray:
    """Samples (S,) int16: a tone of another pitch and loudness in every encoder frame, in noise."""
    random = np.random.default_rng(seed)
    count = math.ceil(S / BEEP)
    pitch_hz = random.uniform(100, 4000, count).repeat(BEEP)[:S]
    loudness = random.uniform(0.05, 0.3, count).repeat(BEEP)[:S]
    phase = 2 * np.pi * np.cumsum(pitch_hz) / RATE_HZ
    noise = 0.01 * random.standard_normal(S)
    sound = loudness * np.sin(phase) + noise
    return (32768 * sound).astype(np.int16)


def scripted(
    config: Config, samples: Sequence[int], folder: Path, *, batch: int, device: str = "cpu"
) -> Scripted:
    """Files of beeps, a model, and the script that makes it say what is known before.

    Args:
        config: of the model, with a FastConformer.
        samples: of each file.
        folder: where the files are written.
        batch: files transcribed at once.
        device: of the model.
    """
    assert isinstance(config.encoder, FastConformerConfig)
    kind = SCRIPT_KINDS[type(config)]
    features = FeatureConfig(bins=config.encoder.bins)
    files = []
    for number, S in enumerate(samples):
        sound = beeps(S, number)
        files.append(write_wav(folder / f"{number}.wav", sound))
    ends = [math.ceil((S // HOP) / config.encoder.subsampling) for S in samples]
    plan = planted(len(ends), max(ends), lengths=ends, **kind.sizes(config))
    with torch.inference_mode(False), torch.no_grad(), tf32(False):
        with torch.device(device), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # on the device, where a billion weights are drawn faster
            model = kind.model(config, plan)
        inputs = [_features(file, features, device) for file in files]
        longest = samples.index(max(samples))
        enliven(model.encoder, *inputs[longest])
        frames = []
        for one in inputs:  # one utterance at a time
            encoded, _ = model.encoder(*one)
            frames.append(encoded[0])  # (T, D)
        lines = kind.lines(model, plan, frames)
        script = torch.zeros_like(lines.wanted)
        for row, own in enumerate(lines.frames):
            T = len(own)
            script[row, :T] = lines.wanted[row, :T] - own
    task = Task(
        model=model,
        files=files,
        samples=samples,
        batch=batch,
        features=features,
        script=script,
        device=device,
        labels=lines.labels,
    )
    return Scripted(task, lines.labels, lines.joints, lines.decoder_flops)


def _flops(layer: nn.Linear) -> int:
    """Operations of a linear layer on one frame."""
    return 2 * layer.in_features * layer.out_features


def _predictor_flops(model: TransducerModel) -> int:
    """Operations of one step of an LSTM predictor and its projection."""
    D = model.output.in_features
    assert isinstance(model.config.predictor, LSTMConfig)
    return model.config.predictor.layers * 16 * D * D + 2 * D * D


def _features(file: Path, config: FeatureConfig, device: str) -> tuple[Tensor, Tensor]:
    """Log-mel features (1, T, F) of a file and their length (1,)."""
    sound = read_wav(file).copy()
    samples = torch.from_numpy(sound).to(device)
    length = torch.tensor([len(sound)], device=device)
    return log_mel(samples[None] / 32768, length, config=config)


def enliven(encoder: nn.Module, features: Tensor, lengths: Tensor) -> None:
    """Make the frames of a random encoder differ, in place.

    Fresh random weights give nearly the same frame whatever the input: products of what a relu lets
    pass have large means. Here what leaves the subsampling gets mean 0 and deviation 1, and the
    blocks' branches are weakened.

    Args:
        encoder: a FastConformer.
        features: (1, T, F), which the means are taken over.
        lengths: (1,) in feature frames.
    """
    assert isinstance(encoder, FastConformer)
    out = encoder.subsampling.out
    subsampled, _ = encoder.subsampling(features, lengths)
    x = subsampled[0]
    scale = 1 / x.std(0)
    if encoder.config.scale_input:
        scale = scale / math.sqrt(encoder.width)
    _standardize(out, x, scale)
    for block in encoder.blocks:
        parts: Any = block
        first_feed, second_feed = parts.feed
        last_layers = (first_feed[-1], parts.attention.out, parts.pointwise, second_feed[-1])
        for layer in last_layers:
            for weight in layer.parameters():
                weight.mul_(0.3)


def _standardize(layer: nn.Linear, outputs: Tensor, scale: Tensor) -> None:
    """Make the layer's outputs (T, D), as they are now, have mean 0, times `scale` (D,)."""
    layer.weight.mul_(scale[:, None])
    layer.bias.sub_(outputs.mean(0))
    layer.bias.mul_(scale)


def equalized(projection: nn.Linear, frames: Sequence[Tensor]) -> list[Tensor]:
    """`frames` projected; `projection` is changed so that each unit has mean 0 and deviation LOUD.

    Args:
        projection: from the encoder's width to the joint's.
        frames: (T, D) of each utterance.
    """
    joined = torch.cat(list(frames))
    projected = projection(joined)
    scale = LOUD / projected.std(0)
    _standardize(projection, projected, scale)
    return [projection(one) for one in frames]


def spell(head: nn.Linear, plan: Planted, deviation: float) -> tuple[Tensor, list[list[int]]]:
    """Frames (N, T, D) from which a CTC head reads the plan's labels, and these labels.

    The head's weights become codes of the tokens. Of two labels on one frame the second is moved to
    the next frame.

    Args:
        head: the CTC head, changed in place.
        plan: labels and the frames that they are on.
        deviation: of the encoder's frames, which the codes hide in.
    """
    V, D = head.weight.shape
    B, T, _ = plan.encoded.shape
    draw = torch.Generator().manual_seed(0)
    codes = torch.randn(V, D, generator=draw).sign()
    codes[-1] = 0  # blank has a bias instead
    size = HEARD * deviation / math.sqrt(D)
    sized_codes = size * codes
    wanted = torch.zeros(B, T, D)
    labels: list[list[int]] = []
    for row, end in enumerate(plan.lengths.tolist()):
        places = _places(plan.labels[row], plan.frames[row], end)
        for place, label in places.items():
            wanted[row, place] = sized_codes[label]
        labels.append(list(places.values()))
    head.weight.copy_(codes * LOGIT / (size * D))
    head.bias.zero_()
    head.bias[-1] = LOGIT / 2
    return wanted.to(head.weight.device), labels


def _places(labels: Sequence[int], frames: Sequence[int], end: int) -> dict[int, int]:
    """The label on each frame, at most one."""
    places: dict[int, int] = {}
    place = -1
    for label, frame in zip(labels, frames, strict=True):
        place = max(frame, place + 1)
        place = min(place, end - 1)
        places[place] = label
    return places


def _transducer_sizes(config: TransducerConfig) -> dict[str, Any]:
    assert isinstance(config.predictor, LSTMConfig)
    return {
        "V": config.vocab_size + 1,
        "durations": config.durations,
        "width": config.joint_width,
        "layers": config.predictor.layers,
    }


def _transducer_model(config: TransducerConfig, plan: Planted) -> TransducerModel:
    return random_transducer(config, plan.model)


def _transducer_lines(
    model: TransducerModel, plan: Planted, frames: Sequence[Tensor]
) -> ScriptLines:
    joints = plan.joints()
    labels = sum(len(row) for row in plan.labels)
    joint_flops = joints * _flops(model.output)
    predictor_flops = labels * _predictor_flops(model)
    device = model.output.weight.device
    return ScriptLines(
        frames=equalized(model.encoder_projection, frames),
        wanted=plan.encoded.to(device),
        labels=plan.labels,
        joints=joints,
        decoder_flops=joint_flops + predictor_flops,
    )


def _ctc_sizes(config: CTCConfig) -> dict[str, Any]:
    return {"V": config.vocab_size + 1}


def _ctc_model(config: CTCConfig, plan: Planted) -> CTCModel:
    return CTCModel(config).eval()


def _ctc_lines(model: CTCModel, plan: Planted, frames: Sequence[Tensor]) -> ScriptLines:
    deviation = torch.cat(list(frames)).std()
    wanted, labels = spell(model.output, plan, deviation.item())
    ends = int(plan.lengths.sum())
    return ScriptLines(
        frames=frames,
        wanted=wanted,
        labels=labels,
        joints=0,
        decoder_flops=ends * _flops(model.output),
    )


SCRIPT_KINDS = {
    TransducerConfig: ScriptKind(_transducer_sizes, _transducer_model, _transducer_lines),
    CTCConfig: ScriptKind(_ctc_sizes, _ctc_model, _ctc_lines),
}
