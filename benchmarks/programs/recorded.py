"""Recorded speech for whole programs, and the word errors of their texts."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from asrkit.files import shipped
from asrkit.text import ErrorRate, normalize_text, wer
from asrkit.workbench.lessons.shared.file_recognizer import RATE_HZ, write_wav

PAUSE_S = 2.0  # longest pause between two recordings
Recordings = Sequence[tuple[np.ndarray, str]]  # samples (S,) int16 of each, and its words


def read(manifest: Path | None = None) -> Recordings:
    """The recordings of a manifest, or those that asrkit ships."""
    from asrkit.data import Utterances, corpora

    cuts = corpora.from_manifest(manifest or shipped("speech/manifest.jsonl"))
    speech = Utterances.load(cuts, progress=False)
    return [*zip((wave.numpy() for wave in speech.waveforms), speech.texts, strict=True)]


def write(folder: Path, recordings: Recordings) -> list[Path]:
    """Write a WAV file of each recording."""
    folder.mkdir(parents=True)
    return [
        write_wav(folder / f"{row}.wav", samples) for row, (samples, _) in enumerate(recordings)
    ]


def joined(recordings: Recordings, seconds: float) -> tuple[np.ndarray, list[str]]:
    """One long recording: samples (S,) int16, and the words of each part of it.

    All recordings follow in one seeded random order, then in another, with pauses of 0 to
    `PAUSE_S`. The long one ends with the recording that reaches `seconds`.
    """
    draw = np.random.default_rng(0)
    parts: list[np.ndarray] = []
    texts: list[str] = []
    length = 0
    while True:
        for row in draw.permutation(len(recordings)):
            samples, text = recordings[row]
            pause = np.zeros(int(draw.uniform(0, PAUSE_S) * RATE_HZ), np.int16)
            parts += [samples, pause]
            texts.append(text)
            length += len(samples) + len(pause)
            if length >= seconds * RATE_HZ:
                return np.concatenate(parts), texts


def plain(text: str) -> str:
    """Words of lower-case letters, digits and apostrophes; other characters separate words."""
    return " ".join(re.findall("[a-z0-9']+", normalize_text(text).replace("\u2019", "'")))


def word_errors(references: Sequence[str], texts: Sequence[str]) -> ErrorRate:
    """WER of plain texts, with a bootstrap interval over recordings.

    A recording that occurs several times in a long one is drawn as a whole, with all its copies.

    Args:
        references: words of each recording.
        texts: a text per recording, or one text of them all.
    """
    references, texts = [*map(plain, references)], [*map(plain, texts)]
    parts = texts if len(texts) == len(references) else cut(references, " ".join(texts))
    copies: dict[str, list[str]] = {}
    for reference, part in zip(references, parts, strict=True):
        copies.setdefault(reference, []).append(part)
    distinct = [" ".join([reference] * len(rows)) for reference, rows in copies.items()]
    drawn = wer(distinct, [*map(" ".join, copies.values())])
    return replace(wer(references, parts), low=drawn.low, high=drawn.high)


def cut(references: Sequence[str], text: str) -> list[str]:
    """The words of one text that are aligned with each reference; words inserted between two belong
    to the first.

    An alignment with the fewest errors has the fewest in each part, so errors add up.
    """
    import jiwer

    counts = [len(reference.split()) for reference in references]
    alignment = jiwer.process_words(" ".join(references), text).alignments[0]
    start = [0] * (sum(counts) + 1)  # by word of the references: where it begins in the text
    for chunk in alignment:
        for word in range(chunk.ref_start_idx, chunk.ref_end_idx):
            offset = 0 if chunk.type == "delete" else word - chunk.ref_start_idx
            start[word] = chunk.hyp_start_idx + offset
    words = text.split()
    start[0], start[-1] = 0, len(words)
    ends = [start[end] for end in accumulate(counts)]
    return [" ".join(words[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
