"""Sound in, text out: features, model, decoder in one natural line."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torchaudio.functional import resample

from asrkit.decoders import ctc_greedy, transducer_greedy
from asrkit.decoders.hypotheses import Hypotheses
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import Checkpoint, TransducerModel
from asrkit.shapes import expect


@torch.inference_mode()
def recognize(checkpoint: Checkpoint, waveforms: Tensor, lengths: Tensor, *, max_symbols: int = 10) -> Hypotheses:
    """Greedy hypotheses for waveforms (B, S) at the model's rate with lengths (B,) in samples."""
    config, model = FeatureConfig(**checkpoint.features), checkpoint.model
    device = next(model.parameters()).device
    features, frames = log_mel(waveforms.to(device), lengths.to(device), config=config)
    if isinstance(model, TransducerModel):
        encoded, frames, _ = model.encode(features, frames)
        return transducer_greedy(model, encoded, frames, max_symbols=max_symbols)
    return ctc_greedy(*model(features, frames))


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """What became of one file: its text and times in seconds, or the error that stopped it."""

    path: Path
    text: str = ""
    audio_s: float = 0.0
    compute_s: float = 0.0
    error: str = ""


def read_audio(path: Path, rate_hz: int) -> Tensor:
    """Mono waveform (S,) float32 at `rate_hz` of any file soundfile reads; ValueError says what is wrong with it."""
    import soundfile

    expect(path.is_file(), "audio", "a WAV, FLAC, OGG or MP3 file", repr(str(path)), "Check the path.")
    try:
        samples, rate = soundfile.read(str(path), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"audio: {path.name} cannot be read ({error}).") from None
    mono = torch.from_numpy(samples).mean(1)
    got = f"{len(mono)} samples" if mono.isfinite().all() else "NaN or infinity"
    expect(len(mono) > 0 and got[0] != "N", "audio", "finite samples", got, f"See {path.name}.")
    if rate * rate_hz > 2e7 * math.gcd(rate, rate_hz) ** 2:  # resample() would tabulate as many taps: gigabytes at 22,051 Hz
        return torch.fft.irfft(torch.fft.rfft(mono), max(1, len(mono) * rate_hz // rate)) * (rate_hz / rate)
    return mono if rate == rate_hz else resample(mono, rate, rate_hz)


def transcribe(checkpoint: Checkpoint, paths: Sequence[Path]) -> Iterator[Transcript]:
    """One `Transcript` a file, in order; a broken file yields its error and the rest goes on."""
    for path in paths:
        start = time.perf_counter()
        try:
            waveform = read_audio(Path(path), FeatureConfig(**checkpoint.features).rate_hz)
            tokens = recognize(checkpoint, waveform[None], torch.tensor([len(waveform)])).tokens()[0]
        except (ValueError, TypeError, RuntimeError) as error:  # a foreign header; no memory for hours of speech
            yield Transcript(path=Path(path), error=" ".join(str(error).split()))
            continue
        rate = FeatureConfig(**checkpoint.features).rate_hz
        yield Transcript(
            path=Path(path), text=checkpoint.tokenizer.decode(tokens), audio_s=len(waveform) / rate,
            compute_s=time.perf_counter() - start,
        )  # fmt: skip
