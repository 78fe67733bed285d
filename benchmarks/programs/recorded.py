"""Recorded speech for whole programs, and the word errors of what they write."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from asrkit.files import shipped
from asrkit.text import ErrorRate, normalize_text, wer
from asrkit.workbench.lessons.shared.file_recognizer import RATE_HZ, write_wav

PAUSE_S = 2.0  # the longest between two recordings
Recordings = Sequence[tuple[np.ndarray, str]]  # samples (S,) int16 of each, and its words


def read(manifest: Path | None = None) -> Recordings:
    """The recordings of a manifest, or those that asrkit ships."""
    from asrkit.data import Utterances, corpora

    cuts = corpora.from_manifest(manifest or shipped("speech/manifest.jsonl"))
    speech = Utterances.load(cuts, progress=False)
    return [*zip((wave.numpy() for wave in speech.waveforms), speech.texts, strict=True)]


def write(folder: Path, recordings: Recordings) -> list[Path]:
    """A WAV file of each."""
    folder.mkdir(parents=True)
    return [
        write_wav(folder / f"{row}.wav", samples) for row, (samples, _) in enumerate(recordings)
    ]


def joined(recordings: Recordings, seconds: float) -> tuple[np.ndarray, list[str]]:
    """One long recording: samples (S,) int16, and the words of each part of it.

    All recordings follow each other in a random order, then in another, with pauses of 0 to
    `PAUSE_S`, the same each time, until there are so many seconds; it ends with the recording
    that reaches them.
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
    """Words of lower-case letters, digits and apostrophes; all else separates words."""
    return " ".join(re.findall("[a-z0-9']+", normalize_text(text).replace("\u2019", "'")))


def word_errors(said: Sequence[str], written: Sequence[str]) -> ErrorRate:
    """WER of plain texts. The interval is a bootstrap of recordings, each with all words that are
    aligned with its own: one that comes several times in a long one is drawn as a whole.

    Args:
        said: the words of each recording.
        written: as many texts, or one of all recordings.
    """
    said, written = [*map(plain, said)], [*map(plain, written)]
    parts = written if len(written) == len(said) else cut(said, " ".join(written))
    of_text: dict[str, list[str]] = {}
    for text, part in zip(said, parts, strict=True):
        of_text.setdefault(text, []).append(part)
    distinct = [" ".join([text] * len(found)) for text, found in of_text.items()]
    drawn = wer(distinct, [*map(" ".join, of_text.values())])
    return replace(wer(said, parts), low=drawn.low, high=drawn.high)


def cut(said: Sequence[str], written: str) -> list[str]:
    """The words of one text that are aligned with each of several; what is inserted between two of
    them belongs to the first.

    An alignment with the fewest errors has the fewest in each part, so errors add up.
    """
    import jiwer

    counts = [len(text.split()) for text in said]
    found = jiwer.process_words(" ".join(said), written)
    place = [0] * (sum(counts) + 1)  # by word that was said: where it stands among those written
    for one in found.alignments[0]:
        for word in range(one.ref_start_idx, one.ref_end_idx):
            behind = 0 if one.type == "delete" else word - one.ref_start_idx
            place[word] = one.hyp_start_idx + behind
    words = written.split()
    place[0], place[-1] = 0, len(words)
    ends = [place[end] for end in accumulate(counts)]
    return [" ".join(words[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
