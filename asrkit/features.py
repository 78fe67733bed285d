"""Log-mel features of waveforms and their normalisation, batched and independent of padding."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from asrkit.devices import CPU_DOUBLE, CPU_FLOAT, autocast, to_device
from asrkit.shapes import dims, expect, expect_types, valid_mask


@dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """Log-mel settings; the defaults are those of NeMo's published models.

    NeMo calls the class AudioToMelSpectrogramPreprocessor.
    """

    rate_hz: int = 16_000
    window_s: float = 0.025
    hop_s: float = 0.010
    fft: int = 512
    bins: int = 80
    window: Literal["hann", "hamming", "blackman"] = "hann"
    periodic: bool = False  # True: one period of the window; False: first and last sample equal
    preemphasis: float = 0.97
    power: Literal[1, 2] = 2  # mel bands sum magnitudes (1) or energies (2)
    # how log_guard keeps zeros from the logarithm: NeMo's log_zero_guard_type
    guard: Literal["add", "clamp"] = "add"
    log_guard: float = 2.0**-24
    # values further below the loudest bin of an utterance are raised to this range, as in Whisper
    range_db: float | None = None
    normalization: Literal["per_feature", "all_features", "whisper", "none"] = "per_feature"
    # samples beyond the ends of an utterance, in the first and last windows: silence, or mirrored
    edges: Literal["zeros", "reflect"] = "zeros"
    # shorter utterances are extended by silence to this length; the silence counts as theirs
    fill_s: float | None = None

    def __post_init__(self) -> None:
        expect_types(self)
        expect(self.rate_hz >= 2000, "rate_hz", "at least 2000", self.rate_hz)
        wanted = f">= {self.window_samples} (the window)"
        expect(self.window_samples <= self.fft, "fft", wanted, self.fft, "Raise fft.")
        sizes = (self.hop_samples, self.window_samples, self.bins, self.log_guard)
        names = "hop_s, window_s, bins, log_guard"
        expect(min(sizes) > 0, names, "at least one sample, one bin, > 0", self)
        for name, most in (("range_db", math.inf), ("fill_s", 3600)):
            value = getattr(self, name)
            expect(value is None or 0 < value <= most, name, f"None, or 0 to {most}", value)

    @property
    def window_samples(self) -> int:
        """Window length in samples."""
        return round(self.window_s * self.rate_hz)

    @property
    def hop_samples(self) -> int:
        """Hop between frames in samples."""
        return round(self.hop_s * self.rate_hz)

    @property
    def fill_samples(self) -> int:
        """Fewest samples of an utterance once it is filled up with silence."""
        return round((self.fill_s or 0.0) * self.rate_hz)

    def frames(self, samples: int) -> int:
        """Frames of a batch whose longest waveform has this number of samples: at least one."""
        return max(max(samples, self.fill_samples) // self.hop_samples, 1)


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # cached, so it may be used later where gradients are computed
def _constants(config: FeatureConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """The window (window_samples,) and the mel bands on a device."""
    make_window = getattr(torch, f"{config.window}_window")
    samples = config.window_samples
    window = make_window(samples, periodic=config.periodic, **CPU_FLOAT)
    return to_device(window, device), to_device(mel_bands(config), device)


def mel_bands(config: FeatureConfig) -> Tensor:
    """Slaney's mel filters, (fft / 2 + 1, F) float32: triangles of unit area in Hz, up to rate / 2.

    Computed in float64 like librosa's, whose values NeMo's checkpoints contain. torchaudio computes
    in float32: the sum of a band is up to 5e-6 off, which normalisation turns into 7e-5 of a
    feature.
    """
    edges_hz = mel_edges_hz(config)
    low = edges_hz[:-2]
    peak = edges_hz[1:-1]
    high = edges_hz[2:]
    hz = torch.linspace(0.0, config.rate_hz / 2, config.fft // 2 + 1, **CPU_DOUBLE)
    hz = hz[:, None]
    rising = (hz - low) / (peak - low)
    falling = (high - hz) / (high - peak)
    triangles = torch.minimum(rising, falling).clamp(min=0.0)
    bands = triangles * 2 / (high - low)
    return bands.float()


def mel_edges_hz(config: FeatureConfig) -> Tensor:
    """Frequencies at which the mel bands begin, peak and end, in Hz: (F + 2,) float64, ascending.

    Band f extends from edge f to edge f + 2 and peaks at edge f + 1.

    Args:
        config: Sample rate and number of bins.
    """
    # the mel scale is linear up to 1000 Hz (3 mel per 200 Hz), and logarithmic above
    knee_mel = 15.0
    log_step = math.log(6.4) / 27
    top_mel = knee_mel + math.log(config.rate_hz / 2000) / log_step
    mels = torch.linspace(0.0, top_mel, config.bins + 2, **CPU_DOUBLE)
    linear_hz = mels * 200 / 3
    logarithmic_hz = 1000 * torch.exp(log_step * (mels - knee_mel))
    return torch.where(mels < knee_mel, linear_hz, logarithmic_hz)


def log_mel(
    waveforms: Tensor, lengths: Tensor, *, config: FeatureConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Log-mel features (B, T, F) float32 and their lengths (B,) in frames, T = S // hop.

    With `fill_s` an utterance has at least the frames of that many seconds. Frame t is centred on
    sample t * hop; padding is exactly zero. Computed in float32, also under autocast: half
    precision costs accuracy here and saves no time.

    Args:
        waveforms: (B, S) float in [-1, 1] at `config.rate_hz`.
        lengths: (B,) valid samples, 1 to S, on the device of the waveforms or on the host. On the
            host the lengths in frames stay there too, and nothing waits for a GPU.
        config: Settings; None takes the defaults.

    Raises:
        ValueError: Shapes, dtype, lengths or config are invalid.
    """
    config = config or FeatureConfig()
    is_config = isinstance(config, FeatureConfig)
    remedy = "Pass FeatureConfig(**settings)."
    expect(is_config, "config", "a FeatureConfig", type(config).__name__, remedy)
    B, S = dims(waveforms, "B S", "waveforms")
    dims(lengths, "B", "lengths", B=B)
    remedy = "Divide int16 by 32768."
    expect(waveforms.is_floating_point(), "waveforms", "a float dtype", waveforms.dtype, remedy)
    expect(B > 0, "lengths", "at least one utterance", tuple(lengths.shape))
    low, high = torch.stack(
        lengths.aminmax()
    ).tolist()  # the only wait for a GPU, if they are there
    expect(1 <= low <= high <= S, "lengths", f"1..{S}", f"{low} to {high}")
    frames = frame_lengths(lengths, config)
    device = waveforms.device
    samples, ends = to_device(lengths, device), to_device(frames, device)
    T = config.frames(S)
    _, mel = _constants(config, device)
    with autocast(device.type):
        features = _power_spectrum(waveforms, samples, config)[..., :T].transpose(1, 2) @ mel
    if config.guard == "add":
        features = (features + config.log_guard).log()
    else:
        features = features.clamp(min=config.log_guard).log()
    padding = ~valid_mask(ends, T)[..., None]
    if config.range_db is not None:
        loudest = features.masked_fill(padding, -math.inf).amax((1, 2), keepdim=True)
        range_nats = config.range_db * config.power / 2 * math.log(10) / 10
        features = torch.maximum(features, loudest - range_nats)
    if config.normalization == "per_feature":
        return normalize(features, ends), frames
    if config.normalization == "all_features":  # over all bins of an utterance together
        one_column = features.reshape(B, -1, 1)
        return normalize(one_column, ends * config.bins).view(features.shape), frames
    if config.normalization == "whisper":  # decimal logarithms, about -1 to 1
        features = (features / math.log(10) + 4) / 4
    return features.masked_fill(padding, 0.0), frames


