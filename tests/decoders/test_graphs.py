"""Loops on fixed buffers, on a CPU: turns run eagerly in place of captured graphs."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from asrkit.decoders import release_graphs, transducer_greedy
from asrkit.decoders.states import state_tensors
from asrkit.decoders.transducer import graphs
from asrkit.decoders.transducer.graph_loop import GraphLoop
from asrkit.decoders.transducer.steps import GreedyModel, GreedyOptions

KINDS = ("stateless", "lstm", "foreign", "table")
STRATEGIES = (*graphs.LOOPS,)
DURATIONS = ((), (0, 1, 2, 4, 8), (0, 3), (1, 2))


def eager(loop, greedy, mode="step"):
    """A stand-in for `capture_loop`: the same turns on the same buffers."""

    def full():
        loop.turn(greedy)
        while loop.active:
            loop.turn(greedy)

    def turns():
        for _ in range(graphs.TURNS):
            loop.turn(greedy)

    return full if mode == "full" else lambda: loop.repeat(turns)


@pytest.fixture
def uncaptured(monkeypatch):
    """Graphs without a GPU; lists the modes of all captures."""
    modes = []

    def capture(loop, greedy, mode, stream):
        modes.append(mode)
        return eager(loop, greedy, mode)

    monkeypatch.setattr(graphs, "capture_loop", capture)
    monkeypatch.setattr(graphs, "free_stream", lambda device: None)
    return modes


@torch.inference_mode()
def loop_for(B, T, model, encoded, confidence=False, **options):
    greedy = GreedyModel(model, confidence)
    carry = greedy.initial_carry(encoded)
    return GraphLoop(B, T, greedy, encoded, carry, GreedyOptions(**options))


@torch.inference_mode()
def by_loop(loop, model, encoded, lengths, carry=None, confidence=False):
    greedy = GreedyModel(model, confidence)
    carry = carry or greedy.initial_carry(encoded)
    loop.load(encoded, lengths, carry)
    eager(loop, greedy)()
    return loop.hypotheses(lengths, carry, "here")


@torch.inference_mode()
def by_graphs(
    store, model, encoded, lengths, mode="auto", *, confidence=False, **options
):
    greedy = GreedyModel(model, confidence)
    carry = greedy.initial_carry(encoded)
    options = GreedyOptions(graphs=mode, **options)
    return store.decode(graphs.DecoderCall(greedy, encoded, lengths, carry, options))


def one_by_one(model, encoded, lengths, **options):
    return transducer_greedy(model, encoded, lengths, strategy="one_by_one", **options)


# ---- the loop on buffers


@given(
    strategy=st.sampled_from(STRATEGIES),
    kind=st.sampled_from(KINDS),
    durations=st.sampled_from(DURATIONS),
    confidence=st.booleans(),
    max_symbols=st.sampled_from((1, 2, 3, 10)),
    window=st.sampled_from((1, 2, 5, 6)),
    seed=st.integers(0, 10**6),
    bias=st.integers(-3, 4),
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 11)), max_size=2),
)
def test_batches_that_share_buffers_decode_as_the_definition(
    make,
    speak,
    same,
    strategy,
    kind,
    durations,
    confidence,
    max_symbols,
    window,
    seed,
    bias,
    sizes,
):
    model = make(kind, seed, durations=durations, bias=bias)
    how = {"confidence": confidence, "max_symbols": max_symbols}
    loop = None
    # the first batch fills the buffers, so its values could leak
    for number, (B, T) in enumerate([(4, 11), *sizes]):
        encoded, lengths = speak(kind, B, T, seed + number)
        own = {"window": window, "strategy": strategy, **how}
        loop = loop or loop_for(4, 12, model, encoded, **own)
        found = by_loop(loop, model, encoded, lengths, confidence=confidence)
        same(found, one_by_one(model, encoded, lengths, **how))
        half = T // 2
        before = encoded[:, :half], lengths.clamp(max=half)
        after = encoded[:, half:], (lengths - half).clamp(min=0)
        carry = one_by_one(model, *before, **how).carry
        found = by_loop(loop, model, *after, carry, confidence)
        same(found, one_by_one(model, *after, carry=carry, **how))


@pytest.mark.parametrize("kind", ["stateless", "lstm", "foreign"])
def test_old_values_in_the_buffers_do_not_matter(make, speak, same, kind):
    model = make(kind, 7, durations=(0, 1, 2, 4, 8))
    encoded, lengths = speak(kind, 3, 9, 7)
    wanted = one_by_one(model, encoded, lengths, confidence=True)
    loop = loop_for(8, 16, model, encoded, True)
    with torch.inference_mode():
        floats = loop.encoded, loop.confidence, loop.state.predicted
        for tensor in (*floats, *state_tensors(loop.state.state)):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
        counts = loop.counts, loop.lengths, loop.state.time, loop.state.symbols
        for tensor in (*counts, loop.outputs, loop.host_flags, loop.active):
            tensor.fill_(3)
    same(by_loop(loop, model, encoded, lengths, confidence=True), wanted)


def test_results_do_not_change_when_the_buffers_do(make, speak, uncaptured):
    model = make("lstm", 3)
    store = graphs.GraphCache()
    first = by_graphs(store, model, *speak("lstm", 4, 11, 3), confidence=True)
    parts = [*first.parts(), *state_tensors(first.carry)]
    kept = [part.clone() for part in parts]
    by_graphs(store, model, *speak("lstm", 4, 11, 4), confidence=True)
    assert len(uncaptured) == 1
    for now, then in zip(parts, kept, strict=True):
        assert torch.equal(now, then)
    assert not any(part.is_inference() for part in first.parts())


# ---- what is kept, and how long


def test_a_captured_loop_serves_what_fits_and_the_least_recently_used_one_is_dropped(
    make, speak, same, uncaptured, monkeypatch
):
    monkeypatch.setattr(graphs, "KEEP", 2)
    monkeypatch.setattr(graphs, "MIN_ROWS", 2)
    monkeypatch.setattr(graphs, "MIN_FRAMES", 8)
    model = make("lstm", 3)
    store = graphs.GraphCache()
    for B, T, captured in [
        (4, 11, 1),  # four rows
        (3, 16, 1),
        (2, 7, 2),  # two
        (4, 17, 3),  # four with more room
        (3, 9, 3),
        (1, 5, 4),  # one, which drops the loop of two
        (2, 5, 5),  # which drops the loop of four again
        (4, 30, 6),  # captured again
        (4, 11, 6),
    ]:
        batch = speak("lstm", B, T, 3)
        same(by_graphs(store, model, *batch), one_by_one(model, *batch))
        assert len(uncaptured) == captured
    assert len(store.loops) == 2
    assert store.trusted == set(store.loops)


@pytest.mark.parametrize(
    "change",
    [
        {"max_symbols": 3},
        {"window": 2},
        {"strategy": "label_looping"},
        {"confidence": True},
        {"mode": "full"},
        {"batch": 9},
    ],
)
def test_a_change_of_what_a_graph_has_fixed_captures_another(
    make, speak, uncaptured, change
):
    model = make("lstm", 3)
    store = graphs.GraphCache()
    batch = speak("lstm", 4, 11, 3)
    by_graphs(store, model, *batch, "step")
    with torch.autocast("cpu", torch.bfloat16):
        by_graphs(store, model, *batch, "step")
    assert len(uncaptured) == 2
    rest = {key: value for key, value in change.items() if key != "batch"}
    batch = speak("lstm", change.get("batch", 4), 11, 3)
    by_graphs(store, model, *batch, **{"mode": "step"} | rest)
    assert len(uncaptured) == 3


def test_weights_that_move_are_captured_again_and_weights_that_change_are_not(
    make, speak, same, uncaptured
):
    model = make("lstm", 3)
    store = graphs.GraphCache()
    encoded, lengths = speak("lstm", 4, 11, 3)

    def check(captures):
        given = encoded.to(model.output.weight.dtype), lengths
        same(by_graphs(store, model, *given), one_by_one(model, *given))
        assert len(uncaptured) == captures
        assert len(store.loops) == 1

    check(1)
    with torch.no_grad():
        model.output.weight.add_(0.5)
    check(1)
    model.output.bias = nn.Parameter(model.output.bias + torch.arange(5))
    check(2)
    model.train()  # a mode is no address, but dropout is another graph
    check(3)
    model.float()
    check(4)
    for part in model.encoder.parameters():  # no turn reads the encoder
        part.data = part.data.clone()
    check(4)
    model.predictor.register_buffer("another", torch.ones(1))
    check(5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("failure", ["capture", "other labels"])
def test_auto_continues_without_graphs_and_gives_the_reason(
    make, speak, same, uncaptured, monkeypatch, failure, strategy
):
    model = make("lstm", 3)
    store = graphs.GraphCache()
    batch = speak("lstm", 4, 11, 3)
    tries = []

    def broken(loop, greedy, mode, stream):
        tries.append(mode)
        if failure == "capture":
            try:
                raise RuntimeError("not permitted when capturing\nmore of it")
            finally:
                raise ValueError("and then the capture could not end")
        return lambda: (eager(loop, greedy)(), loop.outputs[0, 0, 0].add_(1))

    monkeypatch.setattr(graphs, "capture_loop", broken)
    reason = {
        "capture": "graphs='step': capture failed, RuntimeError: not permitted when capturing",
        "other labels": "the captured loop found other labels than the plain one",
    }[failure]
    for _ in range(2):
        found = by_graphs(store, model, *batch, strategy=strategy)
        same(found, one_by_one(model, *batch))
        assert found.impl == f"{strategy}, graphs=off: {reason}"
    assert tries == ["full", "step"]
    assert not store.loops
    if failure == "capture":  # a mode by name is tried again
        with pytest.raises(RuntimeError) as error:
            by_graphs(store, model, *batch, "step")
        assert str(error.value) == reason


def test_graphs_are_freed_with_the_model_or_by_release_graphs(make):
    first = make("lstm", 3)
    second = make("lstm", 3)
    kept = graphs.cache_of(first)
    assert graphs.cache_of(first) is kept is not graphs.cache_of(second)
    release_graphs(first)
    assert first not in graphs.MODELS
    assert second in graphs.MODELS
    assert graphs.cache_of(first) is not kept
    del first
    gc.collect()
    assert list(graphs.MODELS) == [second]
    release_graphs()
    assert not graphs.MODELS


def test_a_captured_loop_does_not_keep_the_model_alive(
    make, speak, uncaptured, monkeypatch
):
    monkeypatch.setattr(graphs, "capture_loop", lambda *_: lambda: None)
    model = make("lstm", 3)
    store = graphs.GraphCache()
    by_graphs(store, model, *speak("lstm", 4, 11, 3), "step")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(store.loops) == 1


class AsOnGpu(torch.Tensor):
    """A tensor on the CPU that claims to be on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("mode", ["step", "full"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_turns_of_every_loop_are_captured(
    make, speak, same, uncaptured, strategy, mode
):
    model = make("lstm", 3, durations=(0, 1, 2))
    encoded, lengths = speak("lstm", 4, 11, 3)
    how = {"strategy": strategy, "confidence": True}
    wanted = transducer_greedy(model, encoded, lengths, **how)
    assert wanted.impl == strategy
    assert not uncaptured
    store = graphs.GraphCache()
    found = by_graphs(store, model, encoded, lengths, mode, **how)
    same(found, wanted)
    assert found.impl == f"{strategy}, graphs={mode}"
    assert uncaptured == [mode]


def test_a_model_that_is_no_module_is_refused_with_the_reason(make, speak):
    net = make("lstm", 3)
    encoded, lengths = speak("lstm", 4, 11, 3)
    model = SimpleNamespace(blank=net.blank, predict=net.predict, join=net.join)
    encoded = encoded.as_subclass(AsOnGpu)
    reason = (
        "the model is no torch.nn.Module, so a change of its weights could not be seen"
    )
    with pytest.raises(RuntimeError) as error:
        transducer_greedy(model, encoded, lengths, graphs="step")
    assert str(error.value) == reason
    found = transducer_greedy(model, encoded, lengths)
    assert found.impl == f"windowed_looping, graphs=off: {reason}"
    plain = transducer_greedy(net, encoded, lengths, graphs="off")
    assert found.tokens() == plain.tokens()
    assert not graphs.MODELS
