"""Magnitudes of the numbers in a recogniser: what a number format has to hold."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from asrkit.features import FeatureConfig
from asrkit.shapes import valid_mask
from asrkit.workbench.bench.suites.precision import Speech

SHARES = (0.001, 0.999)  # quantiles that count as the ends of what occurs


def power_spectrum(waveforms: Tensor, config: FeatureConfig) -> Tensor:
    """Power of each frequency at the input of the mel filterbank, (B, T, fft / 2 + 1).

    Args:
        waveforms: (B, S).
        config: Of the features.
    """
    emphasised = waveforms[:, 1:] - config.preemphasis * waveforms[:, :-1]
    emphasised = torch.cat([waveforms[:, :1], emphasised], 1)
    window = torch.hann_window(config.window_samples, periodic=config.periodic)
    spectrum = torch.stft(
        emphasised,
        config.fft,
        config.hop_samples,
        len(window),
        window,
        pad_mode="constant",
        return_complex=True,
    )
    return spectrum.abs().square().transpose(1, 2)


def activations(model: Any, features: Tensor, frames: Tensor) -> Tensor:
    """Outputs of all norms of a TDNN encoder, without padding, in one row: (N,).

    Args:
        model: With an encoder that lists its `norms`, as `TransducerModel` has it.
        features: (B, T, F).
        frames: (B,).
    """
    outputs = list[Tensor]()

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        outputs.append(output.transpose(1, 2))

    model = copy.deepcopy(model)
    for norm in model.encoder.norms:
        norm.register_forward_hook(keep)
    lengths = model.encode(features, frames)[1]
    valid = [output[valid_mask(lengths, output.shape[1])].flatten() for output in outputs]
    return torch.cat(valid)


@torch.inference_mode()
def of_recogniser(speech: Speech, most: int = 16) -> dict[str, Tensor]:
    """Absolute values of all that is not zero and not padding, a row of numbers for each quantity.

    Args:
        speech: A trained model, and what it reads.
        most: Utterances at most.
    """
    config = FeatureConfig(**speech.checkpoint.features)
    features, frames = (part[:most] for part in speech.features())
    waves = speech.waveforms[:most]
    power = power_spectrum(waves, config)
    model: Any = speech.checkpoint.model
    values = {
        "waveform": waves[valid_mask(speech.lengths[:most], waves.shape[1])],
        "power": power[valid_mask(frames, power.shape[1])],
        "features": features[valid_mask(frames, features.shape[1])],
        "weights": torch.cat([part.flatten() for part in model.parameters()]),
        "activations": activations(model, features, frames),
    }
    return {name: part[part != 0].abs() for name, part in values.items()}


def spans(values: dict[str, Tensor]) -> dict[str, list[float]]:
    """Ends of 99.8 % of the values of each quantity.

    Args:
        values: Quantity -> its magnitudes, as `of_recogniser` returns them.
    """
    ends = {}
    for name, part in values.items():
        ordered = part.flatten().sort().values
        places = [int(share * (len(ordered) - 1)) for share in SHARES]
        ends[name] = [float(ordered[place]) for place in places]
    return ends
