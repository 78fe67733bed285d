"""Log-mel features and their normalisation against their definitions, with padding and in batches."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asrkit.features import (
    FeatureConfig,
    log_mel,
    mel_bands,
    normalize,
    normalize_sequential,
)
from asrkit.workbench.measure import launch_profile

COSINES = {
    "hann": (0.5, 0.5),
    "hamming": (0.54, 0.46),
    "blackman": (0.42, 0.5, 0.08),
}


def reference_log_mel(waveform: np.ndarray, config: FeatureConfig) -> np.ndarray:
    """The definition, frame by frame in float64: pre-emphasis, window, DFT, Slaney mel, log. (T, F)"""
    signal = waveform.copy()
    signal[1:] -= config.preemphasis * waveform[:-1]
    padded = np.pad(signal, config.fft // 2)
    size = config.window_samples
    turns = np.arange(size) / (size if config.periodic else size - 1)
    window = np.zeros(config.fft)
    inside = window[(config.fft - size) // 2 :][:size]
    for k, a in enumerate(COSINES[config.window]):
        inside += (-1) ** k * a * np.cos(2 * np.pi * k * turns)
    power = []
    for start in range(0, len(waveform) - config.hop_samples + 1, config.hop_samples):
        spectrum = np.fft.rfft(padded[start : start + config.fft] * window)
        power.append(np.abs(spectrum) ** config.power)
    bands = np.array(power) @ torchaudios_bands(config).double().numpy()
    if config.guard == "add":
        return np.log(bands + config.log_guard)
    return np.log(np.maximum(bands, config.log_guard))


def torchaudios_bands(config):
    from torchaudio.functional import melscale_fbanks

    sizes = config.fft // 2 + 1, 0.0, config.rate_hz / 2, config.bins
    return melscale_fbanks(*sizes, config.rate_hz, "slaney", "slaney")


def speechlike(samples: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, generator=generator).cumsum(0).sin() * 0.3


PLAIN = FeatureConfig(normalization="none")


@pytest.mark.parametrize("samples", [161, 400, 3217, 16000])
def test_log_mel_equals_its_definition_in_float64(samples):
    waveform = speechlike(samples)
    features, lengths = log_mel(waveform[None], torch.tensor([samples]), config=PLAIN)
    expected = reference_log_mel(waveform.double().numpy(), PLAIN)
    assert lengths.tolist() == [samples // 160]
    np.testing.assert_allclose(features[0].numpy(), expected, atol=2e-3)


@pytest.mark.parametrize("settings", [
    {"window": "hamming"},
    {"window": "blackman", "periodic": True},
    {"periodic": True},
    {"power": 1},
    {"preemphasis": 0.0},
    {"guard": "clamp", "log_guard": 1e-2},
    {"power": 1, "guard": "clamp", "window_s": 0.02, "bins": 40, "fft": 400},
], ids=str)  # fmt: skip
def test_every_setting_follows_the_definition(settings):
    config = replace(PLAIN, **settings)
    waveform = speechlike(4000)
    features, _ = log_mel(waveform[None], torch.tensor([4000]), config=config)
    expected = reference_log_mel(waveform.double().numpy(), config)
    np.testing.assert_allclose(features[0].numpy(), expected, atol=2e-3)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("normalization", ["none", "all_features"])
def test_no_value_is_further_below_the_loudest_bin_than_the_range(power, normalization):
    waveforms = torch.stack([speechlike(4000, 0), speechlike(4000, 1)])
    waveforms *= torch.linspace(1, 0, 4000) ** 4
    lengths = torch.tensor([4000, 1730])  # the second ends within a frame,
    waveforms[1, 1725] = 50.0  # and its loudest sample is in that frame
    config = replace(PLAIN, power=power, log_guard=1e-12)
    plain, frames = log_mel(waveforms, lengths, config=config)
    limited = replace(config, normalization=normalization, range_db=20)
    features, _ = log_mel(waveforms, lengths, config=limited)
    # 20 dB are a factor of 10 in magnitude, of 100 in energy
    range_nats = power * math.log(10)
    for row, whole, n in zip(features, plain, frames, strict=True):
        rows = whole[:n].double()
        expected = rows.clamp(min=float(rows.max()) - range_nats)
        assert 0.1 < (expected > rows).double().mean() < 0.9  # the range matters
        if normalization == "all_features":
            expected = (expected - expected.mean()) / expected.std()
        torch.testing.assert_close(row[:n].double(), expected, atol=1e-4, rtol=0)
        assert (row[n:] == 0).all()


def test_gradients_of_magnitudes_are_finite_for_silence():
    waveform = torch.zeros(1, 1600, requires_grad=True)
    config = FeatureConfig(power=1)
    features, _ = log_mel(waveform, torch.tensor([1600]), config=config)
    features.sum().backward()
    assert waveform.grad.isfinite().all()


def defined_normalization(features, lengths):
    """The definition, bin by bin: (x - mean) / (deviation + 1e-5), zero in the padding."""
    out = torch.zeros_like(features)
    for b, f in np.ndindex(len(features), features.shape[2]):
        x = features[b, : lengths[b], f].numpy()
        if len(x) > 1:
            normalized = (x - x.mean()) / (x.std(ddof=1) + 1e-5)
            out[b, : len(x), f] = torch.from_numpy(normalized)
    return out


@given(
    seed=st.integers(0, 10**6),
    B=st.integers(1, 5),
    T=st.integers(1, 40),
    F=st.integers(1, 4),
    mean=st.floats(-1e3, 1e3),
    spread=st.sampled_from([1e-3, 1.0, 50.0]),
    filler=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]),
)
def test_batched_normalisation_equals_the_loop_and_its_definition(
    seed, B, T, F, mean, spread, filler
):
    g = torch.Generator().manual_seed(seed)
    features = torch.randn(B, T, F, generator=g, dtype=torch.float64) * spread + mean
    # none, one, all frames; a length beyond the last counts as all
    lengths = torch.randint(0, T + 3, (B,), generator=g)
    padding = torch.arange(T) >= lengths[:, None]
    features[padding] = filler
    before = features.clone()
    wanted = defined_normalization(features, lengths)
    for function in (normalize, normalize_sequential):
        normal = function(features, lengths)
        torch.testing.assert_close(normal, wanted, atol=1e-6, rtol=0)
    assert (normalize(features, lengths)[padding] == 0).all()
    # one frame has no deviation, and is its own mean
    assert (normalize(features, lengths.clamp(max=1)) == 0).all()
    # the arguments are unchanged
    torch.testing.assert_close(features, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mean", [0.0, -8.0, 300.0, 3e4])
def test_a_large_mean_costs_the_batched_form_no_more_digits_than_the_loop(mean):
    g = torch.Generator().manual_seed(0)
    features = torch.randn(6, 400, 8, generator=g) + mean
    lengths = torch.tensor([400, 2, 399, 17, 1, 0])
    wanted = normalize_sequential(features.double(), lengths)
    batched, looped = (
        (function(features, lengths) - wanted).abs().max()
        for function in (normalize, normalize_sequential)
    )
    assert batched <= 2 * looped + 2e-6
    # an ulp of the mean, here and there
    assert batched <= 1e-6 * max(2, abs(mean))


def test_normalisation_has_as_many_launches_for_any_batch_and_no_waits():
    profiles = []
    for B, T in ((1, 3), (1, 300), (64, 3), (64, 300)):
        batch = torch.randn(B, T, 4), torch.full((B,), T)
        profiles.append(launch_profile(lambda batch=batch: normalize(*batch)))
    assert len({profile.launches for profile in profiles}) == 1
    assert [profile.syncs for profile in profiles] == [0] * 4


@pytest.mark.parametrize(("waveforms", "lengths", "message"), [
    (torch.zeros(400), torch.tensor([400]), "waveforms: expected shape"),
    (torch.zeros(1, 400), torch.tensor([401]), "lengths: expected 1..400"),
    (torch.zeros(1, 400), torch.tensor([0]), "lengths: expected 1..400"),
    (torch.zeros(1, 400).short(), torch.tensor([400]), "waveforms: expected a float dtype"),
])  # fmt: skip
def test_bad_input_is_refused(waveforms, lengths, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        log_mel(waveforms, lengths)


def test_settings_in_a_dict_are_refused():
    message = "^config: expected a FeatureConfig, got dict. Pass FeatureConfig"
    with pytest.raises(ValueError, match=message):
        log_mel(torch.zeros(1, 400), torch.tensor([400]), config={"bins": 64})


@pytest.mark.parametrize("wrong", [
    {"normalization": "per_utterance"},
    {"power": 3},
    {"bins": 0},
    {"rate_hz": 1999},
    {"window_s": 0.0},
    {"log_guard": 0.0},
    {"range_db": math.inf},
    {"fill_s": 0.0},
    {"fft": 256},
])  # fmt: skip
def test_invalid_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=f"^[^:]*{next(iter(wrong))}.*: expected"):
        FeatureConfig(**wrong)


def test_gradients_of_normalisation_equal_those_of_the_loop_even_without_deviation():
    g = torch.Generator().manual_seed(0)
    features, weights = torch.randn(2, 5, 6, 2, generator=g, dtype=torch.float64)
    features[2, :, 1] = 7.0
    features.requires_grad_()
    lengths = torch.tensor([6, 2, 4, 1, 0])
    slopes = []
    for function in (normalize, normalize_sequential):
        total = (function(features, lengths) * weights).sum()
        slopes.append(torch.autograd.grad(total, features))
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
    config = FeatureConfig(rate_hz=rate_hz, fft=fft, bins=bins)
    bands = mel_bands(config)
    try:
        torch.set_default_dtype(torch.float64)  # torchaudio computes in it
        wanted = torchaudios_bands(config)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(bands.double(), wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_feature(dtype):
    waveforms, lengths = torch.randn(2, 8000), torch.tensor([8000, 5000])
    plain = log_mel(waveforms, lengths)[0]
    with torch.autocast("cpu", dtype):
        assert torch.equal(log_mel(waveforms, lengths)[0], plain)


# ---- Whisper's settings

WHISPER = FeatureConfig(
    fft=400,
    periodic=True,
    preemphasis=0.0,
    guard="clamp",
    log_guard=1e-10,
    range_db=80.0,
    normalization="whisper",
    edges="reflect",
    fill_s=0.5,
)


def whispers(waveform):
    """Whisper's features by their definition in float64, (T, F): silence at the end, mirrored edges, decimal logarithms."""
    signal = np.pad(waveform, (0, max(0, 8000 - len(waveform))))
    mirrored = np.pad(signal, 200, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    starts = range(0, len(signal) - 159, 160)
    frames = np.array([mirrored[start : start + 400] * window for start in starts])
    energies = np.abs(np.fft.rfft(frames)) ** 2
    bands = np.log10(np.maximum(energies @ mel_bands(WHISPER).double().numpy(), 1e-10))
    return (np.maximum(bands, bands.max() - 8) + 4) / 4


@pytest.mark.parametrize("samples", [1, 199, 4000, 8000, 9001])
def test_whispers_features_follow_their_definition(samples):
    waveform = speechlike(samples)
    features, frames = log_mel(waveform[None], torch.tensor([samples]), config=WHISPER)
    expected = whispers(waveform.double().numpy())
    assert frames.tolist() == [max(samples, 8000) // 160] == [len(expected)]
    np.testing.assert_allclose(features[0].numpy(), expected, atol=2e-4)


CONFIGS = [  # and the tolerance between features alone and in a batch
    (FeatureConfig(), 2e-4),
    (WHISPER, 1e-5),
    (replace(WHISPER, fill_s=0.1), 1e-5),
    (replace(WHISPER, fill_s=None), 1e-5),
]


@pytest.mark.parametrize(("config", "near"), CONFIGS)
@pytest.mark.parametrize("filler", [7.0, math.nan, math.inf])
def test_features_depend_neither_on_padding_nor_on_the_batch(config, near, filler):
    lengths = torch.tensor([1, 159, 160, 1600, 2401, 4000])
    waveforms = torch.full((6, 4000), filler)
    for b, length in enumerate(lengths.tolist()):
        waveforms[b, :length] = speechlike(length, b)
    features, frames = log_mel(waveforms, lengths, config=config)
    filled = lengths.clamp(min=config.fill_samples)
    assert frames.tolist() == (filled // 160).clamp(min=1).tolist()
    for b, length in enumerate(lengths.tolist()):
        one = slice(b, b + 1)
        alone, _ = log_mel(waveforms[one, :length], lengths[one], config=config)
        valid, padding = features[b].tensor_split([int(frames[b])])
        torch.testing.assert_close(valid, alone[0], atol=near, rtol=0)
        assert (padding == 0).all()


def test_a_config_knows_the_frames_of_a_batch():
    assert [FeatureConfig().frames(n) for n in (1, 159, 320, 479)] == [1, 1, 2, 2]
    assert [WHISPER.frames(n) for n in (1, 8000, 8160)] == [50, 50, 51]
