"""The transcript of one recording, and every format in which it is written.

`FORMATS`, at the end, is the only list of them: plain text, JSON, subtitles (SubRip, WebVTT) and
NIST's CTM. Importing this file needs no torch.
"""

import html
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from asrkit.transcribe.words import Word

# Most characters in a line of a subtitle, after Netflix's Timed Text Style Guides: in Latin script,
# in Chinese and Korean, and in Japanese. In a line with full-width characters others count half.
LINE, FULL_WIDTH_LINE, KANA_LINE = 42, 16, 13
KANA = re.compile("[\u3040-\u30ff]")
LINES = 2  # most lines in a subtitle
PAUSE_S = 0.8  # a subtitle ends at a pause this long
LONGEST_S = 7.0  # a subtitle is shown at most this long
SHORTEST_S = 1.0  # and at least this long, unless the next one begins earlier
BRIEFEST_S = 0.3  # and at least this long in any case


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """The result for one file: its text and times in seconds, and the error that stopped it.

    Attributes:
        path: The file.
        text: The text, up to the error if there is one.
        audio_s: Seconds of sound.
        words: Words with times, if timestamps were requested.
        language: For a Whisper: code of the language that was detected or requested.
        without_words: (start, end) of passages that sound for 3 s or more but have no word.
        notes: Lines about the recording, such as channels that cancel each other.
        error: One line that says why there is no text, or only its beginning; empty if the text is
            whole.
    """

    path: Path
    text: str = ""
    audio_s: float = 0.0
    words: "tuple[Word, ...]" = ()
    language: str = ""
    without_words: tuple[tuple[float, float], ...] = ()
    notes: tuple[str, ...] = ()
    error: str = ""


class Format(NamedTuple):
    """A format of transcripts."""

    render: Callable[[Transcript, str], str]  # of a transcript and its recording's name
    is_timed: bool = False  # whether it consists of words and their times


def render(transcript: Transcript, kind: str, *, name: str = "") -> str:
    """The contents of a file in this format; the same for the same transcript.

    Args:
        transcript: The transcript, with words for a format in TIMED.
        kind: One of FORMATS.
        name: Name of the recording in CTM, with white space replaced by underscores; "": the stem
            of its file.
    """
    return FORMATS[kind].render(transcript, name)


def _text(transcript: Transcript, name: str) -> str:
    return transcript.text + "\n"


def _json(transcript: Transcript, name: str) -> str:
    return json.dumps(summary(transcript), ensure_ascii=False) + "\n"


def _ctm(transcript: Transcript, name: str) -> str:
    recording = "_".join((name or transcript.path.stem).split())
    lines = []
    for word in transcript.words:
        start_s, end_s = round(word.start_s, 3), round(word.end_s, 3)
        times = f"{start_s:.3f} {end_s - start_s:.3f}"
        lines.append(f"{recording} 1 {times} {word.text} {word.confidence:.3f}\n")
    return "".join(lines)


def _subrip(transcript: Transcript, name: str) -> str:
    return "\n".join(_subtitles(transcript, ",", str))


def _webvtt(transcript: Transcript, name: str) -> str:
    escape = partial(html.escape, quote=False)
    return "\n".join(["WEBVTT\n", *_subtitles(transcript, ".", escape)])


def _subtitles(transcript: Transcript, point: str, escape: Callable[[str], str]) -> Iterator[str]:
    """Yield each subtitle: its number, its times with this decimal point, and its escaped text."""
    for number, (start_s, end_s, text) in enumerate(cues(transcript.words, transcript.audio_s), 1):
        yield f"{number}\n{_clock(start_s, point)} --> {_clock(end_s, point)}\n{escape(text)}\n"


def _clock(seconds: float, point: str) -> str:
    """`seconds` as hours:minutes:seconds and milliseconds after a decimal point."""
    minutes, ms = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{ms / 1000:06.3f}".replace(".", point)


def summary(transcript: Transcript) -> dict[str, object]:
    """A transcript as JSON: file, text and audio_s, and whatever else it has of language, passages
    without words, notes, error and words.
    """
    names = ("start_s", "end_s", "confidence")
    parts = {
        "language": transcript.language,
        "without_words": [
            [round(time_s, 2) for time_s in times] for times in transcript.without_words
        ],
        "notes": [*transcript.notes],
        "error": transcript.error,
        "words": [
            {"word": word.text, **{name: round(getattr(word, name), 3) for name in names}}
            for word in transcript.words
        ],
    }
    return {
        "file": str(transcript.path),
        "text": transcript.text,
        "audio_s": transcript.audio_s,
        **{name: value for name, value in parts.items() if value},
    }


def cues(words: "Sequence[Word]", audio_s: float) -> list[tuple[float, float, str]]:
    """(start, end, text) of each subtitle, in seconds; it has at most LINES lines.

    A subtitle ends at a long pause, when its lines are full, or when it would be shown for more
    than LONGEST_S. It is shown for SHORTEST_S, but ends with the recording or with the start of the
    next one. Starts are moved apart so that each is shown for BRIEFEST_S, if the recording is long
    enough. A word longer than a line is broken, and its time is divided among its characters.

    Args:
        words: The words in order.
        audio_s: Seconds of the recording.
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


def _groups(words: "Sequence[Word]") -> "Iterator[list[Word]]":
    """Yield the words of each subtitle; a word longer than a line is split into letters."""
    group: list[Word] = []
    for word in words:
        for part in [word] if _fits(word.text) else _letters(word):
            if group and _ends(group, part):
                yield group
                group = []
            group.append(part)
    if group:
        yield group


def _letters(word: "Word") -> "Iterator[Word]":
    """Yield a word letter by letter, each with an equal share of the time."""
    letter_s = (word.end_s - word.start_s) / len(word.text)
    for number, letter in enumerate(word.text):
        start_s = word.start_s + number * letter_s
        joined = word.joined or number > 0
        end_s = start_s + letter_s
        yield word._replace(text=letter, start_s=start_s, end_s=end_s, joined=joined)


def _ends(group: "Sequence[Word]", following: "Word") -> bool:
    """Whether a subtitle ends before the following word."""
    pause_s = following.start_s - group[-1].end_s
    shown_s = following.end_s - group[0].start_s
    too_long = len(_lines([*group, following])) > LINES
    return pause_s >= PAUSE_S or shown_s > LONGEST_S or too_long


def _lines(group: "Sequence[Word]") -> list[str]:
    lines = [group[0].text]
    for word in group[1:]:
        longer = lines[-1] + " " * (not word.joined) + word.text
        if _fits(longer):
            lines[-1] = longer
        else:
            lines.append(word.text)
    return lines


def _fits(line: str) -> bool:
    """Whether a line of a subtitle is short enough."""
    wide = sum(unicodedata.east_asian_width(character) in "FW" for character in line)
    if not wide:
        return len(line) <= LINE
    return len(line) + wide <= 2 * (KANA_LINE if KANA.search(line) else FULL_WIDTH_LINE)


FORMATS: Mapping[str, Format] = {
    "txt": Format(_text),
    "json": Format(_json),
    "srt": Format(_subrip, is_timed=True),
    "vtt": Format(_webvtt, is_timed=True),
    "ctm": Format(_ctm, is_timed=True),
}
TIMED = [name for name, kind in FORMATS.items() if kind.is_timed]
