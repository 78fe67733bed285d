"""Speech with transcripts as lhotse cuts at 16 kHz, read from a manifest."""

import json
import zlib
from pathlib import Path
from typing import Any

from lhotse import CutSet, Recording, RecordingSet, SupervisionSegment, SupervisionSet
from lhotse.audio import AudioLoadingError
from lhotse.serialization import load_jsonl
from lhotse.utils import fastcopy

from asrkit.data.utterances import RATE_HZ
from asrkit.shapes import expect

SPLITS = ("train", "dev", "test")
# Names of lhotse's tables in a folder; {} is the part of the corpus.
TABLES = ("*recordings{}.jsonl*", "*supervisions{}.jsonl*")
# What a file that is no manifest, or a damaged one, makes its readers raise.
UNREADABLE = (
    json.JSONDecodeError,
    UnicodeDecodeError,
    KeyError,
    TypeError,
    AttributeError,
    AssertionError,
    AudioLoadingError,
    OSError,
    EOFError,
    zlib.error,
)


def from_manifest(path: str | Path, *, part: str = "*") -> CutSet:
    """Cuts at 16 kHz with text. Audio is read when it is used (`Utterances` averages channels).

    Args:
        path: A file of lhotse cuts (.jsonl, .jsonl.gz); a folder with lhotse recordings and
            supervisions; or a file with a JSON object a line, which has audio and text, and may
            have id, speaker, split and kind. Audio paths are relative to the manifest's folder or
            to that folder's parent.
        part: Read only those tables of a folder that end so: `_dev` for recordings_dev.jsonl.gz.

    Raises:
        ValueError: The manifest cannot be read or has no utterance; the message is one line.
    """
    path = Path(path)
    expect(path.exists(), "manifest", "a file or a folder", repr(str(path)))
    try:
        if path.is_dir():
            folder = path
            cuts = _folder_cuts(path, part)
        else:
            folder = path.parent
            cuts = _file_cuts(path)
    except UNREADABLE as error:
        got = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"manifest: expected cuts, or lines with audio and text, got {got} in {path}."
        ) from None
    expect(bool(cuts), "manifest", "at least one utterance", f"none in {path}")
    return CutSet.from_cuts(_ready(cut, folder) for cut in cuts)


def _folder_cuts(folder: Path, part: str) -> list[Any]:
    """Cuts of lhotse's tables in a folder, one for each supervision; none if a table is missing."""
    recordings, supervisions = (
        [row for file in folder.glob(pattern.format(part)) for row in load_jsonl(file)]
        for pattern in TABLES
    )
    if not recordings or not supervisions:
        return []
    whole_recordings = CutSet.from_manifests(
        RecordingSet.from_dicts(recordings), SupervisionSet.from_dicts(supervisions)
    )
    return list(whole_recordings.trim_to_supervisions(keep_overlapping=False))


def _file_cuts(path: Path) -> list[Any]:
    rows = list(load_jsonl(path))
    if rows and "type" in rows[0]:
        return list(CutSet.from_dicts(rows))
    return [simple_cut(row, path.parent) for row in rows]


def simple_cut(row: dict[str, Any], folder: Path) -> Any:
    """The cut of a line with audio and text.

    Args:
        row: The JSON object: `audio` and `text`, perhaps id, speaker, split and kind.
        folder: Of the manifest.
    """
    audio = row["audio"]
    file = _audio_folder(audio, folder) / audio
    recording = Recording.from_file(file, recording_id=str(row.get("id", audio)))
    custom: dict[str, Any] = {key: row[key] for key in ("kind", "split") if key in row}
    return transcribed_cut(recording, row["text"], str(row.get("speaker", "unknown")), custom)


def transcribed_cut(recording: Recording, text: str, speaker: str, custom: dict[str, Any]) -> Any:
    """A cut of a whole recording with one supervision, in English.

    Args:
        recording: The sound.
        text: What is said in it.
        speaker: Who says it.
        custom: Further fields of the supervision.
    """
    cut = recording.to_cut()
    supervision = SupervisionSegment(
        cut.id, cut.id, 0, cut.duration, cut.channel, text, "en", speaker, custom=custom
    )
    return fastcopy(cut, supervisions=[supervision])


def _audio_folder(audio: str, folder: Path) -> Path:
    """The folder, of a manifest or its parent, that the path `audio` is relative to."""
    for base in (folder, folder.parent):
        if (base / audio).is_file():
            return base
    raise ValueError(f"manifest: expected audio in {folder} or its parent, got no file {audio!r}.")


def _ready(cut: Any, folder: Path) -> Any:
    """`cut` with the path of its audio completed, resampled when read, and checked to have text."""
    texts = [supervision.text for supervision in cut.supervisions if supervision.text]
    has_text = all(isinstance(text, str) for text in texts) and " ".join(texts).strip()
    got = f"{texts or 'none'} for {cut.id!r}"
    expect(bool(has_text), "manifest", "text for each utterance", got)
    tracks = [cut]
    if hasattr(cut, "tracks"):
        tracks = [track.cut for track in cut.tracks]
    sources = [track.recording.sources[0] for track in tracks if track.has_recording]
    if sources and sources[0].type == "file" and not Path(sources[0].source).is_absolute():
        cut = cut.with_recording_path_prefix(_audio_folder(sources[0].source, folder))
    if cut.sampling_rate != RATE_HZ:
        cut = cut.resample(RATE_HZ)
    return cut
