"""Sound files of people: what a recording is, and which a folder holds."""

import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asrkit.shapes import expect, message

if TYPE_CHECKING:
    from torch import Tensor

UNREAD = frozenset(  # libsndfile, with which lhotse reads, decodes none of these
    ".m4a .m4b .mp4 .m4v .mov .3gp .3g2 .aac .ac3 .wma .asf .webm .mkv .mka .amr .avi".split()
)
SUFFIXES = UNREAD | frozenset(
    ".wav .wave .bwf .rf64 .w64 .flac .ogg .oga .opus .mp3 .mp2 .aif .aiff .aifc .au .snd .caf "
    ".sph .nist".split()
)
STDIN = Path("-")
CANCELLED = 0.1  # of the power of independent channels
CANCELLED_S = 0.25  # of a piece in which they are compared


@dataclass(frozen=True)
class Sound:
    """A recording that can be opened: a sound file or the bytes of one, whole or a part of it.

    Args:
        path: The file. With `data`, only what the recording is called in results and errors.
        data: The bytes of a sound file; None: those of the file `path`.
        start_s: Where the part begins, in seconds.
        duration_s: Its length in seconds; None: to the end of the recording.
        channel: Which channel, from 0; None: the mean of all.
        error: Why the recording cannot be opened, in one line; "": it can be tried.
    """

    path: Path
    data: bytes | None = None
    start_s: float = 0.0
    duration_s: float | None = None
    channel: int | None = None
    error: str = ""


def listed(folder: Path) -> list[Path]:
    """What a folder holds at any depth that is a recording, sorted, as paths below `folder`.

    These are files with a suffix of SUFFIXES, links of such names to nothing, and subfolders that
    cannot be read. Opening one of the last two kinds fails with a reason. Links to folders are
    followed, each folder once. Hidden files and folders are left out.

    Args:
        folder: The folder. A file, or nothing, holds no recordings.
    """
    files, closed = _walk(folder)
    found = [path for path in files if path.suffix.lower() in SUFFIXES] + closed
    return sorted(path.relative_to(folder) for path in found if path != folder)


def left_out(paths: Iterable[str | Path]) -> Counter[str]:
    """How many files of each suffix `listed` leaves out of these folders."""
    suffixes = (path.suffix.lower() for folder in paths for path in _walk(Path(folder))[0])
    return Counter(suffix for suffix in suffixes if suffix not in SUFFIXES)


def _walk(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files below a folder that are not hidden, and folders that cannot be read."""
    closed: list[OSError] = []
    files = []
    seen = set[str]()
    for place, folders, names in os.walk(folder, onerror=closed.append, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(place, name) for name in names if not name.startswith("."))
        files += [path for path in paths if path.is_file() or path.is_symlink()]
    return files, [Path(error.filename) for error in closed]


def find(paths: str | Path | Iterable[str | Path]) -> list[tuple[Path, Path]]:
    """(file, its name among the results) for each path, in order.

    A folder stands for the recordings under it, as `listed` returns them. Some of them cannot be
    read, and fail in their turn. A file is taken whatever its suffix. A folder without recordings
    stands for itself: reading it fails. "-" is standard input.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    found: list[tuple[Path, Path]] = []
    for path in map(Path, paths):
        names = [(path / name, name) for name in listed(path)]
        found += names or [(path, Path("stdin" if path == STDIN else path.name))]
    return found


def sound_of(path: Path) -> Sound:
    """The recording of a path; standard input and pipes are read now, to their end."""
    try:
        if path == STDIN:
            there = sys.stdin is not None and not sys.stdin.isatty()
            expect(there, "audio", "a recording on standard input", "none", "Try - < talk.wav.")
            return Sound(path, sys.stdin.buffer.read())
        return Sound(path, path.read_bytes() if path.is_fifo() else None)
    except (OSError, ValueError) as error:
        return Sound(path, error=message(error))


def part_name(audio: str, start_s: float, channel: int | None) -> str:
    """What a manifest's line without an id is called, as several may name one file: "a.wav@2.0#1".

    Args:
        audio: The file, as the line has it.
        start_s: Where the part begins.
        channel: Its channel; None: the mean of all.
    """
    place = f"@{start_s}" if start_s else ""
    return audio + place + ("" if channel is None else f"#{channel}")


def mean_of_channels(channels: "Tensor", rate_hz: int) -> tuple["Tensor", list[float]]:
    """The mean (S,) of channels, and where it is a loud one instead, in seconds.

    That is where channels cancel each other, as in antiphase: in each piece whose mean has a tenth
    or less of the power that independent channels would leave.

    Args:
        channels: Samples (S, C).
        rate_hz: Of the samples.
    """
    mono = channels.mean(1)
    size = int(CANCELLED_S * rate_hz)
    cancelled_s = []
    for start in range(0, len(mono), size):
        piece = channels[start : start + size]
        mean = mono[start : start + size]
        powers = piece.square().mean(0)
        independent = float(powers.sum()) / len(powers) ** 2
        if float(mean.square().mean()) < CANCELLED * independent:
            loud = powers >= powers.max() / 2  # the first of them, lest pieces take turns
            mean.copy_(piece[:, int(loud.nonzero()[0])])
            cancelled_s.append(start / rate_hz)
    return mono, cancelled_s
