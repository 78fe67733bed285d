import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asrkit.features import (
    FeatureConfig,
    log_mel,
    mel_bands,
    normalize,
    normalize_sequential,
)
from asrkit.workbench.measure import launch_profile


def reference_log_mel(waveform: np.ndarray, config: FeatureConfig) -> np.ndarray:
    """The definition, frame by frame in float64: pre-emphasis, window, DFT, Slaney mel, log. (T, F)"""
    from torchaudio.functional import melscale_fbanks

    signal = np.concatenate(
        [waveform[:1], waveform[1:] - config.preemphasis * waveform[:-1]]
    )
    padded = np.pad(signal, config.fft // 2)
    size = config.window_samples
    window = np.zeros(config.fft)
    left = (config.fft - size) // 2
    turns = np.arange(size) / (size if config.periodic else size - 1)
    cosines = {
        "hann": (0.5, 0.5),
        "hamming": (0.54, 0.46),
        "blackman": (0.42, 0.5, 0.08),
    }[config.window]
    window[left : left + size] = sum(
        (-1) ** k * a * np.cos(2 * np.pi * k * turns) for k, a in enumerate(cosines)
    )
    mel = (
        melscale_fbanks(
            config.fft // 2 + 1,
            0.0,
            8000.0,
            config.bins,
            config.rate_hz,
            "slaney",
            "slaney",
        )
        .double()
        .numpy()
    )
    frames = len(waveform) // config.hop_samples
    power = [
        np.abs(
            np.fft.rfft(
                padded[t * config.hop_samples : t * config.hop_samples + config.fft]
                * window
            )
        )
        ** config.power
        for t in range(frames)
    ]
    bands = np.array(power) @ mel
    return np.log(
        bands + config.log_guard
        if config.guard == "add"
        else np.maximum(bands, config.log_guard)
    )


def speechlike(samples: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, generator=generator).cumsum(0).sin() * 0.3


@pytest.mark.parametrize("samples", [161, 400, 3217, 16000])
def test_log_mel_equals_its_definition_in_float64(samples):
    config = FeatureConfig(normalization="none")
    waveform = speechlike(samples)
    features, lengths = log_mel(waveform[None], torch.tensor([samples]), config=config)
    expected = reference_log_mel(waveform.double().numpy(), config)
    assert lengths.tolist() == [samples // 160]
    np.testing.assert_allclose(features[0].numpy(), expected, atol=2e-3)


@pytest.mark.parametrize("settings", [
    {"window": "hamming"}, {"window": "blackman", "periodic": True}, {"periodic": True}, {"power": 1}, {"preemphasis": 0.0},
    {"guard": "clamp", "log_guard": 1e-2}, {"power": 1, "guard": "clamp", "window_s": 0.02, "bins": 40, "fft": 400},
], ids=str)  # fmt: skip
def test_every_setting_is_that_of_the_definition(settings):
    config, waveform = FeatureConfig(normalization="none", **settings), speechlike(4000)
    features, _ = log_mel(waveform[None], torch.tensor([4000]), config=config)
    expected = reference_log_mel(waveform.double().numpy(), config)
    np.testing.assert_allclose(features[0].numpy(), expected, atol=2e-3)
    plain = reference_log_mel(
        waveform.double().numpy(),
        FeatureConfig(normalization="none", bins=config.bins, fft=config.fft),
    )
    assert np.abs(expected - plain).max() > 0.02  # the setting matters


def test_normalisation_over_all_features_is_that_of_the_whole_utterance():
    waveforms, lengths = (
        torch.stack([speechlike(4000, 0), speechlike(4000, 1)]),
        torch.tensor([4000, 1700]),
    )
    plain, frames = log_mel(
        waveforms, lengths, config=FeatureConfig(normalization="none")
    )
    features, _ = log_mel(
        waveforms, lengths, config=FeatureConfig(normalization="all_features")
    )
    assert features.shape == plain.shape
    for b, n in enumerate(frames.tolist()):
        rows = plain[b, :n].double()
        torch.testing.assert_close(
            features[b, :n].double(),
            (rows - rows.mean()) / (rows.std() + 1e-5),
            atol=1e-5,
            rtol=0,
        )
        assert (features[b, n:] == 0).all()


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("normalization", ["none", "all_features"])
def test_nothing_lies_further_below_the_loudest_bin_than_the_range(
    power, normalization
):
    quiet_end = torch.linspace(1, 0, 4000) ** 4
    waveforms = torch.stack([speechlike(4000, 0), speechlike(4000, 1)]) * quiet_end
    lengths = torch.tensor([4000, 1730])  # the second ends within a frame,
    waveforms[1, 1725] = 50.0  # and what is loudest lies in that frame
    config = FeatureConfig(normalization="none", power=power, log_guard=1e-12)
    plain, frames = log_mel(waveforms, lengths, config=config)
    limited = replace(config, normalization=normalization, range_db=20)
    features, _ = log_mel(waveforms, lengths, config=limited)
    decades = 20 / 20 * power  # 20 dB are a factor of 10 in magnitude, of 100 in energy
    for b, n in enumerate(frames.tolist()):
        rows = plain[b, :n].double()
        expected = rows.clamp(min=float(rows.max()) - decades * math.log(10))
        assert 0.1 < (expected > rows).double().mean() < 0.9  # the range matters
        if normalization == "all_features":
            expected = (expected - expected.mean()) / expected.std()
        torch.testing.assert_close(
            features[b, :n].double(), expected, atol=1e-4, rtol=0
        )
        assert (features[b, n:] == 0).all()


@pytest.mark.parametrize("gain", [0.01, 30.0])
def test_with_a_range_the_level_of_a_recording_cannot_matter(gain):
    config = FeatureConfig(normalization="all_features", range_db=30.0, log_guard=1e-20)
    waveform = speechlike(4000)[None]
    lengths = torch.tensor([4000])
    features, _ = log_mel(waveform, lengths, config=config)
    louder, _ = log_mel(waveform * gain, lengths, config=config)
    torch.testing.assert_close(louder, features, atol=1e-4, rtol=0)


def test_gradients_of_magnitudes_are_finite_where_there_is_silence():
    waveform = torch.zeros(1, 1600, requires_grad=True)
    log_mel(waveform, torch.tensor([1600]), config=FeatureConfig(power=1))[
        0
    ].sum().backward()
    assert waveform.grad.isfinite().all()


@pytest.mark.parametrize("filler", [0.0, 7.0, float("nan"), float("inf")])
def test_what_lies_in_the_padding_cannot_matter(filler):
    lengths = torch.tensor([1, 159, 160, 1600, 3999, 4000])
    waveforms = torch.full((6, 4000), filler)
    for b, length in enumerate(lengths.tolist()):
        waveforms[b, :length] = speechlike(length, b)
    features, frames = log_mel(waveforms, lengths)
    for b, length in enumerate(lengths.tolist()):
        alone, n = log_mel(waveforms[b : b + 1, :length], lengths[b : b + 1])
        assert n.tolist() == frames[b : b + 1].tolist()
        torch.testing.assert_close(features[b, : n[0]], alone[0], atol=2e-4, rtol=0)
        assert (features[b, n[0] :] == 0).all()


def defined_normalization(features, lengths):
    """The definition in float64, number by number: (x - mean) / (deviation + 1e-5), zero in the padding."""
    out = np.zeros(features.shape)
    for b, f in np.ndindex(features.shape[0], features.shape[2]):
        x = features[b, : max(0, int(lengths[b])), f].double().tolist()
        if x:
            mean = math.fsum(x) / len(x)
            deviation = math.sqrt(
                math.fsum((v - mean) ** 2 for v in x) / max(1, len(x) - 1)
            )
            out[b, : len(x), f] = [(v - mean) / (deviation + 1e-5) for v in x]
    return torch.from_numpy(out)


@settings(max_examples=250, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 40), st.integers(1, 4), st.floats(-1e3, 1e3),
    st.sampled_from([1e-3, 1.0, 50.0]), st.sampled_from([math.nan, math.inf, -math.inf, 1e30]),
)  # fmt: skip
def test_batched_normalisation_equals_the_loop_and_its_definition(
    seed, B, T, F, mean, spread, filler
):
    g = torch.Generator().manual_seed(seed)
    features = torch.randn(B, T, F, generator=g, dtype=torch.float64) * spread + mean
    lengths = torch.randint(
        0, T + 3, (B,), generator=g
    )  # none, one, all frames; a length beyond the last stands for all
    padding = torch.arange(T) >= lengths[:, None]
    features[padding] = filler
    given, wanted = features.clone(), defined_normalization(features, lengths)
    for normalized in (normalize, normalize_sequential):
        torch.testing.assert_close(
            normalized(features, lengths), wanted, atol=1e-6, rtol=0
        )
    assert (normalize(features, lengths)[padding] == 0).all()
    assert (
        normalize(features, lengths.clamp(max=1)) == 0
    ).all()  # one frame has no deviation, and is its own mean
    torch.testing.assert_close(
        features, given, rtol=0, atol=0, equal_nan=True
    )  # what was given is left alone


@pytest.mark.parametrize("mean", [0.0, -8.0, 300.0, 3e4])
def test_a_large_mean_costs_the_batch_no_more_digits_than_the_loop(mean):
    features, lengths = (
        torch.randn(6, 400, 8, generator=torch.Generator().manual_seed(0)) + mean,
        torch.tensor([400, 2, 399, 17, 1, 0]),
    )
    wanted = normalize_sequential(features.double(), lengths)
    apart = {
        f: (f(features, lengths) - wanted).abs().max()
        for f in (normalize, normalize_sequential)
    }
    assert apart[normalize] <= 2 * apart[normalize_sequential] + 2e-6, apart
    assert apart[normalize] <= 1e-6 * max(2, abs(mean)), (
        apart
    )  # an ulp of the mean, here and there


def test_normalisation_launches_as_much_for_any_batch_and_waits_for_nothing():
    def counted(function, B, T):
        return launch_profile(
            lambda: function(torch.randn(B, T, 4), torch.full((B,), T))
        )

    found = [
        counted(normalize, *size) for size in ((1, 3), (1, 300), (64, 3), (64, 300))
    ]
    assert len({one.launches for one in found}) == 1
    assert [one.syncs for one in found] == [0] * 4
    assert (
        counted(normalize_sequential, 64, 3).launches
        >= counted(normalize_sequential, 1, 3).launches + 63 * 4
    )


@pytest.mark.parametrize(
    ("waveforms", "lengths", "message"),
    [
        (torch.zeros(400), torch.tensor([400]), "waveforms: expected shape"),
        (torch.zeros(1, 400), torch.tensor([401]), "lengths: expected 1..400"),
        (torch.zeros(1, 400), torch.tensor([0]), "lengths: expected 1..400"),
        (torch.zeros(2, 400), torch.tensor([400]), "lengths: expected shape"),
        (
            torch.zeros(1, 400, dtype=torch.int16),
            torch.tensor([400]),
            "waveforms: expected a float dtype",
        ),
        (torch.zeros(0, 400), torch.zeros(0, dtype=torch.long), "lengths"),
    ],
)
def test_bad_input_is_refused_in_one_line(waveforms, lengths, message):
    with pytest.raises(ValueError, match=message) as caught:
        log_mel(waveforms, lengths)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"normalization": "per_utterance"},
        {"window": "bartlett"},
        {"power": 3},
        {"guard": "max"},
        {"bins": 0},
        {"rate_hz": 1999},
        {"window_s": 0.0},
        {"log_guard": 0.0},
        {"hop_s": 0.0},
        {"range_db": 0.0},
        {"range_db": math.inf},
        {"range_db": "30"},
        {"fill_s": 0.0},
        {"edges": "wrap"},
        {"fft": 256},
    ],
)
def test_settings_that_make_no_features_are_refused(wrong):
    with pytest.raises(ValueError, match=f"^[^:]*{next(iter(wrong))}.*: expected"):
        FeatureConfig(**wrong)


