"""Recordings to transcripts: cut into windows, batched by length, recognised, and joined again."""

import itertools
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asrkit.decoders.hypotheses import Hypotheses, Segments
from asrkit.models import Checkpoint
from asrkit.shapes import expect, message
from asrkit.sound_files import Sound, seconds
from asrkit.text import Tokenizer
from asrkit.transcribe.audio import blocks, read_ahead, recordings
from asrkit.transcribe.formats import Transcript
from asrkit.transcribe.options import WindowOptions
from asrkit.transcribe.pauses import FRAME_S, gaps, sounding, stretches
from asrkit.transcribe.progress import Advance, progress_bar
from asrkit.transcribe.recognizer import Recognizer
from asrkit.transcribe.words import Label, join, words

# Batches read ahead and sorted by length: enough for little padding. More would only take memory
# and delay the first transcripts.
POOL = 8
# Seconds of padding in a batch on a CPU: to fill them takes about as long as to start one more
# batch. (Where k utterances differ by d each, k * k * d / 2 of padding and a cost c of each batch
# add up to the least when that padding is c.) A GPU wants the largest batches.
MOST_PADDING_S = 4.0
MOST_WINDOWS = 2  # in a stretch without pauses, which is cut behind so many all the same
LEAST_REST_S = 0.3  # of sound at the end of a stretch, to be a window of its own
LEAST_MISSED_S = 1.5  # of sound without a label, to be decoded again by itself
LEAST_SURE = -0.8  # nats a token in the mean, of a text that is found then
MISSED_S = 3.0  # of sound without a label in the end, to be reported
LEAST_STEP_S = 1.0  # from a window to the next one
SURE = 0.5  # temperature up to which a text is shown to the next window
_start = attrgetter("start_s")
# What recordings, models and machines raise; anything else is a fault of asrkit.
FAILURES = (ValueError, RuntimeError, OSError, MemoryError)


def transcribe(
    checkpoint: Checkpoint,
    paths: str | Path | Sound | Iterable[str | Path | Sound],
    *,
    options: WindowOptions | None = None,
    recognizer: Recognizer | None = None,
    progress: bool = False,
) -> Iterator[Transcript]:
    """Yield one `Transcript` a file, in the order given; a broken file yields its error.

    Windows of one file and of several share batches. About POOL batches of audio (at first one,
    then two, then four) are read, sorted by length and recognised while threads read the next
    ones, so memory is bounded however long a file is. A transcript comes as soon as its file and
    those before it are done.

    To the model, a window is an utterance of its own: features are normalised over the window. A
    file of at most `window_s` is one window. A longer one is cut into windows that overlap, and
    their labels are joined by their times; for a Whisper it is cut at pauses, and where a window
    ends in the middle of a segment the next one begins with that segment. Silence (zeros, or less
    than one feature frame; for a Whisper steady noise too) has no text. A batch that runs out of
    memory is retried in halves.

    Args:
        checkpoint: model, tokenizer and feature settings.
        paths: sound files, and folders that stand for the sound files in them (`find`); or
            recordings that are bytes, or parts of a file (`asrkit.sound_files.Sound`). They are
            drawn as they are needed.
        options: windows and batches; None: the defaults.
        recognizer: of this checkpoint, to compute with another config than the default one.
        progress: show a bar on stderr, if that is a terminal.
    """
    recognizer = recognizer or Recognizer.from_checkpoint(checkpoint)
    transcriber = Transcriber(recognizer, checkpoint.tokenizer, options or WindowOptions())
    sounds: Iterable[Sound] = recordings(paths)
    shown = progress and sys.stderr.isatty()
    if shown:
        sounds = list(sounds)
    with progress_bar(sum(map(seconds, sounds)) if shown else 0.0, show=shown) as bar:
        yield from transcriber.recordings(sounds, bar.update)


class _Span(NamedTuple):
    """Samples of a part that are still to be decoded."""

    start: int
    end: int
    is_gap: bool = False  # between words that were found before


class _Part(NamedTuple):
    """A part of a recording, from its start to its end in samples, and what is known of it.

    It is one window; of a Whisper's recording a stretch between pauses, of one window or more.
    """

    path: Path
    start: int
    end: int
    last: bool  # of the recording
    waveform: Tensor  # (S,); (0,) once it is recognised
    sounds: Tensor  # (N,) bool, frames of FRAME_S that sound
    todo: tuple[_Span, ...]
    error: str = ""
    labels: Sequence[Label] = ()
    language: str = ""
    previous: Sequence[int] = ()  # tokens before the next window, where it is to see them


