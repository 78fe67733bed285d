"""User-supplied audio: what a recording is, and the recordings in a folder."""

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

UNREAD = frozenset(  # libsndfile, which lhotse uses, decodes none of these
    ".m4a .m4b .mp4 .m4v .mov .3gp .3g2 .aac .ac3 .wma .asf .webm .mkv .mka .amr .avi".split()
)
SUFFIXES = UNREAD | frozenset(
    ".wav .wave .bwf .rf64 .w64 .flac .ogg .oga .opus .mp3 .mp2 .aif .aiff .aifc .au .snd .caf "
    ".sph .nist".split()
)
STDIN = Path("-")
CANCELLED = 0.1  # share of the power of independent channels; less means that channels cancel
CANCELLED_S = 0.25  # length of the pieces that are checked for this


@dataclass(frozen=True)
class Sound:
    """A recording to open: a sound file or its bytes, whole or in part.

    Args:
        path: The file. With `data`, only a name for results and errors.
        data: The bytes of a sound file; None reads the file `path`.
        start_s: Start of the part, in seconds.
        duration_s: Length of the part in seconds; None for all that follows.
        channel: Number of the channel, from 0; None for the mean of all.
        error: Why the recording cannot be opened, in one line; "" if no reason is known.
    """

    path: Path
    data: bytes | None = None
    start_s: float = 0.0
    duration_s: float | None = None
    channel: int | None = None
    error: str = ""


def listed(folder: Path) -> list[Path]:
    """Recordings in a folder at any depth, as sorted paths relative to `folder`.

    These are files with a suffix of SUFFIXES, broken links with such names, and subfolders that
    cannot be read. Opening one of the last two kinds fails with a reason. Links to folders are
    followed, each folder once. Hidden files and folders are omitted.

    Args:
        folder: The folder. The result is empty for a file or a missing path.
    """
    files, closed = _walk(folder)
    recordings = [path for path in files if path.suffix.lower() in SUFFIXES] + closed
    return sorted(path.relative_to(folder) for path in recordings if path != folder)


def left_out(paths: Iterable[str | Path]) -> Counter[str]:
    """Number of files of each suffix in these folders that `listed` omits."""
    suffixes = (path.suffix.lower() for folder in paths for path in _walk(Path(folder))[0])
    return Counter(suffix for suffix in suffixes if suffix not in SUFFIXES)


def _walk(folder: Path) -> tuple[list[Path], list[Path]]:
    """Files below a folder that are not hidden, and subfolders that cannot be read."""
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
    """(path, its name in the results) of each recording, in order.

    A folder is replaced by the recordings in it, as `listed` returns them; those that cannot be
    read fail later. A file is taken whatever its suffix. A folder without recordings is returned
    itself, and fails when it is read. "-" is standard input.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    recordings: list[tuple[Path, Path]] = []
    for path in map(Path, paths):
        inside = [(path / name, name) for name in listed(path)]
        recordings += inside or [(path, Path("stdin" if path == STDIN else path.name))]
    return recordings


def sound_of(path: Path) -> Sound:
    """The recording at a path. Standard input and pipes are read to their end at once."""
    try:
        if path == STDIN:
            piped = sys.stdin is not None and not sys.stdin.isatty()
            expect(piped, "audio", "a recording on standard input", "none", "Try - < talk.wav.")
            return Sound(path, sys.stdin.buffer.read())
        return Sound(path, path.read_bytes() if path.is_fifo() else None)
    except (OSError, ValueError) as error:
        return Sound(path, error=message(error))


def part_name(audio: str, start_s: float, channel: int | None) -> str:
    """Name of a manifest's line without an id: "a.wav@2.0#1", since several may use one file.

    Args:
        audio: The file, as written in the line.
        start_s: Start of the part, in seconds.
        channel: Number of its channel; None for the mean of all.
    """
    place = f"@{start_s}" if start_s else ""
    return audio + place + ("" if channel is None else f"#{channel}")


def mean_of_channels(channels: "Tensor", rate_hz: int) -> tuple["Tensor", list[float]]:
    """The mean (S,) of channels, and the times in seconds at which one channel replaces it.

    A loud channel replaces the mean where channels cancel each other, as in antiphase: in each
    piece whose mean has less than a tenth of the power that the mean of independent channels has.

    Args:
        channels: Samples (S, C).
        rate_hz: Sample rate.
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
            loud = powers >= powers.max() / 2  # the first of them, so that pieces do not alternate
            mean.copy_(piece[:, int(loud.nonzero()[0])])
            cancelled_s.append(start / rate_hz)
    return mono, cancelled_s
