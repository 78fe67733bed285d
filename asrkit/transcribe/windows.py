"""Recordings to transcripts: cut into windows, batched by length, recognised, and joined again."""

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from asrkit.decoders.hypotheses import Hypotheses
from asrkit.devices import CPU_FLOAT
from asrkit.memory import return_free_memory
from asrkit.models import Checkpoint
from asrkit.shapes import expect, message
from asrkit.sound_files import Sound
from asrkit.sound_readers import seconds
from asrkit.text import Tokenizer
from asrkit.transcribe.audio import Reading, Sources, read_ahead, recordings
from asrkit.transcribe.formats import Transcript
from asrkit.transcribe.options import WindowOptions
from asrkit.transcribe.parts import Part, Schedule, Span, after_window, text_until
from asrkit.transcribe.pauses import (
    frame_size,
    gaps,
    is_silent,
    sounding,
    stretches,
    windows,
)
from asrkit.transcribe.progress import Advance, progress_bar
from asrkit.transcribe.recognizer import Recognizer
from asrkit.transcribe.words import Label, join, words

# Batches read ahead and sorted by length: enough for little padding. More would only take memory
# and delay the first transcripts.
POOL = 8
ALIKE = 2  # batches of a Whisper's windows, which are filled to one length
BATCH_S = 120.0  # of audio
MEMORY = 600 * 2**20  # of keys and values, in bytes
MOST_TOGETHER = 6  # windows of a Whisper: 8 take 0.95 times as long, and 70 MiB more
# Seconds of padding in a batch on a CPU: to fill them takes about as long as to start one more
# batch. (Where k utterances differ by d each, k * k * d / 2 of padding and a cost c of each batch
# add up to the least when that padding is c.) A GPU wants the largest batches.
MOST_PADDING_S = 4.0
MOST_WINDOWS = 2  # in a stretch without pauses, which is cut behind so many all the same
MISSED_S = 3.0  # of sound without a word, to be reported
# What recordings, models and machines raise; anything else is a fault of asrkit.
FAILURES = (ValueError, RuntimeError, OSError, MemoryError)


