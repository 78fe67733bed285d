from dataclasses import replace

import pytest
import torch

from asrkit.data import AugmentConfig, spec_augment, warp_features
from asrkit.data import augment as augment_with_lengths
from asrkit.features import FeatureConfig, mel_edges_hz

NOTHING = AugmentConfig(
    speed=(1, 1),
    rate=(1, 1),
    formants=(1, 1),
    silence=0,
    noise=0,
    room=0,
    telephone=0,
    low_cut=0,
    gain_db=(0, 0),
    time_masks=0,
    frequency_masks=0,
)


def augment(*args, **kwargs):
    """The altered waveforms alone."""
    return augment_with_lengths(*args, **kwargs)[0]


def seeded(seed=0):
    """A generator."""
    return torch.Generator().manual_seed(seed)


def speech(B=8, S=16_000):
    """Waveforms (B, S) and lengths (B,), one of them full."""
    return torch.randn(B, S, generator=seeded(1)) * 0.1, torch.linspace(
        S // 3, S, B
    ).long()


def test_with_everything_off_waveforms_come_back_as_they_were():
    waveforms, lengths = speech()
    out = augment(waveforms, lengths, seeded(), config=NOTHING)
    for row, size in enumerate(lengths):
        assert torch.allclose(out[row, :size], waveforms[row, :size], atol=1e-6)


def test_what_lies_in_the_padding_cannot_matter_and_comes_back_as_zero():
    waveforms, lengths = speech()
    padding = torch.arange(waveforms.shape[1]) >= lengths[:, None]
    plain, shortened = augment_with_lengths(
        waveforms.masked_fill(padding, 0), lengths, seeded()
    )
    assert torch.equal(
        augment(waveforms.masked_fill(padding, float("nan")), lengths, seeded()), plain
    )
    padding = torch.arange(plain.shape[1]) >= shortened[:, None]
    assert (plain[padding] == 0).all() and plain.isfinite().all()


def test_speed_scales_durations_and_pitch_alike_and_keeps_the_loudness():
    tone = torch.sin(torch.arange(48_000) * (2 * torch.pi * 440 / 16_000))[None]
    durations = set()
    for seed in range(12):
        out, lengths = augment_with_lengths(
            tone,
            torch.tensor([48_000]),
            seeded(seed),
            config=replace(NOTHING, speed=(0.8, 1.25)),
        )
        speed = float(lengths) / 48_000
        durations.add(round(speed, 3))
        assert 0.75 < speed < 1.3 and out.shape[1] == int(lengths)
        hz = torch.fft.rfft(out[0]).abs().argmax() * 16_000 / out.shape[1]
        assert abs(float(hz) - 440 / speed) < 2
        assert abs(float(out.square().mean()) - 0.5) < 0.02
    assert len(durations) > 3


def test_the_generator_decides_everything():
    waveforms, lengths = speech()
    assert torch.equal(
        augment(waveforms, lengths, seeded(5)), augment(waveforms, lengths, seeded(5))
    )
    assert not torch.equal(
        augment(waveforms, lengths, seeded(5))[:, :9000],
        augment(waveforms, lengths, seeded(6))[:, :9000],
    )


@pytest.mark.parametrize("snr_db", [5.0, 20.0])
def test_noise_is_added_at_the_ratio_asked_for(snr_db):
    waveforms, lengths = speech(B=16, S=48_000)
    noisy = augment(
        waveforms,
        lengths,
        seeded(),
        config=replace(NOTHING, noise=1, snr_db=(snr_db, snr_db)),
    )
    for row, size in enumerate(lengths):
        clean = waveforms[row, :size]
        got = 10 * torch.log10(
            clean.square().mean() / (noisy[row, :size] - clean).square().mean()
        )
        assert abs(got - snr_db) < 1.0


def test_a_telephone_passes_below_3400_hz_and_stops_above_4200_hz():
    seconds = torch.arange(16_000) / 16_000
    tones = torch.stack(
        [
            torch.sin(2 * torch.pi * hz * seconds)
            for hz in (300.0, 3000.0, 4400.0, 7000.0)
        ]
    )
    out = augment(
        tones, torch.full((4,), 16_000), seeded(), config=replace(NOTHING, telephone=1)
    )
    ratio = (out.square().mean(1) / tones.square().mean(1))[:4]
    assert (ratio[:2] > 0.98).all() and (ratio[2:] < 1e-2).all()


