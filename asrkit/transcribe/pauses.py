"""Sound and pauses in a signal, found by its loudness alone.

Recordings for a Whisper are cut at pauses, those for other models into overlapping windows. Sound
without words is reported.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from asrkit.devices import CPU_FLOAT

FRAME_S = 0.02  # duration of a frame of loudness
SMOOTHED = 5  # frames in a moving mean of loudness, so that a click does not count
RANGE_DB = 50.0  # range below the loudest frames; quieter frames count as its lower end
LEAST_RANGE_DB = 2.5  # least range of a signal with speech, however noisy
STEADY_DB = 2.0  # least deviation of loudness within a second; noise and tones vary less
STEADY = 51  # frames in that second
FAINTEST_DB = -80.0  # a signal below this loudness is silence
LOUD = 0.35  # a frame above this share of the range sounds
LEAST_PAUSE_S = 0.35  # least pause at which a recording is cut, if there is one
SHORT_PAUSE_S = 0.2  # least pause otherwise
LONG_PAUSE_S = 1.0  # longer pauses are no better than this one
WORD_S = 0.6  # longest time from the point of a label to the end of its word
PAUSE_WORTH = 6.0  # seconds that a window may end earlier for a pause that is one second longer


def sounding(waveform: Tensor, rate_hz: int) -> Tensor:
    """Which frames of FRAME_S sound, (N,) bool; an incomplete last frame is dropped.

    A frame sounds if it is loud within the waveform's range, and if the loudness varies there, as
    that of speech does. Steady noise does not sound.

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
    """Whether a signal is too faint for speech, or more than a second of steady noise."""
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
    power = frames.var(1, correction=0)  # the variance ignores a constant offset
    return 10 * _mean(power, SMOOTHED).clamp(min=1e-10).log10()


def _range(loudness: Tensor) -> tuple[float, float]:
    """Loudness of the quietest and of the loudest frames, outliers excluded."""
    ordered = loudness.sort().values
    loudest = float(ordered[math.ceil(0.99 * len(ordered)) - 1])
    return max(float(ordered[len(ordered) // 20]), loudest - RANGE_DB), loudest


def _mean(values: Tensor, size: int) -> Tensor:
    """Moving mean of the values (N,) over `size` values."""
    half = size // 2
    return avg_pool1d(values[None], size, 1, half, count_include_pad=False)[0]


def runs(frames: Tensor) -> list[tuple[int, int]]:
    """(first frame, end) of each run of True in (N,) bool; the end is exclusive."""
    edges = torch.cat([frames.new_zeros(1), frames, frames.new_zeros(1)]).int().diff()
    starts, ends = (edges.eq(step).nonzero()[:, 0].tolist() for step in (1, -1))
    return [*zip(starts, ends, strict=True)]


def best_pause(waveform: Tensor, rate_hz: int, first: int, least_s: float) -> int | None:
    """The sample in the middle of the best pause from sample `first` on; None if there is none.

    Long pauses are better than short ones, and late ones better than early ones.

    Args:
        waveform: (S,) float.
        rate_hz: Samples a second.
        first: First sample at which the waveform may be cut.
        least_s: Least length of a pause.
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
    """(first frame, end) of each passage between two labels that sounds for `least_s` or more.

    A word lasts longer than the point of its label. So a gap begins with the next frame that does
    not sound, or after WORD_S, and ends with the last such frame before the next label.

    Args:
        sounds: Frames that sound, (N,) bool.
        points: The frame of each label, in order.
        least_s: Seconds of sound.
    """
    passages = []
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
            passages.append((start, end))
    return passages


def stretches(
    chunks: Iterable[Tensor], rate_hz: int, window: int, most: int
) -> Iterator[tuple[int, Tensor, bool]]:
    """Yield (first sample, samples (S,), whether it is the last) of stretches between pauses.

    A stretch ends in the best pause of the second half of a window. If there is none, the search
    goes on by half windows until the stretch has `most` samples. Then it ends in a short pause, or
    after `most` samples.

    Args:
        chunks: Consecutive parts of the signal.
        rate_hz: Samples a second.
        window: Most samples in a stretch, if there is a pause in time.
        most: Most samples in any stretch.
    """

    def end_of(held: Tensor) -> int | None:
        size = len(held)
        end = best_pause(held, rate_hz, size - window // 2, LEAST_PAUSE_S)
        if end is None and size >= most:
            return best_pause(held, rate_hz, window // 2, SHORT_PAUSE_S) or most
        return end

    return _pieces(chunks, [*range(window, most, window // 2), most], end_of)


def windows(
    chunks: Iterable[Tensor], size: int, overlap: int
) -> Iterator[tuple[int, Tensor, bool]]:
    """Yield (first sample, samples (S,), whether it is the last) of a signal's windows.

    The last window has the remaining samples, which are more than `overlap`. A signal of at most
    `size` samples is one window.

    Args:
        chunks: Consecutive parts of the signal.
        size: Most samples in a window.
        overlap: Samples that neighbouring windows share.
    """
    return _pieces(chunks, [size], len, overlap)


def _pieces(
    chunks: Iterable[Tensor],
    sizes: Sequence[int],
    end_of: Callable[[Tensor], int | None],
    overlap: int = 0,
) -> Iterator[tuple[int, Tensor, bool]]:
    """Yield (first sample, samples (S,), whether it is the last) of a signal's pieces.

    Args:
        chunks: Consecutive parts of the signal.
        sizes: Samples among which the end of a piece is searched, each more than the one before.
        end_of: Returns the end of a piece within these samples; None: more samples are needed.
        overlap: Samples that neighbouring pieces share.
    """
    parts = [torch.zeros(0, **CPU_FLOAT)]
    start = attempt = 0
    for chunk in chunks:
        parts.append(chunk)
        # Joined only once there are enough: joining each chunk would copy a long piece many times.
        while sum(map(len, parts)) > sizes[attempt]:
            held = torch.cat(parts)
            end = end_of(held[: sizes[attempt]])
            if end is None:
                parts = [held]
                attempt += 1
                continue
            yield start, held[:end].clone(), False  # a view would keep all of `held`
            parts = [held[end - overlap :]]
            start += end - overlap
            attempt = 0
    yield start, torch.cat(parts), True
