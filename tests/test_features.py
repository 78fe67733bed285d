import numpy as np
import pytest
import torch

from asrkit.features import FeatureConfig, log_mel, normalize, normalize_sequential


def reference_log_mel(waveform: np.ndarray, config: FeatureConfig) -> np.ndarray:
    """The definition, frame by frame in float64: pre-emphasis, Hann window, DFT, Slaney mel, log. (T, F)"""
    from torchaudio.functional import melscale_fbanks

    signal = np.concatenate([waveform[:1], waveform[1:] - config.preemphasis * waveform[:-1]])
    padded = np.pad(signal, config.fft // 2)
    size = config.window_samples
    window = np.zeros(config.fft)
    left = (config.fft - size) // 2
    window[left : left + size] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / (size - 1))
    mel = melscale_fbanks(config.fft // 2 + 1, 0.0, 8000.0, config.bins, config.rate_hz, "slaney", "slaney").double().numpy()
    frames = len(waveform) // config.hop_samples
    power = [
        np.abs(np.fft.rfft(padded[t * config.hop_samples : t * config.hop_samples + config.fft] * window)) ** 2
        for t in range(frames)
    ]
    return np.log(np.array(power) @ mel + config.log_guard)


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


def test_batched_normalisation_equals_the_loop_to_1e_6_with_nan_in_the_padding():
    features = torch.randn(5, 40, 80) * 3 + 10
    lengths = torch.tensor([40, 1, 2, 39, 17])
    for b, length in enumerate(lengths.tolist()):
        features[b, length:] = float("nan")
    batched, loop = normalize(features.double(), lengths), normalize_sequential(features.double(), lengths)
    torch.testing.assert_close(batched, loop, atol=1e-6, rtol=0)
    assert (batched[1] == 0).all()  # one frame has no deviation: centred, and nothing to divide by


def test_normalised_features_have_zero_mean_and_unit_deviation():
    features, _ = log_mel(speechlike(32000)[None], torch.tensor([32000]))
    torch.testing.assert_close(features[0].mean(0), torch.zeros(80), atol=1e-4, rtol=0)
    torch.testing.assert_close(features[0].std(0), torch.ones(80), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("waveforms", "lengths", "message"),
    [
        (torch.zeros(400), torch.tensor([400]), "waveforms: expected shape"),
        (torch.zeros(1, 400), torch.tensor([401]), "lengths: expected 1..400"),
        (torch.zeros(1, 400), torch.tensor([0]), "lengths: expected 1..400"),
        (torch.zeros(2, 400), torch.tensor([400]), "lengths: expected shape"),
        (torch.zeros(1, 400, dtype=torch.int16), torch.tensor([400]), "waveforms: expected a float dtype"),
        (torch.zeros(0, 400), torch.zeros(0, dtype=torch.long), "lengths"),
    ],
)
def test_bad_input_is_refused_in_one_line(waveforms, lengths, message):
    with pytest.raises(ValueError, match=message) as caught:
        log_mel(waveforms, lengths)
    assert "\n" not in str(caught.value)


def test_a_window_longer_than_the_transform_is_refused():
    with pytest.raises(ValueError, match="fft: expected >= 400"):
        FeatureConfig(fft=256)


@pytest.mark.parametrize(
    "wrong", [{"normalization": "per_utterance"}, {"bins": 0}, {"window_s": 0.0}, {"log_guard": 0.0}, {"hop_s": 0.0}]
)
def test_settings_that_make_no_features_are_refused(wrong):
    with pytest.raises(ValueError, match=f"^[^:]*{next(iter(wrong))}.*: expected"):
        FeatureConfig(**wrong)


def test_lengths_of_no_frames_or_beyond_the_last_are_normalised_as_the_loop_does():
    features, lengths = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 5, 9])
    torch.testing.assert_close(normalize(features, lengths), normalize_sequential(features, lengths))
    with pytest.raises(ValueError, match=r"lengths: expected shape \(B=3\), got \(1,\)"):
        normalize(features, lengths[:1])


def test_gradients_flow_even_if_the_first_call_was_in_inference_mode():
    config = FeatureConfig(bins=41)  # settings no other test has cached
    with torch.inference_mode():
        log_mel(speechlike(1600)[None], torch.tensor([1600]), config=config)
    waveform = speechlike(1600)[None].requires_grad_()
    log_mel(waveform, torch.tensor([1600]), config=config)[0].sum().backward()
    assert waveform.grad.isfinite().all()
