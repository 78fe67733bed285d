"""Recorded speech that asrkit ships: two minutes, with the spoken words."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asrkit.files import json_lines, shipped


@dataclass(frozen=True, kw_only=True)
class RecordedSpeech:
    """One recording of one speaker.

    Attributes:
        path: A FLAC file of one channel at 16 kHz.
        id: Name of the recording in the corpus.
        text: The words, in lower-case letters and apostrophes.
        speaker: Name of the speaker in the corpus.
        gender: "f" or "m"; None if the corpus does not state it.
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

    Fourteen are from LibriSpeech, each by a different speaker; the corpus is by Vassil Panayotov,
    Guoguo Chen, Daniel Povey and Sanjeev Khudanpur (CC BY 4.0). Three are from LibriVox (public
    domain). Clean speech comes first, then test-other. data/speech/README.md describes how they
    were chosen. `corpora.from_manifest` and `asrkit transcribe --shards` also read
    data/speech/manifest.jsonl.
    """
    manifest = shipped("speech/manifest.jsonl")

    def recording(row: dict[str, Any]) -> RecordedSpeech:
        fields = {name: row[name] for name in RecordedSpeech.__annotations__ if name in row}
        path = manifest.with_name(row["audio_filepath"])
        return RecordedSpeech(path=path, duration_s=row["duration"], **fields)

    return tuple(json_lines(manifest, recording, "recordings"))
