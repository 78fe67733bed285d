"""Recordings to transcripts: cut into windows, batched by length, recognised, and joined again."""

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asrkit.models import Checkpoint
from asrkit.shapes import expect, message
from asrkit.sound_files import Sound, seconds
from asrkit.text import Tokenizer
from asrkit.transcribe.audio import blocks, read_ahead, recordings
from asrkit.transcribe.formats import Transcript
from asrkit.transcribe.options import WindowOptions
from asrkit.transcribe.pipeline import Recognizer
from asrkit.transcribe.progress import progress_bar
from asrkit.transcribe.words import Label, Word, join, words

# Batches read ahead and sorted by length: enough for little padding. More would only take memory
# and delay the first transcripts.
POOL = 8
# Seconds of padding in a batch on a CPU: to fill them takes about as long as to start one more
# batch. (Where k utterances differ by d each, k * k * d / 2 of padding and a cost c of each batch
# add up to the least when that padding is c.) A GPU wants the largest batches.
MOST_PADDING_S = 4.0


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
    file of at most `window_s` is one window. Silence (zeros, or less than one feature frame) has no
    text. A batch that runs out of memory is retried in halves.

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
    total_s = 0.0
    shown = progress and sys.stderr.isatty()
    if shown:
        sounds = list(sounds)
        total_s = sum(map(seconds, sounds))
    with progress_bar(total_s, show=shown) as bar:
        yield from transcriber.recordings(sounds, bar.update)


class _Part(NamedTuple):
    """What was recognised in one window of a recording, in samples from its start to its end."""

    path: Path
    start: int
    end: int
    last: bool
    error: str = ""
    labels: Sequence[Label] = ()
    compute_s: float = 0.0


class _Window(NamedTuple):
    """Samples of a part of a recording."""

    part: _Part  # without labels
    waveform: Tensor  # (S,)


