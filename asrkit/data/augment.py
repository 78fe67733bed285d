"""Augmentation: noise, rooms, telephone bands, speed and gain for waveforms; SpecAugment masks.

A room, a band and a noise colour each multiply a spectrum, so a batch costs two transforms whatever
is applied, and one more for the rows in a room. All draws come from the generator passed in: (seed,
step) decides them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from asrkit.data.utterances import RATE_HZ
from asrkit.shapes import dims, expect, valid_mask

# Transforms have a multiple of this size: 3600 = 2^4 3^2 5^2 keeps them fast.
SIZE_STEP = 3600
ECHO_DECAY = 6.9  # exp(-6.9) is -60 dB
ECHO_LEVEL = 0.7  # of the echo's norm, the direct sound being 1


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """How often (share of utterances) and how strongly speech is altered.

    Args:
        speed: Slowest and fastest factor of duration and pitch together, drawn for the batch in
            steps of 0.225 s of its length.
        noise: Share with noise: white, pink or shaped like the long-term mean of speech.
        snr_db: Least and greatest signal-to-noise ratio, in dB.
        room: Share in a room.
        rt60_s: Shortest and longest time in which the echo falls by 60 dB.
        telephone: Share with nothing above 4 kHz, as in 8 kHz recordings.
        gain_db: Least and greatest gain, in dB.
        time_masks: Spans of frames that SpecAugment hides.
        time_share: Longest of them, as a share of the utterance.
        frequency_masks: Spans of bins that SpecAugment hides.
        frequency_bins: Widest of them, in bins.
    """

    speed: tuple[float, float] = (0.85, 1.15)
    noise: float = 0.5
    snr_db: tuple[float, float] = (10.0, 30.0)
    room: float = 0.2
    rt60_s: tuple[float, float] = (0.1, 0.5)
    telephone: float = 0.2
    gain_db: tuple[float, float] = (-12.0, 6.0)
    time_masks: int = 4
    time_share: float = 0.06
    frequency_masks: int = 2
    frequency_bins: int = 20

    def __post_init__(self) -> None:
        shares = (self.noise, self.room, self.telephone, self.time_share)
        valid = all(0 <= share <= 1 for share in shares)
        expect(valid, "noise, room, telephone, time_share", "each in 0..1", shares)


class _Draws:
    """Uniform random numbers of a batch, (B, 1) at a time, in a fixed order."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers: Iterator[Tensor] = iter(numbers)

    def rows(self, share: float) -> Tensor:
        """Numbers of the utterances that are among the `share` to alter."""
        number = next(self.numbers)[:, 0]
        chosen = number < share
        return chosen.nonzero()[:, 0]

    def between(self, low: float, high: float) -> Tensor:
        """A value for each utterance, (B, 1)."""
        number = next(self.numbers)
        return low + (high - low) * number


