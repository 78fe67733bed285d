"""Sound files of any format that soundfile reads, as mono samples at the model's rate.

A file is read in blocks of some seconds, so memory does not grow with its length.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchaudio.functional import resample

from asrkit.shapes import expect
from asrkit.sound_files import listed, native, open_sound

BLOCK_S = 10  # a block is resampled with MARGIN_S of its neighbours
MARGIN_S = 1
READ_SAMPLES = 2**20  # of all channels together, in one read


def find(paths: str | Path | Iterable[str | Path]) -> list[tuple[Path, Path]]:
    """(file, its name among the results) for each path, in order.

    A folder stands for the recordings under it, as `sound_files.listed` returns them. Some of them
    cannot be read, and fail in their turn. A file is taken whatever its suffix. A folder without
    recordings stands for itself: reading it fails.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    recordings: list[tuple[Path, Path]] = []
    for path in map(Path, paths):
        names = listed(path)
        if names:
            recordings += [(path / name, name) for name in names]
        else:
            recordings.append((path, Path(path.name)))
    return recordings


def seconds(path: Path) -> float:
    """Length by the file's header, 0 where it has none. For progress only: headers may be wrong."""
    import soundfile

    try:
        return soundfile.info(native(path)).duration
    except (soundfile.LibsndfileError, TypeError, ZeroDivisionError):
        return 0.0


def _mono(file: Any, path: Path) -> Iterator[Tensor]:
    """Yield the file's samples (S,), channels averaged, chunk by chunk.

    ValueError where a sample is not finite, or the file ends earlier than its header says.
    """
    import soundfile

    done = 0
    size = max(1, READ_SAMPLES // file.channels)
    while True:
        try:
            samples = file.read(size, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            at_s = done / file.samplerate
            raise ValueError(
                f"audio: {path.name} breaks off after {at_s:.2f} s ({error})."
            ) from None
        if not len(samples):
            break
        mono = torch.from_numpy(samples).mean(1)
        broken = mono.isfinite().logical_not()
        if broken.any():
            first_broken = int(broken.nonzero()[0])
            at_s = (done + first_broken) / file.samplerate
            place = f"NaN or infinity at {at_s:.3f} s of {path.name}"
            expect(False, "audio", "finite samples", place)
        done += len(mono)
        yield mono
    expect(done > 0, "audio", "samples", f"none in {path.name}")
    promised_s = file.frames / file.samplerate
    read_s = done / file.samplerate
    expect(
        done >= file.frames,
        "audio",
        f"{promised_s:.2f} s, as the header of {path.name} says",
        f"{read_s:.2f} s",
        "The file is truncated.",
    )


def convert(samples: Tensor, rate: int, rate_hz: int) -> Tensor:
    """`samples` (S,) at another sampling rate.

    Args:
        samples: whole seconds; the first and last are margins, which may ring.
        rate: their sampling rate in Hz.
        rate_hz: the sampling rate of the result.
    """
    if rate * rate_hz <= 2e7 * math.gcd(rate, rate_hz) ** 2:
        return resample(samples, rate, rate_hz)
    # resample() would tabulate as many taps as that product: gigabytes at 22,051 Hz. A Fourier
    # transform takes its input for periodic, and rings where the end meets the start: in the
    # margins.
    size = len(samples) // rate * rate_hz
    spectrum = torch.fft.rfft(samples)
    resampled = torch.fft.irfft(spectrum, size)
    return resampled * (rate_hz / rate)


def _resampled(chunks: Iterable[Tensor], rate: int, rate_hz: int) -> Iterator[Tensor]:
    """Yield `chunks` of one signal at `rate_hz`, without seams.

    Blocks are whole seconds, on which both rates have whole samples.
    """
    block = BLOCK_S * rate
    margin = MARGIN_S * rate
    with_margins = block + 2 * margin
    skip = MARGIN_S * rate_hz
    held = torch.zeros(margin)
    for chunk in chunks:
        held = torch.cat([held, chunk])
        while len(held) >= with_margins:
            converted = convert(held[:with_margins], rate, rate_hz)
            yield converted[skip:-skip]
            held = held[block:]
    left = len(held) - margin  # at most a block and a margin
    to_whole_second = -left % rate
    padding = torch.zeros(margin + to_whole_second)
    converted = convert(torch.cat([held, padding]), rate, rate_hz)
    size = math.ceil(left * rate_hz / rate)
    yield converted[skip : skip + size]


def blocks(path: Path, rate_hz: int) -> Iterator[Tensor]:
    """Yield a file's mono samples (S,) float32 at `rate_hz`, in order.

    Raises ValueError with one line that says what is wrong with the file.
    """
    with open_sound(path) as file:
        chunks = _mono(file, path)
        if file.samplerate != rate_hz:
            chunks = _resampled(chunks, file.samplerate, rate_hz)
        yield from chunks


def read_audio(path: Path, rate_hz: int) -> Tensor:
    """Mono waveform (S,) float32 at `rate_hz` of any file that soundfile reads.

    Raises ValueError with one line that says what is wrong with the file.
    """
    return torch.cat([*blocks(path, rate_hz)])
