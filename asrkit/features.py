"""Waveforms to log-mel features, and their normalisation: batched, and blind to what lies in the
padding.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from asrkit.shapes import dims, expect, expect_types, valid_mask

_WINDOWS = {
    "hann": torch.hann_window,
    "hamming": torch.hamming_window,
    "blackman": torch.blackman_window,
}


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """Log-mel settings; the defaults are those of NeMo's AudioToMelSpectrogramPreprocessor (its
    published models).
    """

    rate_hz: int = 16_000
    window_s: float = 0.025
    hop_s: float = 0.010
    fft: int = 512
    bins: int = 80
    window: Literal["hann", "hamming", "blackman"] = "hann"
    # True: the window's first sample would be the one after its last; False: first and last are
    # equal
    periodic: bool = False
    preemphasis: float = 0.97
    power: Literal[1, 2] = 2  # the mel bands add up magnitudes, or energies
    guard: Literal["add", "clamp"] = (
        "add"  # how log_guard keeps the logarithm from zero: NeMo's log_zero_guard_type
    )
    log_guard: float = 2.0**-24
    normalization: Literal["per_feature", "all_features", "none"] = "per_feature"

    def __post_init__(self) -> None:
        expect_types(self)
        expect(self.rate_hz >= 1, "rate_hz", "at least 1", self.rate_hz)
        expect(
            self.window_samples <= self.fft,
            "fft",
            f">= {self.window_samples} (the window)",
            self.fft,
            "Raise fft.",
        )
        kinds = {
            "window": tuple(_WINDOWS),
            "power": (1, 2),
            "guard": ("add", "clamp"),
            "normalization": ("per_feature", "all_features", "none"),
        }
        for name, known in kinds.items():
            expect(getattr(self, name) in known, name, f"one of {known}", repr(getattr(self, name)))
        positive = min(self.hop_samples, self.window_samples, self.bins, self.log_guard) > 0
        expect(
            positive, "hop_s, window_s, bins, log_guard", "at least one sample, one bin, > 0", self
        )

    @property
    def window_samples(self) -> int:
        """Window length in samples."""
        return round(self.window_s * self.rate_hz)

    @property
    def hop_samples(self) -> int:
        """Hop between frames in samples."""
        return round(self.hop_s * self.rate_hz)


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # cached: it may be used where gradients are wanted
def _constants(config: FeatureConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    window = _WINDOWS[config.window](config.window_samples, periodic=config.periodic)
    return window.to(device), mel_bands(config).to(device)


def mel_bands(config: FeatureConfig) -> Tensor:
    """Slaney's triangles on the mel scale, each of unit area in Hz, from 0 Hz to half the rate:
    (fft / 2 + 1, F) float32.

    Made in float64, as librosa's are, whose values NeMo's checkpoints hold; torchaudio's are made
    in float32, and the sum of a band is up to 5e-6 off, which normalisation makes 7e-5 of a
    feature.
    """
    knee_mel, log_step = (
        15.0,
        math.log(6.4) / 27,
    )  # linear up to 1000 Hz, 3 mel each 200 Hz; logarithmic above
    half = config.rate_hz / 2
    top = half * 3 / 200 if half < 1000 else knee_mel + math.log(half / 1000) / log_step
    mels = torch.linspace(0.0, top, config.bins + 2, dtype=torch.float64)
    edges = torch.where(
        mels < knee_mel, mels * 200 / 3, 1000 * torch.exp(log_step * (mels - knee_mel))
    )  # Hz
    low, peak, high = edges[:-2], edges[1:-1], edges[2:]
    hz = torch.linspace(0.0, half, config.fft // 2 + 1, dtype=torch.float64)[:, None]
    triangles = torch.minimum((hz - low) / (peak - low), (high - hz) / (high - peak)).clamp(min=0.0)
    return (triangles * 2 / (high - low)).float()


def log_mel(
    waveforms: Tensor, lengths: Tensor, *, config: FeatureConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Log-mel features (B, T, F) and their lengths (B,) in frames, T = S // hop.

    waveforms: (B, S) float in [-1, 1] at `config.rate_hz`; lengths: (B,) valid samples. Computed in
    float32, in a region of autocast too: half precision here costs accuracy, not time. Frame t is
    centred on sample t * hop; padding comes back as exact zeros.
    """
    config = config or FeatureConfig()
    B, S = dims(waveforms, "B S", "waveforms")
    dims(lengths, "B", "lengths", B=B)
    expect(
        waveforms.is_floating_point(),
        "waveforms",
        "a float dtype",
        waveforms.dtype,
        "Divide int16 by 32768.",
    )
    expect(B > 0, "lengths", "at least one utterance", tuple(lengths.shape))
    low, high = torch.stack(lengths.aminmax()).tolist()  # the only wait for a GPU
    expect(1 <= low <= high <= S, "lengths", f"1..{S}", f"{low} to {high}")
    valid = valid_mask(lengths, S)
    signal = waveforms.float().masked_fill(~valid, 0.0)
    signal = torch.cat(
        [signal[:, :1], signal[:, 1:] - config.preemphasis * signal[:, :-1]], 1
    ).masked_fill(~valid, 0.0)
    window, mel = _constants(config, waveforms.device)
    stft = torch.stft(
        signal,
        config.fft,
        config.hop_samples,
        len(window),
        window,
        pad_mode="constant",
        return_complex=True,
    )  # (B, fft/2+1, T+1)
    power = stft.real.square() + stft.imag.square()
    if config.power == 1:
        power = power.clamp(min=1e-30).sqrt()  # the slope at 0 is infinite, as in `normalize`
    frames = torch.div(lengths, config.hop_samples, rounding_mode="floor").clamp(min=1)
    T = max(S // config.hop_samples, 1)
    with torch.autocast(waveforms.device.type, enabled=False):
        bands = power.transpose(1, 2)[:, :T] @ mel  # (B, T, F)
    features = (
        bands + config.log_guard if config.guard == "add" else bands.clamp(min=config.log_guard)
    ).log()
    if config.normalization == "per_feature":
        return normalize(features, frames), frames
    if config.normalization == "all_features":  # all bins of an utterance are one
        return normalize(features.reshape(B, -1, 1), frames * config.bins).view(
            features.shape
        ), frames
    return features.masked_fill(~valid_mask(frames, T)[..., None], 0.0), frames


def normalize(features: Tensor, lengths: Tensor) -> Tensor:
    """Zero mean and unit (unbiased) deviation over time, per utterance and bin: (B, T, F), padding
    zero.

    A frame's divisor is the deviation + 1e-5, as in NeMo. One frame alone becomes zeros; an
    utterance of none has zeros only. The deviation is of centred features: mean squares less the
    squared mean would lose what a large mean leaves of float32's digits. No loop and no
    synchronisation; equal to `normalize_sequential`.
    """
    B, T, _ = dims(features, "B T F", "features")
    dims(lengths, "B", "lengths", B=B)
    valid = valid_mask(lengths, T)[..., None]  # (B, T, 1)
    padding = ~valid
    count = valid.sum(1, keepdim=True).to(
        features.dtype
    )  # not `lengths`: what exceeds T counts no frames
    kept = features.masked_fill(padding, 0.0)
    mean = kept.sum(1, keepdim=True) / count
    centred = kept.sub_(mean).masked_fill_(
        padding, 0.0
    )  # in place: new memory costs a CPU more than the arithmetic
    variance = centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
    deviation = variance.clamp(
        min=1e-30
    ).sqrt()  # the root's slope at 0 is infinite: gradients would be NaN
    return centred / (deviation + 1e-5)


def normalize_sequential(features: Tensor, lengths: Tensor) -> Tensor:
    """What `normalize` replaces: the same result, one utterance after another. (B, T, F)"""
    out = torch.zeros_like(features)
    for b, length in enumerate(lengths.tolist()):
        rows = features[b, :length]
        deviation = rows.std(0) if len(rows) > 1 else rows.new_zeros(rows.shape[1])
        out[b, :length] = (rows - rows.mean(0)) / (deviation + 1e-5)
    return out
