"""Results of shards: one file each, JSON lines or Parquet, written whole or not at all."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asrkit.files import atomic
from asrkit.transcribe.bulk.containers import Entry, parquet
from asrkit.transcribe.formats import Transcript, summary

FORMATS = ("jsonl", "parquet")
PREFIX = "part-"
FOOTER = b"asrkit"  # the key of the counts in a Parquet file's metadata

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


def count(rows: Iterable[Row]) -> Counts:
    """The counts of results."""
    recordings, failed, audio_s = 0, 0, 0.0
    for one in rows:
        recordings += 1
        failed += bool(one["error"])
        audio_s += one["audio_s"]
    return Counts(recordings, failed, round(audio_s, 3))


def write(path: Path, rows: Sequence[Row]) -> Counts:
    """Write the results of a shard to a file of the kind that its suffix says.

    Args:
        path: With a suffix of FORMATS.
        rows: As `row` makes them.

    Returns:
        Their counts.
    """
    counts = count(rows)
    with atomic(path) as part:
        if path.suffix == ".parquet":
            _write_parquet(part, rows, counts)
        else:
            text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows)
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
    return counts


def _write_parquet(path: Path, rows: Sequence[Row], counts: Counts) -> None:
    writer = parquet()
    import pyarrow

    text, number = pyarrow.string(), pyarrow.float64()
    word = {"word": text, "start_s": number, "end_s": number, "confidence": number}
    fields = {"id": text, "source": text, "start_s": number, "audio_s": number}
    fields |= {"text": text, "error": text}
    if rows and "words" in rows[0]:
        fields["words"] = pyarrow.list_(pyarrow.struct(word))
    footer = {FOOTER: json.dumps(asdict(counts)).encode()}
    schema = pyarrow.schema(list(fields.items()), metadata=footer)
    valid = [{name: _unicode(value) for name, value in one.items()} for one in rows]
    writer.write_table(pyarrow.Table.from_pylist(valid, schema), path)


def _unicode(value: Any) -> Any:
    """A text without what is no Unicode, such as bytes of file names; other values as they are."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return value


def read(path: Path) -> Iterator[Row]:
    """Yield the results in a file that `write` wrote.

    Args:
        path: The file.
    """
    if path.suffix == ".parquet":
        for batch in parquet().ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
        return
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def counts_of(path: Path) -> Counts:
    """The counts of a file that `write` wrote: of the footer, for Parquet.

    Args:
        path: The file.

    Raises:
        ValueError: It was changed since, or it is Parquet and pyarrow is not installed.
    """
    is_parquet = path.suffix == ".parquet"
    if is_parquet:
        parquet()  # now: without the package nothing is known of the file
    try:
        return _footer(path) if is_parquet else count(read(path))
    except (KeyError, TypeError, ValueError):  # pyarrow's errors are ValueErrors
        message = f"out: expected a result of asrkit, got something else in {path}."
        raise ValueError(f"{message} Remove it: the same command makes it again.") from None


def _footer(path: Path) -> Counts:
    """The counts that stand in a Parquet file."""
    footer = parquet().read_metadata(path).metadata[FOOTER]
    return Counts(**json.loads(footer))


def rows(folder: str | Path) -> Iterator[Row]:
    """Yield the results of all shards in a folder, shard by shard.

    Args:
        folder: The --out of a run.
    """
    for path in sorted(Path(folder).glob(f"{PREFIX}*")):
        yield from read(path)


def total(paths: Iterable[Path]) -> Counts:
    """The counts of several files together.

    Args:
        paths: Of files that `write` wrote.
    """
    recordings, failed, audio_s = 0, 0, 0.0
    for path in paths:
        counts = counts_of(path)
        recordings += counts.recordings
        failed += counts.failed
        audio_s += counts.audio_s
    return Counts(recordings, failed, audio_s)
