"""The transcript of one recording, and how it is written: plain text, JSON, subtitles (SubRip,
WebVTT) and NIST's CTM.
"""

import html
import itertools
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from asrkit.transcribe.seams import Word

FORMATS = ("txt", "json", "srt", "vtt", "ctm")
TIMED = FORMATS[2:]  # made of words and their times
LINE = 42  # characters in a line of a subtitle
LINES = 2  # lines of a subtitle
PAUSE_S = 0.8  # a subtitle ends at a pause this long
LONGEST_S = 7.0  # most time that a subtitle is shown
SHORTEST_S = 1.0  # least time, if the next one does not begin before


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """The result for one file: its text and times in seconds, or the error that stopped it."""

    path: Path
    text: str = ""
    audio_s: float = 0.0
    compute_s: float = 0.0  # of its batches, shared by samples; reading is not in it
    words: tuple[Word, ...] = ()  # if timestamps were asked for
    language: str = ""  # its code, of a Whisper: that it was asked for, or that it found
    error: str = ""


def render(transcript: Transcript, kind: str, *, name: str = "") -> str:
    """The contents of a file of this format; the same for the same transcript.

    Args:
        transcript: with words, for a format in TIMED.
        kind: one of FORMATS.
        name: the recording in CTM, white space replaced by underscores; "": its file's stem.
    """
    if kind == "txt":
        return transcript.text + "\n"
    if kind == "json":
        return json.dumps(summary(transcript), ensure_ascii=False) + "\n"
    if kind == "ctm":
        return _ctm(transcript, name)
    if kind == "srt":
        return _srt(transcript)
    return _vtt(transcript)


def _ctm(transcript: Transcript, name: str) -> str:
    recording = "_".join((name or transcript.path.stem).split())
    lines = []
    for word in transcript.words:
        times = f"{word.start_s:.3f} {word.end_s - word.start_s:.3f}"
        lines.append(f"{recording} 1 {times} {word.text} {word.confidence:.3f}\n")
    return "".join(lines)


def _srt(transcript: Transcript) -> str:
    parts = []
    for number, (start_s, end_s, text) in enumerate(cues(transcript.words), 1):
        start = _clock(start_s, ",")
        end = _clock(end_s, ",")
        parts.append(f"{number}\n{start} --> {end}\n{text}\n")
    return "\n".join(parts)


def _vtt(transcript: Transcript) -> str:
    parts = ["WEBVTT\n"]
    for start_s, end_s, text in cues(transcript.words):
        escaped = html.escape(text, quote=False)
        start = _clock(start_s, ".")
        end = _clock(end_s, ".")
        parts.append(f"\n{start} --> {end}\n{escaped}\n")
    return "".join(parts)


def _clock(seconds: float, point: str) -> str:
    """`seconds` as hours:minutes:seconds and milliseconds behind `point`."""
    total, ms = divmod(round(seconds * 1000), 1000)
    total_minutes, s = divmod(total, 60)
    hours, minutes = divmod(total_minutes, 60)
    return f"{hours:02}:{minutes:02}:{s:02}{point}{ms:03}"


def summary(transcript: Transcript) -> dict[str, object]:
    """A transcript as JSON: file, text, audio_s, and language and words if there are any."""
    parts: dict[str, object] = {
        "file": str(transcript.path),
        "text": transcript.text,
        "audio_s": transcript.audio_s,
    }
    if transcript.language:
        parts["language"] = transcript.language
    if transcript.words:
        parts["words"] = [_word(word) for word in transcript.words]
    return parts


def _word(word: Word) -> dict[str, object]:
    return {
        "word": word.text,
        "start_s": round(word.start_s, 3),
        "end_s": round(word.end_s, 3),
        "confidence": round(word.confidence, 3),
    }


def cues(words: Sequence[Word]) -> list[tuple[float, float, str]]:
    """(start, end, text) of subtitles in seconds: at most LINES lines of LINE characters each.

    A subtitle ends where a pause is long, the lines are full, or it would be shown for more than
    LONGEST_S. It stays for SHORTEST_S or until the next one. A word longer than a line is broken.
    """
    groups = [*_groups(_broken(words))]
    shown = []
    for group, following in itertools.zip_longest(groups, groups[1:]):
        next_s = float("inf")
        if following:
            next_s = following[0].start_s
        start_s = group[0].start_s
        end_s = max(group[-1].end_s, start_s + SHORTEST_S)
        end_s = min(end_s, next_s)
        end_s = max(end_s, start_s + 0.001)
        text = "\n".join(_lines(group))
        shown.append((start_s, end_s, text))
    return shown


def _broken(words: Sequence[Word]) -> list[Word]:
    """`words`, those longer than a line in parts."""
    parts = []
    for word in words:
        for start in range(0, len(word.text), LINE):
            parts.append(word._replace(text=word.text[start : start + LINE]))
    return parts


def _groups(words: Sequence[Word]) -> Iterator[list[Word]]:
    """Yield the words of each subtitle."""
    group: list[Word] = []
    for word in words:
        if group and _ends(group, word):
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def _ends(group: Sequence[Word], following: Word) -> bool:
    """Whether a subtitle ends before `following`."""
    pause_s = following.start_s - group[-1].end_s
    shown_s = following.end_s - group[0].start_s
    if pause_s >= PAUSE_S or shown_s > LONGEST_S:
        return True
    lines = _lines([*group, following])
    return len(lines) > LINES


def _lines(group: Sequence[Word]) -> list[str]:
    text = " ".join(word.text for word in group)
    return textwrap.wrap(text, LINE, break_on_hyphens=False)
