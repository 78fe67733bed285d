"""Bytes and launches of an encoder on a GPU, counted without one, against what can be counted by hand."""

import dataclasses

import pytest
import torch

from asrkit.models import FastConformer, FastConformerConfig, presets
from asrkit.workbench.profiling.traffic import KINDS, _steps, encoder_steps, stage_table, traffic

CONFIG = presets.parakeet_tdt_0_6b().encoder
B, T, FRAMES, D = 128, 1000, 128, 1024  # encoded frames of a fused encoder; an eager one has 125
PASS = B * FRAMES * D * 2  # bytes of all frames in bfloat16


@pytest.fixture(scope="module")
def steps():
    """Eager and fused, at the size of the review: ten seconds, 128 utterances."""
    return {fused: encoder_steps(CONFIG, B=B, T=T, fused=fused) for fused in (False, True)}


def total(steps, **wanted):
    """Bytes of the steps whose fields are as wanted."""
    return sum(
        step.bytes
        for step in steps
        if all(getattr(step, name) == value for name, value in wanted.items())
    )


def test_the_convolution_of_a_block_makes_three_passes_where_it_made_eleven(steps):
    eager = ("glu", "masked_fill_", "convolution", "_native_batch_norm_legit_no_training")
    passes = sum(total(steps[False], name=name, stage="blocks") for name in eager) / 24
    passes += (
        total(steps[False], name="silu_", stage="blocks") / 24 - 2 * 8 * PASS * 125 / FRAMES
    )  # those of the feed-forwards
    assert passes == pytest.approx(11 * PASS * 125 / FRAMES, rel=2e-3)
    assert total(steps[True], name="gated_conv") / 24 == pytest.approx(3 * PASS, rel=2e-3)


def test_a_residual_and_its_norm_make_four_passes(steps):
    assert total(steps[True], name="add_norm") / (3 * 24 + 1) == pytest.approx(4 * PASS, rel=1e-3)
    assert total(steps[True], name="add_norm_twice") / 23 == pytest.approx(4 * PASS, rel=1e-3)
    assert total(steps[False], name="mul", stage="blocks") and not total(
        steps[True], name="mul", stage="blocks"
    )


def test_the_first_convolutions_read_features_and_write_a_quarter_of_the_frames(steps):
    written = B * 256 * 32 * 256 * 2
    assert total(steps[True], name="first_convs") == pytest.approx(
        B * T * 128 * 4 + written, rel=1e-3
    )
    assert total(steps[True], stage="subsampling") < 0.17 * total(steps[False], stage="subsampling")


def test_all_in_all_there_is_half_as_much_besides_the_products_in_two_thirds_of_the_launches(steps):
    assert total(steps[True], kind="rest") < 0.52 * total(steps[False], kind="rest")
    assert len(steps[True]) < 0.65 * len(steps[False])
    assert total(steps[True]) < 0.69 * total(steps[False])


def test_positions_are_not_copied_for_every_utterance(steps):
    for fused, made in steps.items():
        frames = FRAMES if fused else 125
        product = B * frames * 2 * (D + 8 * 2 * frames) + 2 * (
            D * 2 * frames
        )  # q in, scores out, P once
        product += (
            fused * 4 * (D * 2 * frames)
        )  # what is the same for all frames: P once more, in float32
        assert total(made, name="bmm") / 24 == pytest.approx(product, rel=2e-3)
        assert not total(made, name="clone", stage="blocks")


def test_a_table_holds_every_byte_and_launch(steps):
    rows = stage_table(steps[False], steps[True])
    for name, fused in (("before", False), ("after", True)):
        assert sum(row[f"bytes {name}"] for row in rows) == total(steps[fused])
        assert sum(row[f"launches {name}"] for row in rows) == len(steps[fused])
    assert {row["kind"] for row in rows} == {*KINDS}
    assert [row["bytes before"] for row in rows] == sorted(
        (row["bytes before"] for row in rows), reverse=True
    )


@pytest.mark.parametrize("fused", [False, True])
def test_layers_that_are_not_looked_at_count_as_those_that_are(fused):
    config = FastConformerConfig(width=16, layers=4, heads=2, subsampling_channels=4)
    by_two, whole = (
        steps_of(config, B=2, T=90, fused=fused) for steps_of in (encoder_steps, _steps)
    )
    assert sorted(map(str, by_two)) == sorted(map(str, whole))


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
        encoder_steps(CONFIG, B=0, T=100, fused=True)
    with pytest.raises(ValueError, match="^config: expected two layers at least, got 1"):
        encoder_steps(dataclasses.replace(CONFIG, layers=1), B=1, T=100, fused=True)
