"""Counts of attention decoders against the models themselves, and against published sizes."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from asrkit.decoders import aed_greedy
from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.states import state_tensors
from asrkit.models import AEDConfig, AEDModel, ConvConfig, presets
from asrkit.workbench.cost import (
    aed_bytes,
    aed_flops,
    aed_parameters,
    encoder_flops,
    encoder_parameters,
)
from asrkit.workbench.ledger import load_claims, verdict

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
DEEP = presets.canary_1b()
SHALLOW = presets.canary_1b_flash()


def endless(config: AEDConfig = SMALL) -> AEDModel:
    """A model that never comes to eos, so that the number of its steps is known."""
    torch.manual_seed(0)
    model = AEDModel(config).eval()
    with torch.no_grad():
        model.output_bias[config.eos] = -1e9
    return model


def counted(model, B, U, **options):
    """Operations that torch counts in greedy decoding of U tokens, and the hypotheses."""
    encoded = torch.randn(B, T, model.config.width)
    lengths = torch.full((B,), T)
    # the counter does not see a CPU's fused attention
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with torch.inference_mode(), math, FlopCounterMode(display=False) as counter:
        found = aed_greedy(model, encoded, lengths, most=U - 1, **options)
    return counter.get_total_flops(), found, encoded, lengths


@pytest.mark.parametrize("past", PAST)
@pytest.mark.parametrize("cross", CROSS)
@pytest.mark.parametrize("B, U, P", [(1, 2, 1), (3, 7, 1), (2, 5, 4)])
def test_operations_are_those_that_torch_counts(cross, past, B, U, P):
    prompt = [17] * P
    count, found, *_ = counted(endless(), B, U, cross=cross, past=past, prompt=prompt)
    assert (found.lengths == U - 1).all()
    flops = aed_flops(T=T, U=U, heads=4, cross=cross, past=past, B=B, prompt=P, **SIZES)
    assert flops.total == count


@pytest.mark.parametrize("changed", [{"expansion": 2}, {"heads": 1}, {"layers": 3, "width": 24}])
def test_so_they_are_at_other_sizes(changed):
    config = replace(SMALL, **changed)
    sizes = {"D": config.width, "layers": config.layers, "V": 19}
    for cross in CROSS:
        count, *_ = counted(endless(config), 2, 4, cross=cross)
        flops = aed_flops(
            T=T,
            U=4,
            heads=config.heads,
            cross=cross,
            past="kept",
            B=2,
            expansion=config.expansion,
            **sizes,
        )
        assert flops.total == count, cross


@pytest.mark.parametrize("N", [1, 4, 6])
def test_a_right_draft_is_read_by_the_first_step(N):
    model = endless()
    _, found, encoded, lengths = counted(model, 2, 7)
    labels = found.labels[:, :N]
    draft = Hypotheses.from_lists(
        [[(token, -1, 0) for token in row] for row in labels.tolist()],
        [torch.zeros(())] * 2,
        "cut",
    )
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with torch.inference_mode(), math, FlopCounterMode(display=False) as counter:
        again = aed_greedy(model, encoded, lengths, most=6, draft=draft)
    assert again.tokens() == found.tokens()
    flops = aed_flops(T=T, U=7, heads=4, cross="kept", past="kept", B=2, draft=N, **SIZES)
    assert flops.total == counter.get_total_flops()


def test_what_is_not_done_costs_nothing():
    kept = aed_flops(T=T, U=5, heads=4, cross="kept", past="kept", **SIZES)
    again = aed_flops(T=T, U=5, heads=4, cross="recomputed", past="states", **SIZES)
    absorbed = aed_flops(T=T, U=5, heads=4, cross="absorbed", past="kept", **SIZES)
    assert kept.again == absorbed.again == absorbed.frames == 0
    assert again.frames == 5 * kept.frames
    assert again.tokens == kept.tokens < absorbed.tokens
    assert again.again == 2 * SIZES["layers"] * 2 * 16**2 * (1 + 2 + 3 + 4)


@pytest.mark.parametrize("past", PAST)
@pytest.mark.parametrize("cross", CROSS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_what_a_model_allocates(cross, past, dtype):
    B, U = 3, 9
    model = endless().to(dtype)
    memory = model.remember(torch.randn(B, T, 16, dtype=dtype), torch.full((B,), T), cross=cross)
    state = model.begin(memory, U, past=past)
    found = aed_bytes(B=B, T=T, U=U, cross=cross, past=past, itemsize=dtype.itemsize, **SIZES)
    of_frames = sum(part.nbytes for part in state_tensors(memory[1:]))
    of_past = sum(part.nbytes for part in state_tensors(state[1:]))
    assert found.frames == of_frames
    assert found.past == of_past
    assert found.kept == of_frames + of_past


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, width=8, expansion=3, layers=1)])
def test_parameters_are_those_of_the_model(config):
    model = AEDModel(config)
    total = sum(weight.numel() for weight in model.parameters())
    encoder = sum(weight.numel() for weight in model.encoder.parameters())
    found = aed_parameters(
        D=config.width,
        layers=config.layers,
        V=19,
        expansion=config.expansion,
        encoder_width=model.encoder.width,
    )
    assert found == total - encoder


def test_a_step_reads_all_weights_but_the_frames_projections_which_are_read_once():
    model = endless()
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    encoder = [*model.encoder.parameters(), *model.encoder_projection.parameters()]
    matrices -= sum(weight.numel() for weight in encoder if weight.dim() == 2)
    again = aed_bytes(B=2, T=T, U=9, cross="recomputed", past="kept", itemsize=4, **SIZES)
    kept = aed_bytes(B=2, T=T, U=9, cross="kept", past="kept", itemsize=4, **SIZES)
    assert again.weights_read == 4 * matrices
    assert again.weights_read - kept.weights_read == 4 * SIZES["layers"] * 2 * 16**2
    assert kept.frames_read == kept.frames
    assert kept.step == kept.weights_read + kept.frames_read + kept.past_read


@pytest.mark.parametrize(
    "preset, published",
    [("canary_1b_flash", 883_554_432), ("canary_180m_flash", 182_643_840)],
)
def test_sizes_of_canary_are_those_of_the_cards(preset, published):
    config = presets.PRESETS[preset]()
    encoder = config.encoder
    count = encoder_parameters(bins=encoder.bins, width=encoder.width, layers=encoder.layers)
    count += aed_parameters(
        D=config.width,
        layers=config.layers,
        V=config.vocab_size,
        encoder_width=encoder.width,
    )
    assert count == published


def work(config: AEDConfig, cross: str, past: str) -> tuple[float, float]:
    """GFLOP of encoder and decoder for 20 s with 70 tokens."""
    encoder = config.encoder
    frames = encoder_flops(
        B=1, T=2000, bins=encoder.bins, width=encoder.width, layers=encoder.layers
    )
    text = aed_flops(
        T=250,
        U=70,
        D=config.width,
        layers=config.layers,
        V=config.vocab_size,
        heads=config.heads,
        cross=cross,
        past=past,
    )
    return frames / 1e9, text.total / 1e9


def test_canarys_operations_for_20_seconds():
    ways = {"none": ("recomputed", "none"), "nemo": ("recomputed", "states")}
    ways |= {"kept": ("kept", "kept")}
    deep = {name: work(DEEP, *way) for name, way in ways.items()}
    shallow = {name: work(SHALLOW, *way) for name, way in ways.items()}
    assert [round(deep[name][1]) for name in ways] == [3586, 2057, 77]
    assert [round(shallow[name][1]) for name in ways] == [598, 343, 13]
    assert (round(deep["kept"][0]), round(shallow["kept"][0])) == (332, 441)
    ratio = [sum(deep[name]) / sum(shallow[name]) for name in ways]
    assert ratio == pytest.approx([3.77, 3.04, 0.90], abs=0.005)


def test_the_ledger_has_the_same_operations_and_weights():
    claims = {claim.id: claim for claim in load_claims()}
    params = claims["decoder-3x-work"].params
    deep, shallow = (work(config, "recomputed", "states") for config in (DEEP, SHALLOW))
    assert [params["deep_encoder"], params["deep_decoder"]] == pytest.approx(deep, abs=0.005)
    assert [params["shallow_encoder"], params["shallow_decoder"]] == pytest.approx(
        shallow, abs=0.005
    )
    for name, layers, width in (("canary-883m", 32, 1024), ("canary-182m", 17, 512)):
        count = encoder_parameters(bins=128, width=width, layers=layers)
        assert claims[name].params["encoder"] == count
        assert verdict(claims[name], [], {"id": "none", "gpus": []}).label == "arithmetic checked"


GOOD = {"T": 5, "U": 3, "D": 16, "layers": 1, "V": 9, "cross": "kept", "past": "kept"}


@pytest.mark.parametrize(
    "wrong",
    [{"T": 0}, {"U": 0}, {"layers": 1.5}, {"cross": "cached"}, {"past": ""}, {"B": 0}],
)
def test_wrong_sizes_and_ways_are_named(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: expected"):
        aed_flops(heads=2, **GOOD | wrong)
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: expected"):
        aed_bytes(**{"B": 1} | GOOD | wrong)


def test_a_draft_leaves_a_step_for_eos():
    with pytest.raises(ValueError, match=r"^draft: expected 0 to U - 1 = 2 tokens, got 3"):
        aed_flops(heads=2, draft=3, **GOOD)
    with pytest.raises(ValueError, match="^itemsize: expected 2, 4 or 8 bytes, got 3"):
        aed_bytes(B=1, itemsize=3, **GOOD)
