"""Counts of attention decoders against the models themselves, and against published sizes."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from asrkit.decoders import aed_greedy
from asrkit.decoders.states import state_tensors
from asrkit.models import AEDConfig, AEDModel, ConvConfig, presets
from asrkit.workbench.claims import load_claims
from asrkit.workbench.cost import encoder_flops
from asrkit.workbench.lessons.encoder_decoder import aed_bytes, aed_flops

CROSS = ("kept", "absorbed", "recomputed")
PAST = ("kept", "states", "none")
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
SIZES = {"D": 16, "layers": 2, "V": 19}
T = 11


def endless(config: AEDConfig = SMALL) -> AEDModel:
    """A model that never comes to eos, so that the number of its steps is known."""
    torch.manual_seed(0)
    model = AEDModel(config).eval()
    with torch.no_grad():
        model.output_bias[config.eos] = -1e9
    return model


@pytest.mark.parametrize("past", PAST)
@pytest.mark.parametrize("cross", CROSS)
@pytest.mark.parametrize("U, changed", [
    (2, {}), (5, {"expansion": 2, "heads": 1, "layers": 3, "width": 24}),
])  # fmt: skip
def test_operations_are_those_that_torch_counts(cross, past, U, changed):
    config = replace(SMALL, **changed)
    encoded = torch.randn(1, T, config.width)
    # the counter does not see a CPU's fused attention
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    ways = {"cross": cross, "past": past}
    with torch.inference_mode(), math, FlopCounterMode(display=False) as counter:
        found = aed_greedy(
            endless(config), encoded, torch.tensor([T]), most=U - 1, **ways
        )
    assert (found.lengths == U - 1).all()
    count = counter.get_total_flops()
    sizes = {"D": config.width, "layers": config.layers, "V": 19, "heads": config.heads}
    sizes |= {"expansion": config.expansion}
    assert aed_flops(T=T, U=U, cross=cross, past=past, **sizes).total == count


@pytest.mark.parametrize("past", PAST)
@pytest.mark.parametrize("cross", CROSS)
def test_what_is_kept_is_what_a_model_allocates(cross, past):
    B, U, dtype = 3, 9, torch.bfloat16
    model = endless().to(dtype)
    memory = model.remember(
        torch.randn(B, T, 16, dtype=dtype), torch.full((B,), T), cross=cross
    )
    state = model.begin(memory, U, past=past)
    found = aed_bytes(
        B=B, T=T, U=U, cross=cross, past=past, itemsize=dtype.itemsize, **SIZES
    )
    of_frames = sum(part.nbytes for part in state_tensors(memory[1:]))
    of_past = sum(part.nbytes for part in state_tensors(state[1:]))
    assert found.frames == of_frames
    assert found.past == of_past
    assert found.kept == of_frames + of_past


def test_a_step_reads_all_weights_but_the_frames_projections_which_are_read_once():
    model = endless()
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    encoder = [*model.encoder.parameters(), *model.encoder_projection.parameters()]
    matrices -= sum(weight.numel() for weight in encoder if weight.dim() == 2)
    again = aed_bytes(
        B=2, T=T, U=9, cross="recomputed", past="kept", itemsize=4, **SIZES
    )
    kept = aed_bytes(B=2, T=T, U=9, cross="kept", past="kept", itemsize=4, **SIZES)
    assert again.weights_read == 4 * matrices
    assert again.weights_read - kept.weights_read == 4 * SIZES["layers"] * 2 * 16**2
    assert kept.frames_read == kept.frames


def work(config: AEDConfig, cross: str, past: str) -> list[float]:
    """GFLOP of encoder and decoder for 20 s with 70 tokens."""
    sizes = {"D": config.width, "layers": config.layers, "V": config.vocab_size}
    text = aed_flops(T=250, U=70, heads=config.heads, cross=cross, past=past, **sizes)
    return [encoder_flops(config.encoder, B=1, T=2000) / 1e9, text.total / 1e9]


def test_canarys_operations_for_20_seconds_are_those_of_the_claim():
    (claim,) = (claim for claim in load_claims() if claim.id == "decoder-3x-work")
    names = ("deep_encoder", "deep_decoder", "shallow_encoder", "shallow_decoder")
    claimed = [claim.params[name] for name in names]
    as_nemo = ("recomputed", "states")
    counts = work(presets.canary_1b(), *as_nemo) + work(
        presets.canary_1b_flash(), *as_nemo
    )
    assert claimed == pytest.approx(counts, abs=0.005)
    kept = [
        work(config(), "kept", "kept")
        for config in (presets.canary_1b, presets.canary_1b_flash)
    ]
    assert sum(kept[0]) / sum(kept[1]) == pytest.approx(0.90, abs=0.005)


@pytest.mark.parametrize("wrong", [{"cross": "cached"}, {"past": ""}])
def test_wrong_ways_are_named(wrong):
    good = {"T": 5, "U": 3, "cross": "kept", "past": "kept", **SIZES}
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: expected"):
        aed_flops(heads=2, **good | wrong)
