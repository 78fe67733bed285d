"""Sound in a signal, its best pause, the stretches between pauses, and sound without a label."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asrkit.data import recorded_speech
from asrkit.transcribe import read_audio
from asrkit.transcribe.pauses import (
    FRAME_S,
    best_pause,
    gaps,
    is_silent,
    sounding,
    stretches,
)

RATE_HZ = 16_000
SPOKEN = [read_audio(one.path, RATE_HZ) for one in recorded_speech()]


def noise(seconds, level, rate_hz=RATE_HZ, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return level * torch.randn(round(seconds * rate_hz), generator=generator)


def babble(seconds, rate_hz=RATE_HZ):
    """Noise whose loudness goes up and down by 12 dB four times a second, as with syllables."""
    when = torch.arange(round(seconds * rate_hz)) / rate_hz
    return noise(seconds, 0.1, rate_hz) * 10 ** (0.3 * torch.sin(8 * torch.pi * when))


def babble_with(pauses, seconds, rate_hz=RATE_HZ):
    """Babble with silence at each (start_s, length_s)."""
    signal = babble(seconds, rate_hz)
    for start_s, length_s in pauses:
        start = round(start_s * rate_hz)
        signal[start : start + round(length_s * rate_hz)] = 0
    return signal


def share(sounds):
    return sounds.float().mean().item()


@pytest.mark.parametrize("signal", [
    torch.zeros(5 * RATE_HZ),
    noise(5, 0.1),
    noise(5, 1e-3),
    0.3 * torch.sin(440 * 2 * torch.pi * torch.arange(5 * RATE_HZ) / RATE_HZ),
    5e-4 * SPOKEN[0],
])  # fmt: skip
def test_silence_steady_noise_a_tone_and_faint_signals_do_not_sound(signal):
    sounds = sounding(signal, RATE_HZ)
    assert len(sounds) == len(signal) // 320
    assert not sounds.any()


@pytest.mark.parametrize("samples", [0, 1, 319, 320, 1000])
def test_less_than_a_frame_is_none_and_a_few_are_no_error(samples):
    assert len(sounding(torch.rand(samples), RATE_HZ)) == samples // 320
    assert best_pause(torch.rand(samples), RATE_HZ, 0, 0.35) is None


def test_most_of_recorded_speech_sounds():
    for signal in SPOKEN:
        assert 0.5 < share(sounding(signal, RATE_HZ)) < 0.95
    assert share(sounding(torch.cat(SPOKEN), RATE_HZ)) > 0.65


@pytest.mark.parametrize("level", [1e-4, 1e-3, 5e-3])
def test_speech_in_half_a_minute_of_noise_sounds_and_the_noise_does_not(level):
    before, after = noise(15, level), noise(15, level, seed=1)
    middle = SPOKEN[0] + noise(len(SPOKEN[0]) / RATE_HZ, level, seed=2)
    sounds = sounding(torch.cat([before, middle, after]), RATE_HZ)
    first, last = 750, 750 + len(SPOKEN[0]) // 320
    assert share(sounds[first:last]) > 0.5
    assert not sounds[: first - 5].any()
    assert not sounds[last + 5 :].any()


@pytest.mark.parametrize("pauses, first_s, wanted", [
    ([], 2, None),
    ([(4, 1.0), (6, 0.5)], 2, 0),  # the longer one
    ([(3, 0.5), (7, 0.5)], 2, 1),  # of two alike the later one
    ([(1.5, 1.0), (8, 0.5)], 1, 1),  # a long one may be too early
    ([(3, 2.0), (5.5, 1.0)], 2, 1),  # longer than a second is not better
    ([(3, 1.0)], 5, None),
    ([(3, 1.0), (6, 0.5)], 5, 1),
    ([(7, 0.3)], 2, None),  # too short
])  # fmt: skip
def test_the_best_pause_is_long_and_late(pauses, first_s, wanted):
    signal = babble_with([(0, 1), *pauses], 10)
    place = best_pause(signal, RATE_HZ, first_s * RATE_HZ, 0.35)
    if wanted is None:
        assert place is None
    else:
        start_s, length_s = pauses[wanted]
        assert abs(place / RATE_HZ - (start_s + length_s / 2)) <= 2 * FRAME_S


@given(
    st.lists(st.tuples(st.floats(0, 19), st.floats(0.1, 1.5)), max_size=8),
    st.integers(0, 20_000),
    st.lists(st.integers(0, 3_000), max_size=20),
    st.integers(1_000, 6_000),
    st.floats(1, 3),
)
def test_stretches_are_the_signal_whatever_its_chunks(
    pauses, total, sizes, window, times
):
    rate_hz, most = 1_000, round(times * window)
    signal = babble_with(pauses, 20, rate_hz)[:total]
    cuts = [0, *itertools.accumulate(sizes), total]
    chunks = [signal[a:b] for a, b in itertools.pairwise(cuts)]
    found = [*stretches(chunks, rate_hz, window, most)]
    starts, parts, lasts = zip(*found, strict=True)
    assert torch.equal(torch.cat(parts), signal)
    ends = [*itertools.accumulate(map(len, parts))]
    assert [*starts] == [0, *ends[:-1]]
    assert max(map(len, parts)) <= most
    assert all(map(len, parts[:-1]))
    assert [*lasts] == [False] * (len(found) - 1) + [True]
    alone = stretches([signal], rate_hz, window, most)
    assert [start for start, _, _ in alone] == [*starts]


@pytest.mark.parametrize("pauses, cuts_s", [
    ([(7, 0.6)], [7.3]),
    ([(3, 0.6), (7, 0.6)], [7.3]),  # not in the earlier half
    ([(3, 0.6), (12, 0.6), (19, 0.6), (29, 0.6)], [12.3, 19.3]),  # in the next half window
    ([(3, 0.6), (8, 0.3), (17, 0.6)], [17.3]),
    ([(3, 0.6), (8, 0.3)], [8.15]),  # in a short one, where there is no other
    ([(3, 0.6)], [20]),
])  # fmt: skip
def test_a_stretch_ends_in_a_pause_or_at_its_limit(pauses, cuts_s):
    signal = babble_with([(0, 2), *pauses], 40)
    chunks = signal.split(7_777)
    found = stretches(chunks, RATE_HZ, 10 * RATE_HZ, 20 * RATE_HZ)
    next(found)
    for cut_s, (start, _, _) in zip(cuts_s, found, strict=False):
        assert abs(start / RATE_HZ - cut_s) <= 2 * FRAME_S


@pytest.mark.parametrize("runs, points, wanted", [
    ([(0, 500)], [*range(0, 500, 50)], []),
    ([], [10, 400], []),
    ([(100, 300)], [], [(0, 500)]),  # no label at all
    ([(0, 30), (100, 300), (390, 420)], [10, 400], [(30, 390)]),
    ([(100, 300), (390, 420)], [400], [(0, 390)]),  # before the first
    ([(0, 30), (100, 300)], [10], [(30, 500)]),  # after the last
    ([(0, 30), (100, 170), (390, 420)], [10, 400], []),  # 1.4 s
    ([(0, 115)], [10, 114], []),  # 2.1 s, of which the word before takes 0.6
    ([(0, 116)], [10, 115], [(40, 115)]),
    ([(0, 40), (120, 330)], [10, 325], [(40, 295)]),  # the next word began a while before
])  # fmt: skip
def test_gaps_are_long_passages_of_sound_without_a_label(runs, points, wanted):
    sounds = torch.zeros(500, dtype=torch.bool)
    for start, end in runs:
        sounds[start:end] = True
    assert gaps(sounds, points, 1.5) == wanted


@pytest.mark.parametrize("signal", [
    torch.zeros(0),
    torch.zeros(5 * RATE_HZ),
    torch.zeros(RATE_HZ // 100),
    noise(30, 1e-3),
    noise(5, 0.1),
    1e-5 * SPOKEN[0],
])  # fmt: skip
def test_silence_and_steady_noise_are_silent(signal):
    assert is_silent(signal, RATE_HZ)


def test_speech_is_not_silent_however_short_or_noisy():
    for spoken in SPOKEN:
        level = float(spoken.square().mean().sqrt())
        loud = int(spoken.abs().argmax())
        assert not is_silent(spoken, RATE_HZ)
        assert not is_silent(spoken[max(0, loud - 1600) :][:3200], RATE_HZ)  # 0.2 s
        assert not is_silent(spoken + noise(len(spoken) / RATE_HZ, level), RATE_HZ)
        assert not is_silent(0.1 * spoken + 0.5, RATE_HZ)  # an offset is no sound