def transcribe(
    checkpoint: Checkpoint,
    paths: Sources,
    *,
    options: WindowOptions | None = None,
    recognizer: Recognizer | None = None,
    progress: bool = False,
) -> Iterator[Transcript]:
    """Yield one `Transcript` a file, in the order given; one that breaks off yields its
    text up to there and its error.

    Windows of one file and of several share batches. About POOL batches of audio (at first one,
    then two, then four), for a Whisper ALIKE, are read, sorted by length and recognised while
    threads read the next ones, so memory is bounded however long a file is. A transcript comes as
    soon as its file and those before it are done.

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


class Transcriber:
    """Recordings cut into windows, recognised, and joined to transcripts.

    Threads read recordings as parts (`_parts`), which are collected in pools (`_pools`), sorted by
    length into batches (`plan_batches`) and recognised (`_labelled`); the parts of a recording make
    its transcript (`_transcript`).

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
        self.batch_s = options.batch_s or usual_batch_s(recognizer, options.window_s)
        self.batch_samples = self.batch_s * config.rate_hz
        # Windows are whole encoder frames long and apart: overlaps then see the same frames.
        self.frame_samples = config.hop_samples * recognizer.model.config.encoder.subsampling
        frame_s = self.frame_samples / config.rate_hz
        self.overlap = round(options.overlap_s / frame_s) * self.frame_samples
        window = round(options.window_s / frame_s) * self.frame_samples
        self.window = max(window, 2 * self.overlap, self.frame_samples)
        self.cuts_at_pauses = recognizer.writes_timestamps
        self.pool = ALIKE if self.cuts_at_pauses else POOL
        name = type(recognizer.model).__name__
        fits = self.cuts_at_pauses or not options.previous_text
        expect(fits, "previous_text", "none, since it is for a Whisper", f"it with {name}")

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
            batches: that the first pool holds at most; POOL: none is needed before the others.
        """
        queue = read_ahead(sounds, self._parts, self.options.readers)
        pools = read_ahead([self._pools(queue, batches)], iter, 1, ahead=1)  # one pool ahead
        parts: list[Part] = []  # of the recording that is under way
        for part in self._recognised(pools):
            before = parts[-1].end if parts else 0
            advance((part.end - before) / self.rate_hz)
            parts.append(part._replace(waveform=torch.zeros(0, **CPU_FLOAT), previous=()))
            if part.last:
                yield self._transcript(parts)
                parts = []

    def _parts(self, sound: Sound) -> Iterator[Part]:
        """Parts of a recording; the last one has the error of a recording that breaks off."""
        end = 0
        reading = Reading(sound, self.rate_hz)
        try:
            chunks = reading.blocks()
            if self.cuts_at_pauses:
                cut = stretches(chunks, self.rate_hz, self.window, MOST_WINDOWS * self.window)
            else:
                cut = windows(chunks, self.window, self.overlap)
            for start, waveform, last in cut:
                end = start + len(waveform)
                sounds = sounding(waveform, self.rate_hz)
                silent = not bool(waveform.any())
                if self.cuts_at_pauses:  # a Whisper may write a text for any noise
                    silent = is_silent(waveform, self.rate_hz)
                has_text = not silent and len(waveform) >= self.features.window_samples
                todo = (Span(0, len(waveform)),) if has_text else ()
                part = Part(sound.path, start, end, last, waveform, sounds, todo)
                if last:
                    part = part._replace(breaks_off=reading.error, notes=tuple(reading.notes))
                yield part
        except FAILURES as error:
            nothing = torch.zeros(0, **CPU_FLOAT)
            part = Part(sound.path, end, end, True, nothing, nothing.bool(), ())
            yield part._replace(breaks_off=message(error), notes=tuple(reading.notes))

    def _pools(self, queue: Iterable[Part], batches: int) -> Iterator[list[Part]]:
        """Parts in lists of about `batches`, then twice as many each time, up to a whole pool."""
        pool: list[Part] = []
        samples = 0
        batches = min(batches, self.pool)
        for part in queue:
            pool.append(part)
            samples += len(part.waveform)
            if samples >= batches * self.batch_samples:
                yield pool
                pool = []
                samples = 0
                batches = min(2 * batches, self.pool)
        if pool:
            yield pool

    def _recognised(self, pools: Iterable[Sequence[Part]]) -> Iterator[Part]:
        """Yield the parts with their labels, in order; a batch is recognised when it is needed.

        Args:
            pools: Parts of recordings, in order.
        """
        schedule = Schedule(
            self._batches,
            shows_text=self.options.previous_text,
            finds_language=self.recognizer.detects_language,
        )
        for pool in pools:
            schedule.add(pool)
            yield from schedule.done()
            while self._fills_a_batch(schedule):
                yield from self._after_batch(schedule)
        while schedule.left:
            yield from self._after_batch(schedule)

    def _fills_a_batch(self, schedule: Schedule) -> bool:
        """Whether the windows that are left are worth a batch without those of the next pool."""
        samples = sum(self._filled(schedule.parts[number]) for number in schedule.left)
        return samples >= self.batch_samples

    def _after_batch(self, schedule: Schedule) -> Iterator[Part]:
        """Recognise the next batch, and yield the parts that are done."""
        numbers = schedule.next_batch()
        schedule.decoded(numbers, self._recognise(schedule.batch(numbers)))
        if self.cuts_at_pauses and self.recognizer.device.type == "cpu":
            return_free_memory()  # what a Whisper's batch has held is hundreds of MiB
        yield from schedule.done()

    def _batches(self, numbers: Iterable[int], parts: Mapping[int, Part]) -> list[list[int]]:
        """The next windows of these parts in batches. Of equally long ones those come first that
        others follow, so that the last of all need not be decoded alone.
        """
        rows = sorted(numbers, key=lambda number: (-self._windows_left(parts[number]), number))
        lengths = {number: self._filled(parts[number]) for number in rows}
        on_cpu = self.recognizer.device.type == "cpu"
        most_padding = MOST_PADDING_S * self.rate_hz if on_cpu else math.inf
        return plan_batches(lengths, self.batch_samples, most_padding)

    def _filled(self, part: Part) -> int:
        """Samples of the next window of a part, with the silence that fills it."""
        return max(self._window_of(part), self.features.fill_samples)

    def _windows_left(self, part: Part) -> int:
        """Windows of a part that are left, at least."""
        return sum(math.ceil((end - start) / self.window) for start, end, _ in part.todo)

    def _window_of(self, part: Part) -> int:
        """Samples of the next window of a part."""
        start, end, _ = part.todo[0]
        return min(end - start, self.window)

    def _recognise(self, batch: Sequence[Part]) -> list[Part]:
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

    def _labelled(self, batch: Sequence[Part]) -> list[Part]:
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
        units = (self.rate_hz, self.frame_samples)
        until: list[int] = []
        if self.cuts_at_pauses:
            until = [text_until(*row, *units) for row in zip(batch, sizes, strict=True)]
        hypotheses = self.recognizer(
            pad_sequence(cut, batch_first=True),
            torch.tensor(sizes, device="cpu"),
            confidence=self.options.timestamps,
            times=self.options.timestamps or overlap or self.cuts_at_pauses,
            timestamps=self.cuts_at_pauses,
            languages=known,
            previous=[part.previous for part in batch] if self.options.previous_text else (),
            until=until,
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
        rows = zip(batch, sizes, labels, hypotheses.segments, strict=True)
        return [
            after_window(*row, *units)._replace(language=language)
            for row, language in zip(rows, languages, strict=True)
        ]

    def _labels(
        self, batch: Sequence[Part], sizes: Sequence[int], hypotheses: Hypotheses
    ) -> list[list[Label]]:
        """The labels of each window with their times; where decoding left these open, spread over
        the window.
        """
        confidence = hypotheses.confidence
        if confidence is None:
            confidence = torch.ones(hypotheses.labels.shape, **CPU_FLOAT)
        starts = hypotheses.frames
        frames = torch.stack([starts, starts + hypotheses.durations.clamp(min=1)]).cpu()
        places = (
            torch.arange(frames.shape[2], **CPU_FLOAT)
            / hypotheses.lengths.cpu().clamp(min=1)[:, None]
        )
        samples = torch.tensor(sizes, device="cpu")[:, None]
        spread = places * (samples.float() / self.frame_samples)  # (B, U)
        frames = frames.where(frames[:1] >= 0, spread)
        first = torch.tensor([[part.start + part.todo[0].start] for part in batch], device="cpu")
        last = first + samples
        times = (first + frames * self.frame_samples).minimum(last)  # (2, B, U) in samples
        columns = (hypotheses.labels, *(times.double() / self.rate_hz), confidence)
        rows = zip(hypotheses.lengths.tolist(), *(part.tolist() for part in columns), strict=True)
        return [list(map(Label, *row))[:count] for count, *row in rows]

    def _transcript(self, parts: Sequence[Part]) -> Transcript:
        """The transcript of a recording from its parts, up to the first that has an error."""
        path, notes = parts[0].path, parts[-1].notes
        decoded = [*itertools.takewhile(lambda part: not part.error, parts)]
        failed = parts[len(decoded) :]
        error = failed[0].error if failed else parts[-1].breaks_off
        if not decoded:
            return Transcript(path=path, notes=notes, error=error)
        parts = decoded
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
            notes=notes,
            error=error,
        )

    def _without_words(
        self, parts: Sequence[Part], labels: Sequence[Label]
    ) -> tuple[tuple[float, float], ...]:
        """(start, end) of what sounds for long between two labels, in seconds."""
        size = frame_size(self.rate_hz)
        sounds = torch.zeros(parts[-1].end // size + 1, dtype=torch.bool, device="cpu")
        for part in parts:
            first = part.start // size
            sounds[first : first + len(part.sounds)] = part.sounds
        frame_s = size / self.rate_hz
        points = [round(label.start_s / frame_s) for label in labels]
        found = gaps(sounds, points, MISSED_S)
        return tuple((start * frame_s, end * frame_s) for start, end in found)


def usual_batch_s(recognizer: Recognizer, window_s: float) -> float:
    """Seconds of audio in a batch where nothing else is asked for.

    On a CPU a Whisper keeps keys and values of each window, for each hypothesis of a beam: so many
    windows that these take MEMORY at most, and MOST_TOGETHER at most.

    Args:
        recognizer: Of the model.
        window_s: Length of a window.
    """
    if not recognizer.writes_timestamps or recognizer.device.type != "cpu":
        return BATCH_S
    config, search = recognizer.model.config, recognizer.config.search
    kept = 2 * config.layers * config.encoder.most * config.width * recognizer.dtype.itemsize
    kept *= search.beam + 1 if search else 1
    filled_s = max(window_s, recognizer.feature_config.fill_s or 0.0)
    return filled_s * min(max(MEMORY // kept, 1), MOST_TOGETHER)


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
