"""Recordings to transcripts: cut into windows, batched, recognised, and joined again."""

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asrkit.models import Checkpoint
from asrkit.shapes import expect
from asrkit.sound_files import Sound, seconds
from asrkit.text import Tokenizer
from asrkit.transcribe.audio import blocks, recordings
from asrkit.transcribe.endings import message
from asrkit.transcribe.formats import Transcript
from asrkit.transcribe.options import WindowOptions
from asrkit.transcribe.progress import Bar
from asrkit.transcribe.reading import read_in_threads
from asrkit.transcribe.recognizer import Recognizer, prefetched
from asrkit.transcribe.seams import Label, Word, join, words

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
    options = options or WindowOptions()
    recognizer = recognizer or Recognizer.from_checkpoint(checkpoint)
    transcriber = Transcriber(recognizer, checkpoint.tokenizer, options)
    sounds: Iterable[Sound] = recordings(paths)
    shown = progress and sys.stderr.isatty()
    total_s = 0.0
    if shown:
        sounds = list(sounds)
        total_s = sum(seconds(sound) for sound in sounds)
    with Bar(total_s, show=shown) as bar:
        yield from transcriber.recordings(sounds, bar.advance)


class _Window(NamedTuple):
    """One window of one recording, or why there is none."""

    sound: Sound
    start: int  # samples
    waveform: Tensor  # (S,)
    new_samples: int  # samples that no earlier window has
    last: bool
    error: str = ""


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
    lengths: Sequence[int],
    budget: float,
    most_padding: float = math.inf,
) -> list[list[int]]:
    """Positions of `lengths`, longest first, in batches of at most `budget` samples with padding.

    An utterance longer than the budget is a batch of its own.

    Args:
        lengths: samples of each utterance.
        budget: most samples in a batch: utterances times the longest of them.
        most_padding: most samples of padding in a batch.
    """
    rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    plan: list[list[int]] = []
    batch: list[int] = []
    longest = 0  # samples of the longest utterance of the batch
    filled = 0  # samples of its utterances, without padding
    for row in rows:
        longest = max(longest, lengths[row])
        filled += lengths[row]
        padded = (len(batch) + 1) * longest
        too_much = padded > budget or padded - filled > most_padding
        if too_much or not plan:
            batch = []
            plan.append(batch)
            longest = lengths[row]
            filled = lengths[row]
        batch.append(row)
    return plan


def _pools(queue: Iterable[_Window], batch_samples: float, batches: int) -> Iterator[list[_Window]]:
    """Windows in lists of about `batches`, then twice as many each time, up to POOL batches."""
    pool: list[_Window] = []
    samples = 0
    budget = batches * batch_samples
    for window in queue:
        pool.append(window)
        samples += len(window.waveform)
        if samples >= budget:
            yield pool
            pool = []
            samples = 0
            budget = min(2 * budget, POOL * batch_samples)
    if pool:
        yield pool


