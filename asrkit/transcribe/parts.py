"""Parts of recordings, and the order in which their windows are decoded.

A part is one window; of a Whisper's recording it is a stretch between two pauses, of which one
window after the other is decoded, and then what sounds without a word.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from asrkit.decoders.hypotheses import Segments
from asrkit.transcribe.pauses import FRAME_S, frame_size, gaps, is_silent
from asrkit.transcribe.words import Label

LEAST_REST_S = 0.3  # of sound behind the last window of a part, to be a window of its own
LEAST_SEGMENT_S = 0.5  # of sound at the end of a part, to be a segment if one begins there
LEAST_MISSED_S = 1.5  # of sound without a word, to be decoded once more by itself
SURE_LOG_PROB = -0.8  # nats a token in the mean, of a text that is found then
MOST_PREVIOUS = 224  # tokens that a window is shown
LEAST_STEP_S = 1.0  # from a window to the next one
SURE = 0.5  # temperature up to which a text is believed without doubt
_start = attrgetter("start_s")
Batches = Callable[[Iterable[int], Mapping[int, "Part"]], list[list[int]]]


class Span(NamedTuple):
    """Samples of a part that are still to be decoded."""

    start: int
    end: int
    is_gap: bool = False  # between words that were found before


class Part(NamedTuple):
    """A part of a recording, from its start to its end in samples, and what is known of it."""

    path: Path
    start: int
    end: int
    last: bool  # of the recording
    waveform: Tensor  # (S,); (0,) once it is decoded
    sounds: Tensor  # (N,) bool, frames of FRAME_S that sound
    todo: tuple[Span, ...]
    error: str = ""  # why a window was not decoded
    breaks_off: str = ""  # why the recording ends here, at its last part
    notes: tuple[str, ...] = ()  # of the recording, at its last part
    labels: Sequence[Label] = ()
    language: str = ""
    previous: Sequence[int] = ()  # tokens before the next window, where it is shown them

    def following(self, before: "Part | None") -> "Part":
        """The part with language and text of the one of its recording that was decoded last."""
        if before is None:
            return self
        return self._replace(language=before.language, previous=before.previous)


def after_window(
    part: Part, size: int, labels: Sequence[Label], segments: Segments, rate_hz: int, frame: int
) -> Part:
    """A part of which a window was decoded with timestamps, with its labels and what is left.

    The next window begins where the last whole segment ended, if the window ended in the middle of
    another one (arXiv 2212.04356, section 3.8); at the end of the part only if something sounds
    behind it. What sounds for long between two labels, or behind the last one, is decoded once more
    by itself: words are missing there.

    Args:
        part: Whose first span the window begins.
        size: Samples of the window.
        labels: That were written.
        segments: Of these.
        rate_hz: Samples a second.
        frame: Samples of a frame of the segments.
    """
    span, *rest = part.todo
    if span.is_gap:
        sure = segments.temperature <= SURE and segments.log_prob > SURE_LOG_PROB
        merged = [*part.labels, *labels] if sure else part.labels
        return part._replace(labels=sorted(merged, key=_start), todo=tuple(rest))
    count = sum(segment.labels for segment in segments.whole)
    ended = Span(span.start + segments.whole[-1].end * frame, span.end) if count else span
    at_end = span.start + size == span.end  # in a pause: the segment is whole, but for sound behind
    if count and segments.cut_off and (not at_end or _sounds(part, ended, rate_hz)):
        end, least = segments.whole[-1].end * frame, round(LEAST_STEP_S * rate_hz)
        size = min(max(end, least), size)
        begins_s = (part.start + span.start + size) / rate_hz
        between = [one for one in labels[count:] if end < least and one.start_s < begins_s]
        labels = [*labels[:count], *between]
    missed = _gaps(part, Span(span.start, span.start + size), labels, rate_hz)
    following = Span(span.start + size, span.end)
    if _sounds(part, following, rate_hz):
        rest = [following, *rest]
    previous: Sequence[int] = ()
    if segments.temperature <= SURE:
        previous = [*part.previous, *(label.token for label in labels)][-MOST_PREVIOUS:]
    return part._replace(labels=[*part.labels, *labels], todo=(*rest, *missed), previous=previous)


def text_until(part: Part, size: int, rate_hz: int, frame: int) -> int:
    """The frame before which later segments of the next window have to have text; 0: none has.

    A part mostly ends in a pause. Its last segment is whole, though the model may take it for cut
    off and write no text of it. A gap ends before a word, and may hold no speech.

    Args:
        part: Whose first span the window begins.
        size: Samples of the window.
        rate_hz: Samples a second.
        frame: Samples of a frame of the segments.
    """
    start, end, is_gap = part.todo[0]
    if is_gap or start + size < end:
        return 0
    first, behind = (sample // frame_size(rate_hz) for sample in (start, end))
    left_s = part.sounds[first:behind].flip(0).cumsum(0).flip(0) * FRAME_S
    return int((left_s >= LEAST_SEGMENT_S).sum()) * frame_size(rate_hz) // frame


def _sounds(part: Part, span: Span, rate_hz: int) -> bool:
    """Whether a span has sound, if it is short, or more than silence and noise."""
    first, behind = (sample // frame_size(rate_hz) for sample in span[:2])
    if float(part.sounds[first:behind].sum()) * FRAME_S >= LEAST_REST_S:
        return True
    is_long = span.end - span.start >= LEAST_STEP_S * rate_hz
    return is_long and not is_silent(part.waveform[span.start : span.end], rate_hz)


def _gaps(part: Part, span: Span, labels: Sequence[Label], rate_hz: int) -> Iterator[Span]:
    """What sounds in a span for LEAST_MISSED_S or more without a label; nothing without labels."""
    size = frame_size(rate_hz)
    first, last = span.start // size, span.end // size
    points = [round((label.start_s * rate_hz - part.start) / size) - first for label in labels]
    for start, end in gaps(part.sounds[first:last], points, LEAST_MISSED_S) if points else ():
        yield Span((first + start) * size, (first + end) * size, True)


class Schedule:
    """Parts in order: those that are to be decoded, and those that are done.

    Windows that follow from others share batches with those of later parts.

    Args:
        batches: Makes batches of the next windows of these parts, of all parts by number.
        shows_text: Whether a window is shown the text before it: then they are decoded one by one,
            and only the first part of each recording that is not done can go on.
        finds_language: Whether the language is found in the first window of each recording that has
            sound: then these are decoded before the others.
    """

    def __init__(self, batches: Batches, *, shows_text: bool, finds_language: bool) -> None:
        self.batches = batches
        self.shows_text = shows_text
        self.finds_language = finds_language
        self.parts: dict[int, Part] = {}  # by number, as all that follows
        self.recording: dict[int, int] = {}
        self.left = set[int]()  # parts that are not done
        self.latest: dict[int, Part] = {}  # part of each recording that was decoded
        self.turn = self.recordings = 0

    def add(self, pool: Iterable[Part]) -> None:
        """Take more parts; those without anything to do are done."""
        for part in pool:
            number = self.turn + len(self.parts)
            self.parts[number] = part
            self.recording[number] = self.recordings
            self.recordings += part.last
            if part.todo:
                self.left.add(number)

    def done(self) -> Iterator[Part]:
        """Take out the parts that are done, up to the first that is not."""
        while self.turn in self.parts and self.turn not in self.left:
            recording = self.recording.pop(self.turn)
            part = self.parts.pop(self.turn).following(self.latest.get(recording))
            if part.last:
                self.latest.pop(recording, None)
            self.turn += 1
            yield part

    def next_batch(self) -> list[int]:
        """Numbers of the parts whose next windows are decoded together."""
        if self.shows_text:
            return [min(self.left)]
        first: dict[int, int] = {}  # part of each recording whose language is to be found
        if self.finds_language:
            for number in sorted(self.left):
                if self.recording[number] not in self.latest:
                    first.setdefault(self.recording[number], number)
        return self.batches(first.values() or self.left, self.parts)[0]

    def batch(self, numbers: Sequence[int]) -> list[Part]:
        """These parts, each with language and text of what was decoded last of its recording."""
        return [
            self.parts[number].following(self.latest.get(self.recording[number]))
            for number in numbers
        ]

    def decoded(self, numbers: Sequence[int], parts: Sequence[Part]) -> None:
        """Put back parts of which a window was decoded."""
        for number, part in zip(numbers, parts, strict=True):
            self.parts[number] = self.latest[self.recording[number]] = part
            if part.error or not part.todo:
                self.left.remove(number)
