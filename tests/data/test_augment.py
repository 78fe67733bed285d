import math
from dataclasses import replace

import pytest
import torch

from asrkit.data import UNALTERED, AugmentConfig, augment, spec_augment, warp_features
from asrkit.features import FeatureConfig, mel_edges_hz


def seeded(seed=0):
    """A generator."""
    return torch.Generator().manual_seed(seed)


def noise(*shape):
    return torch.randn(shape, generator=seeded(1))


def speech(B=8, S=16_000):
    """Waveforms (B, S) and lengths (B,), one of them full."""
    return noise(B, S) * 0.1, torch.linspace(S // 3, S, B).long()


def full(waveforms):
    """The lengths of waveforms without padding."""
    return torch.full(waveforms.shape[:1], waveforms.shape[1])


def tones(*hz, samples=16_000):
    return torch.sin(
        2 * torch.pi * torch.tensor(hz)[:, None] * torch.arange(samples) / 16_000
    )


def changed(waveforms, lengths=None, seed=0, **settings):
    """Waveforms and lengths with only these alterations."""
    if lengths is None:
        lengths = full(waveforms)
    return augment(
        waveforms, lengths, seeded(seed), config=replace(UNALTERED, **settings)
    )


def warped(features, lengths, seed=0, **settings):
    """Features and lengths with only these alterations."""
    config = replace(UNALTERED, **settings)
    return warp_features(features, torch.tensor(lengths), seeded(seed), config=config)


def power(waveforms):
    return waveforms.square().mean(1)


def test_with_everything_off_waveforms_are_unchanged():
    waveforms, lengths = speech()
    out, _ = changed(waveforms, lengths)
    for row, size in enumerate(lengths):
        assert torch.allclose(out[row, :size], waveforms[row, :size], atol=1e-6)


def test_padding_has_no_influence_and_becomes_zero():
    waveforms, lengths = speech()
    padding = torch.arange(waveforms.shape[1]) >= lengths[:, None]
    (plain, shorter), (other, _) = (
        augment(waveforms.masked_fill(padding, value), lengths, seeded())
        for value in (0, float("nan"))
    )
    assert torch.equal(other, plain)
    assert plain.isfinite().all()
    assert (plain[torch.arange(plain.shape[1]) >= shorter[:, None]] == 0).all()


@pytest.mark.parametrize("samples", [6400, 48_000])  # a short word too
def test_speed_scales_duration_and_pitch_and_keeps_the_loudness(samples):
    tone = tones(440.0, 440.0, samples=samples)
    speeds = set()
    for seed in range(12):
        lengths = torch.tensor([samples, samples // 2])
        out, (long, short) = changed(tone, lengths, seed, speed=(0.8, 1.25))
        speed = float(long) / samples
        speeds.add(round(speed, 3))
        assert 0.8 <= speed <= 1.25
        assert out.shape[1] == long
        assert abs(short - long / 2) <= 1
        hz = torch.fft.rfft(out[0]).abs().argmax() * 16_000 / long
        assert abs(float(hz) - 440 / speed) < 0.6 * 16_000 / samples
        assert abs(float(power(out)[0]) - 0.5) < 0.02
    assert len(speeds) > 3


@pytest.mark.parametrize("snr_db", [5.0, 20.0])
def test_noise_has_the_given_ratio(snr_db):
    waveforms, lengths = speech(B=16, S=48_000)
    noisy, _ = changed(waveforms, lengths, noise=1, snr_db=(snr_db, snr_db))
    for clean, with_noise, size in zip(waveforms, noisy, lengths, strict=True):
        added = (with_noise - clean)[:size]
        ratio = clean[:size].square().mean() / added.square().mean()
        assert abs(10 * torch.log10(ratio) - snr_db) < 1.0


def test_silence_does_not_count_in_the_ratio_of_speech_to_noise():
    waveforms = noise(16, 8000)
    second = {"silence": 1, "silence_s": (1.0, 1.0)}
    noisy, _ = changed(waveforms, noise=1, snr_db=(20, 20), **second)
    ratio_db = 10 * torch.log10(power(waveforms) / power(noisy[:, 1000:15_000]))
    assert (ratio_db - 20).abs().max() < 1


@pytest.mark.parametrize(
    "settings, passed_hz, stopped_hz",
    [
        ({"telephone": 1}, (300.0, 3000.0), (4400.0, 7000.0)),
        ({"low_cut": 1, "low_cut_hz": (300, 300)}, (500.0, 3000.0), (60.0, 150.0)),
    ],
)
def test_a_band_keeps_its_frequencies_and_stops_the_rest(
    settings, passed_hz, stopped_hz
):
    waveforms = tones(*passed_hz, *stopped_hz)
    ratio = power(changed(waveforms, **settings)[0]) / power(waveforms)
    assert (ratio[:2] > 0.98).all()
    assert (ratio[2:] < 1e-2).all()


def test_a_room_keeps_the_direct_sound_and_its_echo_falls_by_60_db_in_rt60():
    click = torch.zeros(64, 16_000)
    click[:, 0] = 1
    echo, _ = changed(click, room=1, rt60_s=(0.4, 0.4))
    assert torch.allclose(echo[:, 0], torch.ones(64), atol=1e-5)
    # 0.2 s apart, half of 0.4
    early, late = (power(echo[:, at : at + 400]).mean() for at in (100, 3300))
    assert abs(10 * torch.log10(early / late) - 30) < 1
    assert echo[:, 6401:].abs().max() < 1e-5


def test_gain_stays_in_its_range():
    out, _ = changed(torch.ones(64, 100), gain_db=(-9, 3))
    least, greatest = torch.aminmax(20 * torch.log10(out[:, 50]))
    assert least >= -9.01
    assert greatest <= 3.01
    assert greatest - least > 6


@pytest.mark.parametrize("S", [1, 100])
def test_the_shortest_waveforms_survive(S):
    config = AugmentConfig(noise=1, room=1)
    out, _ = augment(torch.ones(2, S), torch.tensor([S, 1]), seeded(), config=config)
    assert out.isfinite().all()


def test_silence_surrounds_the_unchanged_speech():
    waveforms, lengths = speech()
    out, longer = changed(waveforms, lengths, silence=1, silence_s=(0.05, 0.2))
    added = longer - lengths
    assert (added >= 2 * 800).all()
    assert (added <= 2 * 3200).all()
    for padded, speech_, size in zip(out, waveforms, lengths, strict=True):
        first = int((padded.abs() > 1e-5).nonzero()[0])
        assert 799 <= first <= 3200
        wanted = torch.zeros_like(padded)
        wanted[first : first + size] = speech_[:size]
        assert torch.allclose(padded, wanted, atol=1e-5)


def test_masks_are_zeros_in_whole_frames_or_whole_bins_alone():
    features = noise(8, 200, 80).abs() + 1
    lengths = torch.tensor([200] * 4 + [120] * 4)
    config = replace(AugmentConfig(), time_masks=2, time_share=0.1, frequency_bins=10)
    masked = spec_augment(features, lengths, seeded(), config=config)
    hidden = masked == 0
    frames = hidden.all(2)
    bins = hidden.all(1)
    assert torch.equal(hidden, frames[:, :, None] | bins[:, None, :])
    assert torch.equal(masked[~hidden], features[~hidden])
    assert (frames.sum(1) <= 2 * (lengths * 0.1 + 1)).all()
    assert (bins.sum(1) <= 22).all()
    assert frames.any()
    assert bins.any()
    assert not frames[4:, 120:].any()


def test_warping_by_one_changes_nothing_but_the_padding():
    features = noise(3, 50, 80)
    out, lengths = warped(features, [50, 20, 1])
    assert lengths.tolist() == [50, 20, 1]
    assert out.dtype == torch.float32
    for row, size in enumerate(lengths):
        assert torch.allclose(out[row, :size], features[row, :size], atol=1e-4)
        assert (out[row, size:] == 0).all()


def test_padding_of_features_has_no_influence():
    features = noise(2, 50, 80)
    other = features.clone()
    other[1, 20:] = 1e6
    ranges = {"rate": (0.5, 2), "formants": (0.5, 2)}
    outs = [warped(x, [50, 20], 3, **ranges)[0] for x in (features, other)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("rate", [0.5, 1.5])
def test_rate_stretches_time_alone(rate):
    bins = torch.arange(80.0) * 1000
    ramp = (torch.arange(101.0)[:, None] + bins).expand(2, -1, -1)
    out, longer = warped(ramp, [101, 41], rate=(rate, rate))
    for row, (before, size) in enumerate(zip((101, 41), longer.tolist(), strict=True)):
        assert abs(size - rate * before) <= 1
        assert torch.allclose(out[row, 0], bins, atol=0.1)
        assert torch.allclose(out[row, size - 1], bins + before - 1, atol=0.1)


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_formants_scale_all_frequencies_alone(factor):
    centres_hz = mel_edges_hz(FeatureConfig())[1:-1].float()
    peaks_hz = centres_hz[[15, 30, 50]]
    bumps = -((torch.log(centres_hz / peaks_hz[:, None])) ** 2)
    features = bumps[:, None].expand(-1, 4, -1)
    out, lengths = warped(features, [4] * 3, formants=(factor, factor))
    assert (lengths == 4).all()
    assert torch.equal(out[:, 0], out[:, 3])
    moved = centres_hz[out[:, 0].argmax(1)] / peaks_hz
    assert torch.log(moved / factor).abs().max() < 0.04  # a band's width


@pytest.mark.parametrize("T", [1, 2, 63])
def test_features_of_any_length_stay_finite_and_have_at_least_one_frame(T):
    ranges = {"rate": (0.1, 0.2), "formants": (0.5, 2.0)}
    out, shorter = warped(torch.ones(2, T, 80), [T, 1], **ranges)
    assert out.isfinite().all()
    assert (shorter >= 1).all()
    assert out.shape[1] == int(shorter.max())


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: AugmentConfig(noise=2), "noise: expected a share in 0..1, got 2"),
        (lambda: AugmentConfig(rate=(0, 1)), "rate: expected a range from 0.001 up"),
        (
            lambda: AugmentConfig(silence_s=(-1, 1)),
            "silence_s: expected a range from 0 up",
        ),
        (
            lambda: AugmentConfig(gain_db=(3, -3)),
            "gain_db: expected a range from -inf up",
        ),
        (
            lambda: AugmentConfig(time_masks=-1),
            "time_masks: expected at least 0, got -1",
        ),
        (
            lambda: AugmentConfig(time_masks=2.5),
            "time_masks: expected a whole number, got 2.5",
        ),
        (
            lambda: AugmentConfig(time_masks="4"),
            "time_masks: expected a whole number, got '4'",
        ),
        (
            lambda: AugmentConfig(frequency_bins=-3),
            "frequency_bins: expected at least 0, got -3",
        ),
        (
            lambda: AugmentConfig(frequency_bins=math.nan),
            "frequency_bins: expected a whole number, got nan",
        ),
        (
            lambda: AugmentConfig(room="0.5"),
            "room: expected a finite number, got '0.5'",
        ),
        (
            lambda: AugmentConfig(noise=True),
            "noise: expected a finite number, got True",
        ),
        (
            lambda: AugmentConfig(speed=[0.9, 1.1]),
            r"speed: expected a tuple of two finite numbers, got \[0.9, 1.1\]",
        ),
        (
            lambda: AugmentConfig(gain_db=(0, math.inf)),
            r"gain_db: expected a tuple of two finite numbers, got \(0, inf\)",
        ),
        (
            lambda: AugmentConfig(rate=(0.9, 1.0, 1.1)),
            "rate: expected a tuple of two finite numbers, got",
        ),
        (
            lambda: AugmentConfig(formants=("0.9", 1.1)),
            "formants: expected a tuple of two finite numbers, got",
        ),
        (
            lambda: augment(torch.ones(2, 10), torch.ones(3), seeded()),
            r"lengths: expected shape \(B=2\)",
        ),
        (
            lambda: warped(torch.ones(2, 10, 40), [1.0] * 2),
            r"features: expected shape \(B, T, F=80\)",
        ),
    ],
)
def test_invalid_settings_and_arguments_are_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
