"""Parts of recordings, and the order in which their windows are decoded.

A part is one window. For a Whisper it is a stretch between two pauses, whose windows are decoded
one after the other, followed by passages that sound but got no words.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from asrkit.decoders.hypotheses import Segments
from asrkit.transcribe.pauses import FRAME_S, frame_size, gaps, is_silent
from asrkit.transcribe.words import Label

LEAST_REST_S = 0.3  # sound after the last window of a part that makes another window
LEAST_SEGMENT_S = 0.5  # sound at the end of a part that a segment which begins there must have
LEAST_MISSED_S = 1.5  # sound without a word that is decoded again by itself
SURE_LOG_PROB = -0.8  # least mean log-probability of a token in such a text, in nats
MOST_PREVIOUS = 224  # tokens of the text before it that a window gets
LEAST_STEP_S = 1.0  # least distance between the starts of two windows
SURE = 0.5  # highest temperature of a text that later windows rely on
_start = attrgetter("start_s")
Batches = Callable[[Iterable[int], Mapping[int, "Part"]], list[list[int]]]


class Span(NamedTuple):
    """Samples of a part that are not decoded yet."""

    start: int
    end: int
    is_gap: bool = False  # between words that are decoded already


class Part(NamedTuple):
    """A part of a recording, from its start to its end in samples, and its results so far."""

    path: Path
    start: int
    end: int
    last: bool  # whether it is the last part of the recording
    waveform: Tensor  # (S,); (0,) once it is decoded
    sounds: Tensor  # (N,) bool, frames of FRAME_S that sound
    todo: tuple[Span, ...]
    error: str = ""  # why a window was not decoded
    breaks_off: str = ""  # in the last part: why the recording ends here
    notes: tuple[str, ...] = ()  # in the last part: notes about the recording
    labels: Sequence[Label] = ()
    language: str = ""
    previous: Sequence[int] = ()  # tokens before the next window
    recording: int = 0  # number of the recording

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to decode."""
        return bool(self.error) or not self.todo


