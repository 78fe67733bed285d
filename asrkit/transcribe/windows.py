"""Recordings to transcripts: cut into windows, batched by length, recognised and joined again."""

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

# Batches of audio that are read ahead and sorted by length: enough for little padding. More would
# only take memory and delay the first transcripts.
POOL = 8
ALIKE = 2  # the same for a Whisper, whose windows are all padded to one length
BATCH_S = 120.0  # seconds of audio in a batch
MEMORY = 600 * 2**20  # bytes of a Whisper's keys and values
MOST_TOGETHER = 8  # windows in a Whisper's batch: 6 take 1.07 times as long, and 60 MiB less
# Most seconds of padding in a batch on a CPU: they take about as long as starting another batch.
# (If k utterances differ by d each, the sum of k * k * d / 2 of padding and a cost c of each batch
# is smallest when that padding equals c.) A GPU needs the largest batches.
MOST_PADDING_S = 4.0
MOST_WINDOWS = 2  # windows in a stretch without a pause, before it is cut anyway
MISSED_S = 3.0  # seconds of sound without a word that are reported
# Errors that recordings, models and machines cause; any other error is a defect of asrkit.
FAILURES = (ValueError, RuntimeError, OSError, MemoryError)


def transcribe(
    checkpoint: Checkpoint,
    paths: Sources,
    *,
    options: WindowOptions | None = None,
    recognizer: Recognizer | None = None,
    progress: bool = False,
) -> Iterator[Transcript]:
    """Yield one `Transcript` for each file, in the order given.

    The transcript of a file that breaks off has the text up to there and an error.

    Windows of one or several files share batches. About POOL batches of audio (one at first, then
    two, then four), or ALIKE for a Whisper, are read, sorted by length and recognised while threads
    read the next ones. So memory is bounded however long a file is. A transcript is yielded as soon
    as its file and all files before it are done.

    The model treats each window as an utterance: features are normalised over the window. A file of
    at most `window_s` is one window. A longer file is cut into overlapping windows, whose labels
    are joined by their times. For a Whisper it is cut at pauses, and if a window ends in the middle
    of a segment, the next window begins with that segment. Silence has no text: zeros, less than
    one feature frame, and for a Whisper also steady noise. A batch that runs out of memory is
    retried in halves.

    Args:
        checkpoint: Model, tokenizer and feature settings.
        paths: Sound files, and folders of sound files, as `find` takes them; or recordings that are
            bytes or parts of a file (`asrkit.sound_files.Sound`). They are drawn as needed.
        options: Windows and batches; None: the defaults.
        recognizer: A recogniser of this checkpoint, to compute with another config.
        progress: Whether to show a bar on stderr, if that is a terminal.
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
    """Cuts recordings into windows, recognises them, and joins the results to transcripts.

    Threads read recordings as parts (`_parts`). These are collected in pools (`_pools`), sorted by
    length into batches (`plan_batches`) and recognised (`_labelled`). The parts of a recording make
    its transcript (`_transcript`).

    Args:
        recognizer: Recogniser of the model.
        tokenizer: Tokenizer of the model.
        options: Windows and batches.

    Raises:
        ValueError: The model does not support the options.
    """

    def __init__(
        self, recognizer: Recognizer, tokenizer: Tokenizer, options: WindowOptions
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
        # Windows and overlaps are whole encoder frames, so that overlaps have the same frames.
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
        """Yield one transcript for each recording, in order and as soon as possible.

        Args:
            sounds: The recordings, drawn as they are needed.
            advance: Called with seconds of audio that were recognised.
            batches: Most batches in the first pool. POOL suits callers that need all transcripts
                before they use the first one.
        """
        queue = read_ahead(sounds, self._parts, self.options.readers)
        pools = read_ahead([self._pools(queue, batches)], iter, 1, ahead=1)  # one pool ahead
        parts: list[Part] = []  # parts of the current recording
        for part in self._recognised(pools):
            before = parts[-1].end if parts else 0
            advance((part.end - before) / self.rate_hz)
            parts.append(part._replace(waveform=torch.zeros(0, **CPU_FLOAT), previous=()))
            if part.last:
                yield self._transcript(parts)
                parts = []

    def _parts(self, sound: Sound) -> Iterator[Part]:
        """Yield the parts of a recording; the last one has the error if it breaks off."""
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
                if self.cuts_at_pauses:  # a Whisper may write text for any noise
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
        """Yield lists of parts: first about `batches`, then twice as many each, up to a pool."""
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
        """Yield the parts with their labels, in order; a batch is recognised when it is needed."""
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
        """Whether the remaining windows fill a batch without windows of the next pool."""
        samples = sum(self._filled(schedule.parts[number]) for number in schedule.left)
        return samples >= self.batch_samples

    def _after_batch(self, schedule: Schedule) -> Iterator[Part]:
        """Recognise the next batch, and yield the parts that are done after it."""
        numbers = schedule.next_batch()
        schedule.decoded(numbers, self._recognise(schedule.batch(numbers)))
        if self.cuts_at_pauses and self.recognizer.device.type == "cpu":
            return_free_memory()  # a Whisper's batch has used hundreds of MiB
        yield from schedule.done()

    def _batches(self, numbers: Iterable[int], parts: Mapping[int, Part]) -> list[list[int]]:
        """Batches of the next windows of these parts. Among windows of equal length, those that
        others depend on come first, so that the last window is not decoded alone.
        """
        rows = sorted(numbers, key=lambda number: (-self._windows_left(parts[number]), number))
        lengths = {number: self._filled(parts[number]) for number in rows}
        on_cpu = self.recognizer.device.type == "cpu"
        most_padding = MOST_PADDING_S * self.rate_hz if on_cpu else math.inf
        return plan_batches(lengths, self.batch_samples, most_padding)

    def _filled(self, part: Part) -> int:
        """Samples of the next window of a part, padding included."""
        return max(self._window_of(part), self.features.fill_samples)

    def _windows_left(self, part: Part) -> int:
        """Least number of windows that remain in a part."""
        return sum(math.ceil((end - start) / self.window) for start, end, _ in part.todo)

    def _window_of(self, part: Part) -> int:
        """Samples of the next window of a part."""
        start, end, _ = part.todo[0]
        return min(end - start, self.window)

    def _recognise(self, batch: Sequence[Part]) -> list[Part]:
        """The parts of a batch with labels; a batch that fails, as for lack of memory, is retried
        in halves.
        """
        try:
            return self._labelled(batch)
        except (RuntimeError, MemoryError, ValueError) as error:
            why = message(error)  # the error itself would keep tensors alive
        if len(batch) == 1:
            return [batch[0]._replace(error=why)]
        half = len(batch) // 2
        return self._recognise(batch[:half]) + self._recognise(batch[half:])

    def _labelled(self, batch: Sequence[Part]) -> list[Part]:
        """The parts with the labels of their next window, and with its language if the model
        detects one. Labels of RNN-T have no duration: they end with their frame.
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
        expect(
            bool(hypotheses.scores.isfinite().all()),
            "model",
            "finite scores",
            f"NaN or infinity in {self.recognizer.dtype}",
            "Try another --dtype. An --lm without <unk> may exclude all texts.",
        )
        labels = self._labels(batch, sizes, hypotheses)
        languages = hypotheses.languages or known
        if hypotheses.segments is None:
            decoded = [
                part._replace(labels=written, todo=())
                for part, written in zip(batch, labels, strict=True)
            ]
        else:
            rows = zip(batch, sizes, labels, hypotheses.segments, strict=True)
            decoded = [after_window(*row, *units) for row in rows]
        return [
            part._replace(language=language)
            for part, language in zip(decoded, languages, strict=True)
        ]

    def _labels(
        self, batch: Sequence[Part], sizes: Sequence[int], hypotheses: Hypotheses
    ) -> list[list[Label]]:
        """The labels of each window with their times. Labels without frames are spread evenly over
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
        """The transcript of a recording from its parts, up to the first with an error."""
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
        """(start, end) in seconds of each long passage between two labels that sounds."""
        size = frame_size(self.rate_hz)
        sounds = torch.zeros(parts[-1].end // size + 1, dtype=torch.bool, device="cpu")
        for part in parts:
            first = part.start // size
            sounds[first : first + len(part.sounds)] = part.sounds
        frame_s = size / self.rate_hz
        points = [round(label.start_s / frame_s) for label in labels]
        passages = gaps(sounds, points, MISSED_S)
        return tuple((start * frame_s, end * frame_s) for start, end in passages)


def usual_batch_s(recognizer: Recognizer, window_s: float) -> float:
    """Default seconds of audio in a batch.

    On a CPU, a Whisper stores keys and values of each window, for each hypothesis of a beam. A
    batch has as many windows as fit into MEMORY, but at most MOST_TOGETHER.

    Args:
        recognizer: Recogniser of the model.
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
    """Batches of utterances of similar length, the batch with the earliest utterance first.

    A batch has at most `budget` samples, padding included. A longer utterance is a batch of its
    own.

    Args:
        lengths: Samples of each utterance, by its number.
        budget: Most samples in a batch: number of utterances times the longest of them.
        most_padding: Most samples of padding in a batch.
    """
    plan: list[list[int]] = []
    batch: list[int] = []
    longest = 0  # samples of the longest utterance in the batch
    filled = 0  # samples of its utterances without padding
    for row in sorted(lengths, key=lengths.__getitem__, reverse=True):
        filled += lengths[row]
        padded = (len(batch) + 1) * longest
        if not batch or padded > budget or padded - filled > most_padding:
            batch = []
            plan.append(batch)
            longest = filled = lengths[row]
        batch.append(row)
    return sorted(plan, key=min)
