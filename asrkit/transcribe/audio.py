"""Recordings of any format that soundfile reads, as mono samples at the model's rate.

A recording is read in blocks of some seconds, so memory does not grow with its length. Threads read
ahead of whoever uses them.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore, Event, Thread
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from asrkit.runtime import CPU_FLOAT
from asrkit.shapes import expect
from asrkit.sound_files import Sound, find, open_sound

S = TypeVar("S")
T = TypeVar("T")
BLOCK_S = 10  # a block is resampled with MARGIN_S of its neighbours
MARGIN_S = 1
READ_SAMPLES = 2**20  # of all channels together, in one read
MOST_TAPS = 20_000_000  # in a table of `resample`: gigabytes for 22,051 Hz, few for 22,050
OPEN = 2  # recordings under way for each thread: one that it reads, and the next one
ROUNDED_S = 0.01  # durations in manifests are rounded: such a part ends with its recording


def recordings(
    sources: str | Path | Sound | Iterable[str | Path | Sound],
) -> Iterator[Sound]:
    """Yield each recording of `sources` in order, a folder's as `find` returns them.

    Args:
        sources: paths as `find` takes them, and recordings, one by one as they are needed.
    """
    if isinstance(sources, str | Path | Sound):
        sources = [sources]
    for source in sources:
        if isinstance(source, Sound):
            yield source
        else:
            yield from (Sound(path) for path, _ in find(source))


def _mono(file: Any, sound: Sound) -> Iterator[Tensor]:
    """Yield the samples (S,) of `sound`, its channel or the mean of all, chunk by chunk.

    A part that would end after its recording ends with it. ValueError where a sample is not finite,
    or the file ends earlier than its header says.
    """
    import soundfile

    name = sound.path.name
    rate = file.samplerate
    channel = sound.channel
    there = channel is None or 0 <= channel < file.channels
    expect(there, "audio", f"a channel below {file.channels} of {name}", channel)
    start = round(sound.start_s * rate)
    wanted = f"a part that begins before {file.frames / rate:.2f} s, where {name} ends"
    begins = start == 0 or 0 < start < file.frames
    expect(begins, "audio", wanted, f"a start at {sound.start_s} s")
    left = file.frames - start
    end: float = math.inf  # of what is read: a header may promise too little
    if sound.duration_s is not None and left / rate - sound.duration_s >= ROUNDED_S:
        end = round(sound.duration_s * rate)
    size = max(1, READ_SAMPLES // file.channels)
    done = 0
    try:
        if start:
            file.seek(start)
        while len(samples := file.read(min(size, end - done), dtype="float32", always_2d=True)):
            channels = torch.from_numpy(samples)
            mono = channels.mean(1) if channel is None else channels[:, channel]
            finite = bool(mono.isfinite().all())
            expect(finite, "audio", "finite samples", f"NaN or infinity in {name}")
            done += len(mono)
            yield mono
    except soundfile.LibsndfileError as error:
        at_s = (start + done) / rate
        raise ValueError(f"audio: {name} breaks off after {at_s:.2f} s ({error}).") from None
    expect(done > 0, "audio", "samples", f"none in {name}")
    promised = min(left, end)
    wanted = f"{promised / rate:.2f} s, as the header of {name} says"
    expect(done >= promised, "audio", wanted, f"{done / rate:.2f} s", "The file is truncated.")


def _resampled(chunks: Iterable[Tensor], rate: int, rate_hz: int) -> Iterator[Tensor]:
    """Yield `chunks` of one signal at `rate_hz`, without seams.

    Blocks are whole seconds, on which both rates have whole samples.
    """
    from torchaudio.functional import resample

    block = BLOCK_S * rate
    margin = MARGIN_S * rate
    with_margins = block + 2 * margin
    skip = MARGIN_S * rate_hz
    held = torch.zeros(margin, **CPU_FLOAT)
    for chunk in chunks:
        held = torch.cat([held, chunk])
        while len(held) >= with_margins:
            converted = resample(held[:with_margins], rate, rate_hz)
            yield converted[skip:-skip]
            held = held[block:]
    left = len(held) - margin  # at most a block and a margin
    to_whole_second = -left % rate
    padding = torch.zeros(margin + to_whole_second, **CPU_FLOAT)
    converted = resample(torch.cat([held, padding]), rate, rate_hz)
    size = math.ceil(left * rate_hz / rate)
    yield converted[skip : skip + size]


def blocks(source: Path | Sound, rate_hz: int) -> Iterator[Tensor]:
    """Yield a recording's mono samples (S,) float32 at `rate_hz`, in order.

    Raises ValueError with one line that says what is wrong with the recording.
    """
    sound = source if isinstance(source, Sound) else Sound(source)
    with open_sound(sound) as file:
        chunks = _mono(file, sound)
        if file.samplerate != rate_hz:
            taps = file.samplerate * rate_hz // math.gcd(file.samplerate, rate_hz) ** 2
            got = f"{file.samplerate} Hz in {sound.path.name}"
            remedy = f"Convert it first: ffmpeg -i IN -ar {rate_hz} OUT.wav."
            expect(taps <= MOST_TAPS, "audio", f"a rate in proportion to {rate_hz} Hz", got, remedy)
            chunks = _resampled(chunks, file.samplerate, rate_hz)
        yield from chunks


def read_audio(source: Path | Sound, rate_hz: int) -> Tensor:
    """Mono waveform (S,) float32 at `rate_hz` of any recording that soundfile reads.

    Raises ValueError with one line that says what is wrong with the recording.
    """
    return torch.cat([*blocks(source, rate_hz)])


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