def after_window(
    part: Part, size: int, labels: Sequence[Label], segments: Segments, rate_hz: int, frame: int
) -> Part:
    """A part after a window was decoded with timestamps: with its labels, and what remains to do.

    If the window ended in the middle of a segment, the next window begins where the last whole
    segment ended (arXiv 2212.04356, section 3.8); at the end of the part only if sound follows. A
    long passage of sound between two labels, or after the last one, lacks words, and is decoded
    again by itself.

    Args:
        part: The part; the window is the start of its first span.
        size: Samples of the window.
        labels: Labels of the window.
        segments: Segments of these labels.
        rate_hz: Samples a second.
        frame: Samples of a frame of the segments.
    """
    span, *rest = part.todo
    if span.is_gap:
        is_sure = segments.temperature <= SURE and segments.log_prob > SURE_LOG_PROB
        merged = [*part.labels, *labels] if is_sure else part.labels
        return part._replace(labels=sorted(merged, key=_start), todo=tuple(rest))
    count = sum(segment.labels for segment in segments.whole)
    ended = Span(span.start + segments.whole[-1].end * frame, span.end) if count else span
    # A part ends in a pause, so a segment at its end is whole unless sound follows.
    at_end = span.start + size == span.end
    if count and segments.cut_off and (not at_end or _sounds(part, ended, rate_hz)):
        end, least = segments.whole[-1].end * frame, round(LEAST_STEP_S * rate_hz)
        size = min(max(end, least), size)
        begins_s = (part.start + span.start + size) / rate_hz
        between = [label for label in labels[count:] if end < least and label.start_s < begins_s]
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
    """The frame before which a later segment of the next window must have text; 0: it need not.

    A part usually ends in a pause, so its last segment is whole. The model may nevertheless treat
    it as cut off and write no text for it. A gap ends before a word, and may have no speech.

    Args:
        part: The part; the window is the start of its first span.
        size: Samples of the window.
        rate_hz: Samples a second.
        frame: Samples of a frame of the segments.
    """
    start, end, is_gap = part.todo[0]
    if is_gap or start + size < end:
        return 0
    sounds = part.sounds[start // frame_size(rate_hz) : end // frame_size(rate_hz)]
    left_s = sounds.flip(0).cumsum(0).flip(0) * FRAME_S
    return int((left_s >= LEAST_SEGMENT_S).sum()) * frame_size(rate_hz) // frame


def _sounds(part: Part, span: Span, rate_hz: int) -> bool:
    """Whether a span has sound; a long one also if it is more than silence or steady noise."""
    first, end = (sample // frame_size(rate_hz) for sample in span[:2])
    if float(part.sounds[first:end].sum()) * FRAME_S >= LEAST_REST_S:
        return True
    is_long = span.end - span.start >= LEAST_STEP_S * rate_hz
    return is_long and not is_silent(part.waveform[span.start : span.end], rate_hz)


def _gaps(part: Part, span: Span, labels: Sequence[Label], rate_hz: int) -> Iterator[Span]:
    """Yield passages that sound for LEAST_MISSED_S without a label; none if there are no labels."""
    size = frame_size(rate_hz)
    first, last = span.start // size, span.end // size
    points = [round((label.start_s * rate_hz - part.start) / size) - first for label in labels]
    for start, end in gaps(part.sounds[first:last], points, LEAST_MISSED_S) if points else ():
        yield Span((first + start) * size, (first + end) * size, True)


class Schedule:
    """Parts in order: which windows are decoded next, and which parts are done.

    A window that depends on the one before it shares a batch with windows of later parts.

    Args:
        batches: Takes the numbers of some parts, and all parts by number. Returns batches of
            numbers, whose next windows are decoded together.
        shows_text: Whether a window gets the text before it. Then windows are decoded one by one,
            in order.
        finds_language: Whether the model detects the language in the first window with sound of
            each recording. Then these windows are decoded before the others.
    """

    def __init__(self, batches: Batches, *, shows_text: bool, finds_language: bool) -> None:
        self.batches = batches
        self.shows_text = shows_text
        self.finds_language = finds_language
        self.parts: dict[int, Part] = {}  # by number, in order
        self.latest: dict[int, Part] = {}  # the part decoded last, by number of its recording
        self.added = self.recordings = 0

    @property
    def left(self) -> list[int]:
        """Numbers of the parts that are not done, in order."""
        return [number for number, part in self.parts.items() if not part.is_done]

    def add(self, pool: Iterable[Part]) -> None:
        """Add parts; those with nothing to decode are done."""
        for part in pool:
            self.parts[self.added] = part._replace(recording=self.recordings)
            self.added += 1
            self.recordings += part.last

    def done(self) -> Iterator[Part]:
        """Remove and yield the parts that are done, up to the first that is not."""
        for number, part in [*self.parts.items()]:
            if not part.is_done:
                return
            yield self._continued(self.parts.pop(number))
            if part.last:
                self.latest.pop(part.recording, None)

    def _continued(self, part: Part) -> Part:
        """The part with the language and previous text of its recording."""
        before = self.latest.get(part.recording, part)
        return part._replace(language=before.language, previous=before.previous)

    def next_batch(self) -> list[int]:
        """Numbers of the parts whose next windows are decoded together."""
        if self.shows_text:
            return self.left[:1]
        first: dict[int, int] = {}  # first part of each recording whose language is not known
        if self.finds_language:
            for number in self.left:
                recording = self.parts[number].recording
                if recording not in self.latest:
                    first.setdefault(recording, number)
        return self.batches(first.values() or self.left, self.parts)[0]

    def batch(self, numbers: Sequence[int]) -> list[Part]:
        """These parts, each with the language and previous text of its recording."""
        return [self._continued(self.parts[number]) for number in numbers]

    def decoded(self, numbers: Sequence[int], parts: Sequence[Part]) -> None:
        """Replace parts of which a window was decoded."""
        for number, part in zip(numbers, parts, strict=True):
            self.parts[number] = self.latest[part.recording] = part