class Transcriber:
    """Recordings cut into windows, recognised, and joined to transcripts.

    Threads read recordings as windows (`_windows`), which are collected in pools (`_pools`), sorted
    by length into batches (`plan_batches`) and recognised (`_labelled`); the parts of a recording
    make its transcript (`_transcript`).

    Args:
        recognizer: of the model.
        tokenizer: of the model.
        options: windows and batches.

    Raises:
        ValueError: the model cannot do what the options ask for.
    """

    def __init__(
        self,
        recognizer: Recognizer,
        tokenizer: Tokenizer,
        options: WindowOptions,
    ) -> None:
        config = recognizer.feature_config
        most_s = getattr(recognizer.model.encoder, "most_frames", math.inf) * config.hop_s
        wanted = f"at most {most_s:g} seconds, as the model has positions"
        expect(options.window_s <= most_s, "window_s", wanted, options.window_s)
        self.recognizer = recognizer
        self.tokenizer = tokenizer
        self.options = options
        self.features = config
        self.rate_hz = config.rate_hz
        self.batch_samples = options.batch_s * config.rate_hz
        # Windows are whole encoder frames long and apart: overlaps then see the same frames.
        self.frame_samples = config.hop_samples * recognizer.model.config.encoder.subsampling
        frame_s = self.frame_samples / config.rate_hz
        self.overlap = round(options.overlap_s / frame_s) * self.frame_samples
        window = round(options.window_s / frame_s) * self.frame_samples
        self.window = max(window, 2 * self.overlap, self.frame_samples)
        self.cuts_at_pauses = recognizer.writes_timestamps

    def recordings(
        self,
        sounds: Iterable[Sound],
        advance: Advance = lambda audio_s: None,
        batches: int = 1,
    ) -> Iterator[Transcript]:
        """Yield one transcript a recording, in order, each as soon as it can be.

        Args:
            sounds: drawn as they are needed.
            advance: called with seconds of audio that were recognised.
            batches: that the first pool holds; POOL: none is needed before the others.
        """
        queue = read_ahead(sounds, self._windows, self.options.readers)
        pools = read_ahead([self._pools(queue, batches)], iter, 1, ahead=1)  # one pool ahead
        parts: list[_Part] = []  # of the recording that is under way
        for part in self._recognised(pools):
            before = parts[-1].end if parts else 0
            advance((part.end - before) / self.rate_hz)
            parts.append(part)
            if part.last:
                yield self._transcript(parts)
                parts = []

    def _windows(self, sound: Sound) -> Iterator[_Part]:
        """Windows of a recording; the last one of a recording that breaks has its error."""
        end = 0
        try:
            chunks = blocks(sound, self.rate_hz)
            if self.cuts_at_pauses:
                most = MOST_WINDOWS * self.window
                cut = stretches(chunks, self.rate_hz, self.window, most)
            else:
                cut = windows(chunks, self.window, self.overlap)
            for start, waveform, last in cut:
                end = start + len(waveform)
                sounds = sounding(waveform, self.rate_hz)
                todo = (_Span(0, len(waveform)),)
                yield _Part(sound.path, start, end, last, waveform, sounds, todo)
        except FAILURES as error:
            nothing = torch.zeros(0)
            yield _Part(sound.path, end, end, True, nothing, nothing.bool(), (), message(error))

    def _pools(self, queue: Iterable[_Part], batches: int) -> Iterator[list[_Part]]:
        """Windows in lists of about `batches`, then twice as many each time, up to POOL batches."""
        pool: list[_Part] = []
        samples = 0
        for part in queue:
            pool.append(part)
            samples += len(part.waveform)
            if samples >= batches * self.batch_samples:
                yield pool
                pool = []
                samples = 0
                batches = min(2 * batches, POOL)
        if pool:
            yield pool

    def _recognised(self, pools: Iterable[Sequence[_Part]]) -> Iterator[_Part]:
        """Yield the parts with their labels, in order; a batch is recognised when it is needed.

        Windows that follow from others, and those of the next pool, share batches.

        Args:
            pools: Parts of recordings, in order.
        """
        source = iter(pools)
        parts: dict[int, _Part] = {}  # by number, as all that follows
        recording: dict[int, int] = {}
        left = set[int]()  # parts that are not done
        known: dict[int, _Part] = {}  # the last part of each recording, so far
        batches = deque[list[int]]()
        turn = last = 0
        while True:
            while turn in parts and turn not in left:
                part = _continued(parts.pop(turn), known.get(recording[turn]))
                yield part._replace(waveform=torch.zeros(0))
                turn += 1
            if not batches and self._samples(left, parts) < self.batch_samples:
                for part in next(source, ()):
                    number = turn + len(parts)
                    parts[number] = part
                    recording[number] = last
                    last += part.last
                    if self._has_text(part):
                        left.add(number)
                if turn not in parts:
                    return
            if turn not in left:
                continue
            if not batches:
                batches.extend(self._next_batches(left, parts, recording, known))
            rows = batches.popleft()
            batch = [_continued(parts[row], known.get(recording[row])) for row in rows]
            for row, part in zip(rows, self._recognise(batch), strict=True):
                parts[row] = known[recording[row]] = part
                if part.error or not part.todo:
                    left.remove(row)

    def _next_batches(
        self,
        left: set[int],
        parts: Mapping[int, _Part],
        recording: Mapping[int, int],
        known: Mapping[int, _Part],
    ) -> Iterator[list[int]]:
        """Batches of the next windows of parts that are left.

        Where the model finds the language, it does so in the first part of each recording that has
        sound: these are recognised before the others. Where a window is shown the text before it,
        only the first part of each recording can go on.
        """
        first: dict[int, int] = {}
        for row in sorted(left):
            first.setdefault(recording[row], row)
        alone = {row for name, row in first.items() if name not in known}
        if self.options.previous_text:
            for row in first.values():
                yield [row]
        elif self.recognizer.detects_language:
            yield from self._batches(alone, parts)
            yield from self._batches(left - alone, parts)
        else:
            yield from self._batches(left, parts)

    def _samples(self, rows: Iterable[int], parts: Mapping[int, _Part]) -> int:
        """Samples of the next windows of these parts."""
        return sum(self._filled(parts[row]) for row in rows)

    def _has_text(self, part: _Part) -> bool:
        """Whether a part is worth decoding: a Whisper may write a text for any noise."""
        sounds = part.sounds.any() if self.cuts_at_pauses else part.waveform.any()
        return len(part.waveform) >= self.features.window_samples and bool(sounds)

    def _sounds_s(self, part: _Part, start: int, end: int) -> float:
        """Seconds that sound between two samples of a part."""
        first, behind = (round(sample / (FRAME_S * self.rate_hz)) for sample in (start, end))
        return float(part.sounds[first:behind].sum()) * FRAME_S

    def _batches(self, rows: Iterable[int], parts: Mapping[int, _Part]) -> list[list[int]]:
        """The next windows of these parts in batches."""
        lengths = {row: self._filled(parts[row]) for row in sorted(rows)}
        on_cpu = self.recognizer.device.type == "cpu"
        most_padding = MOST_PADDING_S * self.rate_hz if on_cpu else math.inf
        return plan_batches(lengths, self.batch_samples, most_padding)

    def _filled(self, part: _Part) -> int:
        """Samples of the next window of a part, with the silence that fills it."""
        return max(self._window_of(part), self.features.fill_samples)

    def _window_of(self, part: _Part) -> int:
        """Samples of the next window of a part."""
        start, end, _ = part.todo[0]
        return min(end - start, self.window)

    def _recognise(self, batch: Sequence[_Part]) -> list[_Part]:
        """The parts of a batch with labels; one that fails, as without memory, is retried in
        halves.
        """
        try:
            return self._labelled(batch)
        except (RuntimeError, MemoryError, ValueError) as error:
            why = message(error)  # the error itself would hold the tensors of its frames
        if len(batch) == 1:
            return [batch[0]._replace(error=why)]
        half = len(batch) // 2
        return self._recognise(batch[:half]) + self._recognise(batch[half:])

    def _labelled(self, batch: Sequence[_Part]) -> list[_Part]:
        """The parts with the labels of their next window, and with the language if the model finds
        one. Labels of RNN-T have no duration: they end with their frame.
        """
        sizes = [self._window_of(part) for part in batch]
        cut = [
            part.waveform[part.todo[0].start :][:size]
            for part, size in zip(batch, sizes, strict=True)
        ]
        known = [part.language for part in batch]
        overlap = not self.cuts_at_pauses and not all(
            part.start == 0 and part.last for part in batch
        )
        hypotheses = self.recognizer(
            pad_sequence(cut, batch_first=True),
            torch.tensor(sizes),
            confidence=self.options.timestamps,
            times=self.options.timestamps or overlap or self.cuts_at_pauses,
            timestamps=self.cuts_at_pauses,
            languages=known,
            previous=[part.previous for part in batch],
        )
        got = f"NaN or infinity in {self.recognizer.dtype}"
        remedy = "Try another --dtype. An --lm without <unk> may exclude all texts."
        finite = bool(hypotheses.scores.isfinite().all())
        expect(finite, "model", "finite scores", got, remedy)
        labels = self._labels(batch, sizes, hypotheses)
        languages = hypotheses.languages or known
        if hypotheses.segments is None:
            return [
                part._replace(labels=written, language=language, todo=())
                for part, written, language in zip(batch, labels, languages, strict=True)
            ]
        rows = zip(batch, sizes, labels, hypotheses.segments, languages, strict=True)
        return [self._read(*row[:-1])._replace(language=row[-1]) for row in rows]

    def _labels(
        self, batch: Sequence[_Part], sizes: Sequence[int], hypotheses: Hypotheses
    ) -> list[list[Label]]:
        """The labels of each window with their times; where decoding left these open, spread over
        the window.
        """
        confidence = hypotheses.confidence
        if confidence is None:
            confidence = torch.ones(hypotheses.labels.shape)
        starts = hypotheses.frames
        frames = torch.stack([starts, starts + hypotheses.durations.clamp(min=1)]).cpu()
        places = torch.arange(frames.shape[2]) / hypotheses.lengths.cpu().clamp(min=1)[:, None]
        spread = places * (torch.tensor(sizes)[:, None] / self.frame_samples)  # (B, U)
        frames = frames.where(frames[:1] >= 0, spread)
        first = torch.tensor([[part.start + part.todo[0].start] for part in batch])
        last = first + torch.tensor(sizes)[:, None]
        times = (first + frames * self.frame_samples).minimum(last)  # (2, B, U) in samples
        columns = (hypotheses.labels, *(times.double() / self.rate_hz), confidence)
        rows = zip(hypotheses.lengths.tolist(), *(part.tolist() for part in columns), strict=True)
        return [list(map(Label, *row))[:count] for count, *row in rows]

    def _read(
        self, part: _Part, size: int, labels: Sequence[Label], segments: Segments
    ) -> _Part:
        """A part of which a window was decoded with timestamps.

        The next window begins where the last whole segment ended, if the window ended in the middle
        of another one (arXiv 2212.04356, section 3.8). What sounds for long between two labels,
        or behind the last one, is decoded once more, by itself: words are missing there.

        Args:
            part: Whose first span the window begins.
            size: Samples of the window.
            labels: That were written.
            segments: Of these.
        """
        span, *rest = part.todo
        if span.is_gap:
            sure = segments.temperature <= SURE and segments.log_prob > LEAST_SURE
            merged = [*part.labels, *labels] if sure else part.labels
            return part._replace(labels=sorted(merged, key=_start), todo=tuple(rest))
        done = size
        count = sum(segment.labels for segment in segments.whole)
        at_end = span.start + size == span.end  # in a pause, so that no segment was cut off
        if 0 < count < len(labels) and not at_end:
            end = segments.whole[-1].end * self.frame_samples
            done = min(max(end, round(LEAST_STEP_S * self.rate_hz)), size)
            labels = labels[:count]
        gaps = self._gaps(part, span.start, span.start + done, labels) if labels else []
        following = _Span(span.start + done, span.end)
        if self._sounds_s(part, *following[:2]) >= LEAST_REST_S:
            rest = [following, *rest]
        previous: Sequence[int] = ()
        if self.options.previous_text and segments.temperature <= SURE:
            previous = [*part.previous, *(label.token for label in labels)]
        return part._replace(
            labels=[*part.labels, *labels], todo=(*rest, *gaps), previous=previous
        )

    def _gaps(
        self, part: _Part, start: int, end: int, labels: Sequence[Label]
    ) -> Iterator[_Span]:
        """What sounds without a label for LEAST_MISSED_S or more between two samples of a part."""
        size = FRAME_S * self.rate_hz
        first, last = round(start / size), round(end / size)
        points = [round((label.start_s * self.rate_hz - part.start) / size) for label in labels]
        found = gaps(part.sounds[first:last], [point - first for point in points], LEAST_MISSED_S)
        for before, behind in found:
            yield _Span(round((first + before) * size), round((first + behind) * size), True)

    def _transcript(self, parts: Sequence[_Part]) -> Transcript:
        """The transcript of a recording from its parts; the first error is that of all."""
        path = parts[0].path
        error = next((part.error for part in parts if part.error), "")
        if error:
            return Transcript(path=path, error=error)
        labels = parts[0].labels
        for before, part in itertools.pairwise(parts):
            overlap_s = (part.start / self.rate_hz, before.end / self.rate_hz)
            labels = join(labels, part.labels, *overlap_s)
        return Transcript(
            path=path,
            text=self.tokenizer.decode([label.token for label in labels]),
            audio_s=parts[-1].end / self.rate_hz,
            without_words=self._without_words(parts, labels),
            words=tuple(words(labels, self.tokenizer)) if self.options.timestamps else (),
            language=parts[-1].language,
        )


    def _without_words(
        self, parts: Sequence[_Part], labels: Sequence[Label]
    ) -> tuple[tuple[float, float], ...]:
        """(start, end) of what sounds for long between two labels, in seconds."""
        size = FRAME_S * self.rate_hz
        sounds = torch.zeros(round(parts[-1].end / size) + 1, dtype=torch.bool)
        for part in parts:
            first = round(part.start / size)
            sounds[first : first + len(part.sounds)] = part.sounds
        points = [round(label.start_s / FRAME_S) for label in labels]
        found = gaps(sounds, points, MISSED_S)
        return tuple((start * FRAME_S, end * FRAME_S) for start, end in found)


