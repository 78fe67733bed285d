"""What became of one recording, and how it is written: plain text, JSON, subtitles (SubRip, WebVTT)
and NIST's CTM.
"""

import html
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from asrkit.transcribe.seams import Word

FORMATS = ("txt", "json", "srt", "vtt", "ctm")
TIMED = FORMATS[2:]  # made of words and their times
LINE, LINES = 42, 2  # characters and lines of a subtitle
PAUSE_S, LONGEST_S, SHORTEST_S = (
    0.8,
    7.0,
    1.0,
)  # a cue ends at such a pause; how long it is shown, if the next one lets it


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """What became of one file: its text and times in seconds, or the error that stopped it.

    compute_s is the time of its batches, shared by samples; reading is not in it. words are there
    if they were asked for.
    """

    path: Path
    text: str = ""
    audio_s: float = 0.0
    compute_s: float = 0.0
    words: tuple[Word, ...] = ()
    error: str = ""


def render(transcript: Transcript, kind: str, *, name: str = "") -> str:
    """The contents of a file of `kind`, one of FORMATS; the same for the same transcript, whatever
    it took to compute.

    name: what CTM calls the recording, white space made underscores (none: its file's name without
    suffix).
    """
    if kind == "txt":
        return transcript.text + "\n"
    if kind == "json":
        return json.dumps(summary(transcript), ensure_ascii=False) + "\n"
    if kind == "ctm":
        name = "_".join((name or transcript.path.stem).split())
        lines = [
            f"{name} 1 {w.start_s:.3f} {w.end_s - w.start_s:.3f} {w.text} {w.confidence:.3f}\n"
            for w in transcript.words
        ]
        return "".join(lines)
    shown = [
        (_clock(start, kind), _clock(end, kind), text)
        for start, end, text in cues(transcript.words)
    ]
    if kind == "srt":
        return "\n".join(
            f"{n}\n{start} --> {end}\n{text}\n" for n, (start, end, text) in enumerate(shown, 1)
        )
    return "WEBVTT\n" + "".join(
        f"\n{start} --> {end}\n{html.escape(text, quote=False)}\n" for start, end, text in shown
    )


def summary(transcript: Transcript) -> dict[str, object]:
    """What JSON says of a transcript: file, text, audio_s, and words if there are any; times in
    seconds.
    """
    words = [
        {
            "word": w.text,
            "start_s": _ms(w.start_s),
            "end_s": _ms(w.end_s),
            "confidence": _ms(w.confidence),
        }
        for w in transcript.words
    ]
    said = {"file": str(transcript.path), "text": transcript.text, "audio_s": transcript.audio_s}
    return said | ({"words": words} if words else {})


def _ms(value: float) -> float:
    return round(value, 3)


def cues(words: Sequence[Word]) -> list[tuple[float, float, str]]:
    """(start, end, text) of subtitles in seconds: at most LINES lines of LINE characters, none
    overlapping the next.

    A cue ends where a pause is long, the lines are full, or it would be shown for more than
    LONGEST_S. It stays SHORTEST_S or until the next one. A word longer than a line is broken.
    """
    groups = [
        *_groups(
            [
                w._replace(text=w.text[i : i + LINE])
                for w in words
                for i in range(0, len(w.text), LINE)
            ]
        )
    ]
    found = []
    for n, group in enumerate(groups):
        start, end = group[0].start_s, max(group[-1].end_s, group[0].start_s + SHORTEST_S)
        following = groups[n + 1][0].start_s if n + 1 < len(groups) else float("inf")
        found.append((start, max(min(end, following), start + 0.001), "\n".join(_lines(group))))
    return found


def _groups(words: Sequence[Word]) -> Iterator[list[Word]]:
    group: list[Word] = []
    for word in words:
        if group and (
            word.start_s - group[-1].end_s >= PAUSE_S
            or word.end_s - group[0].start_s > LONGEST_S
            or len(_lines([*group, word])) > LINES
        ):
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def _lines(group: Sequence[Word]) -> list[str]:
    return textwrap.wrap(" ".join(word.text for word in group), LINE, break_on_hyphens=False)


def _clock(seconds: float, kind: str) -> str:
    ms = round(seconds * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{',' if kind == 'srt' else '.'}{ms % 1000:03}"
