"""Files and models with known labels, which the ladder's recognisers transcribe.

The encoder has random weights; predictor and joint, or the output layer of a CTC model, are planted
(planted.py). So that tokens depend on the whole computation, the decoder reads frames + script. The
script is the planted frames minus the frames that the encoder returns for that utterance alone in
float32. The encoder's frames are `ENCODER_SCALE` times as large as the planted codes, and cancel
only if a pipeline computes the same frames. Frames of another utterance, a wrong length or a NaN
hide the labels.
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
from asrkit.models import CTCConfig, CTCModel, FastConformer, TransducerConfig, TransducerModel
from asrkit.models.inference import tf32
from asrkit.transcribe.options import PipelineConfig
from asrkit.transcribe.recognizer import Recognizer
from asrkit.workbench.lessons.shared.file_recognizer import RATE_HZ, Task, read_wav, write_wav
from asrkit.workbench.lessons.shared.one_utterance import random_transducer
from asrkit.workbench.lessons.shared.planted import (
    LABEL_LOGIT,
    Planted,
    ctc_log_probs,
    planted,
    seeded,
)

HOP = 160  # samples between feature frames
BEEP = 1280  # samples of a beep: one encoder frame
PLAIN = PipelineConfig(precision="float32", encoder="eager")
ENCODER_SCALE = 6.0  # standard deviation of the encoder's frames; codes are signs of 1


def lengths(N: int, *, most_s: float = math.inf) -> list[int]:
    """Samples of N utterances, distributed like LibriSpeech's dev and test sets, in random order.

    Each is the median length of one of N equal parts of these sets, or `most_s` if that is less.
    """
    table = shipped("lengths") / "librispeech_eval.csv.gz"
    seconds = np.loadtxt(table, delimiter=",", skiprows=1, usecols=0)
    medians = np.quantile(seconds, (np.arange(N) + 0.5) / N).clip(max=most_s)
    samples = np.random.default_rng(0).permutation(medians) * RATE_HZ
    return samples.astype(int).tolist()


def beeps(S: int, seed: int) -> np.ndarray:
    """Samples (S,) int16: noise, and in each encoder frame a beep of random pitch and loudness."""
    random = np.random.default_rng(seed)
    count = math.ceil(S / BEEP)
    tones = random.uniform((100, 0.05), (4000, 0.3), (count, 2))
    pitch_hz, loudness = tones.repeat(BEEP, axis=0)[:S].T
    phase = 2 * np.pi * np.cumsum(pitch_hz) / RATE_HZ
    sound = loudness * np.sin(phase) + 0.01 * random.standard_normal(S)
    return (32768 * sound).astype(np.int16)


def scripted(
    config: TransducerConfig | CTCConfig,
    samples: Sequence[int],
    folder: Path,
    *,
    batch: int,
    device: str = "cpu",
) -> Task:
    """Files of beeps, a model, and the script that makes it emit planted labels.

    Args:
        config: config of the model, with a FastConformer, and of a transducer with an LSTM.
        samples: length of each file.
        folder: folder to write the files into.
        batch: files transcribed at once.
        device: device of the model.
    """
    features = FeatureConfig(bins=config.encoder.bins)
    files = [write_wav(folder / f"{row}.wav", beeps(S, row)) for row, S in enumerate(samples)]
    ends = [math.ceil((S // HOP) / config.encoder.subsampling) for S in samples]
    sizes: dict[str, Any] = {"V": config.vocab_size + 1}
    if isinstance(config, TransducerConfig):
        sizes |= {"durations": config.durations, "width": config.joint_width}
        sizes["layers"] = config.predictor.layers  # type: ignore[union-attr]
    plan = planted(len(ends), max(ends), lengths=ends, **sizes)
    with torch.device(device):  # drawing a billion weights is faster on a GPU
        model: Any
        if isinstance(config, CTCConfig):
            model, script = planted_ctc(config, plan)
        else:
            model, script = random_transducer(config, plan.model), plan.encoded
    alone = Recognizer(model, PLAIN, features=features)
    with torch.no_grad(), tf32(False):
        inputs = []
        for file, S in zip(files, samples, strict=True):
            sound = torch.tensor(read_wav(file))[None] / 32768
            inputs.append(alone.features(sound, torch.tensor([S])))
        spread_features(model.encoder, *inputs[samples.index(max(samples))])
        frames = [model.encoder(*utterance)[0][0] for utterance in inputs]
        if isinstance(model, TransducerModel):
            projection = model.encoder_projection
            standardize(projection, projection(torch.cat(frames)), ENCODER_SCALE)
            frames = [projection(encoded) for encoded in frames]
        script = script.to(device)
        for row, encoded in enumerate(frames):
            script[row, : len(encoded)] -= encoded
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


def planted_ctc(config: CTCConfig, plan: Planted) -> tuple[CTCModel, Tensor]:
    """A CTC model with random weights, and frames (B, T, D) that make it emit the labels of a plan.

    The rows of its output layer are codes, and a frame has the code of its label or of the blank.
    """
    model: CTCModel = seeded(CTCModel, config)
    V, D = model.output.weight.shape
    codes = torch.randn(V, D, generator=torch.Generator().manual_seed(0), device="cpu").sign()
    model.output.weight.copy_(LABEL_LOGIT * ENCODER_SCALE / D * codes)
    model.output.bias.zero_()
    return model, codes[ctc_log_probs(plan).argmax(-1)] / ENCODER_SCALE


def spread_features(encoder: nn.Module, features: Tensor, lengths: Tensor) -> None:
    """Change the weights of a random FastConformer so that its frames depend on the features.

    Random weights return nearly the same frame for any input, because products of relu outputs have
    large means. Here the outputs of the subsampling get mean 0 and standard deviation 1 over these
    features (1, T, F), and the branches of the blocks are scaled down.
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
    """Change the layer so that these outputs (N, D) get mean 0 and this standard deviation."""
    scale = deviation / outputs.std(0)
    layer.weight.mul_(scale[:, None])
    layer.bias.sub_(outputs.mean(0))
    layer.bias.mul_(scale)
