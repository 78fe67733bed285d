"""What is to be transcribed in bulk: recordings of folders, manifests, cuts and containers."""

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from asrkit.shapes import expect, whole
from asrkit.sound_files import SUFFIXES, UNREAD, Sound, listed, seconds

CONTAINERS = (".tar", ".tar.gz", ".tgz")  # files that hold recordings
MANIFESTS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
KINDS = "a folder, a manifest (.jsonl, .json, .gz of them), a .tar or a sound file"
HEADER_READERS = 8  # threads that ask files for their length
# What a damaged manifest makes its readers raise.
UNREADABLE = (
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    OSError,
    EOFError,
    zlib.error,
)
LONGEST_S = 1e9  # that a manifest may say of a recording: 31 years
WHOLE_CUT_S = 0.01  # a cut that covers its recording but for this is the whole recording


class Recording(NamedTuple):
    """What a manifest or a folder says of one recording, or of a container of recordings.

    `duration_s` None: not known, and all that is there from `start_s` on. `channel` None: the mean
    of all channels. `state` is size and time of change of a file that no manifest describes.
    """

    id: str
    path: str
    start_s: float = 0.0
    duration_s: float | None = None
    channel: int | None = None
    state: tuple[int, int] | None = None

    @property
    def is_container(self) -> bool:
        """Whether the file holds recordings."""
        return self.path.lower().endswith(CONTAINERS)


def read(inputs: Iterable[str | Path]) -> Iterator[Recording]:
    """Yield the recordings that `inputs` name, in order, with their lengths where they are known.

    Args:
        inputs: Each one of KINDS. A manifest has a JSON object a line: `audio_filepath` or `audio`,
            perhaps `id`, `offset` and `duration` in seconds (NeMo's names), or a lhotse cut of one
            recording. A line with a duration is that part of the file. Paths are relative to the
            manifest's folder or to its parent.

    Raises:
        ValueError: In one line, with the file and the number of the line.
    """
    for given in map(Path, inputs):
        name = given.name.lower()
        if given.is_dir():
            yield from _folder(given)
        elif name.endswith(MANIFESTS):
            expect(given.is_file(), "files", "a manifest", repr(str(given)), "Check the path.")
            yield from _manifest(given)
        else:
            known = name.endswith(CONTAINERS) or given.suffix.lower() in SUFFIXES | UNREAD
            expect(known, "files", KINDS, repr(str(given)))
            expect(given.is_file(), "files", KINDS, repr(str(given)), "Check the path.")
            yield from _files([(given, given.name)])


def state(given: Path) -> list[Any]:
    """What changes when an input does: its path and its size and time of change.

    For a folder, a hash of names, sizes and times of all recordings in it.
    """
    path = str(given.absolute())
    if not given.is_dir():
        return [path, *file_state(given)]
    digest = hashlib.sha256()
    for file, name in _listed(given):
        digest.update(f"{name} {file_state(file)}\n".encode(errors="surrogateescape"))
    return [path, digest.hexdigest()]


