"""Where a signal sounds and where it pauses, by its loudness alone.

A Whisper's recordings are cut at pauses, those of other models into windows that overlap; sound
without words is reported.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from asrkit.devices import CPU_FLOAT

FRAME_S = 0.02  # of a loudness
SMOOTHED = 5  # frames that a loudness is the mean of, so that a click does not count
RANGE_DB = 50.0  # from the loudest frames down; what is quieter is as quiet
LEAST_RANGE_DB = 2.5  # of a signal with speech, however noisy
STEADY_DB = 2.0  # what varies less within a second is noise or a tone, and no speech
STEADY = 51  # frames of that second
FAINTEST_DB = -80.0  # a signal below that is silence
LOUD = 0.35  # a frame sounds from this share of the range on
LEAST_PAUSE_S = 0.35  # where a recording is cut if it can be
SHORT_PAUSE_S = 0.2  # where it is cut otherwise
LONG_PAUSE_S = 1.0  # a pause this long is as good as any longer one
WORD_S = 0.6  # from the point of a label to the end of its word, at most
PAUSE_WORTH = 6.0  # seconds that a window may end earlier for a pause that is a second longer


def sounding(waveform: Tensor, rate_hz: int) -> Tensor:
    """Which frames of FRAME_S sound, (N,) bool; a rest of less than a frame is none.

    A frame sounds where it is nearer to the loudest frames of the waveform than to the quietest,
    and where the loudness varies, as that of speech does: steady noise does not sound.

    Args:
        waveform: (S,) float.
        rate_hz: Samples a second.
    """
    loudness = _loudness(waveform, rate_hz)
    if not len(loudness):
        return torch.zeros(0, dtype=torch.bool, device="cpu")
    quietest, loudest = _range(loudness)
    if loudest < FAINTEST_DB:
        return torch.zeros(len(loudness), dtype=torch.bool, device="cpu")
    spread = _mean(loudness.square(), STEADY) - _mean(loudness, STEADY).square()
    loud = loudness > quietest + LOUD * (loudest - quietest)
    return loud & (spread > STEADY_DB**2)


def is_silent(waveform: Tensor, rate_hz: int) -> bool:
    """Whether a signal is too faint for speech, or noise of one loudness for more than a second."""
    loudness = _loudness(waveform, rate_hz)
    if not len(loudness):
        return not bool(waveform.any())
    quietest, loudest = _range(loudness)
    is_steady = len(loudness) > STEADY and loudest - quietest < LEAST_RANGE_DB
    return loudest < FAINTEST_DB or is_steady


def frame_size(rate_hz: int) -> int:
    """Samples of a frame of loudness."""
    return round(FRAME_S * rate_hz)


def _loudness(waveform: Tensor, rate_hz: int) -> Tensor:
    """Loudness of each frame (N,) in decibels."""
    size = frame_size(rate_hz)
    frames = waveform[: len(waveform) // size * size].view(-1, size)
    if not len(frames):
        return torch.zeros(0, **CPU_FLOAT)
    power = frames.var(1, correction=0)  # without an offset of the recording
    return 10 * _mean(power, SMOOTHED).clamp(min=1e-10).log10()


def _range(loudness: Tensor) -> tuple[float, float]:
    """Loudness of the quietest and of the loudest frames, but for a few."""
    ordered = loudness.sort().values
    loudest = float(ordered[math.ceil(0.99 * len(ordered)) - 1])
    return max(float(ordered[len(ordered) // 20]), loudest - RANGE_DB), loudest


def _mean(values: Tensor, size: int) -> Tensor:
    """The mean of each of the values (N,) and those around it, `size` in all."""
    half = size // 2
    return avg_pool1d(values[None], size, 1, half, count_include_pad=False)[0]


def runs(frames: Tensor) -> list[tuple[int, int]]:
    """(first, behind the last) of each run of True in (N,) bool."""
    edges = torch.cat([frames.new_zeros(1), frames, frames.new_zeros(1)]).int().diff()
    first, behind = (edges.eq(step).nonzero()[:, 0].tolist() for step in (1, -1))
    return [*zip(first, behind, strict=True)]


def best_pause(waveform: Tensor, rate_hz: int, first: int, least_s: float) -> int | None:
    """The sample in the middle of the best pause behind sample `first`; None where there is none.

    A long pause is better than a short one, and a late one than an early one.

    Args:
        waveform: (S,) float.
        rate_hz: Samples a second.
        first: Samples that are not to be cut.
        least_s: Length of a pause.
    """
    size = frame_size(rate_hz)
    quiet = ~sounding(waveform, rate_hz)
    quiet[: first // size] = False
    best, place = -math.inf, None
    for start, end in runs(quiet):
        pause_s = (end - start) * FRAME_S
        early_s = (len(quiet) - (start + end) / 2) * FRAME_S
        worth = PAUSE_WORTH * min(pause_s, LONG_PAUSE_S) - early_s
        if pause_s >= least_s and worth > best:
            best, place = worth, (start + end) // 2 * size
    return place


def gaps(sounds: Tensor, points: Sequence[int], least_s: float) -> list[tuple[int, int]]:
    """(first frame, frame behind) of what sounds for `least_s` or more between two labels.

    A word goes on behind the point of its label: a gap begins with the next frame that does not
    sound, if that comes within WORD_S, and ends with the last one before the next label.

    Args:
        sounds: Frames that sound, (N,) bool.
        points: The frame of each label, in order.
        least_s: Seconds.
    """
    found = []
    most = round(WORD_S / FRAME_S)
    for before, point in itertools.pairwise([-most, *points, len(sounds)]):
        if (point - before) * FRAME_S < least_s:
            continue
        quiet = (~sounds[max(before, 0) : point]).nonzero()[:, 0] + max(before, 0)
        start, end = before + most, point
        if len(quiet) and before >= 0:
            start = min(start, int(quiet[0]))
        if len(quiet) and point < len(sounds):
            end = max(end - most, int(quiet[-1]) + 1)
        if float(sounds[start:end].sum()) * FRAME_S >= least_s:
            found.append((start, end))
    return found


def stretches(
    chunks: Iterable[Tensor], rate_hz: int, window: int, most: int
) -> Iterator[tuple[int, Tensor, bool]]:
    """Yield (first sample, samples (S,), whether it is the last) of a signal cut at its pauses.

    A stretch ends in the best pause of the later half of a window. Where there is none, the next
    half windows are looked at, until the stretch has `most` samples: then it ends in a short pause,
    or there.

    Args:
        chunks: Consecutive parts of the signal.
        rate_hz: Samples a second.
        window: Most samples of a stretch that has a pause in time.
        most: Most samples of any stretch.
    """
    parts = [torch.zeros(0, **CPU_FLOAT)]
    start, size = 0, window  # of the samples that are looked at next
    for chunk in chunks:
        parts.append(chunk)
        while sum(map(len, parts)) > size:
            held = torch.cat(parts)
            end = best_pause(held[:size], rate_hz, size - window // 2, LEAST_PAUSE_S)
            if end is None and size < most:
                size = min(size + window // 2, most)
                parts = [held]
                continue
            end = end or best_pause(held[:size], rate_hz, window // 2, SHORT_PAUSE_S) or size
            yield start, held[:end].clone(), False  # a view would keep all of `held`
            start += end
            size = window
            parts = [held[end:]]
    yield start, torch.cat(parts), True


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
    parts = [torch.zeros(0, **CPU_FLOAT)]
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