def test_gradients_of_normalisation_are_those_of_the_loop_where_nothing_deviates_too():
    features = torch.randn(
        5, 6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    features[2, :, 1] = 7.0
    features.requires_grad_()
    weights, lengths = (
        torch.randn(5, 6, 2, generator=torch.Generator().manual_seed(1)),
        torch.tensor([6, 2, 4, 1, 0]),
    )
    slopes = [
        torch.autograd.grad((f(features, lengths) * weights).sum(), features)[0]
        for f in (normalize, normalize_sequential)
    ]
    torch.testing.assert_close(*slopes)


def test_gradients_flow_even_if_the_first_call_was_in_inference_mode():
    config = FeatureConfig(bins=41)  # settings no other test has cached
    with torch.inference_mode():
        log_mel(speechlike(1600)[None], torch.tensor([1600]), config=config)
    waveform = speechlike(1600)[None].requires_grad_()
    log_mel(waveform, torch.tensor([1600]), config=config)[0].sum().backward()
    assert waveform.grad.isfinite().all()


@pytest.mark.parametrize(
    ("rate_hz", "fft", "bins"),
    [(16_000, 512, 80), (16_000, 512, 128), (8000, 256, 40)],
)
def test_mel_bands_are_torchaudios_without_its_rounding(rate_hz, fft, bins):
    from torchaudio.functional import melscale_fbanks

    bands = mel_bands(FeatureConfig(rate_hz=rate_hz, fft=fft, bins=bins))
    try:
        torch.set_default_dtype(torch.float64)  # the precision in which it computes
        wanted = melscale_fbanks(
            fft // 2 + 1, 0.0, rate_hz / 2, bins, rate_hz, "slaney", "slaney"
        )
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(bands.double(), wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_region_of_autocast_changes_no_feature(dtype):
    waveforms, lengths = torch.randn(2, 8000), torch.tensor([8000, 5000])
    plain = log_mel(waveforms, lengths)[0]
    with torch.autocast("cpu", dtype):
        assert torch.equal(log_mel(waveforms, lengths)[0], plain)


# ---- Whisper's settings

WHISPER = FeatureConfig(
    fft=400, periodic=True, preemphasis=0.0, guard="clamp", log_guard=1e-10, range_db=80.0, normalization="whisper",
    edges="reflect", fill_s=0.5,
)  # fmt: skip


def whispers(waveform, config):
    """Whisper's features by their definition in float64, (T, F): silence behind, mirrored edges, decimal logarithms."""
    signal = np.pad(waveform, (0, max(0, 8000 - len(waveform))))
    mirrored = np.pad(signal, 200, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    frames = [
        mirrored[t * 160 : t * 160 + 400] * window for t in range(len(signal) // 160)
    ]
    energies = np.abs(np.fft.rfft(np.array(frames))) ** 2
    bands = np.log10(np.maximum(energies @ mel_bands(config).double().numpy(), 1e-10))
    return (np.maximum(bands, bands.max() - 8) + 4) / 4


@pytest.mark.parametrize("samples", [1, 199, 4000, 8000, 9001])
def test_whispers_features_are_their_definition(samples):
    waveform = speechlike(samples)
    features, frames = log_mel(waveform[None], torch.tensor([samples]), config=WHISPER)
    expected = whispers(waveform.double().numpy(), WHISPER)
    assert frames.tolist() == [max(samples, 8000) // 160] == [len(expected)]
    np.testing.assert_allclose(features[0].numpy(), expected, atol=2e-4)


def test_silence_has_the_features_that_whisper_gives_it():
    features, _ = log_mel(torch.zeros(1, 300), torch.tensor([300]), config=WHISPER)
    assert (features == -1.5).all()


@pytest.mark.parametrize("fill_s", [None, 0.1, 0.5])
def test_mirrored_and_filled_utterances_do_not_see_their_batch(fill_s):
    config = replace(WHISPER, fill_s=fill_s)
    lengths = torch.tensor([4000, 150, 1, 2401])
    waveforms = torch.stack([speechlike(4000, n) for n in range(4)])
    waveforms[1, 150:] = torch.nan  # what lies behind
    features, frames = log_mel(waveforms, lengths, config=config)
    filled = lengths.clamp(min=round((fill_s or 0) * 16_000))
    assert frames.tolist() == (filled // 160).clamp(min=1).tolist()
    for b, n in enumerate(lengths.tolist()):
        alone, _ = log_mel(waveforms[b : b + 1, :n], lengths[b : b + 1], config=config)
        torch.testing.assert_close(
            features[b, : frames[b]], alone[0], rtol=0, atol=1e-5
        )
        assert (features[b, frames[b] :] == 0).all()


def test_edges_are_mirrored_at_both_ends_of_each_utterance():
    waveforms = torch.stack([speechlike(1600, 0), speechlike(1600, 1)])
    lengths = torch.tensor([1600, 800])
    config = FeatureConfig(normalization="none", edges="reflect", preemphasis=0.0)
    features, frames = log_mel(waveforms, lengths, config=config)
    plain = replace(config, edges="zeros")
    for b, n in enumerate(lengths.tolist()):
        mirrored = torch.nn.functional.pad(
            waveforms[b : b + 1, :n], (320, 320), mode="reflect"
        )
        wanted, _ = log_mel(mirrored, torch.tensor([n + 640]), config=plain)
        torch.testing.assert_close(
            features[b, : frames[b]], wanted[0, 2 : 2 + frames[b]], rtol=0, atol=1e-4
        )
    assert not torch.allclose(features, log_mel(waveforms, lengths, config=plain)[0])


def test_a_config_knows_the_frames_of_a_batch():
    assert [FeatureConfig().frames(n) for n in (1, 159, 320, 479)] == [1, 1, 2, 2]
    assert [WHISPER.frames(n) for n in (1, 8000, 8160)] == [50, 50, 51]
