"""Notebook 05: the steps of a CTC recogniser, in loops over utterances and batched."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from asrkit.decoders import ctc_greedy, ctc_greedy_sequential
from asrkit.features import FeatureConfig, log_mel, normalize, normalize_sequential
from asrkit.models import CTCConfig, CTCModel, FastConformerConfig
from asrkit.models.ctc import log_probs
from asrkit.workbench.lessons.shared.frontends import log_probs_of, set_blank_share
from asrkit.workbench.measure import Launches, Timing
from asrkit.workbench.plots.palette import BLUE, COLOURS, RED

RATE_HZ = 16_000
STEPS = ("STFT and mel", "normalisation", "encoder", "CTC head", "decoding")
LOOPED_STEPS: dict[str, dict[str, Callable[..., Any]]] = {  # step -> its variants
    "normalisation": {"sequential": normalize_sequential, "batched": normalize},
    "decoding": {"sequential": ctc_greedy_sequential, "batched": ctc_greedy},
}


def noise_batch(
    B: int, seconds: float, *, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Waveforms of noise (B, S) and their lengths in samples (B,), from half to full length."""
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
    """A CTC model with random weights whose share of blank in `speech` is that of trained models.

    Args:
        speech: Waveforms and lengths, on the model's device.
        encoder: Size of the encoder.
        V: Number of tokens, blank included.
        dtype: dtype of the weights.
        seed: Seed of the weights.
    """
    torch.manual_seed(seed)
    with torch.device(speech[0].device):
        model = CTCModel(CTCConfig(vocab_size=V - 1, encoder=encoder)).eval().to(dtype)
    scores, _ = log_probs_of(model, *speech)
    set_blank_share(model, scores)
    return model


@torch.no_grad()
def step_arms(model: CTCModel, speech: tuple[Tensor, Tensor]) -> dict[str, Callable[[], Any]]:
    """A function for each step; looped steps have two: "decoding, sequential" and ", batched".

    Args:
        model: A model on the device of the speech.
        speech: Waveforms (B, S) and lengths (B,) in samples.
    """
    mel = partial(log_mel, config=FeatureConfig(normalization="none"))
    energies, frames = mel(*speech)
    features = normalize(energies, frames).to(model.output.weight.dtype)
    encoded, ends = model.encoder(features, frames)

    def head() -> Tensor:
        return log_probs(model.output(encoded))

    arms: dict[str, Callable[[], Any]] = {
        "STFT and mel": partial(mel, *speech),
        "encoder": partial(model.encoder, features, frames),
        "CTC head": head,
    }
    inputs = {"normalisation": (energies, frames), "decoding": (head(), ends)}
    for step, variants in LOOPED_STEPS.items():
        for variant, function in variants.items():
            arms[f"{step}, {variant}"] = partial(function, *inputs[step])
    return arms


def step_ms(times: Mapping[str, Timing], variant: str) -> dict[str, float]:
    """Median milliseconds of each step, in order.

    Args:
        times: Timings of `step_arms`.
        variant: Variant of the looped steps, "sequential" or "batched".
    """
    names = {step: f"{step}, {variant}" if step in LOOPED_STEPS else step for step in STEPS}
    return {step: times[name].median_ms for step, name in names.items()}


def amdahl(faster: float, needed: Mapping[float, float], ax: Axes) -> Axes:
    """Draw the gain in throughput over the share of a step that becomes `faster` times as fast.

    Args:
        faster: Speed-up of the step.
        needed: Gain, such as 1.1 -> the share of the step that it needs; drawn as dashed lines.
        ax: Axes to draw on; returned.
    """
    share = np.linspace(0, 0.4, 200)
    ax.plot(100 * share, 100 / (1 - share + share / faster) - 100, color=BLUE)
    for gain, share_of_step in needed.items():
        x = 100 * share_of_step
        y = 100 * gain - 100
        ax.plot([0, x, x], [y, y, 0], color=RED, lw=1, ls="--")
    ax.set(xlabel="share of the step before, %", ylabel="throughput gained, %")
    ax.set(xlim=(0, 40), ylim=(0, 30))
    return ax


def launches_and_waits(
    profiles: Mapping[str, Sequence[Launches]], sizes: Sequence[int], axes: Sequence[Axes]
) -> None:
    """Draw launches and waits over the batch size, with a line for each variant.

    Args:
        profiles: Variant -> its launches, one profile for each batch size.
        sizes: Batch sizes in utterances.
        axes: Two Axes to draw on, for launches and for waits.
    """
    for ax, (field, name) in zip(axes, (("launches", "launches"), ("syncs", "waits")), strict=True):
        for shade, (variant, counts) in zip(COLOURS, profiles.items(), strict=False):
            numbers = [getattr(profile, field) for profile in counts]
            ax.plot(sizes, numbers, "o-", ms=4, color=shade, label=variant)
        over_batch(ax, sizes, name)


def over_batch(ax: Axes, sizes: Sequence[int], ylabel: str) -> None:
    """Set up Axes of lines that start at zero, over logarithmic batch sizes, with a legend."""
    ax.set(xscale="log", xlabel="utterances in the batch", ylabel=ylabel, ylim=(0, None))
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.minorticks_off()
    ax.legend(frameon=False)