@dataclass
class _FileState:
    """What has been recognised so far of the file that is being put together."""

    labels: list[Label] = field(default_factory=list)
    end: int = 0  # samples
    compute_s: float = 0.0
    error: str = ""
    language: str = ""  # that a Whisper found in its first window with sound, or was asked for


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
        config = recognizer.feature_config
        self.recognizer = recognizer
        self.tokenizer = tokenizer
        self.options = options
        self.rate_hz = config.rate_hz
        self.batch_samples = options.batch_s * config.rate_hz
        self.most_padding = math.inf
        if recognizer.device.type == "cpu":
            self.most_padding = MOST_PADDING_S * config.rate_hz
        self.least_samples = config.window_samples
        subsampling = recognizer.model.config.encoder.subsampling
        self.frame_samples = config.hop_samples * subsampling  # of one encoder frame
        self.state = _FileState()
        most_frames = getattr(recognizer.model.encoder, "most_frames", None)
        if most_frames is not None:
            most_s = most_frames * config.hop_s
            fits = options.window_s <= most_s
            wanted = f"at most {most_s:g} seconds, as the model has positions"
            expect(fits, "window_s", wanted, options.window_s)

    def recordings(
        self, sounds: Iterable[Sound], heard: Callable[[float], object]
    ) -> Iterator[Transcript]:
        """Yield one transcript a recording, in order.

        Args:
            sounds: drawn as they are needed.
            heard: called with the seconds of audio that were recognised, batch by batch.
        """
        yield from self._transcripts(self._read(sounds, 1), heard)

    def groups(
        self, groups: Iterable[Sequence[Sound]], heard: Callable[[float], object]
    ) -> Iterator[Transcript]:
        """Yield one transcript a recording, in order; no batch has recordings of two groups.

        While a group is recognised, the next one is drawn and read.

        Args:
            groups: recordings that are there at once.
            heard: called with the seconds of audio that were recognised, batch by batch.
        """
        pools = (pool for group in groups for pool in self._read(group, POOL))
        yield from self._transcripts(pools, heard)

    def _transcripts(
        self, pools: Iterator[list[_Window]], heard: Callable[[float], object]
    ) -> Iterator[Transcript]:
        for pool in prefetched(pools):
            yield from self.run(pool, heard)

    def _read(self, sounds: Iterable[Sound], batches: int) -> Iterator[list[_Window]]:
        """Windows of `sounds` in lists, the first of about `batches` batches."""
        queue = read_in_threads(sounds, self.windows, self.options.readers)
        return _pools(queue, self.batch_samples, batches)

    def windows(self, sound: Sound) -> Iterator[_Window]:
        """Windows of a recording, whole encoder frames apart: overlaps then see the same frames."""
        overlap = self._in_frames(self.options.overlap_s)
        size = max(self._in_frames(self.options.window_s), 2 * overlap, self.frame_samples)
        try:
            for start, waveform, last in windows(blocks(sound, self.rate_hz), size, overlap):
                new_samples = len(waveform)
                if start > 0:
                    new_samples -= overlap
                yield _Window(sound, start, waveform, new_samples, last)
        except (ValueError, RuntimeError, OSError, MemoryError) as error:
            yield _Window(sound, 0, torch.zeros(0), 0, True, message(error))

    def _in_frames(self, time_s: float) -> int:
        """`time_s` in samples, rounded to whole encoder frames."""
        return round(time_s * self.rate_hz / self.frame_samples) * self.frame_samples

    def run(
        self, pool: Sequence[_Window], heard: Callable[[float], object]
    ) -> Iterator[Transcript]:
        """Recognise `pool`, the batch with the earliest window first; yield the files that end."""
        recognised: dict[int, list[Label] | str] = {}
        compute_s = dict.fromkeys(range(len(pool)), 0.0)
        recordings = [0, *itertools.accumulate(window.last for window in pool)]  # of each window
        languages = {0: self.state.language}  # of recordings
        loud = []
        for index, window in enumerate(pool):
            if len(window.waveform) >= self.least_samples and window.waveform.any():
                loud.append(index)
            else:
                recognised[index] = []
        heard(self._new_s(pool[index] for index in recognised))
        batches = iter(self._plan(pool, loud, recordings))
        for index, window in enumerate(pool):
            while index not in recognised:
                rows = next(batches)
                batch = [pool[row] for row in rows]
                known = [languages.get(recordings[row], "") for row in rows]
                start = time.perf_counter()
                recognised.update(zip(rows, self.recognize(batch, known), strict=True))
                took_s = time.perf_counter() - start
                samples = sum(len(member.waveform) for member in batch)
                for row, language in zip(rows, known, strict=True):
                    compute_s[row] = took_s * len(pool[row].waveform) / samples
                    languages[recordings[row]] = language
                heard(self._new_s(batch))
            self.state.compute_s += compute_s[index]
            self.state.language = languages.get(recordings[index], "")
            transcript = self.add(window, recognised[index])
            if transcript is not None:
                yield transcript

    def _plan(
        self, pool: Sequence[_Window], loud: Sequence[int], recordings: Sequence[int]
    ) -> list[list[int]]:
        """Positions in `pool` of each batch of loud windows, the batch with the earliest first.

        Where the language is found in a recording's first window, those are first.
        """
        first = {recordings[index]: index for index in reversed(loud)}
        if not self.recognizer.detects_language:
            first = {}
        later = [index for index in loud if index not in first.values()]
        filled = self.recognizer.feature_config.fill_samples
        plan: list[list[int]] = []
        for part in ([*first.values()][::-1], later):
            lengths = [max(len(pool[index].waveform), filled) for index in part]
            batches = plan_batches(lengths, self.batch_samples, self.most_padding)
            plan += [[part[place] for place in batch] for batch in sorted(batches, key=min)]
        return plan

    def _new_s(self, windows: Iterable[_Window]) -> float:
        """Seconds of `windows` that no earlier window has."""
        return sum(window.new_samples for window in windows) / self.rate_hz

    def recognize(self, batch: Sequence[_Window], languages: list[str]) -> list[list[Label] | str]:
        """Labels of each window, or an error message; a batch that fails is retried in halves.

        Args:
            batch: of one call of the recogniser.
            languages: of their recordings, "" where not known; those that it finds are filled in.
        """
        try:
            return self._labels(batch, languages)
        except (RuntimeError, MemoryError, ValueError) as error:  # out of memory: a RuntimeError
            why = message(error)
        if len(batch) == 1:
            return [why]
        half = len(batch) // 2
        halves = languages[:half], languages[half:]
        found = self.recognize(batch[:half], halves[0]) + self.recognize(batch[half:], halves[1])
        languages[:] = [*halves[0], *halves[1]]
        return found

    def _labels(self, batch: Sequence[_Window], languages: list[str]) -> list[list[Label] | str]:
        waveforms = pad_sequence([window.waveform for window in batch], batch_first=True)
        lengths = torch.tensor([len(window.waveform) for window in batch])
        timestamps = self.options.timestamps
        hypotheses = self.recognizer(
            waveforms,
            lengths,
            confidence=timestamps,
            times=timestamps or not all(one.last and one.start == 0 for one in batch),
            timestamps=timestamps,
            languages=languages,
        )
        languages[:] = hypotheses.languages or languages
        confidence = hypotheses.confidence
        if confidence is None:
            confidence = torch.ones(hypotheses.labels.shape)
        parts = (hypotheses.labels, hypotheses.frames, hypotheses.durations, confidence)
        columns = [part.tolist() for part in parts]
        counts = hypotheses.lengths.tolist()
        scores = hypotheses.scores.tolist()
        results: list[list[Label] | str] = []
        for row, (window, score) in enumerate(zip(batch, scores, strict=True)):
            if not math.isfinite(score):
                results.append(self._no_score(score))
                continue
            values = zip(*(column[row][: counts[row]] for column in columns), strict=True)
            results.append([self._label(window, *value) for value in values])
        return results

    def _no_score(self, score: float) -> str:
        """What is said of a window without a finite score."""
        dtype = self.recognizer.dtype
        remedy = "Try another --dtype."
        if self.recognizer.decode_options.lm is not None:
            remedy += " Or the --lm excludes all texts: it needs <unk> to allow unknown words."
        shown = str(score).replace("nan", "NaN")
        return f"model: expected finite scores, got {shown} in {dtype}. {remedy}"

    def _label(
        self, window: _Window, token: int, frame: int, duration: int, confidence: float
    ) -> Label:
        """A label in time. Those of RNN-T have no duration: they end with their frame."""
        limit = window.start + len(window.waveform)
        start = window.start + frame * self.frame_samples
        end = start + max(duration, 1) * self.frame_samples
        return Label(
            token, min(start, limit) / self.rate_hz, min(end, limit) / self.rate_hz, confidence
        )

    def add(self, window: _Window, recognised: list[Label] | str) -> Transcript | None:
        """Join a window to what precedes it in its file; the transcript if it was the last one."""
        state = self.state
        if isinstance(recognised, str):
            state.error = state.error or window.error or recognised
        else:
            state.error = state.error or window.error
            if not state.error and state.end:
                seam_s = (window.start / self.rate_hz, state.end / self.rate_hz)
                state.labels = join(state.labels, recognised, *seam_s)
            elif not state.error:
                state.labels = recognised
        state.end = window.start + len(window.waveform)
        if not window.last:
            return None
        self.state = _FileState()
        return self._transcript(window.sound.path, state)

    def _transcript(self, path: Path, state: _FileState) -> Transcript:
        if state.error:
            return Transcript(path=path, compute_s=state.compute_s, error=state.error)
        timed: tuple[Word, ...] = ()
        if self.options.timestamps:
            timed = tuple(words(state.labels, self.tokenizer))
        return Transcript(
            path=path,
            text=self.tokenizer.decode([label.token for label in state.labels]),
            audio_s=state.end / self.rate_hz,
            compute_s=state.compute_s,
            words=timed,
            language=state.language,
        )
