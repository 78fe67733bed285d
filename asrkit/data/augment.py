"""Augmentation: silence, noise, rooms, bands, speed and gain for waveforms; rate, formants and
SpecAugment masks for features.

A room, a band and a noise colour each multiply a spectrum. A batch so costs two transforms in any
case, and one more for rows with a room. Rate and formants are one interpolation of the features.
All random numbers come from the generator that is passed in.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from asrkit.data.utterances import RATE_HZ
from asrkit.devices import CPU_FLOAT, to_device
from asrkit.features import FeatureConfig, mel_edges_hz
from asrkit.shapes import dims, expect, expect_types, valid_mask

# Sizes of fast transforms: 2^4 3^2 times a number without a prime factor above 5, up to 2^27.
FAST_SIZES = sorted(
    144 * 2**twos * 3**threes * 5**fives
    for twos in range(20)
    for threes in range(13)
    for fives in range(9)
    if 2**twos * 3**threes * 5**fives < 2**20
)
BAND_EDGE_HZ = 50  # width of the upper edge of a telephone's band
LOW_EDGE_HZ = 20  # width of a lower edge
ECHO_DECAY = 6.9  # exp(-6.9) is -60 dB
ECHO_LEVEL = 0.7  # norm of the echo relative to the direct sound


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Augmentation: how often (share of utterances) and how strongly speech is altered.

    Args:
        speed: Range of the factor of duration, pitch and formants together, drawn once for a batch.
        rate: Range of the factor of duration alone, by `warp_features`.
        formants: Range of the factor of all frequencies of the features, as of a longer or shorter
            vocal tract.
        silence: Share with silence added before and after the speech.
        silence_s: Range of the length of each silence, in seconds.
        noise: Share with noise: white, pink or with the long-term spectrum of speech.
        snr_db: Range of the signal-to-noise ratio, in dB; added silence does not count.
        room: Share with the echo of a room.
        rt60_s: Range of the time in which the echo falls by 60 dB.
        telephone: Share with nothing above 4 kHz, as in 8 kHz recordings.
        low_cut: Share without low frequencies, as from a telephone or a small microphone.
        low_cut_hz: Range of the edge below which they are cut, in Hz.
        gain_db: Range of the gain, in dB.
        time_masks: Number of spans of frames that SpecAugment hides.
        time_share: Longest span of frames, as a share of the utterance.
        frequency_masks: Number of spans of bins that SpecAugment hides.
        frequency_bins: Widest span of bins.

    Raises:
        ValueError: A value of the wrong type, a share outside 0..1, or an invalid range.
    """

    speed: tuple[float, float] = (0.85, 1.15)
    rate: tuple[float, float] = (0.8, 1.25)
    formants: tuple[float, float] = (0.8, 1.25)
    silence: float = 0.3
    silence_s: tuple[float, float] = (0.0, 0.2)
    noise: float = 0.5
    snr_db: tuple[float, float] = (10.0, 30.0)
    room: float = 0.2
    rt60_s: tuple[float, float] = (0.1, 0.5)
    telephone: float = 0.4
    low_cut: float = 0.2
    low_cut_hz: tuple[float, float] = (80.0, 400.0)
    gain_db: tuple[float, float] = (-30.0, 6.0)
    time_masks: int = 4
    time_share: float = 0.06
    frequency_masks: int = 2
    frequency_bins: int = 20

    def __post_init__(self) -> None:
        expect_types(self)
        least_of = {"silence_s": 0, "low_cut_hz": 0, "snr_db": -math.inf, "gain_db": -math.inf}
        for name, value in vars(self).items():
            if isinstance(value, tuple):
                low, high = value
                least = least_of.get(name, 1e-3)
                expect(least <= low <= high, name, f"a range from {least} up", value)
            elif name in ("time_masks", "frequency_masks", "frequency_bins"):
                expect(value >= 0, name, "at least 0", value)
            else:
                expect(0 <= value <= 1, name, "a share in 0..1", value)

    def longest_s(self, seconds: float) -> float:
        """Seconds of features, at most, that an utterance of `seconds` becomes."""
        silence_s = 2 * self.silence_s[1] if self.silence else 0.0
        return (seconds + silence_s) * self.speed[1] * self.rate[1]


DEFAULT = AugmentConfig()
UNALTERED = AugmentConfig(
    speed=(1, 1),
    rate=(1, 1),
    formants=(1, 1),
    silence=0,
    noise=0,
    room=0,
    telephone=0,
    low_cut=0,
    gain_db=(0, 0),
    time_masks=0,
    frequency_masks=0,
)
FEATURES = FeatureConfig()


