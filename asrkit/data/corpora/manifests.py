"""Speech with transcripts as lhotse cuts at 16 kHz, read from a manifest."""

import re
from functools import partial
from pathlib import Path
from typing import Any

from lhotse import CutSet, Recording, RecordingSet, SupervisionSegment, SupervisionSet
from lhotse.cut.set import deserialize_cut
from lhotse.serialization import load_jsonl
from lhotse.utils import fastcopy

from asrkit.data.utterances import RATE_HZ, expect_valid, sound_paths
from asrkit.files import json_lines, refuse_manifest
from asrkit.shapes import expect, whole
from asrkit.sound_files import part_name
from asrkit.sound_readers import MIN_MISSING_S

SPLITS = ("train", "dev", "test")
SPLIT_NAMES = {  # the first word of a split's name, in corpora of others -> which one it is
    **dict.fromkeys(("train", "training", "all"), "train"),
    **dict.fromkeys(("dev", "devel", "development", "val", "valid", "validation"), "dev"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
TABLES = ("*recordings*.jsonl*", "*supervisions*.jsonl*")  # lhotse's, in a folder
LINES = "cuts, or lines with audio or duration, and text"


def from_manifest(path: str | Path) -> CutSet:
    """Cuts at 16 kHz with text. Audio is read when it is used (`Utterances` averages channels).

    Args:
        path: A file of lhotse cuts (.jsonl, .jsonl.gz); a folder with lhotse recordings and
            supervisions; or a file with a JSON object a line, which has audio and text, and may
            have id, speaker, split and kind. NeMo's names are known too: audio_filepath, offset
            and duration. Audio paths are relative to the manifest's folder or to that folder's
            parent. Blank lines and a byte order mark do not matter.

    Raises:
        ValueError: The manifest cannot be read or has no utterance; the message is one line.
    """
    path = Path(path)
    expect(path.exists(), "manifest", "a file or a folder", repr(str(path)))
    if path.is_dir():
        cuts = _folder_cuts(path)
    else:
        ready = partial(_ready_cut, folder=path.parent)
        cuts = list(json_lines(path, ready, LINES))
    remedy = "Of a folder, recordings and supervisions are read; name other files." * path.is_dir()
    expect(bool(cuts), "manifest", "at least one utterance", f"none in {path}", remedy)
    return CutSet.from_cuts(cuts)


def _folder_cuts(folder: Path) -> list[Any]:
    """Cuts of lhotse's tables in a folder, one for each supervision; none if a table is missing.

    Recipes name the part last: supervisions of "x_supervisions_test.jsonl.gz" get the split test,
    and those of "test_supervisions.jsonl", unless they have one.
    """
    try:
        recordings, parts = (
            [(row, file) for file in folder.glob(pattern) for row in load_jsonl(file)]
            for pattern in TABLES
        )
        if not recordings or not parts:
            return []
        supervisions = SupervisionSet.from_dicts(_with_split(row, file) for row, file in parts)
        whole_recordings = CutSet.from_cuts(
            _supervised(recording.to_cut(), supervisions)
            for recording in RecordingSet.from_dicts(row for row, _ in recordings)
        )
        return [
            _ready(cut, folder)
            for cut in whole_recordings.trim_to_supervisions(keep_overlapping=False)
        ]
    except Exception as error:  # a damaged table makes lhotse raise anything
        refuse_manifest(error, LINES, str(folder))


def _supervised(cut: Any, supervisions: SupervisionSet) -> Any:
    """A cut of a whole recording with its supervisions, which are inside it but for rounding."""
    everywhere_s = 1e9  # beyond the recording too: refused below
    cut.supervisions = [*supervisions.find(cut.recording_id, tolerance=everywhere_s)]
    expect_valid(cut)
    return cut.map_supervisions(lambda one: one.trim(cut.duration))


def split_of(name: str) -> str:
    """The set that a split's name means: "test" of "test-other" or "eval_2"; "" of others."""
    return SPLIT_NAMES.get(re.split("[-_. ]", name.lower())[0], "")


def _with_split(row: dict[str, Any], file: Path) -> dict[str, Any]:
    corpus, _, part = file.name.partition("supervisions")
    words = [*re.split("[-_.]", part), *re.split("[-_.]", corpus)]
    split = next(filter(None, map(split_of, words)), "all")
    return row | {"custom": {"split": split, **(row.get("custom") or {})}}


def row_cut(row: dict[str, Any], folder: Path) -> Any:
    """The cut of a line of a manifest in `folder`: one of lhotse's, or audio and text.

    The latter has `audio` (NeMo: `audio_filepath`) and `text`, perhaps id, speaker, split and kind.
    `offset` and `duration` in seconds name a part of the sound, `channel` one of its channels.
    """
    if "type" in row:
        return deserialize_cut(row)
    audio = row["audio_filepath"] if "audio_filepath" in row else row["audio"]
    file = _audio_folder(audio, folder) / audio
    start = float(row.get("offset") or 0)
    channel = row.get("channel")
    name = part_name(audio, start, channel)
    cut = Recording.from_file(file, recording_id=str(row.get("id", name))).to_cut()
    if channel is not None:
        there = whole(channel, 0, cut.num_channels - 1)
        wanted = f"a channel below {cut.num_channels} of {audio!r}"
        expect(there, "manifest", wanted, repr(channel))
        if cut.num_channels > 1:
            cut = fastcopy(cut.to_mono()[channel], id=cut.id)
    left = cut.duration - start
    stated = row.get("duration")
    seconds = left if stated is None else float(stated)
    wanted = f"offset and duration in 0..{cut.duration} s"
    inside = start >= 0 and 0 < seconds < left + MIN_MISSING_S
    expect(inside, "manifest", wanted, f"{start} and {stated} for {cut.id!r}")
    rounded = 0.01  # NeMo's durations of whole files are
    if start > 0 or left - seconds >= rounded:
        cut = cut.truncate(offset=start, duration=min(seconds, left), preserve_id=True)
    custom: dict[str, Any] = {key: row[key] for key in ("kind", "split") if key in row}
    return transcribed_cut(cut, row["text"], str(row.get("speaker", "unknown")), custom)


def transcribed_cut(cut: Any, text: str, speaker: str, custom: dict[str, Any]) -> Any:
    """A cut with one supervision, in English.

    Args:
        cut: The sound.
        text: What is said in it.
        speaker: Who says it.
        custom: Further fields of the supervision.
    """
    supervision = SupervisionSegment(
        cut.id, cut.recording_id, 0, cut.duration, cut.channel, text, "en", speaker, custom=custom
    )
    return fastcopy(cut, supervisions=[supervision])


def _audio_folder(audio: str, folder: Path) -> Path:
    """The folder, of a manifest or its parent, that the path `audio` is relative to."""
    for base in (folder, folder.parent):
        if (base / audio).is_file():
            return base
    raise ValueError(f"manifest: expected audio in {folder} or its parent, got no file {audio!r}.")


def _ready_cut(row: dict[str, Any], folder: Path) -> Any:
    return _ready(row_cut(row, folder), folder)


def _ready(cut: Any, folder: Path) -> Any:
    """`cut` with the path of its audio completed, resampled when read, and checked to have text."""
    if not isinstance(cut.id, str):
        raise TypeError("an id has to be text")
    expect_valid(cut)
    texts = [part.text for part in cut.supervisions if part.text]
    expect(
        " ".join(texts).strip() != "",
        "manifest",
        "text for each utterance",
        f"none for {cut.id!r}",
    )
    path = next(sound_paths(cut), None)
    if path is not None and not path.is_absolute():
        cut = cut.with_recording_path_prefix(_audio_folder(str(path), folder))
    return cut if cut.sampling_rate == RATE_HZ else cut.resample(RATE_HZ)