def _continued(part: _Part, before: _Part | None) -> _Part:
    """A part with what is known from the part before it: language and text."""
    if before is None:
        return part
    return part._replace(language=before.language, previous=before.previous)


def windows(
    chunks: Iterable[Tensor], size: int, overlap: int
) -> Iterator[tuple[int, Tensor, bool]]:
    """Yield (first sample, samples (S,), whether it is the last) of a signal's windows.

    The last window holds what is left, more than `overlap`; a signal of at most `size` samples is
    one window.

    Args:
        chunks: consecutive parts of the signal.
        size: most samples in a window.
        overlap: samples that neighbouring windows share.
    """
    parts = [torch.zeros(0)]
    start = 0
    for chunk in chunks:
        parts.append(chunk)
        # Joined once a window: joining at each chunk would copy a long window over and over.
        if sum(map(len, parts)) > size:
            held = torch.cat(parts)
            while len(held) > size:
                yield start, held[:size].clone(), False  # a view would keep all of `held`
                held = held[size - overlap :]
                start += size - overlap
            parts = [held]
    yield start, torch.cat(parts), True


def plan_batches(
    lengths: Mapping[int, int], budget: float, most_padding: float = math.inf
) -> list[list[int]]:
    """Utterances of similar length in batches, the batch with the earliest utterance first.

    A batch has at most `budget` samples, padding included; an utterance longer than that is a batch
    of its own.

    Args:
        lengths: samples of each utterance, by its number.
        budget: most samples in a batch: utterances times the longest of them.
        most_padding: most samples of padding in a batch.
    """
    plan: list[list[int]] = []
    batch: list[int] = []
    longest = 0  # samples of the longest utterance of the batch
    filled = 0  # samples of its utterances, without padding
    for row in sorted(lengths, key=lengths.__getitem__, reverse=True):
        filled += lengths[row]
        padded = (len(batch) + 1) * longest
        if not batch or padded > budget or padded - filled > most_padding:
            batch = []
            plan.append(batch)
            longest = filled = lengths[row]
        batch.append(row)
    return sorted(plan, key=min)
