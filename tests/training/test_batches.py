"""Prepared batches: every augmentation is on the way, and (seed, step) decides it."""

from dataclasses import replace

import torch

from asrkit.text import CharTokenizer
from asrkit.training import TrainConfig, prepare_batch


def test_a_prepared_batch_is_a_function_of_seed_and_step_and_keeps_its_targets(
    tiny_speech,
):
    batch = tiny_speech.batch(range(4), CharTokenizer())
    config = TrainConfig()
    first = prepare_batch(batch, config, 3)
    for ours, again in zip(first[:4], prepare_batch(batch, config, 3)[:4], strict=True):
        assert torch.equal(ours, again)
    assert not torch.equal(first.lengths, prepare_batch(batch, config, 4).lengths)
    other_seed = prepare_batch(batch, replace(config, seed=1), 3)
    assert not torch.equal(first.lengths, other_seed.lengths)
    assert torch.equal(first.targets, batch.targets)
    assert torch.equal(first.target_lengths, batch.target_lengths)
    frames = first.features.shape[1]
    assert frames == int(first.lengths.max()) and first.features.isfinite().all()
    padding = torch.arange(frames) >= first.lengths[:, None]
    assert (first.features[padding] == 0).all()


def test_rate_and_formants_are_among_what_changes_a_batch(tiny_speech):
    batch = tiny_speech.batch(range(4), CharTokenizer())
    config = TrainConfig()
    plain = replace(
        config, augment=replace(config.augment, rate=(1, 1), formants=(1, 1))
    )
    for change in ({"rate": (1.2, 1.25)}, {"formants": (1.2, 1.25)}):
        changed = replace(plain, augment=replace(plain.augment, **change))
        same_time = torch.equal(
            prepare_batch(batch, plain, 0).lengths,
            prepare_batch(batch, changed, 0).lengths,
        )
        assert same_time == ("formants" in change)
        if same_time:
            pair = [prepare_batch(batch, c, 0).features for c in (plain, changed)]
            assert not torch.equal(*pair)