class Transcriber:
    """Recordings cut into windows, recognised, and joined to transcripts.

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
        expect(
            recognizer.has_confidence or not options.timestamps,
            "timestamps",
            "greedy decoding of this model",
            "a beam search",
            "Only the beam of a CTC model has confidences.",
        )
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

    def recordings(
        self, sounds: Iterable[Sound], advance: Callable[[float], object]
    ) -> Iterator[Transcript]:
        """Yield one transcript a recording, in order, each as soon as it can be.

        Args:
            sounds: drawn as they are needed.
            advance: called with seconds of audio that were recognised.
        """
        yield from self._transcripts(sounds, advance, 1)

    def job(self, sounds: Sequence[Sound]) -> list[Transcript]:
        """One transcript a recording, where no transcript is needed before the others.

        Args:
            sounds: recordings, best of at most POOL batches: they then share all batches.
        """
        return list(self._transcripts(sounds, lambda audio_s: None, POOL))

    def _transcripts(
        self, sounds: Iterable[Sound], advance: Callable[[float], object], batches: int
    ) -> Iterator[Transcript]:
        windows = read_ahead(sounds, self._windows, self.options.readers)
        pools = self._pools(windows, batches)
        parts: list[_Part] = []  # of the recording that is under way
        for pool in read_ahead([pools], iter, 1, ahead=1):  # reads one pool during another
            for part in self._recognised(pool):
                before = parts[-1].end if parts else 0
                advance((part.end - before) / self.rate_hz)
                parts.append(part)
                if part.last:
                    yield self._transcript(parts)
                    parts = []

    def _windows(self, sound: Sound) -> Iterator[_Window]:
        """Windows of a recording; the last one of a recording that breaks has its error."""
        end = 0
        try:
            chunks = blocks(sound, self.rate_hz)
            for start, waveform, last in windows(chunks, self.window, self.overlap):
                end = start + len(waveform)
                yield _Window(_Part(sound.path, start, end, last), waveform)
        except (ValueError, RuntimeError, OSError, MemoryError) as error:
            part = _Part(sound.path, end, end, True, message(error))
            yield _Window(part, torch.zeros(0))

    def _pools(self, queue: Iterable[_Window], batches: int) -> Iterator[list[_Window]]:
        """Windows in lists of about `batches`, then twice as many each time, up to POOL batches."""
        pool: list[_Window] = []
        samples = 0
        for window in queue:
            pool.append(window)
            samples += len(window.waveform)
            if samples >= batches * self.batch_samples:
                yield pool
                pool = []
                samples = 0
                batches = min(2 * batches, POOL)
        if pool:
            yield pool

    def _recognised(self, pool: Sequence[_Window]) -> Iterator[_Part]:
        """Yield the part of each window, in order; a batch is recognised when it is needed."""
        lengths = {
            row: max(len(waveform), self.features.fill_samples)
            for row, (_, waveform) in enumerate(pool)
            if len(waveform) >= self.features.window_samples and waveform.any()
        }
        most_padding = math.inf
        if self.recognizer.device.type == "cpu":
            most_padding = MOST_PADDING_S * self.rate_hz
        batches = iter(plan_batches(lengths, self.batch_samples, most_padding))
        parts: dict[int, _Part] = {}
        for row, window in enumerate(pool):
            if row in lengths and row not in parts:
                rows = next(batches)
                found = self._recognise([pool[member] for member in rows])
                parts.update(zip(rows, found, strict=True))
            yield parts.pop(row, window.part)

    def _recognise(self, batch: Sequence[_Window]) -> list[_Part]:
        """The parts of a batch; one that fails, as without memory, is retried in halves."""
        start = time.perf_counter()
        try:
            found = self._labels(batch)
        except (RuntimeError, MemoryError, ValueError) as error:
            why = message(error)  # the error itself would hold the tensors of its frames
        else:
            samples = sum(len(waveform) for _, waveform in batch)
            a_sample_s = (time.perf_counter() - start) / samples
            return [
                part._replace(labels=labels, compute_s=len(waveform) * a_sample_s)
                for (part, waveform), labels in zip(batch, found, strict=True)
            ]
        if len(batch) == 1:
            return [batch[0].part._replace(error=why)]
        half = len(batch) // 2
        return self._recognise(batch[:half]) + self._recognise(batch[half:])

    def _labels(self, batch: Sequence[_Window]) -> list[list[Label]]:
        """Labels of each window. Those of RNN-T have no duration: they end with their frame."""
        lengths = torch.tensor([len(waveform) for _, waveform in batch])
        waveforms = pad_sequence([waveform for _, waveform in batch], batch_first=True)
        hypotheses = self.recognizer(
            waveforms, lengths, confidence=self.options.timestamps, times=True
        )
        self._expect_finite(hypotheses.scores)
        confidence = hypotheses.confidence
        if confidence is None:
            confidence = torch.ones(hypotheses.labels.shape)
        first = torch.tensor([[part.start] for part, _ in batch])
        end = torch.tensor([[part.end] for part, _ in batch])
        starts = first + hypotheses.frames.cpu() * self.frame_samples
        ends = starts + hypotheses.durations.cpu().clamp(min=1) * self.frame_samples
        starts_s, ends_s = (times.minimum(end).double() / self.rate_hz for times in (starts, ends))
        columns = (hypotheses.labels, starts_s, ends_s, confidence)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        counts = hypotheses.lengths.tolist()
        return [
            [Label(*values) for values in itertools.islice(zip(*row, strict=True), count)]
            for row, count in zip(rows, counts, strict=True)
        ]

    def _expect_finite(self, scores: Tensor) -> None:
        remedy = "Try another --dtype."
        if self.recognizer.decode_options.lm is not None:
            remedy += " Or the --lm excludes all texts: it needs <unk> to allow unknown words."
        got = f"NaN or infinity in {self.recognizer.dtype}"
        expect(bool(scores.isfinite().all()), "model", "finite scores", got, remedy)

    def _transcript(self, parts: Sequence[_Part]) -> Transcript:
        """The transcript of a recording from its parts; the first error is that of all."""
        path = parts[0].path
        compute_s = sum(part.compute_s for part in parts)
        error = next((part.error for part in parts if part.error), "")
        if error:
            return Transcript(path=path, compute_s=compute_s, error=error)
        labels = parts[0].labels
        for before, part in itertools.pairwise(parts):
            labels = join(labels, part.labels, part.start / self.rate_hz, before.end / self.rate_hz)
        timed: list[Word] = []
        if self.options.timestamps:
            timed = words(labels, self.tokenizer)
        return Transcript(
            path=path,
            text=self.tokenizer.decode([label.token for label in labels]),
            audio_s=parts[-1].end / self.rate_hz,
            compute_s=compute_s,
            words=tuple(timed),
        )


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