def frame_lengths(lengths: Tensor, config: FeatureConfig) -> Tensor:
    """Frames (B,) of `log_mel` for `lengths` (B,) in samples: at least one each."""
    filled = lengths.clamp(min=config.fill_samples)
    return torch.div(filled, config.hop_samples, rounding_mode="floor").clamp(min=1)


def _power_spectrum(waveforms: Tensor, lengths: Tensor, config: FeatureConfig) -> Tensor:
    """Energies (power=2) or magnitudes of the pre-emphasised signal: (B, fft / 2 + 1, T + 1)."""
    padding = ~valid_mask(lengths, waveforms.shape[1])
    signal = waveforms.float().masked_fill(padding, 0.0)
    emphasised = signal[:, 1:] - config.preemphasis * signal[:, :-1]
    signal = torch.cat([signal[:, :1], emphasised], 1)
    signal = signal.masked_fill(padding, 0.0)
    missing = config.fill_samples - signal.shape[1]
    if missing > 0:
        signal = torch.nn.functional.pad(signal, (0, missing))
    mirrored = config.edges == "reflect"
    if mirrored:
        lengths = lengths.clamp(min=config.fill_samples)
        signal = _with_mirrored_edges(signal, lengths, config.fft // 2)
    window, _ = _constants(config, waveforms.device)
    stft = torch.stft(
        signal,
        config.fft,
        config.hop_samples,
        len(window),
        window,
        center=not mirrored,
        pad_mode="constant",
        return_complex=True,
    )
    energy = stft.real.square() + stft.imag.square()
    if config.power == 1:
        return energy.clamp(min=1e-30).sqrt()  # the slope at 0 is infinite, as in `normalize`
    return energy


def _with_mirrored_edges(signal: Tensor, lengths: Tensor, reach: int) -> Tensor:
    """`signal` (B, S) with `reach` more samples at each end, (B, S + 2 reach).

    They mirror each utterance, of `lengths` (B,) samples, at its first and last sample. An
    utterance with fewer samples than `reach` is followed by silence.
    """
    B, S = signal.shape
    steps = torch.arange(1, reach + 1, device=signal.device)
    before = steps.flip(0).expand(B, -1)
    after = lengths[:, None] - 1 - steps
    places = torch.cat([before, after], 1)
    inside = (places >= 0) & (places < lengths[:, None])
    mirrored = signal.gather(1, places.clamp(0, S - 1)).masked_fill(~inside, 0.0)
    head, tail = mirrored.split(reach, 1)
    padded = torch.cat([head, signal, torch.zeros_like(tail)], 1)
    return padded.scatter(1, reach + lengths[:, None] - 1 + steps, tail)


def normalize(features: Tensor, lengths: Tensor) -> Tensor:
    """Features with zero mean and unit deviation over time, per utterance and bin: (B, T, F).

    Padding becomes zero. As in NeMo, frames are divided by the (unbiased) deviation + 1e-5; a
    single frame becomes zeros. The deviation is computed from centred features: the mean square
    minus the squared mean would cancel digits of float32 if the mean is large. There is no loop and
    no synchronisation. The result equals that of `normalize_sequential`.

    Args:
        features: (B, T, F) float.
        lengths: (B,) valid frames; 0 is allowed.
    """
    B, T, _ = dims(features, "B T F", "features")
    dims(lengths, "B", "lengths", B=B)
    valid = valid_mask(lengths, T)[..., None]  # (B, T, 1)
    padding = ~valid
    count = valid.sum(1, keepdim=True).to(features.dtype)  # not `lengths`, which may exceed T
    kept = features.masked_fill(padding, 0.0)
    mean = kept.sum(1, keepdim=True) / count
    # in place, since new memory costs a CPU more than the arithmetic
    centred = kept.sub_(mean).masked_fill_(padding, 0.0)
    variance = centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
    # the slope of the root at 0 is infinite, which would make gradients NaN
    deviation = variance.clamp(min=1e-30).sqrt()
    return centred / (deviation + 1e-5)


def normalize_sequential(features: Tensor, lengths: Tensor) -> Tensor:
    """Reference of `normalize`, one utterance after another: (B, T, F)."""
    F = features.shape[2]
    out = torch.zeros_like(features)
    for b, length in enumerate(lengths.tolist()):
        rows = features[b, :length]
        centred = rows - rows.mean(0)
        deviation = features.new_zeros(F)
        if len(rows) > 1:
            deviation = rows.std(0)
        out[b, :length] = centred / (deviation + 1e-5)
    return out