def test_a_room_leaves_the_direct_sound_and_an_echo_that_falls_by_60_db_in_its_time():
    click = torch.zeros(64, 16_000)
    click[:, 0] = 1
    echo = augment(
        click,
        torch.full((64,), 16_000),
        seeded(),
        config=replace(NOTHING, room=1, rt60_s=(0.4, 0.4)),
    )
    assert torch.allclose(echo[:, 0], torch.ones(64), atol=1e-5)
    early, late = (
        echo[:, at : at + 400].square().mean() for at in (100, 3300)
    )  # 0.2 s apart, half of 0.4
    assert abs(10 * torch.log10(early / late) - 30) < 1
    assert echo[:, 6401:].abs().max() < 1e-5


def test_gain_stays_in_its_range():
    waveforms, lengths = torch.ones(64, 100), torch.full((64,), 100)
    gains_db = 20 * torch.log10(
        augment(waveforms, lengths, seeded(), config=replace(NOTHING, gain_db=(-9, 3)))[
            :, 50
        ]
    )
    assert (
        gains_db.min() >= -9.01
        and gains_db.max() <= 3.01
        and gains_db.max() - gains_db.min() > 6
    )


def test_masks_are_zeros_in_whole_frames_or_whole_bins_and_the_rest_is_untouched():
    features, lengths = (
        torch.rand(8, 200, 80, generator=seeded()) + 1,
        torch.tensor([200] * 4 + [120] * 4),
    )
    config = AugmentConfig(
        time_masks=2, time_share=0.1, frequency_masks=2, frequency_bins=10
    )
    masked = spec_augment(features, lengths, seeded(), config=config)
    hidden = masked == 0
    frames, bins = hidden.all(2), hidden.all(1)
    assert torch.equal(hidden, frames[:, :, None] | bins[:, None, :])
    assert torch.equal(masked[~hidden], features[~hidden])
    assert (frames.sum(1) <= 2 * (lengths * 0.1 + 1)).all() and (
        bins.sum(1) <= 22
    ).all()
    assert frames.any() and bins.any() and not frames[4:, 120:].any()
    assert torch.equal(
        spec_augment(features, lengths, seeded(), config=NOTHING), features
    )


@pytest.mark.parametrize("S", [1, 100])
def test_the_shortest_waveforms_survive(S):
    assert (
        augment(
            torch.ones(2, S),
            torch.tensor([S, 1]),
            seeded(),
            config=AugmentConfig(noise=1, room=1),
        )
        .isfinite()
        .all()
    )


def test_speed_keeps_its_range_in_a_batch_of_short_words_too():
    words, lengths = (
        torch.randn(2, 6400, generator=seeded()),
        torch.tensor([6400, 3200]),
    )
    speeds = set()
    for seed in range(20):
        config = replace(NOTHING, speed=(0.9, 1.1))
        out, shortened = augment_with_lengths(
            words, lengths, seeded(seed), config=config
        )
        assert 0.9 <= out.shape[1] / 6400 <= 1.1
        assert abs(int(shortened[1]) - int(shortened[0]) / 2) <= 1
        speeds.add(out.shape[1])
    assert len(speeds) > 3


def test_silence_stands_around_the_speech_and_leaves_it_as_it_was():
    waveforms, lengths = speech()
    config = replace(NOTHING, silence=1, silence_s=(0.05, 0.2))
    out, longer = augment_with_lengths(waveforms, lengths, seeded(), config=config)
    added = longer - lengths
    assert (added >= 2 * 800).all() and (added <= 2 * 3200).all()
    for row, size in enumerate(lengths):
        first = int((out[row].abs() > 1e-5).nonzero()[0])
        assert 799 <= first <= 3200
        spoken = out[row, first : first + size]
        assert torch.allclose(spoken, waveforms[row, :size], atol=1e-5)
        assert out[row, first + size :].abs().max() < 1e-5
    some, _ = augment_with_lengths(
        waveforms, lengths, seeded(), config=replace(config, silence=0)
    )
    assert some.shape == waveforms.shape


def test_silence_does_not_count_in_the_ratio_of_speech_to_noise():
    waveforms, lengths = (
        torch.randn(16, 8000, generator=seeded(1)),
        torch.full((16,), 8000),
    )
    config = replace(NOTHING, noise=1, snr_db=(20, 20), silence=1, silence_s=(1.0, 1.0))
    noisy, _ = augment_with_lengths(waveforms, lengths, seeded(), config=config)
    noise_power = noisy[:, 1000:15_000].square().mean(1)
    ratio_db = 10 * torch.log10(waveforms.square().mean(1) / noise_power)
    assert (ratio_db - 20).abs().max() < 1


