"""Recordings inside containers: tars (WebDataset, lhotse's Shar) and Parquet with audio bytes.

A container is read once, from its beginning to its end.
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from asrkit.shapes import expect
from asrkit.sound_files import SUFFIXES, UNREAD, Sound
from asrkit.transcribe.bulk.inputs import Recording

ROWS = 16  # of a Parquet file in memory at once
AUDIO_COLUMNS = ("audio", "bytes")  # that hold sound files, the first one there is
ID_COLUMNS = ("id", "key", "__key__", "path")


class Entry(NamedTuple):
    """One recording of a shard: what its result is called, and how it is opened."""

    id: str
    source: str  # the file: of the recording itself, or of its container
    start_s: float
    sound: Sound


def entries(recording: Recording) -> Iterator[Entry]:
    """Yield what a recording stands for: itself, or every recording of a container, in its order.

    Files in a container that no suffix calls sound are left out, and hidden ones. A container that
    breaks off, or holds no recording, ends with an entry that cannot be opened and says why.

    Args:
        recording: Of a plan.

    Raises:
        ValueError: It is a Parquet file, and pyarrow is not installed.
    """
    if recording.is_container:
        yield from _members(recording)
    else:
        yield _single(recording)


def _single(recording: Recording) -> Entry:
    """The entry of a recording that is a sound file, or a part of one."""
    sound = Sound(
        Path(recording.path), None, recording.start_s, recording.duration_s, recording.channel
    )
    if recording.state is not None:  # no manifest says its length: the header's is for plans only
        sound = Sound(Path(recording.path))
    return Entry(recording.id, recording.path, recording.start_s, sound)


def _members(container: Recording) -> Iterator[Entry]:
    """Yield the entry of each recording in a container, and one that says what it lacks, if any."""
    read = _tar
    if container.path.lower().endswith(".parquet"):
        parquet()  # now: without the package no row can be read, which is no fault of the file's
        read = _parquet
    path = Path(container.path)
    seen: set[str] = set()
    why = ""
    try:
        for name, data in read(path):
            yield _member(container, name, data, seen)
    except Exception as error:  # classes of tarfile, zlib and pyarrow, for damaged files
        why = _reason(error)
    if not seen:
        why = why or "it holds no recording"
        message = f"audio: {path.name} has no recording to read ({why})."
    elif why:
        message = f"audio: {path.name} breaks off after {len(seen)} ({why})."
    else:
        return
    yield Entry(f"{container.id}/", container.path, 0.0, Sound(path, error=message))


def _reason(error: Exception) -> str:
    """What an error says, in one line; asrkit's own say it without the name of their class."""
    text = str(error)
    if not isinstance(error, ValueError):
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _member(recording: Recording, name: str, data: bytes | None, seen: set[str]) -> Entry:
    """The entry of a container's member, an error for one without bytes or with a name twice."""
    label = name
    error = ""
    if name in seen:
        label = f"{name}#{len(seen)}"
        error = f"audio: {Path(recording.path).name} has {name!r} twice."
    elif data is None:
        error = f"audio: {Path(recording.path).name} has no bytes for {name!r}."
    seen.add(label)
    path = Path(recording.path, *PurePosixPath(name).parts[-1:])
    return Entry(
        f"{recording.id}/{label}", recording.path, 0.0, Sound(path, data or b"", error=error)
    )


def _tar(path: Path) -> Iterator[tuple[str, bytes | None]]:
    """Yield (name, bytes) of the sound files in a tar, plain or gzipped; no bytes of a link."""
    with tarfile.open(path, "r|*") as tar:
        for member in tar:
            name = PurePosixPath(member.name)
            if member.isdir() or name.suffix.lower() not in SUFFIXES | UNREAD:
                continue
            if name.name.startswith("."):  # "._talk.wav", which macOS adds to talk.wav
                continue
            data = None  # of a link, whose file a tar need not hold
            if member.isfile():
                opened: Any = tar.extractfile(member)
                data = opened.read()
                whole = len(data) == member.size
                expect(whole, "tar", "a whole file", f"a part of {member.name!r}")
            yield member.name, data


def _parquet(path: Path) -> Iterator[tuple[str, bytes | None]]:
    """Yield (id, bytes) of each row of a Parquet file with audio bytes."""
    file = parquet().ParquetFile(path)
    names = file.schema_arrow.names
    audio = next((name for name in AUDIO_COLUMNS if name in names), "")
    shown = ", ".join(names)
    expect(bool(audio), "parquet", "a column audio, of bytes or of bytes and path", shown)
    label = next((name for name in ID_COLUMNS if name in names), "")
    number = 0
    for batch in file.iter_batches(ROWS, columns=[audio, label] if label else [audio]):
        for row in batch.to_pylist():
            data, name = _cell(row[audio])
            is_file = data is None or isinstance(data, bytes)
            wanted = f"bytes of sound files in the column {audio}"
            expect(is_file, "parquet", wanted, type(data).__name__)
            if label and row[label] is not None:
                name = str(row[label])
            yield name or f"{number:08d}", data
            number += 1


def _cell(cell: Any) -> tuple[bytes | None, str]:
    """(bytes, name) of a cell: bytes alone, or a struct of bytes and path."""
    if isinstance(cell, dict):
        return cell.get("bytes"), str(cell.get("path") or "")
    return cell, ""


def parquet() -> Any:
    """The module pyarrow.parquet; ValueError where it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        expect(False, "parquet", "the package pyarrow", "none", "pip install 'asrkit[parquet]'")
    return pyarrow.parquet