def augment(
    waveforms: Tensor,
    lengths: Tensor,
    generator: torch.Generator,
    *,
    config: AugmentConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Altered copies of waveforms, on the CPU.

    Args:
        waveforms: (B, S) float32, 16 kHz.
        lengths: Samples of each waveform, (B,).
        generator: Decides everything that is drawn.
        config: How often and how strongly; None is AugmentConfig().

    Returns:
        Waveforms (B, S'), all at one new speed and zero in the padding, and their lengths (B,).
    """
    B, S = dims(waveforms, "B S", "waveforms")
    dims(lengths, "B", "lengths", B=B)
    config = config or AugmentConfig()
    _, longest_echo_s = config.rt60_s
    echo_samples = int(longest_echo_s * RATE_HZ)
    # Room for the echo, so that nothing wraps round to the beginning.
    steps = math.ceil((S + echo_samples) / SIZE_STEP)
    size = steps * SIZE_STEP
    draws = _Draws(torch.rand(7, B, 1, generator=generator))
    clean = waveforms.masked_fill(~valid_mask(lengths, S), 0)
    spectrum = torch.fft.rfft(clean, size)
    hz = torch.linspace(0, RATE_HZ / 2, size // 2 + 1)

    rows = draws.rows(config.room)
    rt60_s = draws.between(*config.rt60_s)
    if len(rows):
        echo = _echo(rt60_s[rows], echo_samples, generator)
        spectrum[rows] *= torch.fft.rfft(echo, size)

    rows = draws.rows(config.noise)
    snr_db = draws.between(*config.snr_db)
    if len(rows):
        energy = clean[rows].square().sum(1, keepdim=True)
        power = energy / lengths[rows, None].clamp(min=1)
        spectrum[rows] += _noise(hz, size, power, snr_db[rows], generator)

    rows = draws.rows(config.telephone)
    band_hz = draws.between(3400, 4000)
    spectrum[rows] *= torch.sigmoid((band_hz[rows] - hz) / 50)

    # A spectrum read out at another size is the sound at another speed: resampling that costs
    # nothing more.
    new_size = _draw_size(size, config.speed, generator)
    speed = new_size / size
    samples = max(1, round(S * speed))
    altered = torch.fft.irfft(spectrum, new_size)[:, :samples]
    gain_db = draws.between(*config.gain_db)
    altered = altered * (speed * 10 ** (gain_db / 20))
    samples = altered.shape[1]
    lengths = (lengths * speed).round().long().clamp(1, samples)
    padding = ~valid_mask(lengths, samples)
    return altered.masked_fill_(padding, 0), lengths


def _echo(rt60_s: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """Impulse responses of rooms, (rows, samples): the direct sound and noise that fades."""
    echo = torch.rand(len(rt60_s), samples, generator=generator).sub_(0.5)
    exponents = torch.arange(samples) * (-ECHO_DECAY / RATE_HZ) / rt60_s
    echo *= torch.exp(exponents)
    echo *= ECHO_LEVEL / echo.norm(dim=1, keepdim=True)
    echo[:, 0] = 1.0  # the direct sound
    return echo


def _noise(
    hz: Tensor,
    size: int,
    power: Tensor,
    snr_db: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Spectra of noise of a random colour, (rows, bins), `snr_db` below speech of `power`."""
    white = torch.ones_like(hz)
    pink = hz.clamp(min=20) ** -0.5
    speech_like = 1 / (1 + (hz / 500) ** 1.5)
    colours = torch.stack([white, pink, speech_like])
    colours /= colours.square().mean(1, keepdim=True).sqrt()
    rows = len(power)
    choice = torch.randint(3, (rows,), generator=generator)
    colour = colours[choice]
    bins = torch.rand(rows, len(hz), 2, generator=generator).sub_(0.5)
    noise = torch.view_as_complex(bins)  # of power 1/6 in each bin
    noise_power = power * 6 * size * 10 ** (-snr_db / 10)
    return noise.mul_(colour * noise_power.sqrt())


def _draw_size(size: int, speed: tuple[float, float], generator: torch.Generator) -> int:
    """Size of the transform that makes a sound of `size` last longer or shorter."""
    slowest, fastest = speed
    steps = size / SIZE_STEP
    fewest = max(1, round(steps * slowest))
    most = max(fewest, round(steps * fastest))
    drawn = torch.randint(fewest, most + 1, (), generator=generator)
    return SIZE_STEP * int(drawn)


def spec_augment(
    features: Tensor,
    lengths: Tensor,
    generator: torch.Generator,
    *,
    config: AugmentConfig | None = None,
) -> Tensor:
    """Features with random spans of frames and of bins set to 0 (SpecAugment, arXiv 1904.08779).

    Args:
        features: (B, T, F), normalised, so that 0 is their mean.
        lengths: Frames of each utterance, (B,).
        generator: Decides everything that is drawn.
        config: Number and width of the masks; None is AugmentConfig().

    Returns:
        A masked copy, (B, T, F).
    """
    B, T, F = dims(features, "B T F", "features")
    dims(lengths, "B", "lengths", B=B)
    config = config or AugmentConfig()
    frames = lengths.cpu().float()
    longest = frames * config.time_share
    hidden_frames = _spans(config.time_masks, frames, longest, T, generator)
    bins = torch.full((B,), float(F))
    widest = bins.clamp(max=config.frequency_bins)
    hidden_bins = _spans(config.frequency_masks, bins, widest, F, generator)
    hidden = hidden_frames[:, :, None] | hidden_bins[:, None, :]
    return features.masked_fill(hidden.to(features.device), 0)


def _spans(
    count: int,
    size: Tensor,
    widest: Tensor,
    positions: int,
    generator: torch.Generator,
) -> Tensor:
    """Where any of `count` random spans lies in each row, bool (B, positions)."""
    B = len(size)
    width = torch.rand(count, B, generator=generator) * widest
    first = torch.rand(count, B, generator=generator) * (size - width)
    offset = torch.arange(positions) - first[..., None]  # (count, B, positions)
    inside = (offset >= 0) & (offset < width[..., None])
    return inside.any(0)
