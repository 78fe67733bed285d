"""What can be transcribed in shards: folders, manifests, lhotse's cuts, tars and sound files."""

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

CONTAINERS = (".tar", ".tar.gz", ".tgz")  # files that hold recordings
MANIFESTS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
KINDS = "a folder, a manifest (.jsonl, .json, .gz of them), a .tar or a sound file"
LINES = "lines with audio_filepath, or lhotse cuts"
HEADER_READERS = 8  # threads that ask files for their length
LONGEST_S = 1e9  # that a manifest may say of a recording: 31 years
UNKNOWN_S = 10.0  # guessed for a recording of unknown length
BYTES_PER_S = 32_000  # guessed for a container: 16 bits at 16 kHz


class Recording(NamedTuple):
    """One recording, or a container of recordings, and what its result is called.

    Args:
        id: Of the result.
        sound: The file, or the part of it.
        planned_s: Seconds, guessed where they are not known.
        state: Size and time of the file; "" where a manifest describes it.
    """

    id: str
    sound: Sound
    planned_s: float = UNKNOWN_S
    state: str = ""


def is_container(path: Path) -> bool:
    """Whether a file of this name holds recordings."""
    return path.name.lower().endswith(CONTAINERS)


def read(inputs: Iterable[Path]) -> Iterator[Recording]:
    """Yield the recordings that `inputs` name, in order.

    Args:
        inputs: Each one of KINDS. A manifest has a JSON object a line: `audio_filepath` or `audio`,
            perhaps `id`, `offset` and `duration` in seconds (NeMo's names), or a lhotse cut of one
            recording. A line with a duration is that part of the file. Paths are relative to the
            manifest's folder or to its parent.

    Raises:
        ValueError: In one line, with the file and the number of the line.
    """
    for given in inputs:
        name = given.name.lower()
        known = name.endswith((*CONTAINERS, *MANIFESTS, *SUFFIXES)) and given.is_file()
        expect(known or given.is_dir(), "files", KINDS, repr(str(given)), "Check the path.")
        if given.is_dir():
            yield from _files(given, _inside(given))
        elif name.endswith(MANIFESTS):
            yield from json_lines(given, _Lines(given.absolute().parent), LINES)
        else:
            yield from _files(given.parent, [Path(given.name)])


def changes(given: Path) -> str:
    """A hash that changes when a file does, or one in a folder: of paths, sizes and times.

    Args:
        given: The file or folder.
    """
    digest = hashlib.sha256()
    for file in [given.absolute(), *sorted(given.absolute().rglob("*"))]:
        if file.is_file():
            digest.update(os.fsencode(f"{file} {_state(file)}\n"))
    return digest.hexdigest()


def _state(file: Path) -> str:
    status = file.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _inside(folder: Path) -> list[Path]:
    """Recordings and containers in a folder, sorted, as paths below it; hidden ones left out."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if is_container(path))
    visible = [path for path in files if "/." not in f"/{path.as_posix()}"]
    return sorted([*listed(folder), *visible])


def _files(folder: Path, names: Iterable[Path]) -> Iterator[Recording]:
    """Yield files that no manifest describes, with the lengths that their headers say."""

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

    Relative paths begin in the manifest's folder, or in that folder's parent. Which of the two, the
    first one decides: to look for millions takes too long.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base: Path | None = None

    def __call__(self, row: dict[str, Any]) -> Recording:
        if "type" in row:
            row, channel = _of_cut(row)
        else:
            channel = row.get("channel")  # None: the mean of all
            fits = channel is None or whole(channel, 0)
            expect(fits, "manifest", "a channel from 0 on", repr(channel))
        audio = row["audio_filepath"] if "audio_filepath" in row else row["audio"]
        start_s = _time(row, "offset")
        duration_s = _time(row, "duration") or None
        name = part_name(audio, start_s, channel)
        sound = Sound(self._path(audio), None, start_s, duration_s, channel)
        return Recording(str(row.get("id", name)), sound, duration_s or UNKNOWN_S)

    def _path(self, audio: str) -> Path:
        if os.path.isabs(audio):  # noqa: PTH117 - a Path takes longer
            return Path(audio)
        if self.base is None:
            in_parent = not (self.folder / audio).exists() and (self.folder.parent / audio).exists()
            self.base = self.folder.parent if in_parent else self.folder
        return self.base / audio


def _time(row: dict[str, Any], name: str) -> float:
    """A time of a line, in seconds; 0 where there is none, and for NeMo's null."""
    value = float(row.get(name) or 0)
    expect(0 <= value <= LONGEST_S, "manifest", f"0 to {LONGEST_S:,.0f} seconds as {name}", value)
    return value


def _of_cut(cut: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """What a lhotse cut says, in the words of a manifest, and its channel; None: all of them."""
    kind, recording = cut["type"], cut.get("recording") or {}
    sources = recording.get("sources", [])
    plain = [one["type"] for one in sources] == ["file"] and not recording.get("transforms")
    wanted = "cuts of one recording in one file, as it was recorded"
    known = kind in ("MonoCut", "MultiCut")
    expect(plain and known, "manifest", wanted, f"a {kind!s:.40} {cut['id']!r:.80}")
    several = len(sources[0].get("channels", [0])) > 1
    row = {
        "id": cut["id"],
        "audio": sources[0]["source"],
        "offset": cut["start"],
        "duration": cut["duration"],
    }
    return row, int(cut["channel"]) if several and kind == "MonoCut" else None


def members(recording: Recording) -> Iterator[Recording]:
    """Yield what a recording stands for: itself, or every recording of a container, in its order.

    Files in a container that no suffix calls sound are left out, and hidden ones. A link has no
    bytes. A container that breaks off, or holds no recording, ends with a recording that cannot be
    opened and says why.

    Args:
        recording: Of a plan.
    """
    path, data = recording.sound.path, recording.sound.data
    if data is not None or not is_container(path):
        yield recording
        return
    found = 0
    try:
        for name, data in _tar(path):
            found += 1
            sound = Sound(path / name, data)
            yield Recording(f"{recording.id}/{name}", sound)
        expect(found > 0, "tar", "sound files", "none")
    except Exception as error:  # of tarfile and zlib, for damaged files
        text = f"audio: {path.name} has {count(found, 'recording')} to read ({message(error)})."
        yield Recording(f"{recording.id}/", Sound(path, b"", error=text))


def _tar(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of the sound files in a tar, plain or gzipped."""
    with tarfile.open(path, "r|*") as tar:
        for member in tar:
            place = PurePosixPath(member.name)
            is_sound = place.suffix.lower() in SUFFIXES and not member.isdir()
            if not is_sound or place.name.startswith("."):  # "._a.wav", which macOS adds to a.wav
                continue
            file = tar.extractfile(member) if member.isfile() else None  # no file: a link
            yield member.name, file.read() if file else b""
