"""Files and models whose labels are known before: what the ladder's recognisers transcribe.

Weights of the encoder are random, those of predictor and joint planted
(asrkit.workbench.lessons.shared.planted). So that tokens depend on all that was computed, the decoder reads
frames + script. The script is what the decoder should read, less the frames that the encoder gave
for that utterance alone, one at a time, in float32. The frames are `LOUD` times as large as what
the labels differ by, and cancel only where a pipeline computed the same: another utterance's,
another length's, or a NaN drowns the labels.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asrkit.features import FeatureConfig
from asrkit.files import shipped
from asrkit.models import FastConformer, TransducerConfig
from asrkit.models.inference import tf32
from asrkit.transcribe.options import PipelineConfig
from asrkit.transcribe.recognizer import Recognizer
from asrkit.workbench.lessons.shared.file_recognizer import RATE_HZ, Task, read_wav, write_wav
from asrkit.workbench.lessons.shared.one_utterance import random_transducer
from asrkit.workbench.lessons.shared.planted import planted

HOP = 160  # samples between feature frames
BEEP = 1280  # samples of a tone: one encoder frame
PLAIN = PipelineConfig(precision="float32", encoder="eager")
LOUD = 6.0  # deviation of the encoder's part of a frame, where labels are signs of 1


def lengths(N: int, *, most_s: float = math.inf) -> list[int]:
    """Samples of N utterances, distributed like LibriSpeech's dev and test sets, in random order:
    each has the median length of one of N equal parts of these sets, or `most_s` if that is less.
    """
    table = shipped("lengths") / "librispeech_eval.csv.gz"
    seconds = np.loadtxt(table, delimiter=",", skiprows=1, usecols=0)
    medians = np.quantile(seconds, (np.arange(N) + 0.5) / N).clip(max=most_s)
    samples = np.random.default_rng(0).permutation(medians) * RATE_HZ
    return samples.astype(int).tolist()


def beeps(S: int, seed: int) -> np.ndarray:
    """Samples (S,) int16: a tone of another pitch and loudness in every encoder frame, in noise."""
    random = np.random.default_rng(seed)
    count = math.ceil(S / BEEP)
    tones = random.uniform((100, 0.05), (4000, 0.3), (count, 2))
    pitch_hz, loudness = tones.repeat(BEEP, axis=0)[:S].T
    phase = 2 * np.pi * np.cumsum(pitch_hz) / RATE_HZ
    sound = loudness * np.sin(phase) + 0.01 * random.standard_normal(S)
    return (32768 * sound).astype(np.int16)


def scripted(
    config: TransducerConfig,
    samples: Sequence[int],
    folder: Path,
    *,
    batch: int,
    device: str = "cpu",
) -> Task:
    """Files of beeps, a model, and the script that makes it say what is known before.

    Args:
        config: of the model, with a FastConformer and an LSTM.
        samples: of each file.
        folder: where the files are written.
        batch: files transcribed at once.
        device: of the model.
    """
    encoder = config.encoder
    predictor: Any = config.predictor
    features = FeatureConfig(bins=encoder.bins)
    files = [write_wav(folder / f"{row}.wav", beeps(S, row)) for row, S in enumerate(samples)]
    ends = [math.ceil((S // HOP) / encoder.subsampling) for S in samples]
    plan = planted(
        len(ends),
        max(ends),
        lengths=ends,
        durations=config.durations,
        V=config.vocab_size + 1,
        width=config.joint_width,
        layers=predictor.layers,
    )
    with torch.device(device):  # where a billion weights are drawn faster
        model = random_transducer(config, plan.model)
    alone = Recognizer(model, PLAIN, features=features)
    with torch.no_grad(), tf32(False):
        inputs = []
        for file, S in zip(files, samples, strict=True):
            sound = torch.tensor(read_wav(file))[None] / 32768
            inputs.append(alone.features(sound, torch.tensor([S])))
        spread_features(model.encoder, *inputs[samples.index(max(samples))])
        frames = [model.encoder(*one)[0][0] for one in inputs]  # one utterance at a time
        projection = model.encoder_projection
        standardize(projection, projection(torch.cat(frames)), LOUD)
        script = plan.encoded.to(device)
        for row, own in enumerate(frames):
            script[row, : len(own)] -= projection(own)
    return Task(
        model=model,
        files=files,
        samples=samples,
        batch=batch,
        features=features,
        script=script,
        labels=plan.labels,
        device=device,
    )


def spread_features(encoder: nn.Module, features: Tensor, lengths: Tensor) -> None:
    """Make the frames of a random FastConformer differ, in place.

    Fresh random weights give nearly the same frame whatever the input: products of what a relu lets
    pass have large means. Here what leaves the subsampling gets mean 0 and deviation 1 over these
    features (1, T, F), and the blocks' branches are weakened.
    """
    assert isinstance(encoder, FastConformer)
    subsampled, _ = encoder.subsampling(features, lengths)
    scale = encoder.width**-0.5 if encoder.config.scale_input else 1.0
    standardize(encoder.subsampling.out, subsampled[0], scale)
    for block in encoder.blocks:
        parts: Any = block
        feeds = [feed[-1] for feed in parts.feed]
        for layer in (*feeds, parts.attention.out, parts.pointwise):
            for weight in layer.parameters():
                weight.mul_(0.3)


def standardize(layer: nn.Linear, outputs: Tensor, deviation: float = 1.0) -> None:
    """Make the layer's outputs (N, D), as they are now, have mean 0 and this deviation."""
    scale = deviation / outputs.std(0)
    layer.weight.mul_(scale[:, None])
    layer.bias.sub_(outputs.mean(0))
    layer.bias.mul_(scale)