class _Draws:
    """Uniform random numbers for a batch, (B, 1) at a time, in a fixed order."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers: Iterator[Tensor] = iter(numbers)

    def rows(self, share: float) -> Tensor:
        """Row numbers of the utterances to alter, about `share` of them."""
        return (next(self.numbers)[:, 0] < share).nonzero()[:, 0]

    def between(self, low: float, high: float) -> Tensor:
        """A value for each utterance, (B, 1)."""
        return low + (high - low) * next(self.numbers)


def augment(
    waveforms: Tensor,
    lengths: Tensor,
    generator: torch.Generator,
    *,
    config: AugmentConfig = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """Altered copies of waveforms, on the CPU.

    Args:
        waveforms: (B, S) float32, 16 kHz.
        lengths: Samples of each waveform, (B,).
        generator: Source of all random numbers.
        config: How often and how strongly to alter speech.

    Returns:
        Waveforms (B, S'), all at one new speed and zero in the padding, and their lengths (B,).
    """
    B, _ = dims(waveforms, "B S", "waveforms")
    dims(lengths, "B", "lengths", B=B)
    draws = _Draws(torch.rand(12, B, 1, generator=generator, **CPU_FLOAT))
    speech_lengths = lengths
    clean, lengths = _add_silence(waveforms, lengths, draws, config)
    S = clean.shape[1]
    echo_samples = int(max(config.rt60_s) * RATE_HZ)
    # room for the echo, so that nothing wraps around to the beginning
    size = FAST_SIZES[bisect_left(FAST_SIZES, S + echo_samples)]
    spectrum = torch.fft.rfft(clean, size)
    hz = torch.linspace(0, RATE_HZ / 2, size // 2 + 1, **CPU_FLOAT)

    rows = draws.rows(config.room)
    rt60_s = draws.between(*config.rt60_s)
    if len(rows):
        echo = _echo(rt60_s[rows], echo_samples, generator)
        spectrum[rows] *= torch.fft.rfft(echo, size)

    rows = draws.rows(config.noise)
    snr_db = draws.between(*config.snr_db)
    if len(rows):
        energy = clean[rows].square().sum(1, keepdim=True)
        power = energy / speech_lengths[rows, None].clamp(min=1)
        spectrum[rows] += _noise(hz, size, power, snr_db[rows], generator)

    rows = draws.rows(config.telephone)
    band_hz = draws.between(3400, 4000)
    spectrum[rows] *= torch.sigmoid((band_hz[rows] - hz) / BAND_EDGE_HZ)

    rows = draws.rows(config.low_cut)
    low_hz = draws.between(*config.low_cut_hz)
    spectrum[rows] *= torch.sigmoid((hz - low_hz[rows]) / LOW_EDGE_HZ)

    # the inverse transform at another size gives another speed: resampling at no extra cost
    slowest, fastest = config.speed
    first = bisect_left(FAST_SIZES, size * slowest)
    sizes = FAST_SIZES[first : bisect_right(FAST_SIZES, size * fastest)] or [size]
    new_size = sizes[int(torch.randint(len(sizes), (), generator=generator, device="cpu"))]
    speed = new_size / size
    altered = torch.fft.irfft(spectrum, new_size)[:, : max(1, round(S * speed))]
    gain_db = draws.between(*config.gain_db)
    altered = altered * (speed * 10 ** (gain_db / 20))
    samples = altered.shape[1]
    lengths = (lengths.float() * speed).round().long().clamp(1, samples)
    return altered.masked_fill_(~valid_mask(lengths, samples), 0), lengths


def _echo(rt60_s: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """Impulse responses of rooms, (rows, samples): the direct sound and noise that fades."""
    echo = torch.rand(len(rt60_s), samples, generator=generator, **CPU_FLOAT).sub_(0.5)
    exponents = torch.arange(samples, **CPU_FLOAT) * (-ECHO_DECAY / RATE_HZ) / rt60_s
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
    colour = colours[torch.randint(3, (rows,), generator=generator, device="cpu")]
    bins = torch.rand(rows, len(hz), 2, generator=generator, **CPU_FLOAT).sub_(0.5)
    noise = torch.view_as_complex(bins)  # each bin has power 1/6
    noise_power = power * 6 * size * 10 ** (-snr_db / 10)
    return noise.mul_(colour * noise_power.sqrt())


def _add_silence(
    waveforms: Tensor, lengths: Tensor, draws: _Draws, config: AugmentConfig
) -> tuple[Tensor, Tensor]:
    """Waveforms, some with zeros before and after the speech, (B, S'), and their lengths."""
    rows = draws.rows(config.silence)
    before = torch.zeros_like(lengths)
    after = torch.zeros_like(lengths)
    for silence in (before, after):
        seconds = draws.between(*config.silence_s)
        silence[rows] = (seconds[rows, 0] * RATE_HZ).long()
    longer = lengths + before + after
    B, S = waveforms.shape
    padded = waveforms.new_zeros(B, max(S, int(longer.max())))
    for row, (first, samples) in enumerate(zip(before.tolist(), lengths.tolist(), strict=True)):
        padded[row, first : first + samples] = waveforms[row, :samples]
    return padded, longer


def warp_features(
    features: Tensor,
    lengths: Tensor,
    generator: torch.Generator,
    *,
    config: AugmentConfig = DEFAULT,
    mel: FeatureConfig = FEATURES,
) -> tuple[Tensor, Tensor]:
    """Features at another rate and with other formants, drawn for each utterance.

    The rate stretches time. Formants scale the frequency axis in Hz, as a vocal tract of another
    length does (vocal tract length perturbation, Jaitly and Hinton 2013). Both by interpolation.

    Args:
        features: (B, T, F) float32.
        lengths: Frames of each utterance, (B,), at least 1 each, on the host.
        generator: Source of all random numbers.
        config: Ranges of both factors.
        mel: Settings that define the bins.

    Returns:
        Features (B, T', F), zero in the padding, and their lengths (B,).
    """
    B, T, F = dims(features, "B T F", "features", F=mel.bins)
    dims(lengths, "B", "lengths", B=B)
    draws = _Draws(torch.rand(2, B, 1, generator=generator, **CPU_FLOAT))
    # logarithms are drawn, so that a factor and its inverse are equally likely
    rate, formants = (
        draws.between(math.log(low), math.log(high)).exp()
        for low, high in (config.rate, config.formants)
    )
    new_lengths = (lengths[:, None] * rate).round().long().clamp(min=1)  # (B, 1)
    frames = torch.arange(int(new_lengths.max()), device="cpu")
    steps_of_source = (lengths[:, None] - 1).float() / (new_lengths - 1).clamp(min=1)
    source_frame = (frames * steps_of_source).clamp(max=T - 1)  # (B, T')
    centres_hz = mel_edges_hz(mel)[1:-1].float()
    source_hz = centres_hz / formants  # (B, F)
    above = torch.searchsorted(centres_hz, source_hz.contiguous()).clamp(1, F - 1)
    below = above - 1
    width_hz = centres_hz[above] - centres_hz[below]
    source_bin = (below + (source_hz - centres_hz[below]) / width_hz).clamp(0, F - 1)
    grid = torch.stack(
        [
            _to_unit(source_bin, F)[:, None].expand(-1, len(frames), -1),
            _to_unit(source_frame, T)[:, :, None].expand(-1, -1, F),
        ],
        dim=-1,
    )
    warped = functional.grid_sample(
        features[:, None],
        to_device(grid, features.device),
        padding_mode="border",
        align_corners=True,
    )
    new_lengths = new_lengths[:, 0]
    padding = to_device(~valid_mask(new_lengths, len(frames)), features.device)
    return warped[:, 0].masked_fill(padding[..., None], 0), new_lengths


def _to_unit(position: Tensor, size: int) -> Tensor:
    """Positions 0 .. size - 1 mapped to -1 .. 1, as `grid_sample` expects."""
    return position * (2 / max(1, size - 1)) - 1


def spec_augment(
    features: Tensor,
    lengths: Tensor,
    generator: torch.Generator,
    *,
    config: AugmentConfig = DEFAULT,
) -> Tensor:
    """Features with random spans of frames and of bins set to 0 (SpecAugment, arXiv 1904.08779).

    Args:
        features: (B, T, F), normalised, so that 0 is their mean.
        lengths: Frames of each utterance, (B,).
        generator: Source of all random numbers.
        config: Number and width of the masks.

    Returns:
        A masked copy, (B, T, F).
    """
    B, T, F = dims(features, "B T F", "features")
    dims(lengths, "B", "lengths", B=B)
    frames = lengths.cpu().float()
    bins = torch.full((B,), float(F), **CPU_FLOAT)
    hidden_frames = _spans(config.time_masks, frames, frames * config.time_share, T, generator)
    widest = bins.clamp(max=config.frequency_bins)
    hidden_bins = _spans(config.frequency_masks, bins, widest, F, generator)
    hidden = hidden_frames[:, :, None] | hidden_bins[:, None, :]
    return features.masked_fill(to_device(hidden, features.device), 0)


def _spans(
    count: int,
    size: Tensor,
    widest: Tensor,
    positions: int,
    generator: torch.Generator,
) -> Tensor:
    """Positions covered by any of `count` random spans in each row, bool (B, positions)."""
    B = len(size)
    width = torch.rand(count, B, generator=generator, **CPU_FLOAT) * widest
    first = torch.rand(count, B, generator=generator, **CPU_FLOAT) * (size - width)
    offset = torch.arange(positions, **CPU_FLOAT) - first[..., None]  # (count, B, positions)
    inside = (offset >= 0) & (offset < width[..., None])
    return inside.any(0)
