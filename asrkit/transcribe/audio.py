"""Recordings of any format, as mono samples at the model's rate.

A file is read in blocks of some seconds, so memory does not grow with its length (of a pipe it
does). Threads read ahead of whoever uses them.
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
BLOCK_S = 10  # a block is resampled with MARGIN_S of its neighbours
MARGIN_S = 1
READ_SAMPLES = 2**20  # of all channels together, in one read
MOST_TAPS = 20_000_000  # in a table of `resample`: gigabytes for 22,051 Hz, few for 22,050
OPEN = 2  # recordings under way for each thread: one that it reads, and the next one
ROUNDED_S = 0.01  # durations in manifests are rounded: such a part ends with its recording


def recordings(sources: Sources) -> Iterator[Sound]:
    """Yield each recording of `sources` in order, a folder's as `find` returns them.

    Args:
        sources: paths as `find` takes them, and recordings, one by one as they are needed.
    """
    if isinstance(sources, Source):
        sources = [sources]
    for source in sources:
        if isinstance(source, Sound):
            yield source
        else:
            yield from (sound_of(path) for path, _ in find(source))


class Reading:
    """A recording as mono samples, and what was found while it was read.

    Args:
        source: A file, or a recording.
        rate_hz: Of the samples.

    Attributes:
        error: Why reading ended before the recording did, in one line; "": it did not.
    """

    def __init__(self, source: Path | Sound, rate_hz: int) -> None:
        self.sound = source if isinstance(source, Sound) else sound_of(source)
        self.rate_hz = rate_hz
        self.cancelled_s: list[float] = []  # where pieces begin whose channels cancel each other
        self.tracks = 1
        self.error = ""

    @property
    def notes(self) -> list[str]:
        """Lines about what is not as usual."""
        lines = []
        if self.tracks > 1:
            lines.append(f"one of {self.tracks} tracks of sound is read")
        if len(self.cancelled_s) * CANCELLED_S >= 0.5:
            lines.append(
                f"channels cancel each other from {self.cancelled_s[0]:.0f} s on; the loudest is "
                "taken where they do (--channel chooses)"
            )
        return lines

    def blocks(self) -> Iterator[Tensor]:
        """Yield the samples (S,) float32 in order, up to the end or an error."""
        name = self.sound.path.name
        try:
            with open_sound(self.sound) as file:
                self.tracks = file.tracks
                chunks = self._mono(file)
                if file.rate_hz != self.rate_hz:
                    wanted = f"a rate in proportion to {self.rate_hz} Hz"
                    taps = file.rate_hz * self.rate_hz // math.gcd(file.rate_hz, self.rate_hz) ** 2
                    got = f"{file.rate_hz} Hz in {name}"
                    remedy = f"Convert it first: ffmpeg -i IN -ar {self.rate_hz} OUT.wav."
                    expect(taps <= MOST_TAPS, "audio", wanted, got, remedy)
                    chunks = _resampled(chunks, file.rate_hz, self.rate_hz)
                yield from chunks
        except ValueError as error:
            self.error = str(error)

    def _mono(self, file: SoundReader) -> Iterator[Tensor]:
        """Yield the samples (S,) of the channel that is asked for or the mean of all, in chunks.

        A part that would end after its recording ends with it.
        """
        sound, name, rate = self.sound, self.sound.path.name, file.rate_hz
        there = sound.channel is None or 0 <= sound.channel < file.channels
        expect(there, "audio", f"a channel below {file.channels} of {name}", sound.channel)
        start = round(sound.start_s * rate)
        left = file.frames - start
        wanted = f"a part that begins before {file.frames / rate:.2f} s, where {name} ends"
        expect(
            start == 0 or 0 < start < file.frames, "audio", wanted, f"a start at {sound.start_s} s"
        )
        end = math.inf  # of what is read: a header may promise too little
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
            if min(left, end) - done >= MIN_MISSING_S * rate and left < math.inf:
                raise BrokenOff(f"its header says {file.frames / rate:.2f} s")
        except BrokenOff as error:  # kept here, since the resampler holds samples before it
            at_s = (start + done) / rate
            self.error = f"audio: {name} cannot be read beyond {at_s:.2f} s ({error})."
            return
        expect(done > 0, "audio", "samples", f"none in {name}")

    def _channel(self, channels: Tensor, at_s: float, rate: int) -> Tensor:
        """The channel (S,) of a chunk (S, C) that is asked for, or the mean."""
        if self.sound.channel is not None or channels.shape[1] == 1:
            return channels[:, self.sound.channel or 0]
        mono, cancelled_s = mean_of_channels(channels, rate)
        self.cancelled_s += [at_s + seconds for seconds in cancelled_s]
        return mono


def _resampled(chunks: Iterable[Tensor], rate: int, rate_hz: int) -> Iterator[Tensor]:
    """Yield `chunks` of one signal at `rate_hz`, without seams.

    Blocks are whole seconds, on which both rates have whole samples.
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

    Raises ValueError with one line that says what is wrong with the recording.
    """
    reading = Reading(source, rate_hz)
    waveform = torch.cat([torch.zeros(0, **CPU_FLOAT), *reading.blocks()])
    if reading.error:
        raise ValueError(reading.error)
    return waveform


def read_ahead(
    sources: Iterable[S], read: Callable[[S], Iterable[T]], readers: int, ahead: int = 4
) -> Iterator[T]:
    """Yield the items of `read(source)` for each source, in order, as a plain loop would.

    Threads read the first `ahead` items of the next OPEN * readers sources, and the next ones of
    the source whose items are yielded, so memory is bounded.

    Args:
        sources: drawn one by one, in the thread that asks for items.
        read: reads one source.
        readers: sources that are read at once, at least 1.
        ahead: items that are read at once.
    """

    turns = BoundedSemaphore(readers)
    closed = Event()

    def take(items: Iterator[T]) -> tuple[list[T], Iterator[T]]:
        with turns:
            found = [] if closed.is_set() else list(itertools.islice(items, ahead))
            return found, items

    remaining = iter(sources)
    under_way: deque[_Call[tuple[list[T], Iterator[T]]]] = deque()
    try:
        while True:
            for source in itertools.islice(remaining, OPEN * readers - len(under_way)):
                under_way.append(_Call(partial(take, iter(read(source)))))
            if not under_way:
                return
            found, rest = under_way[0].result()  # still there for `finally` if this is interrupted
            under_way.popleft()
            if len(found) == ahead:
                under_way.appendleft(_Call(partial(take, rest)))
            yield from found
    finally:
        closed.set()
        for call in under_way:
            call.join()


class _Call(Thread, Generic[T]):
    """A call in a thread of its own, which ends with it.

    A thread in which torch has computed keeps OpenMP's threads as long as it lives. When those of
    all threads together are more than the cores, they sleep between two operations, and a decoder's
    small operations take up to 1.5 times as long.
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
        except BaseException as error:  # raised where the result is asked for
            self.error = error

    def result(self) -> T:
        """What it returns or raises, once it has."""
        self.join()
        try:
            if self.error is not None:
                raise self.error
            return self.value
        finally:
            del self  # the error's traceback would hold what holds the error
