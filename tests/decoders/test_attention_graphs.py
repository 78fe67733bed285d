"""Attention decoding on buffers that stay: on a CPU everything but the recording, whose place eager turns take."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from asrkit.decoders import aed_greedy, release_graphs
from asrkit.decoders.attention import graphs
from asrkit.decoders.attention.loop import AttentionLoop, Batch
from asrkit.decoders.attention.steps import (
    AttentionOptions,
    draft_of,
    limits_of,
    prompt_of,
)
from asrkit.decoders.states import state_tensors
from asrkit.decoders.transducer.graph_capture import TURNS, CaptureGuard
from asrkit.decoders.transducer.loop_cache import GraphsUnavailable
from asrkit.models import AEDConfig, AEDModel, ConvConfig
from asrkit.workbench.profiling import launch_profile
from asrkit.workbench.profiling.launches import CountOps

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import OPTIONS, WAYS, Story, as_draft, frames, heard, random_model, same


def eager(loop, model, mode="step"):
    """Stands in for `capture`: as many turns at a time on the same buffers, and what capture leaves behind."""
    loop.turn(model)
    loop.storages_read = {part.untyped_storage().data_ptr() for part in model.parameters()}
    return lambda: loop.repeat(lambda: [loop.turn(model) for _ in range(TURNS)])


@pytest.fixture
def uncaptured(monkeypatch):
    """Graphs without a GPU; lists the loops that would have been captured."""
    made = []
    monkeypatch.setattr(
        graphs, "capture", lambda loop, *args: made.append(loop) or eager(loop, *args)
    )
    return made


def by_graphs(cache, model, encoded, lengths, *, prompt=None, draft=None, most=None, **options):
    """What `aed_greedy` does on a GPU."""
    with torch.inference_mode():
        prompts = prompt_of(model, prompt, encoded)
        limits = limits_of(model, lengths, prompts.shape[1], most)
        guess = draft_of(model, draft, limits)
        options = AttentionOptions(**{"graphs": "step"} | options)
        call = graphs.Call(model, encoded, lengths, prompts, limits, guess, options)
        return cache.decode(call)


@pytest.mark.parametrize(("cross", "past"), WAYS)
def test_batches_that_share_buffers_decode_as_the_definition_says(cross, past, uncaptured):
    model = random_model(2, eos=3.0)
    cache = graphs.AttentionCache()
    ways = {"cross": cross, "past": past, "confidence": "max_prob", "align": True}
    for seed, (B, T, prompt) in enumerate([(5, 6, None), (3, 4, [1, 4, 5]), (1, 3, None)]):
        encoded, lengths = heard(B, T, seed)
        if seed == 0:
            encoded[2, 0] = torch.nan  # what it leaves in the buffers must not matter
        wanted = aed_greedy(model, encoded, lengths, prompt=prompt, **OPTIONS)
        found = by_graphs(cache, model, encoded, lengths, prompt=prompt, most=9, **ways)
        same(found, wanted)
        assert f"cross={cross}, past={past}, graphs=step" in found.impl
        draft = as_draft([row[:2] for row in wanted.tokens()])
        again = by_graphs(
            cache, model, encoded, lengths, prompt=prompt, most=9, draft=draft, **ways
        )
        same(again, wanted)
        assert not any(part.is_inference() for part in again.parts())
    assert len(uncaptured) == 2  # of eight rows, and of one
    same(found, wanted)


def test_whatever_lies_in_the_buffers_cannot_matter(uncaptured):
    model = random_model(2, eos=3.0)
    cache = graphs.AttentionCache()
    encoded, lengths = heard(5, 6)
    wanted = by_graphs(cache, model, encoded, lengths, most=9, confidence="entropy")
    [loop] = uncaptured
    with torch.inference_mode():
        for tensor in (*state_tensors((loop.past, loop.batch.memory)), loop.scores):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 3)
        for tensor in (loop.labels, loop.counts, loop.last, loop.going, loop.ended, loop.active):
            tensor.fill_(1)
    found = by_graphs(cache, model, encoded, lengths, most=9, confidence="entropy")
    same(found, wanted)
    assert len(uncaptured) == 1


def test_sizes_are_rounded_and_the_loops_used_last_stay(uncaptured, monkeypatch):
    monkeypatch.setattr(graphs, "KEEP", 2)
    story = random_model(1, eos=9.0)
    cache = graphs.AttentionCache()
    captured = []
    for B, T in [(2, 5), (8, 128), (8, 129), (1, 5), (5, 5), (1, 7)]:
        encoded, lengths = heard(B, T)
        by_graphs(cache, story, encoded, lengths, most=2)
        captured.append(len(uncaptured))
    assert captured == [1, 1, 2, 3, 4, 4]
    assert len(cache.loops) == 2


@pytest.mark.parametrize("change", [
    {"cross": "absorbed"}, {"past": "states"}, {"confidence": "entropy"}, {"graphs": "full"},
])  # fmt: skip
def test_what_a_graph_has_fixed_asks_for_another(uncaptured, change):
    model = random_model()
    cache = graphs.AttentionCache()
    batch = heard(3, 4)
    by_graphs(cache, model, *batch, most=2)
    looked = by_graphs(cache, model, *batch, most=2, align=True)
    same(looked, aed_greedy(model, *batch, most=2, align=True))
    assert (looked.frames >= 0).any()
    assert len(uncaptured) == 1
    by_graphs(cache, model, *batch, most=2, **change)
    assert len(uncaptured) == 2


def test_weights_that_move_are_captured_again_and_weights_that_change_are_not(uncaptured):
    model = random_model(2, eos=3.0)
    cache = graphs.AttentionCache()
    batch = heard(3, 4)

    def check(captures):
        same(by_graphs(cache, model, *batch, most=9), aed_greedy(model, *batch, most=9))
        assert len(uncaptured) == captures
        assert len(cache.loops) == 1

    check(1)
    with torch.no_grad():
        model.output_bias.add_(torch.arange(11) / 10)
    check(1)
    model.norm.weight = nn.Parameter(model.norm.weight + 1)
    check(2)


def test_auto_asks_once_and_falls_back_where_graphs_fail_or_find_others(uncaptured, monkeypatch):
    model = random_model(2, eos=3.0)
    batch = heard(3, 4)
    cache = graphs.AttentionCache()
    wanted = aed_greedy(model, *batch, most=9)
    for _ in range(2):
        found = by_graphs(cache, model, *batch, most=9, graphs="auto")
        same(found, wanted)
        assert "graphs=step" in found.impl
    assert cache.trusted == set(cache.loops)

    def breaks(loop, model, mode):
        raise RuntimeError("no such node")

    monkeypatch.setattr(graphs, "capture", breaks)
    for _ in range(2):
        cache = graphs.AttentionCache()
        found = by_graphs(cache, model, *batch, most=9, graphs="auto")
        same(found, wanted)
        assert "graphs=off: graphs='step': capture failed, RuntimeError: no such node" in found.impl
        with pytest.raises(GraphsUnavailable, match="no such node"):
            by_graphs(cache, model, *batch, most=9, graphs="step")

    def lies(loop, model, mode):
        replayed = eager(loop, model, mode)
        return lambda: (replayed(), loop.labels.fill_(7))

    monkeypatch.setattr(graphs, "capture", lies)
    cache = graphs.AttentionCache()
    found = by_graphs(cache, model, *batch, most=9, graphs="auto")
    same(found, wanted)
    assert "graphs=off: the captured loop found other labels" in found.impl
    assert not cache.loops


def test_a_model_that_nobody_can_watch_is_decoded_without_graphs():
    found = by_graphs(graphs.AttentionCache(), Story(3), *frames(3, 4), graphs="auto")
    same(found, aed_greedy(Story(3), *frames(3, 4)))
    assert "graphs=off: the model's attributes hold no tensors" in found.impl


def test_graphs_are_released_with_those_of_transducers():
    model = random_model()
    cache = graphs.cache_of(graphs.MODELS, model, graphs.AttentionCache)
    assert graphs.cache_of(graphs.MODELS, model, graphs.AttentionCache) is cache
    release_graphs(model)
    assert id(model) not in graphs.MODELS


# ---- that it can be recorded


def plain():
    """A model that was never moved or cast, which fakes could not be."""
    sizes = {"encoder": ConvConfig(bins=4, width=6, layers=1), "width": 8, "heads": 2, "layers": 2}
    return AEDModel(AEDConfig(vocab_size=11, pad=0, bos=1, eos=2, most=16, **sizes)).eval()


def turn_of(model, device, cross, past):
    """A turn of a loop on `device`, and all that a call computes before it."""
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):  # .to cannot move fakes
            module._parameters[name] = nn.Parameter(torch.zeros_like(value, device=device))
    model.positions = torch.zeros_like(model.positions, device=device)
    B, T, D = 4, 6, 8
    with torch.inference_mode():
        lengths = torch.full((B,), T, device=device)
        memory = model.remember(torch.zeros(B, T, D, device=device), lengths, cross=cross)
        prompt = torch.ones(B, 1, dtype=torch.int64, device=device)
        options = AttentionOptions(cross=cross, past=past, confidence="entropy")
        batch = Batch(memory, prompt, lengths, lengths)
        loop = AttentionLoop(model, batch, 10, options)
        loop.load(batch)
    return torch.inference_mode()(lambda: loop.turn(model))


@pytest.mark.parametrize(("cross", "past"), WAYS)
def test_a_turn_never_waits_and_a_capture_would_take_it(cross, past):
    turn = turn_of(plain(), "cpu", cross, past)
    found = launch_profile(turn)
    assert found.syncs == 0
    assert found.launches > 50
    with CaptureGuard() as guard:
        turn()
    assert guard.storages_read


@pytest.mark.parametrize(("cross", "past"), WAYS)
def test_on_a_gpu_no_tensor_of_the_host_and_no_size_of_the_device_is_needed(cross, past):
    with FakeTensorMode():
        turn = turn_of(plain(), "cuda", cross, past)
        count = CountOps("cuda")
        with count:
            turn()
    assert count.result().syncs == 0
    assert count.launches > 50


SPOILERS = [lambda logits: logits.sum().item(), lambda logits: logits[logits > 0].sum()]


@pytest.mark.parametrize("spoil", SPOILERS, ids=["item", "mask"])
def test_both_proofs_can_fail(spoil):
    def spoiled(device):
        model = plain()
        score = model.score
        model.score = lambda x: score(x) + spoil(score(x))
        return turn_of(model, device, "kept", "kept")

    assert launch_profile(spoiled("cpu")).syncs == 1
    with (
        pytest.raises(Exception, match=r"nonzero|_local_scalar_dense|data-dependent"),
        FakeTensorMode(),
    ):
        spoiled("cuda")()
