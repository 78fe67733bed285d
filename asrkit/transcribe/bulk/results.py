"""Results of shards: a file of JSON lines each, written whole or not at all."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asrkit.files import atomic
from asrkit.transcribe.bulk.containers import Entry
from asrkit.transcribe.formats import Transcript, summary

PREFIX = "part-"

Row = dict[str, Any]


@dataclass(frozen=True)
class Counts:
    """What a result holds: recordings, those that failed, and seconds of audio transcribed."""

    recordings: int = 0
    failed: int = 0
    audio_s: float = 0.0


def row(entry: Entry, transcript: Transcript, *, timestamps: bool) -> Row:
    """The result of one recording, without any time of the run: the same for the same transcript.

    Args:
        entry: The recording.
        transcript: Its text, or the error.
        timestamps: With words, also where there are none.
    """
    values: Row = {
        "id": entry.id,
        "source": entry.source,
        "start_s": entry.start_s,
        "audio_s": round(transcript.audio_s, 3),
        "text": transcript.text,
        "error": transcript.error,
    }
    if timestamps:
        values["words"] = summary(transcript).get("words", [])
    return values


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write the results of a shard.

    Args:
        path: The file.
        rows: As `row` makes them.
    """
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows)
    with atomic(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


def read(path: Path) -> Iterator[Row]:
    """Yield the results in a file that `write` wrote."""
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def rows(folder: str | Path) -> Iterator[Row]:
    """Yield the results of all shards in a folder, shard by shard.

    Args:
        folder: The --out of a run.
    """
    for path in sorted(Path(folder).glob(f"{PREFIX}*")):
        yield from read(path)


def count(paths: Iterable[Path]) -> Counts:
    """The counts of all results in files that `write` wrote.

    Raises:
        ValueError: A file was changed since.
    """
    recordings, failed, audio_s = 0, 0, 0.0
    for path in paths:
        try:
            for one in read(path):
                recordings += 1
                failed += bool(one["error"])
                audio_s += one["audio_s"]
        except (KeyError, TypeError, ValueError):
            message = f"out: expected a result of asrkit, got something else in {path}."
            raise ValueError(f"{message} Remove it: the same command makes it again.") from None
    return Counts(recordings, failed, round(audio_s, 3))
