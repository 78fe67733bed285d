"""Recordings to windows: any file soundfile reads, mono at the model's rate, never more than some
seconds at once.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchaudio.functional import resample

from asrkit.shapes import expect

SUFFIXES = frozenset(
    ".wav .flac .ogg .oga .opus .mp3 .aif .aiff .aifc .au .snd .caf .w64 .rf64 .sph .nist".split()
)
BLOCK_S, MARGIN_S = 10, 1  # a block is resampled with this much of its neighbours
READ_SAMPLES = 2**20  # of all channels together, in one read


@dataclass(frozen=True, kw_only=True)
class Options:
    """How recordings are cut and batched; all times in seconds.

    batch_s: audio in a batch at most, padding counted (one window may be longer). window_s: what is
    longer is heard in windows of this length, `overlap_s` of which each shares with the next.
    timestamps: also words with times and confidences.
    """

    batch_s: float = 120.0
    window_s: float = 30.0
    overlap_s: float = 4.0
    timestamps: bool = False

    def __post_init__(self) -> None:
        expect(self.batch_s > 0, "batch_s", "more than 0 seconds", self.batch_s)
        expect(1 <= self.window_s <= 86_400, "window_s", "1 to 86,400 seconds", self.window_s)
        expect(
            0 <= 2 * self.overlap_s <= self.window_s,
            "overlap_s",
            "0 to half a window",
            self.overlap_s,
        )


def find(paths: str | Path | Iterable[str | Path]) -> list[tuple[Path, Path]]:
    """(file, its name among the results) for each path, or for the only one, in order.

    A folder stands for the sound files under it, at any depth, sorted, hidden ones left out, known
    by their suffix; their names are relative to it. A file is taken whatever its suffix. A folder
    without sound files stands for itself: reading it fails.
    """
    found: list[tuple[Path, Path]] = []
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        inside = [
            file.relative_to(path)
            for file in sorted(path.rglob("*"))
            if file.suffix.lower() in SUFFIXES and file.is_file()
        ]
        seen = [name for name in inside if not any(part.startswith(".") for part in name.parts)]
        found += [(path / name, name) for name in seen] or [(path, Path(path.name))]
    return found


def seconds(path: Path) -> float:
    """Length by the file's header, for plans only: 0 where there is none, and headers may be wrong."""
    import soundfile

    try:
        return soundfile.info(str(path)).duration
    except (soundfile.LibsndfileError, TypeError, ZeroDivisionError):
        return 0.0


def _open(path: Path) -> Any:
    import soundfile

    expect(
        not path.is_dir(),
        "audio",
        "a sound file, or a folder with some",
        repr(str(path)),
        "There is none in it.",
    )
    expect(
        path.is_file(), "audio", "a WAV, FLAC, OGG or MP3 file", repr(str(path)), "Check the path."
    )
    expect(path.stat().st_size > 0, "audio", "a sound file", f"0 bytes in {path.name}")
    try:
        file = soundfile.SoundFile(str(path))
    except (
        soundfile.LibsndfileError,
        TypeError,
    ) as error:  # TypeError: a suffix that promises samples without a header
        why = getattr(error, "error_string", error)  # without the path
        raise ValueError(f"audio: {path.name} cannot be read (libsndfile: {why}).") from None
    expect(
        100 <= file.samplerate <= 1_000_000,
        "audio",
        "100 to 1,000,000 Hz",
        f"{file.samplerate} Hz in {path.name}",
    )
    return file


