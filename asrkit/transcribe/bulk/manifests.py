"""Inputs of shards: folders, manifests, lhotse cuts, tars and sound files."""

import hashlib
import os
import tarfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from asrkit.files import json_lines
from asrkit.shapes import count, expect, message, whole
from asrkit.sound_files import SUFFIXES, Sound, listed, part_name
from asrkit.sound_readers import seconds

CONTAINERS = (".tar", ".tar.gz", ".tgz")  # files that contain recordings
MANIFESTS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
KINDS = "a folder, a manifest (.jsonl, .json, .gz of them), a .tar or a sound file"
LINES = "lines with audio_filepath, or lhotse cuts"
HEADER_READERS = 8  # threads that read the lengths of files
LONGEST_S = 1e9  # longest time that a manifest may state: 31 years
UNKNOWN_S = 10.0  # estimate for a recording of unknown length
BYTES_PER_S = 32_000  # estimate for a file that is not opened: 16 bits at 16 kHz


class Recording(NamedTuple):
    """One recording, or a container of recordings, and the id of its result.

    Args:
        id: Id of the result.
        sound: The file, or a part of it.
        planned_s: Seconds of audio, estimated if they are not known.
        state: Size and time of the file; "" for a file in a manifest.
    """

    id: str
    sound: Sound
    planned_s: float = UNKNOWN_S
    state: str = ""


def is_container(path: Path) -> bool:
    """Whether a file of this name is a container of recordings."""
    return path.name.lower().endswith(CONTAINERS)


def read(inputs: Iterable[Path]) -> Iterator[Recording]:
    """Yield the recordings in `inputs`, in order.

    Args:
        inputs: Paths, each one of KINDS. A manifest has one JSON object a line: `audio_filepath` or
            `audio`, and optionally `id`, `offset` and `duration` in seconds (NeMo's names), or a
            lhotse cut of one recording. A line with a duration is that part of the file. Paths are
            relative to the manifest's folder or to its parent.

    Raises:
        ValueError: One line with the file and the number of the line.
    """
    for path in inputs:
        name = path.name.lower()
        known = name.endswith((*CONTAINERS, *MANIFESTS, *SUFFIXES)) and path.is_file()
        expect(known or path.is_dir(), "files", KINDS, repr(str(path)), "Check the path.")
        if path.is_dir():
            yield from _files(path, _inside(path))
        elif name.endswith(MANIFESTS):
            yield from json_lines(path, _Lines(path.absolute().parent), LINES)
        else:
            yield from _files(path.parent, [Path(path.name)])


def changes(path: Path) -> str:
    """A hash of paths, sizes and times, which changes with the file or a file in the folder.

    Args:
        path: The file or folder.
    """
    digest = hashlib.sha256()
    for file in [path.absolute(), *sorted(path.absolute().rglob("*"))]:
        if file.is_file():
            digest.update(os.fsencode(f"{file} {_state(file)}\n"))
    return digest.hexdigest()


def _state(file: Path) -> str:
    status = file.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _inside(folder: Path) -> list[Path]:
    """Recordings and containers in a folder, sorted, as paths below it; none that is hidden."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if is_container(path))
    visible = [path for path in files if "/." not in f"/{path.as_posix()}"]
    return sorted([*listed(folder), *visible])


def _files(folder: Path, names: Iterable[Path]) -> Iterator[Recording]:
    """Yield files that are in no manifest, with the lengths in their headers."""

    def recording(name: Path) -> Recording:
        path = (folder / name).absolute()
        if is_container(path):
            planned_s = path.stat().st_size / BYTES_PER_S
        else:
            planned_s = seconds(Sound(path))
        state = _state(path) if path.exists() else ""
        return Recording(name.as_posix(), Sound(path), planned_s or UNKNOWN_S, state)

    with ThreadPoolExecutor(HEADER_READERS) as pool:
        yield from pool.map(recording, names)


class _Lines:
    """Makes a recording of each line of a manifest.

    Relative paths begin in the manifest's folder, or in that folder's parent. The first one decides
    which, since checking millions of paths takes too long.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base: Path | None = None

    def __call__(self, row: dict[str, Any]) -> Recording:
        if "type" in row:
            row, channel = _from_cut(row)
        else:
            channel = row.get("channel")  # None: the mean of all channels
            if channel is not None:
                expect(whole(channel, 0), "manifest", "a channel from 0 on", repr(channel))
        audio = row["audio_filepath"] if "audio_filepath" in row else row["audio"]
        start_s = _time(row, "offset")
        duration_s = _time(row, "duration") or None
        name = part_name(audio, start_s, channel)
        sound = Sound(self._path(audio), None, start_s, duration_s, channel)
        return Recording(str(row.get("id", name)), sound, duration_s or UNKNOWN_S)

    def _path(self, audio: str) -> Path:
        if os.path.isabs(audio):  # noqa: PTH117 - faster than a Path
            return Path(audio)
        if self.base is None:
            in_parent = not (self.folder / audio).exists() and (self.folder.parent / audio).exists()
            self.base = self.folder.parent if in_parent else self.folder
        return self.base / audio


def _time(row: dict[str, Any], name: str) -> float:
    """A time in a line, in seconds; 0 if it is absent, or NeMo's null."""
    value = float(row.get(name) or 0)
    expect(0 <= value <= LONGEST_S, "manifest", f"0 to {LONGEST_S:,.0f} seconds as {name}", value)
    return value


def _from_cut(cut: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """A lhotse cut as a line of a manifest, and its channel; None: the mean of all channels."""
    kind, recording = cut["type"], cut.get("recording") or {}
    sources = recording.get("sources", [])
    plain = [source["type"] for source in sources] == ["file"] and not recording.get("transforms")
    expect(
        plain and kind in ("MonoCut", "MultiCut"),
        "manifest",
        "cuts of one recording in one file, as it was recorded",
        f"a {kind!s:.40} {cut['id']!r:.80}",
    )
    several = len(sources[0].get("channels", [0])) > 1
    row = {
        "id": cut["id"],
        "audio": sources[0]["source"],
        "offset": cut["start"],
        "duration": cut["duration"],
    }
    return row, int(cut["channel"]) if several and kind == "MonoCut" else None


def members(recording: Recording) -> Iterator[Recording]:
    """Yield the recording itself, or, if it is a container, every recording in it, in order.

    Hidden files in a container, and files without the suffix of a sound file, are skipped. A link
    has no bytes. A container that breaks off, or has no recording, ends with a recording that
    cannot be opened, whose error says why.

    Args:
        recording: A recording of a plan.
    """
    path, data = recording.sound.path, recording.sound.data
    if data is not None or not is_container(path):
        yield recording
        return
    number = 0
    try:
        for name, data in _tar(path):
            number += 1
            yield Recording(f"{recording.id}/{name}", Sound(path / name, data))
        expect(number > 0, "tar", "sound files", "none")
    except Exception as error:  # tarfile and zlib raise many kinds for damaged files
        text = f"audio: {path.name} has {count(number, 'recording')} to read ({message(error)})."
        yield Recording(f"{recording.id}/", Sound(path, b"", error=text))


def _tar(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of the sound files in a tar, plain or gzipped."""
    with tarfile.open(path, "r|*") as tar:
        for member in tar:
            place = PurePosixPath(member.name)
            is_sound = place.suffix.lower() in SUFFIXES and not member.isdir()
            if not is_sound or place.name.startswith("."):  # "._a.wav", which macOS adds to a.wav
                continue
            file = tar.extractfile(member) if member.isfile() else None  # None for a link
            yield member.name, file.read() if file else b""
