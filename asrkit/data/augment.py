"""Noise, rooms, telephone bands and gain for batches of waveforms, and SpecAugment masks for
features.

A room, a band and a noise colour each multiply a spectrum, so a batch costs two transforms whatever
is applied, and one more for the rows in a room. All draws come from the generator passed in: (seed,
step) decides them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from asrkit.shapes import dims, expect, valid_mask

RATE_HZ = 16_000


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """How often (share of utterances) and how strongly speech is altered."""

    speed: tuple[float, float] = (
        0.85,
        1.15,
    )  # duration and pitch together, in steps of 0.225 s of the batch
    noise: float = 0.5  # white, pink or shaped like the long-term mean of speech
    snr_db: tuple[float, float] = (10.0, 30.0)
    room: float = 0.2
    rt60_s: tuple[float, float] = (0.1, 0.5)  # time in which the echo falls by 60 dB
    telephone: float = 0.2  # nothing above 4 kHz, as in 8 kHz recordings
    gain_db: tuple[float, float] = (-12.0, 6.0)
    time_masks: int = 4
    time_share: float = 0.06  # longest time mask, as a share of the utterance
    frequency_masks: int = 2
    frequency_bins: int = 20  # widest frequency mask

    def __post_init__(self) -> None:
        shares = (self.noise, self.room, self.telephone, self.time_share)
        expect(
            all(0 <= share <= 1 for share in shares),
            "noise, room, telephone, time_share",
            "each in 0..1",
            shares,
        )


def augment(
    waveforms: Tensor,
    lengths: Tensor,
    generator: torch.Generator,
    *,
    config: AugmentConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Altered copies of waveforms (B, S), 16 kHz, on the CPU, and their lengths (B,), all at one
    speed; the padding is zero.
    """
    B, S = dims(waveforms, "B S", "waveforms")
    dims(lengths, "B", "lengths", B=B)
    config = config or AugmentConfig()
    echo_samples = int(config.rt60_s[1] * RATE_HZ)
    size = (
        -(-(S + echo_samples) // 3600) * 3600
    )  # nothing wraps round; 3600 = 2^4 3^2 5^2 keeps the transform fast
    draw = iter(torch.rand(7, B, 1, generator=generator))

    def chosen(share: float) -> Tensor:
        return (next(draw)[:, 0] < share).nonzero()[:, 0]

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * next(draw)

    clean = waveforms.masked_fill(~valid_mask(lengths, S), 0)
    spectrum = torch.fft.rfft(clean, size)
    rows, rt60_s = chosen(config.room), between(*config.rt60_s)
    if len(rows):
        echo = torch.rand(len(rows), echo_samples, generator=generator).sub_(0.5)
        echo *= torch.exp(torch.arange(echo_samples) * (-6.9 / RATE_HZ) / rt60_s[rows])
        echo *= 0.7 / echo.norm(dim=1, keepdim=True)
        echo[:, 0] = 1.0  # the direct sound
        spectrum[rows] *= torch.fft.rfft(echo, size)
    hz = torch.linspace(0, RATE_HZ / 2, size // 2 + 1)
    rows, snr_db = chosen(config.noise), between(*config.snr_db)
    if len(rows):
        colours = torch.stack(
            [torch.ones_like(hz), hz.clamp(min=20) ** -0.5, 1 / (1 + (hz / 500) ** 1.5)]
        )
        colours /= colours.square().mean(1, keepdim=True).sqrt()
        power = clean[rows].square().sum(1, keepdim=True) / lengths[rows, None].clamp(min=1)
        colours = colours[torch.randint(3, (len(rows),), generator=generator)]
        noise = torch.view_as_complex(
            torch.rand(len(rows), len(hz), 2, generator=generator).sub_(0.5)
        )  # power 1/6 a bin
        spectrum[rows] += noise.mul_(
            colours * (power * 6 * size * 10 ** (-snr_db[rows] / 10)).sqrt()
        )
    rows, band_hz = chosen(config.telephone), between(3400, 4000)
    spectrum[rows] *= torch.sigmoid((band_hz[rows] - hz) / 50)
    # A spectrum read out at another size is the sound at another speed: resampling that costs
    # nothing more.
    slowest, fastest = (round(size / 3600 * share) for share in config.speed)
    new_size = 3600 * int(
        torch.randint(max(1, slowest), max(1, slowest, fastest) + 1, (), generator=generator)
    )
    speed = new_size / size
    altered = torch.fft.irfft(spectrum, new_size)[:, : max(1, round(S * speed))]
    altered = altered * (speed * 10 ** (between(*config.gain_db) / 20))
    lengths = (lengths * speed).round().long().clamp(1, altered.shape[1])
    return altered.masked_fill_(~valid_mask(lengths, altered.shape[1]), 0), lengths


def spec_augment(
    features: Tensor,
    lengths: Tensor,
    generator: torch.Generator,
    *,
    config: AugmentConfig | None = None,
) -> Tensor:
    """features (B, T, F) with random spans of frames and of bins set to 0, their mean after
    normalisation (SpecAugment).
    """
    B, T, F = dims(features, "B T F", "features")
    dims(lengths, "B", "lengths", B=B)
    config = config or AugmentConfig()

    def spans(masks: int, size: Tensor, widest: Tensor, places: int) -> Tensor:
        width = torch.rand(masks, B, generator=generator) * widest
        first = torch.rand(masks, B, generator=generator) * (size - width)
        place = torch.arange(places) - first[..., None]
        return ((place >= 0) & (place < width[..., None])).any(0)  # (B, places)

    frames, bins = lengths.cpu().float(), torch.full((B,), float(F))
    hidden = spans(config.time_masks, frames, frames * config.time_share, T)[:, :, None]
    hidden = (
        hidden
        | spans(config.frequency_masks, bins, bins.clamp(max=config.frequency_bins), F)[:, None, :]
    )
    return features.masked_fill(hidden.to(features.device), 0)