def file_state(path: Path) -> tuple[int, int]:
    """Size, and time of change in nanoseconds; zeros where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _listed(folder: Path) -> list[tuple[Path, str]]:
    """(file, its name below `folder`) of each recording and container in a folder, sorted."""
    names = [name.as_posix() for name in listed(folder)]
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in files:
            if file.lower().endswith(CONTAINERS) and not file.startswith("."):
                names.append(Path(place, file).relative_to(folder).as_posix())
    return [(folder / name, name) for name in sorted(names)]


def _folder(folder: Path) -> Iterator[Recording]:
    found = _listed(folder)
    expect(bool(found), "files", "recordings or .tar", f"none in {str(folder)!r}")
    return _files(found)


def _files(found: Iterable[tuple[Path, str]]) -> Iterator[Recording]:
    """Yield files that no manifest describes, with the lengths that their headers say."""

    def recording(entry: tuple[Path, str]) -> Recording:
        path, name = entry
        one = Recording(name, str(path.absolute()), state=file_state(path))
        if one.is_container:
            return one
        return one._replace(duration_s=seconds(Sound(path)) or None)

    with ThreadPoolExecutor(HEADER_READERS) as pool:
        yield from pool.map(recording, found)


def _manifest(path: Path) -> Iterator[Recording]:
    """Yield the recording of each line of a manifest."""
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    complete = _Completer(path.absolute().parent)
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):  # noqa: B007 - errors tell it
                text = line.strip()
                if text:
                    yield _line(json.loads(text), complete)
    except (*UNREADABLE, ValueError, RecursionError) as error:
        place = f"{path}:{max(1, number)}"
        if str(error).startswith("manifest: "):
            raise ValueError(f"{error} See {place}.") from None
        got = f"{type(error).__name__}: {error}".splitlines()[0]
        if isinstance(error, json.JSONDecodeError):
            got = f"no JSON ({error.msg}, column {error.colno})"
        wanted = "lines with audio_filepath, or lhotse cuts"
        raise ValueError(f"manifest: expected {wanted}, got {got} at {place}.") from None


class _Completer:
    """Completes paths of a manifest: relative ones begin in its folder, or in that one's parent.

    Which of the two, the first relative path decides: to look for millions takes too long.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = ""

    def __call__(self, path: str) -> str:
        is_path = isinstance(path, str) and bool(path)
        expect(is_path, "manifest", "the path of a sound file", repr(path)[:80])
        if path[0] == "/" or os.path.isabs(path):  # noqa: PTH117 - a Path of each takes too long
            return path
        if not self.base:
            in_parent = not (self.folder / path).exists() and (self.folder.parent / path).exists()
            self.base = str(self.folder.parent if in_parent else self.folder)
        return f"{self.base}/{path}"


def _line(row: Any, complete: Callable[[str], str]) -> Recording:
    """The recording of a line's JSON object."""
    expect(isinstance(row, dict), "manifest", "objects", type(row).__name__)
    if "recording" in row or "type" in row:
        return _cut(row, complete)
    path = row["audio_filepath"] if "audio_filepath" in row else row["audio"]
    start_s = _time(row["offset"], "offset") if "offset" in row else 0.0
    duration_s = _time(row["duration"], "duration") if "duration" in row else 0.0
    name = row.get("id")
    if name is None:
        name = f"{path}@{start_s}" if start_s else path  # several lines may name one file
    return Recording(str(name), complete(path), start_s, duration_s or None)


def _time(value: Any, name: str) -> float:
    """`value` in seconds; 0.0 for None, which NeMo writes for what is not known."""
    if value is None:
        return 0.0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    wanted = f"0 to {LONGEST_S:,.0f} seconds as {name}"
    expect(is_number and 0 <= value <= LONGEST_S, "manifest", wanted, repr(value)[:80])
    return float(value)


def _cut(row: dict[str, Any], complete: Callable[[str], str]) -> Recording:
    """The part of a recording that a lhotse cut is."""
    kind = row.get("type", "MonoCut")
    known = kind in ("MonoCut", "MultiCut") and isinstance(row.get("recording"), dict)
    expect(known, "manifest", "cuts of one recording", f"a {kind!s:.40} {row.get('id')!r:.80}")
    recording = row["recording"]
    sources = recording["sources"]
    is_file = len(sources) == 1 and sources[0]["type"] == "file"
    expect(is_file, "manifest", "cuts with audio in one file", f"others for {row.get('id')!r:.80}")
    transforms = recording.get("transforms")
    got = f"transforms of {row['id']!r:.80}"
    expect(not transforms, "manifest", "cuts as they were recorded", got)
    start_s = _time(row["start"], "start")
    duration_s = _time(row["duration"], "duration")
    channel = row.get("channel")
    if kind == "MonoCut" and channel is not None and not whole(channel, 0):
        got = f"{channel!r:.40} of {row['id']!r:.80}"
        expect(False, "manifest", "the number of a channel, from 0", got)
    if kind == "MultiCut" or len(sources[0].get("channels", [0])) == 1:
        channel = None
    if start_s == 0:
        whole_s = _time(recording["duration"], "duration of the recording")
        if 0 < whole_s < duration_s + WHOLE_CUT_S:
            duration_s = whole_s
    return Recording(str(row["id"]), complete(sources[0]["source"]), start_s, duration_s, channel)
