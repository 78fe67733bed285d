"""Cache policies of attention decoding: all return the text of the model that caches keys and values."""

import sys
from pathlib import Path

import pytest
import torch

from asrkit.decoders import aed_greedy
from asrkit.decoders.states import map_state
from asrkit.workbench.lessons.shared.cache_policies import POLICIES, with_policy

sys.path.insert(0, str(Path(__file__).parents[3] / "decoders"))
from attention_cases import OPTIONS, as_draft, random_frames, random_model, same

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES),
]


def test_step_by_step_it_is_all_at_once_and_padding_has_no_influence(policy):
    model = random_model()
    for layer in model.layers:  # biases start as zeros, and those of keys must cancel
        torch.nn.init.normal_(layer.self_attention.qkv.bias)
    kept = with_policy(model, policy)
    encoded, lengths = random_frames(3, 7, least=1)
    tokens = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model.logits(encoded, lengths, tokens)
        for b, length in enumerate(lengths):
            encoded[b, length:] = torch.nan
        for chunks in ([1] * 5, [2, 3], [5]):
            memory = kept.prefill(encoded, lengths)
            state = kept.init_state(memory, 8)
            seen = 0
            for K in chunks:
                more = tokens[:, seen : seen + K]
                seen += K
                logits, state = kept.step(more, state, memory, reach=seen)
                found = wanted[:, seen - K : seen]
                torch.testing.assert_close(logits, found, rtol=0, atol=1e-10)


@torch.no_grad()
def test_rows_may_be_at_different_places_and_selected(policy):
    model = random_model()
    kept = with_policy(model, policy)
    encoded, lengths = random_frames(3, 7, least=1)
    tokens = torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(0))
    wanted = model.logits(encoded, lengths, tokens)
    memory = kept.prefill(encoded, lengths)
    _, state = kept.step(tokens[:, :4], kept.init_state(memory, 8), memory)
    state = state._replace(place=torch.tensor([4, 1, 3]))  # what lies behind is void
    rows = torch.tensor([2, 1])
    memory, state = map_state(lambda part: part[rows], (memory, state))
    more = torch.stack([tokens[2, 3:5], tokens[1, 1:3]])
    found, state = kept.step(more, state, memory)
    assert state.place.tolist() == [5, 3]
    wanted = torch.stack([wanted[2, 3:5], wanted[1, 1:3]])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_greedy_decoding_finds_the_same_with_and_without_a_draft(policy):
    for seed, (B, T) in enumerate([(1, 1), (5, 6), (33, 3)]):
        model = random_model(seed, eos=3.0)
        batch = random_frames(B, T, seed)
        wanted = aed_greedy(model, *batch, **OPTIONS)
        kept = with_policy(model, policy)
        same(aed_greedy(kept, *batch, **OPTIONS), wanted)
        draft = as_draft([row[:2] for row in wanted.tokens()])
        same(aed_greedy(kept, *batch, draft=draft, **OPTIONS), wanted)
