"""Encoder-decoder models: operations and bytes against the models themselves, and published sizes;
ways that agree, and drafts with known errors.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from asrkit.decoders import aed_greedy
from asrkit.decoders.states import state_tensors
from asrkit.models import AEDConfig, AEDModel, ConvConfig, presets
from asrkit.workbench.bench.attention_ways import WAYS, in_a_way
from asrkit.workbench.claims import load_claims
from asrkit.workbench.lessons import encoder_decoder as lesson
from asrkit.workbench.lessons.encoder_decoder import (
    LAYERS,
    Times,
    aed_bytes,
    aed_flops,
)
from asrkit.workbench.measure import Timing

SMALL = AEDConfig(
    vocab_size=19,
    pad=16,
    bos=17,
    eos=18,
    encoder=ConvConfig(width=8),
    width=16,
    layers=2,
    heads=4,
    most=40,
)
T = 11
TOKENS = 6


def endless(config: AEDConfig = SMALL) -> AEDModel:
    """A model that never comes to eos, so that the number of its steps is known."""
    torch.manual_seed(0)
    model = AEDModel(config).eval()
    with torch.no_grad():
        model.output_bias[config.eos] = -1e9
    return model


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("U, changed", [
    (2, {}), (5, {"expansion": 2, "heads": 1, "layers": 3, "width": 24}),
])  # fmt: skip
def test_operations_are_those_that_torch_counts(way, U, changed):
    config = replace(SMALL, **changed)
    encoded = torch.randn(1, T, config.width)
    # the counter does not see a CPU's fused attention
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    model = in_a_way(endless(config), way)
    with torch.inference_mode(), math, FlopCounterMode(display=False) as counter:
        found = aed_greedy(model, encoded, torch.tensor([T]), most=U - 1)
    assert (found.lengths == U - 1).all()
    counted = aed_flops(config, way, T=T, U=U)
    assert sum(counted.values()) == counter.get_total_flops()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_is_kept_is_what_a_model_allocates(way):
    B, U, dtype = 3, 9, torch.bfloat16
    model = in_a_way(endless().to(dtype), way)
    frames = torch.randn(B, T, 16, dtype=dtype)
    memory = model.remember(frames, torch.full((B,), T))
    state = model.begin(memory, U)
    found = aed_bytes(SMALL, way, B=B, T=T, U=U, itemsize=dtype.itemsize)
    assert found.frames == sum(part.nbytes for part in state_tensors(memory[1:]))
    assert found.past == sum(part.nbytes for part in state_tensors(state[1:]))


def test_a_step_reads_all_weights_but_the_frames_projections_which_are_read_once():
    model = endless()
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    encoder = [*model.encoder.parameters(), *model.encoder_projection.parameters()]
    matrices -= sum(weight.numel() for weight in encoder if weight.dim() == 2)
    again, kept = (
        aed_bytes(SMALL, (cross, "kept"), B=2, T=T, U=9, itemsize=4)
        for cross in ("recomputed", "kept")
    )
    assert again.weights_read == 4 * matrices
    assert again.weights_read - kept.weights_read == 4 * SMALL.layers * 2 * 16**2
    assert kept.frames_read == kept.frames


def work(config: AEDConfig, way: str) -> list[float]:
    """GFLOP of encoder and decoder for 20 s with 70 tokens."""
    encoder, *decoder = lesson.gigaflops(
        config, WAYS[way], seconds=20, tokens=70
    ).values()
    return [encoder, sum(decoder)]


def test_canarys_operations_for_20_seconds_are_those_of_the_claim():
    (claim,) = (claim for claim in load_claims() if claim.id == "decoder-3x-work")
    names = ("deep_encoder", "deep_decoder", "shallow_encoder", "shallow_decoder")
    claimed = [claim.params[name] for name in names]
    deep, shallow = presets.canary_1b(), presets.canary_1b_flash()
    counts = work(deep, "NeMo 3.0") + work(shallow, "NeMo 3.0")
    assert claimed == pytest.approx(counts, abs=0.005)
    kept = sum(work(deep, "K/V kept")) / sum(work(shallow, "K/V kept"))
    assert kept == pytest.approx(0.90, abs=0.005)


@pytest.fixture(scope="module")
def model():
    return lesson.random_model((1, 2), heads=1)


@pytest.fixture(scope="module")
def speech():
    return lesson.noise(3, width=64, seconds=0.8, tokens=TOKENS)


def test_the_two_models_have_about_equal_parameters():
    models = [lesson.random_model(layers, heads=1) for layers in LAYERS.values()]
    counts = [sum(weight.numel() for weight in one.parameters()) for one in models]
    assert max(counts) / min(counts) < 1.1


def test_texts_have_the_length_that_is_asked_for_and_all_ways_write_the_same(
    model, speech
):
    found = lesson.decode(model, speech, WAYS["K/V kept"])
    assert found.lengths.tolist() == [TOKENS - 1] * 3
    texts = found.tokens()
    assert len({tuple(text) for text in texts}) == 3 and len(set(texts[0])) > 1
    assert lesson.texts_agree(model, speech)


def test_what_is_kept_is_what_the_formula_says(model, speech):
    frames = speech.encoded.shape[1]
    for way in WAYS.values():
        found = aed_bytes(model.config, way, B=3, T=frames, U=TOKENS, itemsize=4)
        kept = lesson.kept_MB(model, speech, way)
        assert kept == pytest.approx((found.frames + found.past) / 1e6)


def timing(*samples_ms):
    return Timing(samples_ms=samples_ms, warmup=0, timer="none")


def test_projections_count_once_a_step_and_never_more_than_the_whole():
    times = Times(
        seconds=4.0,
        tokens=10,
        timings={
            "deep, encoder": timing(30.0, 30.0, 30.0),
            "deep, projections": timing(5.0),
            "deep, NeMo 3.0": timing(70.0, 70.0, 90.0),
            "deep, K/V kept": timing(20.0, 20.0, 20.0),
            "deep, absorbed": timing(10.0, 10.0, 10.0),
            "deep, no cache": timing(45.0),
            "shallow, encoder": timing(40.0, 40.0, 40.0),
            "shallow, NeMo 3.0": timing(10.0, 60.0, 10.0),
        },
    )
    parts = {name: times.parts_ms("deep", name) for name in WAYS}
    assert list(parts["NeMo 3.0"].values()) == [30, 50, 20]
    assert list(parts["K/V kept"].values()) == [30, 5, 15]
    assert list(parts["absorbed"].values()) == [30, 0, 10]
    assert list(parts["no cache"].values()) == [30, 45, 0]
    assert times.gain("NeMo 3.0").tolist() == [2, 1, 2.4]


def test_ways_of_each_model_are_timed_with_their_parts(model, speech):
    times = lesson.time_ways({"deep": model}, speech, repeats=1)
    names = ["encoder", "projections", *WAYS]
    assert list(times.timings) == [f"deep, {name}" for name in names]
    assert times.seconds == pytest.approx(2.4)


def test_drafts_change_the_calls_and_never_the_text(model, speech):
    plain, right, wrong = lesson.time_drafts(model, speech, (0.0, 1.0), repeats=1)
    assert (plain.rate, right.rate, wrong.rate) == (None, 0.0, 1.0)
    assert (plain.calls, right.calls) == (TOKENS, 1) and 1 < wrong.calls <= TOKENS
    assert plain.same and right.same and wrong.same
    assert plain.speedups == (1.0,)


def test_behind_the_first_error_of_a_draft_the_draft_goes_on(model, speech):
    way = WAYS["K/V kept"]
    text = lesson.decode(model, speech, way)
    draft = lesson.spoiled(text, 0.4, np.random.default_rng(3))
    right = [
        [one == other for one, other in zip(*rows, strict=True)]
        for rows in zip(text.tokens(), draft.tokens(), strict=True)
    ]
    assert any(map(any, right)) and not all(map(all, right))
    counted = lesson.Counting(model)
    assert lesson.decode(counted, speech, way, draft).tokens() == text.tokens()
    assert 1 < counted.calls["follow"] <= TOKENS
