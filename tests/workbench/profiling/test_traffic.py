"""Bytes and launches of an encoder on a GPU, counted without one, against what can be counted by hand."""

import dataclasses

import pytest
import torch

from asrkit.models import FastConformer, FastConformerConfig, presets
from asrkit.workbench.profiling.traffic import KINDS, _steps, encoder_steps, stage_table, traffic

CONFIG = presets.parakeet_tdt_0_6b().encoder
B, T, FRAMES, D = 128, 1000, 125, 1024
PASS = B * FRAMES * D * 2  # bytes of all frames in bfloat16


@pytest.fixture(scope="module")
def steps():
    """Ten seconds, 128 utterances."""
    return encoder_steps(CONFIG, B=B, T=T)


def total(steps, **wanted):
    """Bytes of the steps whose fields are as wanted."""
    return sum(
        step.bytes
        for step in steps
        if all(getattr(step, name) == value for name, value in wanted.items())
    )


def test_the_convolution_of_a_block_makes_eleven_passes(steps):
    names = ("glu", "masked_fill_", "convolution", "_native_batch_norm_legit_no_training")
    passes = sum(total(steps, name=name, stage="blocks") for name in names) / 24
    # without those of the feed-forwards
    passes += total(steps, name="silu_", stage="blocks") / 24 - 2 * 8 * PASS
    assert passes == pytest.approx(11 * PASS, rel=2e-3)


def test_positions_are_not_copied_for_every_utterance(steps):
    # q in, scores out, P once
    product = B * FRAMES * 2 * (D + 8 * 2 * FRAMES) + 2 * (D * 2 * FRAMES)
    assert total(steps, name="bmm") / 24 == pytest.approx(product, rel=2e-3)
    assert not total(steps, name="clone", stage="blocks")


def test_a_table_holds_every_byte_and_launch(steps):
    rows = stage_table(steps)
    assert sum(row["bytes"] for row in rows) == total(steps)
    assert sum(row["launches"] for row in rows) == len(steps)
    assert {row["kind"] for row in rows} == {*KINDS}
    assert [row["bytes"] for row in rows] == sorted((row["bytes"] for row in rows), reverse=True)


def test_layers_that_are_not_looked_at_count_as_those_that_are():
    config = FastConformerConfig(width=16, layers=4, heads=2, subsampling_channels=4)
    by_two = encoder_steps(config, B=2, T=90)
    assert sorted(map(str, by_two)) == sorted(map(str, _steps(config, 2, 90, torch.bfloat16)))


def test_steps_are_those_that_a_cpu_takes_too():
    encoder = FastConformer(
        FastConformerConfig(width=16, layers=1, heads=2, subsampling_channels=4)
    ).eval()
    with torch.inference_mode():
        seen = traffic(encoder, lambda: encoder(torch.zeros(2, 50, 80), torch.tensor([50, 9])))
    assert {step.stage for step in seen} == {"subsampling", "blocks", "around"} and min(
        step.bytes for step in seen
    ) > 0
    assert sum(step.name == "scaled_dot_product_attention" for step in seen) == 1
    assert not any(
        "dropout" in step.name or (step.name == "clone" and step.stage == "blocks") for step in seen
    )


def test_nothing_to_count_is_refused():
    with pytest.raises(ValueError, match="^B, T: expected at least 1, got"):
        encoder_steps(CONFIG, B=0, T=100)
    with pytest.raises(ValueError, match="^config: expected two layers at least, got 1"):
        encoder_steps(dataclasses.replace(CONFIG, layers=1), B=1, T=100)
