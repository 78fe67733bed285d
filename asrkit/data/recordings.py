"""Recorded speech that asrkit ships: two minutes to transcribe at once, with the words spoken."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asrkit.files import json_lines, shipped


@dataclass(frozen=True, kw_only=True)
class RecordedSpeech:
    """One recording of one speaker.

    Attributes:
        path: A FLAC file of one channel at 16 kHz.
        id: The corpus's name of the recording.
        text: The words, in lower-case letters and apostrophes.
        speaker: The corpus's name of the speaker.
        gender: "f" or "m"; None where the corpus names none.
        split: Part of the corpus, such as "test-clean".
        source: "LibriSpeech" or "LibriVox".
        licence: "CC-BY-4.0" or "public domain".
        duration_s: Length in seconds.
    """

    path: Path
    id: str
    text: str
    speaker: str
    gender: str | None
    split: str
    source: str
    licence: str
    duration_s: float


def recorded_speech() -> tuple[RecordedSpeech, ...]:
    """Seventeen recordings of read English with their words: fifteen speakers, 119 s.

    Fourteen are of LibriSpeech, each of another speaker, by Vassil Panayotov, Guoguo Chen, Daniel
    Povey and Sanjeev Khudanpur (CC BY 4.0); three are of LibriVox (public domain). Clean speech
    comes first, then that of test-other. data/speech/README.md says how they were chosen.
    `corpora.from_manifest` and `asrkit transcribe --shards` read data/speech/manifest.jsonl too.
    """
    manifest = shipped("speech/manifest.jsonl")

    def recording(row: dict[str, Any]) -> RecordedSpeech:
        kept = {name: row[name] for name in RecordedSpeech.__annotations__ if name in row}
        path = manifest.with_name(row["audio_filepath"])
        return RecordedSpeech(path=path, duration_s=row["duration"], **kept)

    return tuple(json_lines(manifest, recording, "recordings"))
