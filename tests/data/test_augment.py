from dataclasses import replace

import pytest
import torch

from asrkit.data import AugmentConfig, spec_augment
from asrkit.data import augment as augment_with_lengths

NOTHING = AugmentConfig(
    speed=(1, 1), noise=0, room=0, telephone=0, gain_db=(0, 0), time_masks=0, frequency_masks=0
)


def augment(*args, **kwargs):
    """The altered waveforms alone."""
    return augment_with_lengths(*args, **kwargs)[0]


def seeded(seed=0):
    """A generator."""
    return torch.Generator().manual_seed(seed)


def speech(B=8, S=16_000):
    """Waveforms (B, S) and lengths (B,), one of them full."""
    return torch.randn(B, S, generator=seeded(1)) * 0.1, torch.linspace(S // 3, S, B).long()


def test_with_everything_off_waveforms_come_back_as_they_were():
    waveforms, lengths = speech()
    out = augment(waveforms, lengths, seeded(), config=NOTHING)
    for row, size in enumerate(lengths):
        assert torch.allclose(out[row, :size], waveforms[row, :size], atol=1e-6)


def test_what_lies_in_the_padding_cannot_matter_and_comes_back_as_zero():
    waveforms, lengths = speech()
    padding = torch.arange(waveforms.shape[1]) >= lengths[:, None]
    plain, shortened = augment_with_lengths(waveforms.masked_fill(padding, 0), lengths, seeded())
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
            tone, torch.tensor([48_000]), seeded(seed), config=replace(NOTHING, speed=(0.8, 1.25))
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
        waveforms, lengths, seeded(), config=replace(NOTHING, noise=1, snr_db=(snr_db, snr_db))
    )
    for row, size in enumerate(lengths):
        clean = waveforms[row, :size]
        got = 10 * torch.log10(clean.square().mean() / (noisy[row, :size] - clean).square().mean())
        assert abs(got - snr_db) < 1.0


def test_a_telephone_passes_below_3400_hz_and_stops_above_4200_hz():
    seconds = torch.arange(16_000) / 16_000
    tones = torch.stack(
        [torch.sin(2 * torch.pi * hz * seconds) for hz in (300.0, 3000.0, 4400.0, 7000.0)]
    )
    out = augment(tones, torch.full((4,), 16_000), seeded(), config=replace(NOTHING, telephone=1))
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
        augment(waveforms, lengths, seeded(), config=replace(NOTHING, gain_db=(-9, 3)))[:, 50]
    )
    assert (
        gains_db.min() >= -9.01 and gains_db.max() <= 3.01 and gains_db.max() - gains_db.min() > 6
    )


def test_masks_are_zeros_in_whole_frames_or_whole_bins_and_the_rest_is_untouched():
    features, lengths = (
        torch.rand(8, 200, 80, generator=seeded()) + 1,
        torch.tensor([200] * 4 + [120] * 4),
    )
    config = AugmentConfig(time_masks=2, time_share=0.1, frequency_masks=2, frequency_bins=10)
    masked = spec_augment(features, lengths, seeded(), config=config)
    hidden = masked == 0
    frames, bins = hidden.all(2), hidden.all(1)
    assert torch.equal(hidden, frames[:, :, None] | bins[:, None, :])
    assert torch.equal(masked[~hidden], features[~hidden])
    assert (frames.sum(1) <= 2 * (lengths * 0.1 + 1)).all() and (bins.sum(1) <= 22).all()
    assert frames.any() and bins.any() and not frames[4:, 120:].any()
    assert torch.equal(spec_augment(features, lengths, seeded(), config=NOTHING), features)


@pytest.mark.parametrize("S", [1, 100])
def test_the_shortest_waveforms_survive(S):
    assert (
        augment(
            torch.ones(2, S), torch.tensor([S, 1]), seeded(), config=AugmentConfig(noise=1, room=1)
        )
        .isfinite()
        .all()
    )


def test_bad_arguments_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"each in 0..1"):
        AugmentConfig(noise=2)
    with pytest.raises(ValueError, match=r"lengths: expected shape \(B=2\)"):
        augment(torch.ones(2, 10), torch.ones(3), seeded())
