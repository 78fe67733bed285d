"""Sound files of any format that soundfile reads, as mono samples at the model's rate.

A file is read in blocks of some seconds, so memory does not grow with its length.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchaudio.functional import resample

from asrkit.shapes import expect

SUFFIXES = frozenset(
    ".wav .flac .ogg .oga .opus .mp3 .aif .aiff .aifc .au .snd .caf .w64 .rf64 .sph .nist".split()
)
UNREADABLE = frozenset(".m4a .mp4 .aac .wma .webm .mkv .mka .amr".split())  # libsndfile reads none
BLOCK_S = 10  # a block is resampled with MARGIN_S of its neighbours
MARGIN_S = 1
# Bytes of samples in a WAV, AIFF or AU file by its header, and those that are there.
PROMISED = re.compile(r"(?:data|SSND|Data Size) *: (\d+) \(should be (\d+)\)")
UNKNOWN_SIZE = 0x7FFF0000
READ_SAMPLES = 2**20  # of all channels together, in one read


def find(paths: str | Path | Iterable[str | Path]) -> list[tuple[Path, Path]]:
    """(file, its name among the results) for each path, in order.

    A folder stands for the sound files under it, at any depth, sorted, recognised by their suffix,
    hidden ones left out; their names are relative to the folder. A file is taken whatever its
    suffix. A folder without sound files stands for itself: reading it fails.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    recordings: list[tuple[Path, Path]] = []
    for path in map(Path, paths):
        names = _sound_files(path)
        if names:
            recordings += [(path / name, name) for name in names]
        else:
            recordings.append((path, Path(path.name)))
    return recordings


def _sound_files(folder: Path) -> list[Path]:
    """The sound files under `folder`, relative to it; none where it is a file."""
    names = []
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if not hidden and file.suffix.lower() in SUFFIXES and file.is_file():
            names.append(name)
    return names


def _native(path: Path) -> str | bytes:
    """The path as soundfile takes it: bytes on POSIX, where a name need not be valid UTF-8."""
    return os.fsencode(path) if os.name == "posix" else str(path)


def seconds(path: Path) -> float:
    """Length by the file's header, 0 where it has none. For progress only: headers may be wrong."""
    import soundfile

    try:
        return soundfile.info(_native(path)).duration
    except (soundfile.LibsndfileError, TypeError, ZeroDivisionError):
        return 0.0


def _open(path: Path) -> Any:
    """The opened soundfile.SoundFile; ValueError says what is wrong with the file."""
    import soundfile

    is_folder = path.is_dir()
    wanted = "a sound file, or a folder with some"
    expect(not is_folder, "audio", wanted, repr(str(path)), "There is none in it.")
    wanted = "a WAV, FLAC, OGG or MP3 file"
    expect(path.is_file(), "audio", wanted, repr(str(path)), "Check the path.")
    expect(path.stat().st_size > 0, "audio", "a sound file", f"0 bytes in {path.name}")
    try:
        file = soundfile.SoundFile(_native(path))
    except (soundfile.LibsndfileError, TypeError) as error:
        # TypeError: a suffix that promises samples without a header
        reason = getattr(error, "error_string", error)  # without the path
        remedy = ""
        if path.suffix.lower() in UNREADABLE:
            remedy = " Convert it first: ffmpeg -i IN OUT.wav."
        message = f"audio: {path.name} cannot be read (libsndfile: {reason}).{remedy}"
        raise ValueError(message) from None
    rate = file.samplerate
    usable = 100 <= rate <= 1_000_000
    expect(usable, "audio", "100 to 1,000,000 Hz", f"{rate} Hz in {path.name}")
    whole = not _is_cut(file.extra_info)
    expect(whole, "audio", "a whole file", f"a part of {path.name}", "The file is truncated.")
    return file


def _is_cut(log: str) -> bool:
    """Whether libsndfile's log of a file says that its end is missing.

    libsndfile shortens the number of frames to what is there, and only its log tells. A stream
    whose writer did not know its length has a size near 2^31 or 2^32 in its header, and is whole.
    """
    if "lacks an end-of-stream bit" in log:
        return True
    sizes = PROMISED.search(log)
    return sizes is not None and int(sizes[2]) < int(sizes[1]) < UNKNOWN_SIZE


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
    with _open(path) as file:
        chunks = _mono(file, path)
        if file.samplerate != rate_hz:
            chunks = _resampled(chunks, file.samplerate, rate_hz)
        yield from chunks


def read_audio(path: Path, rate_hz: int) -> Tensor:
    """Mono waveform (S,) float32 at `rate_hz` of any file that soundfile reads.

    Raises ValueError with one line that says what is wrong with the file.
    """
    return torch.cat([*blocks(path, rate_hz)])
