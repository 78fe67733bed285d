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
SPLIT_NAMES = {  # first word of a split's name in published corpora -> its set
    **dict.fromkeys(("train", "training", "all"), "train"),
    **dict.fromkeys(("dev", "devel", "development", "val", "valid", "validation"), "dev"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
TABLES = ("*recordings*.jsonl*", "*supervisions*.jsonl*")  # names of lhotse's tables
LINES = "cuts, or lines with audio or duration, and text"


def from_manifest(path: str | Path) -> CutSet:
    """Cuts at 16 kHz with text. Audio is read on use (`Utterances` averages channels).

    Args:
        path: A file of lhotse cuts (.jsonl, .jsonl.gz); a folder with lhotse recordings and
            supervisions; or a file with a JSON object on each line, which has audio and text, and
            optionally id, speaker, split and kind. NeMo's audio_filepath, offset and duration work
            too. Audio paths are relative to the manifest's folder or its parent. Blank lines and a
            byte order mark are ignored.

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
    remedy = "A folder needs recordings and supervisions; name other files." * path.is_dir()
    expect(bool(cuts), "manifest", "at least one utterance", f"none in {path}", remedy)
    return CutSet.from_cuts(cuts)


def _folder_cuts(folder: Path) -> list[Any]:
    """Cuts of lhotse's tables in a folder, one for each supervision; none if a table is missing.

    A supervision without a split takes it from the name of its file, such as
    "x_supervisions_test.jsonl.gz" or "test_supervisions.jsonl". Recipes put it last.
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
    except Exception as error:  # lhotse may raise anything for a damaged table
        refuse_manifest(error, LINES, str(folder))


def _supervised(cut: Any, supervisions: SupervisionSet) -> Any:
    """A cut of a whole recording with its supervisions, trimmed where rounding exceeds it."""
    everywhere_s = 1e9  # also outside of the recording, which is refused below
    cut.supervisions = [*supervisions.find(cut.recording_id, tolerance=everywhere_s)]
    expect_valid(cut)
    return cut.map_supervisions(lambda supervision: supervision.trim(cut.duration))


def split_of(name: str) -> str:
    """The set of a split's name: "test" for "test-other" or "eval_2"; "" for other names."""
    return SPLIT_NAMES.get(re.split("[-_. ]", name.lower())[0], "")


def _with_split(row: dict[str, Any], file: Path) -> dict[str, Any]:
    corpus, _, part = file.name.partition("supervisions")
    words = [*re.split("[-_.]", part), *re.split("[-_.]", corpus)]
    split = next(filter(None, map(split_of, words)), "all")
    return row | {"custom": {"split": split, **(row.get("custom") or {})}}


def row_cut(row: dict[str, Any], folder: Path) -> Any:
    """The cut of a line of a manifest in `folder`: a cut of lhotse's, or audio and text.

    The latter has `audio` (NeMo: `audio_filepath`) and `text`, optionally id, speaker, split and
    kind. `offset` and `duration` in seconds select a part of the sound, `channel` a channel.
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
        wanted = f"a channel below {cut.num_channels} of {audio!r}"
        expect(whole(channel, 0, cut.num_channels - 1), "manifest", wanted, repr(channel))
        if cut.num_channels > 1:
            cut = fastcopy(cut.to_mono()[channel], id=cut.id)
    remaining = cut.duration - start
    stated = row.get("duration")
    seconds = remaining if stated is None else float(stated)
    wanted = f"offset and duration in 0..{cut.duration} s"
    inside = start >= 0 and 0 < seconds < remaining + MIN_MISSING_S
    expect(inside, "manifest", wanted, f"{start} and {stated} for {cut.id!r}")
    rounding = 0.01  # NeMo rounds durations of whole files
    if start > 0 or remaining - seconds >= rounding:
        cut = cut.truncate(offset=start, duration=min(seconds, remaining), preserve_id=True)
    custom: dict[str, Any] = {key: row[key] for key in ("kind", "split") if key in row}
    return transcribed_cut(cut, row["text"], str(row.get("speaker", "unknown")), custom)


def transcribed_cut(cut: Any, text: str, speaker: str, custom: dict[str, Any]) -> Any:
    """`cut` with one supervision, in English.

    Args:
        cut: The sound.
        text: Its transcript.
        speaker: Name of the speaker.
        custom: Further fields of the supervision.
    """
    supervision = SupervisionSegment(
        cut.id, cut.recording_id, 0, cut.duration, cut.channel, text, "en", speaker, custom=custom
    )
    return fastcopy(cut, supervisions=[supervision])


def _audio_folder(audio: str, folder: Path) -> Path:
    """The folder that the path `audio` is relative to: that of the manifest, or its parent."""
    for base in (folder, folder.parent):
        if (base / audio).is_file():
            return base
    raise ValueError(f"manifest: expected audio in {folder} or its parent, got no file {audio!r}.")


def _ready_cut(row: dict[str, Any], folder: Path) -> Any:
    return _ready(row_cut(row, folder), folder)


def _ready(cut: Any, folder: Path) -> Any:
    """`cut` with the full path of its audio, resampled on reading, after a check of its text."""
    if not isinstance(cut.id, str):
        raise TypeError("an id must be text")
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
