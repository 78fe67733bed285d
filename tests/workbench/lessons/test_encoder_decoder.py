"""Encoder-decoder models: operations and bytes against the models themselves, and published sizes;
cache policies that agree.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from asrkit.decoders import aed_greedy
from asrkit.decoders.states import state_tensors
from asrkit.models import AEDConfig, AEDModel, ConvConfig, decoder_layers, presets
from asrkit.workbench.claims import load_claims
from asrkit.workbench.lessons.encoder_decoder import policies as lesson
from asrkit.workbench.lessons.encoder_decoder.policies import Times, aed_flops
from asrkit.workbench.lessons.shared.cache_policies import POLICIES, with_policy
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


def endless(config=SMALL):
    """A model that never comes to eos, so that the number of its steps is known."""
    torch.manual_seed(0)
    model = AEDModel(config).eval()
    with torch.no_grad():
        model.output_bias[config.eos] = -1e9
    return model


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("U, changed", [
    (2, {}),
    (5, {"expansion": 2, "heads": 1, "layers": 3, "width": 24}),
])  # fmt: skip
def test_operations_are_those_that_torch_counts(policy, U, changed, monkeypatch):
    # on a CPU a token looks at empty slots too, up to a round number, which no policy asks for
    monkeypatch.setattr(decoder_layers, "SLOTS", 1)
    model = endless(replace(SMALL, **changed))
    encoded = torch.randn(1, T, model.config.width)
    # the counter does not see a CPU's fused attention
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with torch.inference_mode(), math, FlopCounterMode(display=False) as counter:
        aed_greedy(
            with_policy(model, policy), encoded, torch.tensor([T]), max_labels=U - 1
        )
    counted = aed_flops(model.config, policy, T=T, U=U)
    assert sum(counted.values()) == counter.get_total_flops()


def work(config, policy):
    """GFLOP of encoder and decoder for 20 s with 70 tokens."""
    encoder, *decoder = lesson.gigaflops(
        config, POLICIES[policy], seconds=20, tokens=70
    ).values()
    return [encoder, sum(decoder)]


def test_canarys_operations_for_20_seconds_are_those_of_the_claim():
    (claim,) = (claim for claim in load_claims() if claim.id == "decoder-3x-work")
    names = ("deep_encoder", "deep_decoder", "shallow_encoder", "shallow_decoder")
    claimed = [claim.params[name] for name in names]
    deep, shallow = presets.canary_1b(), presets.canary_1b_flash()
    counts = work(deep, "NeMo 3.0") + work(shallow, "NeMo 3.0")
    assert claimed == pytest.approx(counts, abs=0.005)


@pytest.fixture(scope="module")
def model():
    return lesson.random_model((1, 2), heads=1)


@pytest.fixture(scope="module")
def speech():
    return lesson.noise(3, width=64, seconds=0.8, tokens=TOKENS)


def test_texts_have_the_length_that_is_asked_for_and_all_policies_write_the_same(
    model, speech
):
    texts = lesson.decode(model, speech, POLICIES["KV cache"]).tokens()
    assert [*map(len, texts)] == [TOKENS - 1] * 3
    assert texts[0] != texts[1] and len({*texts[0]}) > 1
    assert lesson.texts_agree(model, speech)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_is_kept_is_what_a_model_allocates(model, speech, policy):
    _, lengths = speech.lengths
    kept_model = with_policy(model, policy)
    memory = kept_model.prefill(speech.encoded, lengths)
    state = kept_model.init_state(memory, TOKENS)
    found = [state_tensors(memory[1:]), state_tensors(state[1:])]
    B, T, D = speech.encoded.shape
    layers = 2 * 2  # keys and values of both layers
    frames = {"kept": layers, "absorbed": 1, "recomputed": 1}[policy.cross] * B * T * D
    text = {"kept": layers * D, "states": 2 * D, "none": 2}[policy.past] * B * TOKENS
    sizes = [sum(part.nbytes for part in parts) for parts in found]
    assert sizes == [4 * frames, 4 * text]  # "none" keeps tokens, of eight bytes
    assert lesson.kept_MB(model, speech, policy) == pytest.approx(sum(sizes) / 1e6)


def timing(*samples_ms):
    return Timing(samples_ms=samples_ms, warmup=0, timer="none")


def test_projections_count_once_a_step_and_never_more_than_the_whole():
    timings = {
        "deep, encoder": timing(30.0, 30.0, 30.0),
        "deep, projections": timing(5.0),
        "deep, NeMo 3.0": timing(70.0, 70.0, 90.0),
        "deep, KV cache": timing(20.0),
        "deep, absorbed": timing(10.0),
        "deep, no cache": timing(45.0),
        "shallow, encoder": timing(40.0, 40.0, 40.0),
        "shallow, NeMo 3.0": timing(10.0, 60.0, 10.0),
    }
    times = Times(seconds=4.0, tokens=10, timings=timings)
    assert {
        policy: [*times.parts_ms("deep", policy).values()] for policy in POLICIES
    } == {
        "NeMo 3.0": [30, 50, 20],
        "KV cache": [30, 5, 15],
        "absorbed": [30, 0, 10],
        "no cache": [30, 45, 0],
    }
    gain = times.ratio(("deep", "NeMo 3.0"), ("shallow", "NeMo 3.0"))
    assert gain == (1, 2, 2.4)
