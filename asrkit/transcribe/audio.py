"""Recordings of any format that soundfile reads, as mono samples at the model's rate.

A recording is read in blocks of some seconds, so memory does not grow with its length.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrkit.shapes import expect
from asrkit.sound_files import Sound, listed, open_sound

BLOCK_S = 10  # a block is resampled with MARGIN_S of its neighbours
MARGIN_S = 1
READ_SAMPLES = 2**20  # of all channels together, in one read
MOST_TAPS = 20_000_000  # in a table of `resample`: gigabytes for 22,051 Hz, few for 22,050
ROUNDED_S = 0.01  # durations in manifests are rounded: such a part ends with its recording


def find(paths: str | Path | Iterable[str | Path]) -> list[tuple[Path, Path]]:
    """(file, its name among the results) for each path, in order.

    A folder stands for the recordings under it, as `sound_files.listed` returns them. Some of them
    cannot be read, and fail in their turn. A file is taken whatever its suffix. A folder without
    recordings stands for itself: reading it fails.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    recordings: list[tuple[Path, Path]] = []
    for path in map(Path, paths):
        names = listed(path)
        if names:
            recordings += [(path / name, name) for name in names]
        else:
            recordings.append((path, Path(path.name)))
    return recordings


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
            for path, _ in find(source):
                yield Sound(path)


def _seek(file: Any, sound: Sound) -> int | None:
    """Move `file` to the first sample of `sound`; returns its number of samples.

    None: all that is left. A part that would end after its recording ends with it.
    """
    import soundfile

    start = round(sound.start_s * file.samplerate)
    left = file.frames - start
    if start:
        whole_s = file.frames / file.samplerate
        wanted = f"a part that begins before {whole_s:.2f} s, where {sound.path.name} ends"
        expect(0 < start < file.frames, "audio", wanted, f"a start at {sound.start_s} s")
        try:
            file.seek(start)
        except soundfile.LibsndfileError as error:
            message = f"audio: {sound.path.name} has no sample at {sound.start_s} s ({error})."
            raise ValueError(message) from None
    if sound.duration_s is None:
        return None
    wanted_samples = round(sound.duration_s * file.samplerate)
    if left - wanted_samples < ROUNDED_S * file.samplerate:
        return None
    return wanted_samples


def _mono(file: Any, sound: Sound) -> Iterator[Tensor]:
    """Yield the samples (S,) of `sound`, its channel or the mean of all, chunk by chunk.

    ValueError where a sample is not finite, or the file ends earlier than its header says.
    """
    import soundfile

    path = sound.path
    channel = sound.channel
    there = channel is None or 0 <= channel < file.channels
    expect(there, "audio", f"a channel below {file.channels} of {path.name}", channel)
    wanted = _seek(file, sound)
    done = 0
    size = max(1, READ_SAMPLES // file.channels)
    while wanted is None or done < wanted:
        if wanted is not None:
            size = min(size, wanted - done)
        try:
            samples = file.read(size, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            at_s = done / file.samplerate
            raise ValueError(
                f"audio: {path.name} breaks off after {at_s:.2f} s ({error})."
            ) from None
        if not len(samples):
            break
        channels = torch.from_numpy(samples)
        mono = channels.mean(1) if channel is None else channels[:, channel]
        broken = mono.isfinite().logical_not()
        if broken.any():
            first_broken = int(broken.nonzero()[0])
            at_s = (done + first_broken) / file.samplerate
            place = f"NaN or infinity at {at_s:.3f} s of {path.name}"
            expect(False, "audio", "finite samples", place)
        done += len(mono)
        yield mono
    expect(done > 0, "audio", "samples", f"none in {path.name}")
    promised = wanted
    if promised is None:
        promised = file.frames - round(sound.start_s * file.samplerate)
    promised_s = promised / file.samplerate
    read_s = done / file.samplerate
    expect(
        done >= promised,
        "audio",
        f"{promised_s:.2f} s, as the header of {path.name} says",
        f"{read_s:.2f} s",
        "The file is truncated.",
    )


def _resampled(chunks: Iterable[Tensor], rate: int, rate_hz: int) -> Iterator[Tensor]:
    """Yield `chunks` of one signal at `rate_hz`, without seams.

    Blocks are whole seconds, on which both rates have whole samples.
    """
    from torchaudio.functional import resample  # it is loaded only for what needs it

    block = BLOCK_S * rate
    margin = MARGIN_S * rate
    with_margins = block + 2 * margin
    skip = MARGIN_S * rate_hz
    held = torch.zeros(margin)
    for chunk in chunks:
        held = torch.cat([held, chunk])
        while len(held) >= with_margins:
            converted = resample(held[:with_margins], rate, rate_hz)
            yield converted[skip:-skip]
            held = held[block:]
    left = len(held) - margin  # at most a block and a margin
    to_whole_second = -left % rate
    padding = torch.zeros(margin + to_whole_second)
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
