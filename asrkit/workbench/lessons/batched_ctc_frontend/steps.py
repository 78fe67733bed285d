"""The steps of a CTC recogniser, each alone: with loops over utterances, and batched."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders import ctc_greedy, ctc_greedy_sequential
from asrkit.features import FeatureConfig, log_mel, normalize, normalize_sequential
from asrkit.models import CTCConfig, CTCModel, FastConformerConfig
from asrkit.models.transducer import log_probs
from asrkit.workbench.bench.suites.claims import log_probs_of, set_blank_share
from asrkit.workbench.measure import Timing

RATE_HZ = 16_000
STEPS = ("STFT and mel", "normalisation", "encoder", "CTC head", "decoding")
SEQUENTIAL = "sequential"
BATCHED = "batched"
LOOPED_STEPS: dict[str, dict[str, Callable[..., Any]]] = {  # step -> its variants
    "normalisation": {SEQUENTIAL: normalize_sequential, BATCHED: normalize},
    "decoding": {SEQUENTIAL: ctc_greedy_sequential, BATCHED: ctc_greedy},
}
Arms = dict[str, Callable[[], Any]]


def noise_batch(
    B: int, seconds: float, *, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Waveforms of noise (B, S) and their lengths in samples (B,), from half to full length.

    Args:
        B: Utterances.
        seconds: Of the longest.
        device: Of both tensors.
        seed: Of noise and lengths.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = int(RATE_HZ * seconds)
    waveforms = 0.1 * torch.randn(B, samples, generator=generator)
    lengths = torch.randint(samples // 2, samples + 1, (B,), generator=generator)
    return waveforms.to(device), lengths.to(device)


@torch.no_grad()
def recogniser_for(
    speech: tuple[Tensor, Tensor],
    encoder: FastConformerConfig,
    *,
    V: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> CTCModel:
    """A CTC model of random weights that finds as much blank in `speech` as models do in speech.

    Args:
        speech: Waveforms and lengths, on the model's device.
        encoder: Size of the encoder.
        V: Tokens, blank included.
        dtype: Of the weights.
        seed: Of the weights.
    """
    torch.manual_seed(seed)
    with torch.device(speech[0].device):
        model = CTCModel(CTCConfig(vocab_size=V - 1, encoder=encoder)).eval().to(dtype)
    scores, _ = log_probs_of(model, *speech)
    set_blank_share(model, scores)
    return model


@torch.no_grad()
def step_arms(model: CTCModel, speech: tuple[Tensor, Tensor]) -> Arms:
    """A function for each step; looped steps have two: "decoding, sequential" and ", batched".

    Args:
        model: On the device of the speech.
        speech: Waveforms (B, S) and lengths (B,) in samples.
    """
    mel = partial(log_mel, config=FeatureConfig(normalization="none"))
    energies, frames = mel(*speech)
    features = normalize(energies, frames).to(model.output.weight.dtype)
    encoded, ends = model.encoder(features, frames)
    arms: Arms = {
        "STFT and mel": partial(mel, *speech),
        "encoder": partial(model.encoder, features, frames),
        "CTC head": partial(_head, model, encoded),
    }
    inputs = {"normalisation": (energies, frames), "decoding": (_head(model, encoded), ends)}
    for step, variants in LOOPED_STEPS.items():
        for variant, function in variants.items():
            arms[f"{step}, {variant}"] = partial(function, *inputs[step])
    return arms


def _head(model: CTCModel, encoded: Tensor) -> Tensor:
    return log_probs(model.output(encoded))


def step_ms(times: Mapping[str, Timing], variant: str) -> dict[str, float]:
    """Median milliseconds of each step, in their order, for one variant of the looped ones.

    Args:
        times: Timings of `step_arms`.
        variant: "sequential" or "batched".
    """
    found = {}
    for step in STEPS:
        name = step
        if step in LOOPED_STEPS:
            name = f"{step}, {variant}"
        found[step] = times[name].median_ms
    return found


def share_needed(gain: float, faster: float) -> float:
    """Amdahl's law in reverse: the share of the time that a step had before it became faster.

    Args:
        gain: How many times as fast the whole became.
        faster: How many times as fast the step became; infinity if nothing is left of it.
    """
    return (1 - 1 / gain) / (1 - 1 / faster)


def random_scores(
    B: int, T: int, V: int, *, blank_share: float, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, T, V) with NaN in the padding, and lengths (B,) in frames.

    Args:
        B: Utterances.
        T: Frames of the longest; the shortest has half of them.
        V: Tokens, blank last.
        blank_share: Share of the frames whose best token is blank.
        seed: Of scores and lengths.
    """
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(B, T, V, generator=generator)
    margins = (scores[..., :-1].amax(-1) - scores[..., -1]).flatten()
    place = int(blank_share * margins.numel())
    scores[..., -1] += margins.kthvalue(place).values
    lengths = torch.randint(T // 2, T + 1, (B,), generator=generator)
    return with_nan_padding(scores.log_softmax(-1), lengths), lengths


def with_nan_padding(values: Tensor, lengths: Tensor) -> Tensor:
    """`values` (B, T, F) with NaN in every frame from an utterance's length on.

    Args:
        values: (B, T, F).
        lengths: (B,), in frames.
    """
    padding = torch.arange(values.shape[1]) >= lengths[:, None]
    return values.masked_fill(padding[..., None], torch.nan)
