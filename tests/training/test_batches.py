"""Prepared batches: every augmentation is applied, and depends on (seed, step) alone."""

from dataclasses import replace

import pytest
import torch

from asrkit.features import FeatureConfig
from asrkit.text import CharTokenizer
from asrkit.training import TrainConfig, prepare_batch
from asrkit.workbench.measure import host_reads


def test_a_prepared_batch_is_a_function_of_seed_and_step_and_keeps_its_targets(
    tiny_speech,
):
    batch = tiny_speech.batch(range(4), CharTokenizer())
    config = TrainConfig()
    first = prepare_batch(batch, config, 3)
    repeated = prepare_batch(batch, config, 3)
    torch.testing.assert_close(repeated, first, rtol=0, atol=0)
    for other in (
        prepare_batch(batch, config, 4),
        prepare_batch(batch, replace(config, seed=1), 3),
    ):
        assert not torch.equal(first.lengths, other.lengths)
    assert torch.equal(first.targets, batch.targets)
    assert torch.equal(first.target_lengths, batch.target_lengths)
    frames = first.features.shape[1]
    assert frames == int(first.lengths.max())
    assert first.features.isfinite().all()
    assert not first.features[torch.arange(frames) >= first.lengths[:, None]].any()
    assert (first.useful, first.computed) == (int(first.lengths.sum()), 4 * frames)


@pytest.mark.parametrize(
    "features",
    [
        FeatureConfig(),
        FeatureConfig(edges="reflect", normalization="all_features", fill_s=2.0),
    ],
)
def test_features_are_computed_on_the_device_without_a_read(tiny_speech, features):
    batch = tiny_speech.batch(range(4), CharTokenizer())
    config = TrainConfig(features=features)
    meta = torch.device("meta")
    prepare_batch(batch, config, 3, meta)  # makes the constants
    reads = host_reads(lambda: prepare_batch(batch, config, 3, meta), device="meta")
    assert reads == {}
    device = prepare_batch(batch, config, 3, meta)
    host = prepare_batch(batch, config, 3)
    assert device.features.device == meta
    assert device.features.shape == host.features.shape
    torch.testing.assert_close(device[1:], host[1:], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["rate", "formants"])
def test_rate_and_formants_change_a_batch(tiny_speech, name):
    batch = tiny_speech.batch(range(4), CharTokenizer())
    unchanged = replace(TrainConfig().augment, rate=(1, 1), formants=(1, 1))
    plain, changed = (
        prepare_batch(batch, TrainConfig(augment=augment), 0)
        for augment in (unchanged, replace(unchanged, **{name: (1.2, 1.25)}))
    )
    assert torch.equal(plain.lengths, changed.lengths) == (name == "formants")
    assert not torch.equal(plain.features, changed.features)