def _mono(file: Any, path: Path) -> Iterator[Tensor]:
    """The file's samples (S,), channels averaged, chunk by chunk; ValueError where one is not
    finite or the file ends early.
    """
    import soundfile

    done, size = 0, max(1, READ_SAMPLES // file.channels)
    while True:
        try:
            samples = file.read(size, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise ValueError(
                f"audio: {path.name} breaks off after {done / file.samplerate:.2f} s ({error})."
            ) from None
        if not len(samples):
            break
        mono = torch.from_numpy(samples).mean(1)
        if not mono.isfinite().all():
            at = (done + int(mono.isfinite().logical_not().nonzero()[0])) / file.samplerate
            expect(
                False, "audio", "finite samples", f"NaN or infinity at {at:.3f} s of {path.name}"
            )
        done += len(mono)
        yield mono
    expect(done > 0, "audio", "samples", f"none in {path.name}")
    whole = f"{file.frames / file.samplerate:.2f} s, as the header of {path.name} says"
    expect(
        done >= file.frames,
        "audio",
        whole,
        f"{done / file.samplerate:.2f} s",
        "The file is truncated.",
    )


def convert(samples: Tensor, rate: int, rate_hz: int) -> Tensor:
    """`samples` (S,) of `rate` Hz at `rate_hz`; S a whole number of seconds, the first and last of
    which are margins.
    """
    if rate * rate_hz <= 2e7 * math.gcd(rate, rate_hz) ** 2:
        return resample(samples, rate, rate_hz)
    # resample() would tabulate as many taps as that product: gigabytes at 22,051 Hz. A Fourier
    # transform takes its input for
    # periodic, and rings where the end meets the start: in the margins.
    return torch.fft.irfft(torch.fft.rfft(samples), len(samples) // rate * rate_hz) * (
        rate_hz / rate
    )


def _resampled(chunks: Iterable[Tensor], rate: int, rate_hz: int) -> Iterator[Tensor]:
    """`chunks` of one signal at `rate_hz`, without seams: blocks of whole seconds, on which both
    rates have whole samples.
    """
    block, margin, skip = BLOCK_S * rate, MARGIN_S * rate, MARGIN_S * rate_hz
    held = torch.zeros(margin)
    for chunk in chunks:
        held = torch.cat([held, chunk])
        while len(held) >= block + 2 * margin:
            yield convert(held[: block + 2 * margin], rate, rate_hz)[skip:-skip]
            held = held[block:]
    left = len(held) - margin  # at most a block and a margin
    padded = torch.cat([held, torch.zeros(margin + -left % rate)])
    yield convert(padded, rate, rate_hz)[skip : skip + math.ceil(left * rate_hz / rate)]


def blocks(path: Path, rate_hz: int) -> Iterator[Tensor]:
    """Mono samples (S,) float32 at `rate_hz` of any file soundfile reads, in order; ValueError says
    what is wrong with it.
    """
    with _open(path) as file:
        same = file.samplerate == rate_hz
        yield from (
            _mono(file, path) if same else _resampled(_mono(file, path), file.samplerate, rate_hz)
        )


def read_audio(path: Path, rate_hz: int) -> Tensor:
    """Mono waveform (S,) float32 at `rate_hz` of any file soundfile reads; ValueError says what is
    wrong with it.
    """
    return torch.cat([*blocks(path, rate_hz)])


def windows(
    chunks: Iterable[Tensor], size: int, overlap: int
) -> Iterator[tuple[int, Tensor, bool]]:
    """(first sample, samples (S,), whether it is the last) of windows of at most `size`, neighbours
    sharing `overlap` samples.

    The last one holds what is left, more than `overlap`; a signal of at most `size` samples is one
    window.
    """
    parts, start = [torch.zeros(0)], 0
    for chunk in chunks:
        parts.append(chunk)
        if (
            sum(map(len, parts)) > size
            # joined once a window: chunk by chunk, an hour in one window would be copied for minutes
        ):
            held = torch.cat(parts)
            while len(held) > size:
                yield start, held[:size].clone(), False  # a view would keep all of `held` in memory
                held, start = held[size - overlap :], start + size - overlap
            parts = [held]
    yield start, torch.cat(parts), True


def fits(lengths: Sequence[int], budget: float) -> list[list[int]]:
    """Positions of `lengths`, longest first, in batches whose count x longest is at most `budget`,
    or that hold one.
    """
    plan: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not plan or (len(plan[-1]) + 1) * lengths[plan[-1][0]] > budget:
            plan.append([])
        plan[-1].append(row)
    return plan
