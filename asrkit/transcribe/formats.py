"""The transcript of one recording, and how it is written: plain text, JSON, subtitles (SubRip,
WebVTT) and NIST's CTM.
"""

import html
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from asrkit.transcribe.words import Word

FORMATS = ("txt", "json", "srt", "vtt", "ctm")
TIMED = FORMATS[2:]  # made of words and their times
# Characters in a line of a subtitle as in Netflix's Timed Text Style Guides: of Latin script, of
# Chinese and Korean, of Japanese. Where there are full-width ones, others count as half of one.
LINE, FULL_WIDTH_LINE, KANA_LINE = 42, 16, 13
KANA = re.compile("[\u3040-\u30ff]")
LINES = 2  # lines of a subtitle
PAUSE_S = 0.8  # a subtitle ends at a pause this long
LONGEST_S = 7.0  # most time that a subtitle is shown
SHORTEST_S = 1.0  # least time, if the next one does not begin before
BRIEFEST_S = 0.3  # least time even then


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """The result for one file: its text and times in seconds, and the error that stopped it.

    Attributes:
        path: Of the file.
        text: Up to the error, if there is one.
        audio_s: Seconds of sound.
        words: If timestamps were asked for.
        language: Its code, of a Whisper: found, or as it was asked for.
        without_words: (start, end) of passages that sound for 3 s or more and have no word.
        notes: Lines about the recording, such as channels that cancel each other.
        error: One line, why there is no text or only the beginning of one; empty where it is whole.
    """

    path: Path
    text: str = ""
    audio_s: float = 0.0
    words: tuple[Word, ...] = ()
    language: str = ""
    without_words: tuple[tuple[float, float], ...] = ()
    notes: tuple[str, ...] = ()
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
    return _subtitles(transcript, kind)


def _ctm(transcript: Transcript, name: str) -> str:
    recording = "_".join((name or transcript.path.stem).split())
    lines = []
    for word in transcript.words:
        start_s, end_s = round(word.start_s, 3), round(word.end_s, 3)
        times = f"{start_s:.3f} {end_s - start_s:.3f}"
        lines.append(f"{recording} 1 {times} {word.text} {word.confidence:.3f}\n")
    return "".join(lines)


def _subtitles(transcript: Transcript, kind: str) -> str:
    web = kind == "vtt"
    point = "." if web else ","
    parts = ["WEBVTT\n"] * web
    for number, (start_s, end_s, text) in enumerate(cues(transcript.words, transcript.audio_s), 1):
        times = f"{_clock(start_s, point)} --> {_clock(end_s, point)}"
        shown = html.escape(text, quote=False) if web else text
        parts.append(f"{number}\n{times}\n{shown}\n")
    return "\n".join(parts)


def _clock(seconds: float, point: str) -> str:
    """`seconds` as hours:minutes:seconds and milliseconds behind `point`."""
    minutes, ms = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{ms / 1000:06.3f}".replace(".", point)


def summary(transcript: Transcript) -> dict[str, object]:
    """A transcript as JSON: file, text and audio_s; language, words, passages without words, notes
    and an error if there are any.
    """
    parts = {
        "file": str(transcript.path),
        "text": transcript.text,
        "audio_s": transcript.audio_s,
    }
    if transcript.language:
        parts["language"] = transcript.language
    if transcript.without_words:
        parts["without_words"] = [
            [round(time_s, 2) for time_s in times] for times in transcript.without_words
        ]
    if transcript.notes:
        parts["notes"] = [*transcript.notes]
    if transcript.error:
        parts["error"] = transcript.error
    if transcript.words:
        names = ("start_s", "end_s", "confidence")
        parts["words"] = [
            {"word": word.text, **{name: round(getattr(word, name), 3) for name in names}}
            for word in transcript.words
        ]
    return parts


def cues(words: Sequence[Word], audio_s: float) -> list[tuple[float, float, str]]:
    """(start, end, text) of subtitles in seconds: at most LINES lines, as long as in the guides.

    A subtitle ends where a pause is long, the lines are full, or it would be shown for more than
    LONGEST_S. It stays for SHORTEST_S, or until the next one or the end of the recording at
    `audio_s`; for BRIEFEST_S these come later, or it comes earlier, if the recording is long
    enough. A word longer than a line is broken, and its time shared out over its characters.
    """
    groups = list(_groups(words))
    brief_s = min(BRIEFEST_S, audio_s / (len(groups) or 1))
    starts_s = [group[0].start_s for group in groups]
    starts_s = [*accumulate(starts_s, lambda before, time: max(time, before + brief_s))]
    starts_s = [
        *accumulate([audio_s, *starts_s[::-1]], lambda after, time: min(time, after - brief_s))
    ]
    shown = []
    for group, (start_s, next_s) in zip(groups, pairwise(starts_s[::-1]), strict=True):
        end_s = min(max(group[-1].end_s, start_s + SHORTEST_S), start_s + LONGEST_S, next_s)
        shown.append((start_s, end_s, "\n".join(_lines(group))))
    return shown


def _groups(words: Sequence[Word]) -> Iterator[list[Word]]:
    """Yield the words of each subtitle, those longer than a line in letters."""
    group: list[Word] = []
    for word in words:
        for part in [word] if _fits(word.text) else _letters(word):
            if group and _ends(group, part):
                yield group
                group = []
            group.append(part)
    if group:
        yield group


def _letters(word: Word) -> Iterator[Word]:
    """Yield a word letter by letter, each with its share of the time."""
    letter_s = (word.end_s - word.start_s) / len(word.text)
    for number, letter in enumerate(word.text):
        start_s = word.start_s + number * letter_s
        joined = word.joined or number > 0
        yield Word(letter, start_s, start_s + letter_s, word.confidence, joined)


def _ends(group: Sequence[Word], following: Word) -> bool:
    """Whether a subtitle ends before `following`."""
    pause_s = following.start_s - group[-1].end_s
    shown_s = following.end_s - group[0].start_s
    too_long = len(_lines([*group, following])) > LINES
    return pause_s >= PAUSE_S or shown_s > LONGEST_S or too_long


def _lines(group: Sequence[Word]) -> list[str]:
    lines = [group[0].text]
    for word in group[1:]:
        longer = lines[-1] + " " * (not word.joined) + word.text
        if _fits(longer):
            lines[-1] = longer
        else:
            lines.append(word.text)
    return lines


def _fits(line: str) -> bool:
    """Whether a line of a subtitle is not too long."""
    wide = sum(unicodedata.east_asian_width(character) in "FW" for character in line)
    if not wide:
        return len(line) <= LINE
    return len(line) + wide <= 2 * (KANA_LINE if KANA.search(line) else FULL_WIDTH_LINE)
