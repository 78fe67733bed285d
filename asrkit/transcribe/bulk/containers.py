"""Recordings inside tars (WebDataset, lhotse's Shar), each read once from beginning to end."""

import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from asrkit.shapes import expect
from asrkit.sound_files import SUFFIXES, UNREAD, Sound
from asrkit.transcribe.bulk.inputs import Recording


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
    path = Path(container.path)
    seen: set[str] = set()
    why = ""
    try:
        for name, data in _tar(path):
            yield _member(container, name, data, seen)
    except Exception as error:  # of tarfile and zlib, for damaged files
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
