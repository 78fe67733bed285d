"""Batches prepared several at once, and features held on a device: equal to one by one."""

from dataclasses import replace
from itertools import cycle, islice

import numpy as np
import pytest
import torch

from asrkit.data import AugmentConfig, ResidentFeatures, Utterances
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import ConvConfig, TransducerConfig, TransducerModel
from asrkit.text import CharTokenizer
from asrkit.training import (
    Prepared,
    TrainConfig,
    ahead,
    prepare_batch,
    prepare_batches,
    training_loss,
)

TOKENIZER = CharTokenizer()
SAMPLES = [8_000, 24_123, 700, 16_000, 31_999, 12_345, 90, 20_000]
CONFIG = TrainConfig(augment=AugmentConfig(room=0.5, noise=0.5), joint="full", precision="float32")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def speech():
    draw = torch.Generator().manual_seed(0)
    waveforms = [
        torch.randint(-8000, 8000, (size,), generator=draw).to(torch.int16) for size in SAMPLES
    ]
    texts = ["one", "two three", "", "four", "five six", "seven", "a", "b"]
    ids = [f"u{number}" for number in range(len(SAMPLES))]
    return Utterances(waveforms=waveforms, ids=ids, texts=texts, speakers=[""] * len(SAMPLES))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = TransducerConfig(
        vocab_size=TOKENIZER.vocab_size, encoder=ConvConfig(width=16, layers=1, dropout=0.0)
    )
    return TransducerModel(config).eval()


def batches_of(speech, count):
    """Batches of different sizes and lengths."""
    rows = [[0, 1], [2], [3, 4, 5], [6], [7, 0, 2], [1, 6]]
    return [speech.batch(one, TOKENIZER) for one in islice(cycle(rows), count)]


def expect_same(got, wanted):
    torch.testing.assert_close(got.features, wanted.features, rtol=1e-4, atol=1e-4)
    assert torch.equal(got.features == 0, wanted.features == 0), "other masks or padding"
    for name in ("lengths", "targets", "target_lengths"):
        assert torch.equal(getattr(got, name), getattr(wanted, name))
    assert got.speech_s == wanted.speech_s


@pytest.mark.parametrize("first_step", [0, 5])
def test_batches_prepared_at_once_are_those_prepared_one_by_one(speech, first_step):
    batches = batches_of(speech, 6)
    together = prepare_batches(batches, CONFIG, first_step)
    assert len(together) == 6
    for step, (batch, got) in enumerate(zip(batches, together, strict=True), first_step):
        expect_same(got, prepare_batch(batch, CONFIG, step))


def test_batches_that_are_filled_up_with_silence_are_so_at_once_too(speech):
    steady = replace(CONFIG.augment, speed=(1.0, 1.0), rate=(1.0, 1.0), silence=0.0)
    features = FeatureConfig(fill_s=1.5, edges="reflect")
    config = replace(CONFIG, augment=steady, features=features)
    batches = batches_of(speech, 4)
    together = prepare_batches(batches, config, 0)
    assert [one.features.shape[1] for one in together] == [150, 150, 199, 150]
    for step, (batch, got) in enumerate(zip(batches, together, strict=True)):
        expect_same(got, prepare_batch(batch, config, step))


@pytest.mark.parametrize("factor", [1, 2, 5])
def test_ahead_yields_every_batch_in_order_whatever_the_factor(speech, factor):
    batches = batches_of(speech, 11)
    stream = ahead(iter([*batches, *batches_of(speech, 40)]), CONFIG, 3, factor=factor)
    for step, got in enumerate(islice(stream, 11), 3):
        expect_same(got, prepare_batch(batches[step - 3], CONFIG, step))
    stream.close()


def test_a_factor_calls_for_features_once_for_so_many_batches(speech, monkeypatch):
    calls = []

    def counted(waveforms, lengths, **options):
        calls.append(len(waveforms))
        return log_mel(waveforms, lengths, **options)

    monkeypatch.setattr("asrkit.training.batches_at_once.log_mel", counted)
    prepare_batches(batches_of(speech, 6), CONFIG, 0)
    assert calls == [12], "one call for all utterances"


@pytest.mark.gpu
def test_features_on_a_gpu_are_those_of_the_host(speech):
    batches = batches_of(speech, 4)
    on_gpu = prepare_batches(batches, CONFIG, 0, device="cuda")
    for got, wanted in zip(on_gpu, prepare_batches(batches, CONFIG, 0), strict=True):
        assert got.features.is_cuda and not got.lengths.is_cuda
        torch.testing.assert_close(got.features.cpu(), wanted.features, rtol=1e-3, atol=2e-3)
        assert torch.equal(got.lengths, wanted.lengths)


def test_ahead_refuses_a_factor_of_none_and_batches_that_end(speech):
    with pytest.raises(ValueError, match="factor: expected a whole number of at least 1, got 0"):
        ahead(iter([]), CONFIG, factor=0)
    stream = ahead(iter(batches_of(speech, 5)), CONFIG, 0, factor=2)
    with pytest.raises(ValueError, match="batches: expected batches without end, got none for st"):
        list(stream)


@pytest.mark.parametrize("normalization", ["per_feature", "none"])
def test_resident_features_are_those_computed_on_the_fly(speech, normalization, monkeypatch):
    monkeypatch.setattr("asrkit.data.resident.BATCH_SAMPLES", 50_000)  # several calls
    config = FeatureConfig(normalization=normalization)
    held = speech.resident(config)
    assert len(held) == len(SAMPLES) and held.frames.shape[1] == 80
    for rows in ([4, 2, 7], [6], np.array([0, 1]), torch.tensor([3, 3])):
        batch = speech.batch(rows, TOKENIZER)
        wanted, lengths = log_mel(batch.waveforms, batch.sample_lengths, config=config)
        features, frames = held.batch(rows)
        assert torch.equal(frames, lengths)
        torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-4)
        for row, length in zip(features, frames.tolist(), strict=True):
            assert not row[length:].any()


def test_resident_features_train_as_others_do(speech, model):
    rows = [0, 1, 3]
    targets = speech.targets(rows, TOKENIZER)
    features, frames = speech.resident().batch(rows)
    batch = speech.batch(rows, TOKENIZER)
    on_the_fly = log_mel(batch.waveforms, batch.sample_lengths)
    losses = [
        training_loss(model, Prepared(*inputs, *targets, 1.0), CONFIG).per_label
        for inputs in ((features, frames), on_the_fly)
    ]
    torch.testing.assert_close(*losses)


def test_resident_features_refuse_what_they_do_not_hold(speech):
    held = speech.resident()
    for rows in ([8], [-1], []):
        with pytest.raises(ValueError, match="rows: expected numbers of utterances, 0 to 7, got"):
            held.batch(rows)
    with pytest.raises(ValueError, match="config: expected a rate of 16000 Hz"):
        speech.resident(FeatureConfig(rate_hz=8000, fft=512))
    with pytest.raises(ValueError, match="utterances: expected at least one, got none"):
        ResidentFeatures.of_waveforms([], FeatureConfig(), "cpu")
