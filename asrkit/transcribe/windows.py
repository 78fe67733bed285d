"""Recordings to transcripts: cut into windows, batched by length, recognised, and joined again."""

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    shown = progress and sys.stderr.isatty()
    if shown:
        sounds = list(sounds)
    with progress_bar(sum(map(seconds, sounds)) if shown else 0.0, show=shown) as bar:
        yield from transcriber.recordings(sounds, bar.update)


class _Part(NamedTuple):
    """A window of a recording, from its start to its end in samples, and what is known of it."""

    path: Path
    start: int
    end: int
    last: bool  # of the recording
    waveform: Tensor  # (S,); (0,) once it is recognised
    error: str = ""
    labels: Sequence[Label] = ()
    language: str = ""


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
        pools = self._pools(read_ahead(sounds, self._windows, self.options.readers), batches)
        parts: list[_Part] = []  # of the recording that is under way
        for pool in read_ahead([pools], iter, 1, ahead=1):  # reads one pool during another
            language = parts[-1].language if parts else ""
            for part in self._recognised(pool, language):
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
            for start, waveform, last in windows(chunks, self.window, self.overlap):
                end = start + len(waveform)
                yield _Part(sound.path, start, end, last, waveform)
        except FAILURES as error:
            yield _Part(sound.path, end, end, True, torch.zeros(0), message(error))

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

    def _recognised(self, pool: Sequence[_Part], language: str) -> Iterator[_Part]:
        """Yield the parts with their labels, in order; a batch is recognised when it is needed.

        Where the model finds the language, it does so in the first window of each recording that
        has sound: these are recognised before the others.

        Args:
            pool: windows.
            language: of the recording that the first one continues, "" where it is not known.
        """
        recordings = [0, *itertools.accumulate(part.last for part in pool)]
        languages = {0: language}  # by recording
        lengths = {
            row: max(len(part.waveform), self.features.fill_samples)
            for row, part in enumerate(pool)
            if len(part.waveform) >= self.features.window_samples and part.waveform.any()
        }
        first: dict[int, int] = {}  # the first window with sound of each recording
        if self.recognizer.detects_language:
            first = {recordings[row]: row for row in reversed(lengths)}
        on_cpu = self.recognizer.device.type == "cpu"
        most_padding = MOST_PADDING_S * self.rate_hz if on_cpu else math.inf
        batches: list[list[int]] = []
        for group in (first.values(), lengths.keys() - first.values()):
            sizes = {row: lengths[row] for row in sorted(group)}
            batches += plan_batches(sizes, self.batch_samples, most_padding)
        planned = iter(batches)
        done: dict[int, _Part] = {}
        for row, part in enumerate(pool):
            while row in lengths and row not in done:
                rows = next(planned)
                batch = [
                    pool[member]._replace(language=languages.get(recordings[member], ""))
                    for member in rows
                ]
                done.update(zip(rows, self._recognise(batch), strict=True))
                languages |= {recordings[member]: done[member].language for member in rows}
            found = languages.get(recordings[row], "")
            yield done.pop(row, part)._replace(language=found, waveform=torch.zeros(0))

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
        """The parts with labels, and with the language if the model finds one. Labels of RNN-T have
        no duration: they end with their frame.
        """
        lengths = torch.tensor([len(part.waveform) for part in batch])
        known = [part.language for part in batch]
        timestamps = self.options.timestamps
        hypotheses = self.recognizer(
            pad_sequence([part.waveform for part in batch], batch_first=True),
            lengths,
            confidence=timestamps,
            times=timestamps or not all(part.start == 0 and part.last for part in batch),
            timestamps=timestamps,
            languages=known,
        )
        got = f"NaN or infinity in {self.recognizer.dtype}"
        remedy = "Try another --dtype. An --lm without <unk> may exclude all texts."
        finite = bool(hypotheses.scores.isfinite().all())
        expect(finite, "model", "finite scores", got, remedy)
        confidence = hypotheses.confidence
        if confidence is None:
            confidence = torch.ones(hypotheses.labels.shape)
        starts = hypotheses.frames
        frames = torch.stack([starts, starts + hypotheses.durations.clamp(min=1)]).cpu()
        first = torch.tensor([[part.start] for part in batch])
        last = torch.tensor([[part.end] for part in batch])
        times = (first + frames * self.frame_samples).minimum(last)  # (2, B, U) in samples
        columns = (hypotheses.labels, *(times.double() / self.rate_hz), confidence)
        rows = zip(hypotheses.lengths.tolist(), *(part.tolist() for part in columns), strict=True)
        labels = [list(map(Label, *row))[:count] for count, *row in rows]
        return [
            part._replace(labels=said, language=language)
            for part, said, language in zip(
                batch, labels, hypotheses.languages or known, strict=True
            )
        ]

    def _transcript(self, parts: Sequence[_Part]) -> Transcript:
        """The transcript of a recording from its parts; the first error is that of all."""
        path = parts[0].path
        error = next((part.error for part in parts if part.error), "")
        if error:
            return Transcript(path=path, error=error)
        labels = parts[0].labels
        for before, part in itertools.pairwise(parts):
            labels = join(labels, part.labels, part.start / self.rate_hz, before.end / self.rate_hz)
        return Transcript(
            path=path,
            text=self.tokenizer.decode([label.token for label in labels]),
            audio_s=parts[-1].end / self.rate_hz,
            words=tuple(words(labels, self.tokenizer)) if self.options.timestamps else (),
            language=parts[-1].language,
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