def test_a_low_cut_stops_below_its_edge_and_passes_above_it():
    seconds = torch.arange(16_000) / 16_000
    tones = [
        torch.sin(2 * torch.pi * hz * seconds) for hz in (60.0, 150.0, 500.0, 3000.0)
    ]
    waveforms = torch.stack(tones)
    config = replace(NOTHING, low_cut=1, low_cut_hz=(300, 300))
    out = augment(waveforms, torch.full((4,), 16_000), seeded(), config=config)
    ratio = out.square().mean(1) / waveforms.square().mean(1)
    assert (ratio[:2] < 1e-2).all() and (ratio[2:] > 0.98).all()


def test_warping_by_one_changes_nothing_but_the_padding():
    features, lengths = (
        torch.randn(3, 50, 80, generator=seeded()),
        torch.tensor([50, 20, 1]),
    )
    out, same = warp_features(features, lengths, seeded(), config=NOTHING)
    assert torch.equal(same, lengths) and out.dtype == torch.float32
    for row, size in enumerate(lengths):
        assert torch.allclose(out[row, :size], features[row, :size], atol=1e-4)
        assert (out[row, size:] == 0).all()


def test_what_lies_in_the_padding_of_features_cannot_matter():
    features, lengths = (
        torch.randn(2, 50, 80, generator=seeded()),
        torch.tensor([50, 20]),
    )
    other = features.clone()
    other[1, 20:] = 1e6
    config = AugmentConfig(rate=(0.5, 2), formants=(0.5, 2))
    outs = [
        warp_features(x, lengths, seeded(3), config=config)[0]
        for x in (features, other)
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("rate", [0.5, 1.5])
def test_rate_stretches_time_and_leaves_frequencies_alone(rate):
    lengths = torch.tensor([101, 41])
    ramp = (
        torch.arange(101.0)[None, :, None].expand(2, -1, 80) + torch.arange(80.0) * 1000
    )
    config = replace(NOTHING, rate=(rate, rate))
    out, longer = warp_features(ramp, lengths, seeded(), config=config)
    for row in range(2):
        size = int(longer[row])
        assert abs(size - rate * int(lengths[row])) <= 1
        first, last = out[row, 0], out[row, size - 1]
        assert torch.allclose(first, torch.arange(80.0) * 1000, atol=0.1)
        assert torch.allclose(last - first, (lengths[row] - 1).float(), atol=0.1)


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_formants_move_all_frequencies_by_one_factor_and_leave_time_alone(factor):
    centres_hz = mel_edges_hz(FeatureConfig())[1:-1].float()
    peaks = [15, 30, 50]
    features = torch.zeros(3, 4, 80)
    for row, peak in enumerate(peaks):
        features[row] = -((torch.log(centres_hz / centres_hz[peak])) ** 2)
    config = replace(NOTHING, formants=(factor, factor))
    out, lengths = warp_features(features, torch.full((3,), 4), seeded(), config=config)
    assert (lengths == 4).all() and torch.equal(out[:, 0], out[:, 3])
    for row, peak in enumerate(peaks):
        moved = centres_hz[out[row, 0].argmax()] / centres_hz[peak]
        assert abs(float(torch.log(moved / factor))) < 0.04  # a band's width


@pytest.mark.parametrize("T", [1, 2, 63])
def test_features_of_any_length_stay_finite_and_have_a_frame_at_least(T):
    config = AugmentConfig(rate=(0.1, 0.2), formants=(0.5, 2.0))
    lengths = torch.tensor([T, 1])
    out, shorter = warp_features(torch.ones(2, T, 80), lengths, seeded(), config=config)
    assert (
        out.isfinite().all()
        and (shorter >= 1).all()
        and out.shape[1] == int(shorter.max())
    )
    again, _ = warp_features(torch.ones(2, T, 80), lengths, seeded(), config=config)
    assert torch.equal(out, again)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"noise": 2}, "noise: expected a share in 0..1, got 2"),
        ({"silence": -0.1}, "silence: expected a share in 0..1"),
        ({"rate": (0, 1)}, "rate: expected a range from 0.001 up"),
        ({"formants": (1.2, 0.8)}, "formants: expected a range from 0.001 up"),
        ({"silence_s": (-1, 1)}, "silence_s: expected a range from 0 up"),
        ({"gain_db": (3, -3)}, "gain_db: expected a range from -inf up"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_line(wrong, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        AugmentConfig(**wrong)


def test_bad_arguments_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"lengths: expected shape \(B=2\)"):
        augment(torch.ones(2, 10), torch.ones(3), seeded())
    with pytest.raises(ValueError, match=r"lengths: expected shape \(B=2\)"):
        warp_features(torch.ones(2, 10, 80), torch.ones(3), seeded())
    with pytest.raises(ValueError, match=r"features: expected shape \(B, T, F=80\)"):
        warp_features(torch.ones(2, 10, 40), torch.ones(2), seeded())
