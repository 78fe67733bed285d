"""Files and models whose labels are known before: what the ladder's recognisers transcribe.

Weights of the encoder are random, those of predictor and joint planted
(asrkit.workbench.bench.planted). So that tokens depend on all that was computed, the decoder reads
frames + script. The script is what the decoder should read, less the frames that the encoder gave
for that utterance alone, one at a time, in float32. The frames are `LOUD` times as large as what
the labels differ by, and cancel only where a pipeline computed the same: another utterance's,
another length's, or a NaN drowns the labels. A CTC head reads likewise.
"""

import math
from collections.abc import Sequence
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
from asrkit.workbench.bench.suites.encoder import random_transducer

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


def lengths(N: int, *, seed: int = 0) -> list[int]:
    """Samples of N utterances, distributed like LibriSpeech's dev and test sets, in random order.

    Args:
        N: utterances; each has the median length of one of N equal parts of these sets.
        seed: of the order.
    """
    expect(whole(N, 1), "utterances", "at least 1", N)
    file = shipped("lengths") / "librispeech_eval.csv.gz"
    seconds = np.sort(np.loadtxt(file, delimiter=",", skiprows=1)[:, 0])
    middles = (np.arange(N) + 0.5) / N * len(seconds)
    drawn = np.random.default_rng(seed).permutation(seconds[middles.astype(int)])
    return (drawn * RATE_HZ).astype(int).tolist()


def beeps(S: int, seed: int) -> np.ndarray:
    """Samples (S,) int16: a tone of another pitch and loudness in every encoder frame, in noise."""
    random = np.random.default_rng(seed)
    count = -(-S // BEEP)
    pitch_hz = random.uniform(100, 4000, count).repeat(BEEP)[:S]
    loudness = random.uniform(0.05, 0.3, count).repeat(BEEP)[:S]
    tones = loudness * np.sin(2 * np.pi * np.cumsum(pitch_hz) / RATE_HZ)
    noise = 0.01 * random.standard_normal(S)
    return (32768 * (tones + noise)).astype(np.int16)


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
    features = FeatureConfig(bins=config.encoder.bins)
    files = [write_wav(folder / f"{n}.wav", beeps(S, n)) for n, S in enumerate(samples)]
    ends = [-(-(S // HOP) // config.encoder.subsampling) for S in samples]
    plan = _plan(config, ends)
    with torch.inference_mode(False), torch.no_grad(), tf32(False):
        model = _model(config, plan, device)
        inputs = [_features(file, features, device) for file in files]
        enliven(model.encoder, *inputs[samples.index(max(samples))])
        frames = [model.encoder(*one)[0][0] for one in inputs]  # (T, D), one utterance at a time
        if isinstance(model, TransducerModel):
            frames = equalized(model.encoder_projection, frames)
            wanted = plan.encoded.to(device)
            labels = plan.labels
            joints = plan.joints()
            flops = joints * _flops(model.output) + sum(map(len, labels)) * _predictor_flops(model)
        else:
            wanted, labels = spell(model.output, plan, torch.cat(frames).std().item())
            joints = 0
            flops = sum(ends) * _flops(model.output)
        script = torch.zeros_like(wanted)
        for row, own in enumerate(frames):
            script[row, : len(own)] = wanted[row, : len(own)] - own
    task = Task(
        model=model,
        files=files,
        samples=samples,
        batch=batch,
        features=features,
        script=script,
        device=device,
        labels=labels,
    )
    return Scripted(task, labels, joints, flops)


def _flops(layer: nn.Linear) -> int:
    """Operations of a linear layer on one frame."""
    return 2 * layer.in_features * layer.out_features


def _predictor_flops(model: TransducerModel) -> int:
    """Operations of one step of an LSTM predictor and its projection."""
    D = model.output.in_features
    assert isinstance(model.config.predictor, LSTMConfig)
    return model.config.predictor.layers * 16 * D * D + 2 * D * D


def _plan(config: Config, ends: Sequence[int]) -> Planted:
    """What is to be said, in so many encoder frames of each file."""
    sizes: dict[str, Any] = {"V": config.vocab_size + 1, "lengths": ends}
    if isinstance(config, TransducerConfig):
        assert isinstance(config.predictor, LSTMConfig)
        sizes["durations"] = config.durations
        sizes["width"] = config.joint_width
        sizes["layers"] = config.predictor.layers
    return planted(len(ends), max(ends), **sizes)


def _model(config: Config, plan: Planted, device: str) -> TransducerModel | CTCModel:
    """Random weights, drawn on the device, where a billion is drawn faster; a planted decoder."""
    with torch.device(device), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if isinstance(config, CTCConfig):
            return CTCModel(config).eval()
        return random_transducer(config, plan.model)


def _features(file: Path, config: FeatureConfig, device: str) -> tuple[Tensor, Tensor]:
    """Log-mel features (1, T, F) of a file and their length (1,)."""
    samples = torch.from_numpy(read_wav(file).copy())[None].to(device)
    length = torch.tensor([samples.shape[1]], device=device)
    return log_mel(samples / 32768, length, config=config)


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
    x = encoder.subsampling(features, lengths)[0][0]
    scale = 1 / x.std(0)
    if encoder.config.scale_input:
        scale = scale / math.sqrt(encoder.width)
    out.weight.mul_(scale[:, None])
    out.bias.sub_(x.mean(0)).mul_(scale)
    for block in encoder.blocks:
        parts: Any = block
        for last in (parts.feed[0][-1], parts.attention.out, parts.pointwise, parts.feed[1][-1]):
            for weight in last.parameters():
                weight.mul_(0.3)


def equalized(projection: nn.Linear, frames: Sequence[Tensor]) -> list[Tensor]:
    """`frames` projected; `projection` is changed so that each unit has mean 0 and deviation LOUD.

    Args:
        projection: from the encoder's width to the joint's.
        frames: (T, D) of each utterance.
    """
    projected = projection(torch.cat([*frames]))
    scale = LOUD / projected.std(0)
    projection.weight.mul_(scale[:, None])
    projection.bias.sub_(projected.mean(0)).mul_(scale)
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
    codes = torch.randn(V, D, generator=torch.Generator().manual_seed(0)).sign()
    codes[-1] = 0  # blank has a bias instead
    size = HEARD * deviation / math.sqrt(D)
    wanted = torch.zeros(*plan.encoded.shape[:2], D)
    labels: list[list[int]] = []
    for row, end in enumerate(plan.lengths.tolist()):
        places = _places(plan.labels[row], plan.frames[row], end)
        for place, label in places.items():
            wanted[row, place] = size * codes[label]
        labels.append([*places.values()])
    head.weight.copy_(codes * LOGIT / (size * D))
    head.bias.zero_()[-1] = LOGIT / 2
    return wanted.to(head.weight.device), labels


def _places(labels: Sequence[int], frames: Sequence[int], end: int) -> dict[int, int]:
    """The label on each frame, at most one."""
    places: dict[int, int] = {}
    place = -1
    for label, frame in zip(labels, frames, strict=True):
        place = min(max(frame, place + 1), end - 1)
        places[place] = label
    return places
