"""Recordings of any format, as mono samples at the model's rate.

A file is read in blocks of some seconds, so memory does not grow with its length; a pipe is read as
a whole. Threads read ahead of the caller.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore, Event, Thread
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from asrkit.devices import CPU_FLOAT
from asrkit.shapes import expect
from asrkit.sound_files import CANCELLED_S, Sound, find, mean_of_channels, sound_of
from asrkit.sound_readers import MIN_MISSING_S, BrokenOff, SoundReader, open_sound

S = TypeVar("S")
T = TypeVar("T")
Source = str | Path | Sound
Sources = Source | Iterable[Source]
BLOCK_S = 10  # a block is resampled together with MARGIN_S of its neighbours
MARGIN_S = 1
READ_SAMPLES = 2**20  # samples of all channels together that one read returns
MOST_TAPS = 20_000_000  # entries in a table of `resample`: 22,050 Hz needs few, 22,051 Hz gigabytes
OPEN = 2  # open recordings for each thread: one that it reads, and the next one
ROUNDED_S = 0.01  # manifests round durations: a part this near the end is read to the end


def recordings(sources: Sources) -> Iterator[Sound]:
    """Yield each recording of `sources` in order; those of a folder as `find` returns them.

    Args:
        sources: Paths as `find` takes them, and recordings. They are drawn as they are needed.
    """
    if isinstance(sources, Source):
        sources = [sources]
    for source in sources:
        if isinstance(source, Sound):
            yield source
        else:
            yield from (sound_of(path) for path, _ in find(source))


class Reading:
    """A recording as mono samples, and what was noticed while it was read.

    Args:
        source: A file, or a recording.
        rate_hz: Sampling rate of the result.

    Attributes:
        error: Why reading stopped before the end of the recording, in one line; "" if it did not.
    """

    def __init__(self, source: Path | Sound, rate_hz: int) -> None:
        self.sound = source if isinstance(source, Sound) else sound_of(source)
        self.rate_hz = rate_hz
        self.cancelled_s: list[float] = []  # starts of pieces whose channels cancel out
        self.tracks = 1
        self.gaps_s: list[tuple[float, float]] = []  # start and length of each
        self.error = ""

    @property
    def notes(self) -> list[str]:
        """One line about each unusual property of the recording."""
        lines = []
        if self.tracks > 1:
            lines.append(f"one of {self.tracks} tracks of sound is read")
        if len(self.cancelled_s) * CANCELLED_S >= 0.5:
            lines.append(
                f"channels cancel each other from {self.cancelled_s[0]:.0f} s on; the loudest one "
                "is used there (--channel selects another)"
            )
        if self.gaps_s:
            first_s, total_s = self.gaps_s[0][0], sum(length_s for _, length_s in self.gaps_s)
            lines.append(
                f"{total_s:.1f} s of it have no sound, the first at {first_s:.1f} s; they are read "
                "as silence"
            )
        return lines

    def blocks(self) -> Iterator[Tensor]:
        """Yield the samples (S,) float32 in order, up to the end or to an error."""
        try:
            with open_sound(self.sound) as file:
                self.tracks = file.tracks
                self.gaps_s = file.gaps_s
                chunks = self._mono(file)
                if file.rate_hz != self.rate_hz:
                    taps = file.rate_hz * self.rate_hz // math.gcd(file.rate_hz, self.rate_hz) ** 2
                    expect(
                        taps <= MOST_TAPS,
                        "audio",
                        f"a rate in proportion to {self.rate_hz} Hz",
                        f"{file.rate_hz} Hz in {self.sound.path.name}",
                        f"Convert it first: ffmpeg -i IN -ar {self.rate_hz} OUT.wav.",
                    )
                    chunks = _resampled(chunks, file.rate_hz, self.rate_hz)
                yield from chunks
        except ValueError as error:
            self.error = str(error)

    def _mono(self, file: SoundReader) -> Iterator[Tensor]:
        """Yield the samples (S,) of the requested channel, or the mean of all, in chunks.

        A part whose end lies beyond the recording ends with the recording.
        """
        sound, name, rate = self.sound, self.sound.path.name, file.rate_hz
        exists = sound.channel is None or 0 <= sound.channel < file.channels
        expect(exists, "audio", f"a channel below {file.channels} of {name}", sound.channel)
        start = round(sound.start_s * rate)
        left = file.frames - start
        expect(
            start == 0 or 0 < start < file.frames,
            "audio",
            f"a part that begins before {file.frames / rate:.2f} s, where {name} ends",
            f"a start at {sound.start_s} s",
        )
        end = math.inf  # samples to read: a header may state too few
        if sound.duration_s is not None and left / rate - sound.duration_s >= ROUNDED_S:
            end = round(sound.duration_s * rate)
        size = max(1, READ_SAMPLES // file.channels)
        done = 0
        try:
            file.skip(start)
            while len(samples := file.read(int(min(size, end - done)))):
                finite = np.isfinite(samples).all(1)
                if not finite.all():
                    samples = samples[: finite.argmin()]
                mono = self._channel(torch.from_numpy(samples), (start + done) / rate, rate)
                done += len(mono)
                yield mono
                if not finite.all():
                    raise BrokenOff("NaN or infinity")
            if file.lost_s >= MIN_MISSING_S:
                self.error = f"audio: {file.lost_s:.1f} s of {name} cannot be decoded."
            elif min(left, end) - done >= MIN_MISSING_S * rate and left < math.inf:
                raise BrokenOff(f"its header says {file.frames / rate:.2f} s")
        except BrokenOff as error:  # kept, since the resampler still holds samples
            at_s = (start + done) / rate
            self.error = f"audio: {name} cannot be read beyond {at_s:.2f} s ({error})."
            return
        expect(done > 0, "audio", "samples", f"none in {name}")

    def _channel(self, channels: Tensor, at_s: float, rate: int) -> Tensor:
        """The requested channel (S,) of a chunk (S, C), or the mean of all."""
        if self.sound.channel is not None or channels.shape[1] == 1:
            return channels[:, self.sound.channel or 0]
        mono, cancelled_s = mean_of_channels(channels, rate)
        self.cancelled_s += [at_s + seconds for seconds in cancelled_s]
        return mono


def _resampled(chunks: Iterable[Tensor], rate: int, rate_hz: int) -> Iterator[Tensor]:
    """Yield the chunks of one signal at `rate_hz`, without audible seams.

    A block is a number of whole seconds, which are whole samples at both rates.
    """
    from lhotse.augmentation.resample import Resample  # torchaudio may not load

    resample = Resample(rate, rate_hz, dtype=torch.float64).float()
    block = BLOCK_S * rate
    margin = MARGIN_S * rate
    with_margins = block + 2 * margin
    skip = MARGIN_S * rate_hz
    held = torch.zeros(margin, **CPU_FLOAT)
    for chunk in chunks:
        held = torch.cat([held, chunk])
        while len(held) >= with_margins:
            converted = resample(held[:with_margins])
            yield converted[skip:-skip]
            held = held[block:]
    left = len(held) - margin  # at most a block and a margin
    to_whole_second = -left % rate
    padding = torch.zeros(margin + to_whole_second, **CPU_FLOAT)
    converted = resample(torch.cat([held, padding]))
    size = math.ceil(left * rate_hz / rate)
    yield converted[skip : skip + size]


def read_audio(source: Path | Sound, rate_hz: int) -> Tensor:
    """Mono waveform (S,) float32 at `rate_hz` of any recording.

    Args:
        source: A file, or a recording.
        rate_hz: Sampling rate of the result.

    Raises:
        ValueError: One line that says what is wrong with the recording.
    """
    reading = Reading(source, rate_hz)
    waveform = torch.cat([torch.zeros(0, **CPU_FLOAT), *reading.blocks()])
    if reading.error:
        raise ValueError(reading.error)
    return waveform


def read_ahead(
    sources: Iterable[S], read: Callable[[S], Iterable[T]], readers: int, ahead: int = 4
) -> Iterator[T]:
    """Yield the items of `read(source)` for each source, in the order of a plain loop.

    Threads read the first `ahead` items of the next OPEN * readers sources, and the next items of
    the source whose items are yielded, so memory is bounded.

    Args:
        sources: The sources, drawn one by one in the caller's thread.
        read: Reads one source.
        readers: Number of sources that are read at the same time, at least 1.
        ahead: Number of items that are read in one turn.
    """

    turns = BoundedSemaphore(readers)
    closed = Event()

    def take(items: Iterator[T]) -> tuple[list[T], Iterator[T]]:
        with turns:
            return [] if closed.is_set() else [*itertools.islice(items, ahead)], items

    remaining = iter(sources)
    calls: deque[_Call[tuple[list[T], Iterator[T]]]] = deque()
    try:
        while True:
            for source in itertools.islice(remaining, OPEN * readers - len(calls)):
                calls.append(_Call(partial(take, iter(read(source)))))
            if not calls:
                return
            items, rest = calls[0].result()  # `finally` still needs the call after an interrupt
            calls.popleft()
            if len(items) == ahead:
                calls.appendleft(_Call(partial(take, rest)))
            yield from items
    finally:
        closed.set()
        for call in calls:
            call.join()


class _Call(Thread, Generic[T]):
    """A call in a thread of its own, which ends with the call.

    A thread in which torch has computed keeps its OpenMP threads until it ends. If all threads
    together have more of them than there are cores, they sleep between two operations, and the
    small operations of a decoder take up to 1.5 times as long.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self.function = function
        self.value: T
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Make the call."""
        try:
            self.value = self.function()
        except BaseException as error:  # raised again by `result`
            self.error = error

    def result(self) -> T:
        """Wait for the call, and return its value or raise its error."""
        self.join()
        try:
            if self.error is not None:
                raise self.error
            return self.value
        finally:
            del self  # otherwise the error's traceback would refer to the error itself
