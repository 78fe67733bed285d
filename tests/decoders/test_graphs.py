"""Label looping on buffers that stay: on a CPU everything but the recording itself, whose place turns run eagerly take."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asrkit.decoders import release_graphs, transducer_greedy
from asrkit.decoders.states import state_tensors
from asrkit.decoders.transducer import graphs
from asrkit.decoders.transducer.graph_loop import GraphLoop
from asrkit.decoders.transducer.steps import GreedyModel, GreedyOptions

KINDS, DURATIONS = (
    ("stateless", "lstm", "foreign", "table"),
    ((), (0, 1, 2, 3, 4), (0, 1, 2, 4, 8), (0, 3), (1, 2)),
)
CONFIDENCE = (False, True)


def eager(loop, greedy, mode="step"):
    """Stands in for `capture`: the same turns on the same buffers."""
    if mode == "full":
        return lambda: [loop.turn(greedy) for _ in range(1000)]
    return lambda: loop.repeat(lambda: [loop.turn(greedy) for _ in range(graphs.TURNS)])


@pytest.fixture
def uncaptured(monkeypatch):
    """Graphs without a GPU; lists what would have been captured."""
    made = []

    def capture(loop, greedy, mode, stream):
        made.append((loop, mode))
        return eager(loop, greedy, mode)

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "free_stream", lambda device: None)
    return made


def by_loop(loop, model, encoded, lengths, carry=None, confidence=False):
    with torch.inference_mode():
        greedy = GreedyModel(model, confidence)
        carry = carry or greedy.initial_carry(encoded)
        loop.load(encoded, lengths, carry)
        eager(loop, greedy)()
        return loop.hypotheses(lengths, carry, "here")


def loop_for(B, T, model, encoded, confidence=False, **options):
    with torch.inference_mode():
        greedy = GreedyModel(model, confidence)
        return GraphLoop(
            B,
            T,
            greedy,
            encoded,
            greedy.initial_carry(encoded),
            GreedyOptions(**options),
        )


def by_graphs(
    store,
    model,
    encoded,
    lengths,
    mode="auto",
    confidence=False,
    carry=None,
    **options,
):
    with torch.inference_mode():
        greedy = GreedyModel(model, confidence)
        carry = carry or greedy.initial_carry(encoded)
        options = GreedyOptions(graphs=mode, **options)
        return store.decode(
            graphs.DecoderCall(greedy, encoded, lengths, carry, options)
        )


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(KINDS), st.sampled_from(DURATIONS), st.sampled_from(CONFIDENCE), st.sampled_from((1, 2, 3, 10)),
    st.sampled_from((1, 2, 5, 6)), st.integers(0, 10**6), st.integers(-3, 4),
)  # fmt: skip
def test_batches_that_share_buffers_decode_as_the_definition_says(
    make, speak, same, kind, durations, confidence, max_symbols, window, seed, bias
):
    model = make(kind, seed, durations=durations, bias=bias)
    generator = torch.Generator().manual_seed(seed)
    sizes = [(4, 11)] + [
        tuple(
            torch.randint(1, high, (), generator=generator).item() for high in (5, 12)
        )
        for _ in range(2)
    ]
    loop = None
    for number, (B, T) in enumerate(
        sizes
    ):  # the first fills the buffers, so that what it leaves could leak
        encoded, lengths = speak(kind, B, T, seed + number)
        loop = loop or loop_for(
            4, 12, model, encoded, confidence, max_symbols=max_symbols, window=window
        )
        options = {"confidence": confidence, "max_symbols": max_symbols}
        wanted = transducer_greedy(
            model, encoded, lengths, strategy="one_by_one", **options
        )
        same(by_loop(loop, model, encoded, lengths, confidence=confidence), wanted)
        half = T // 2
        before, after = lengths.clamp(max=half), (lengths - half).clamp(min=0)
        carry = transducer_greedy(
            model, encoded[:, :half], before, strategy="one_by_one", **options
        ).carry
        wanted = transducer_greedy(
            model,
            encoded[:, half:],
            after,
            strategy="one_by_one",
            carry=carry,
            **options,
        )
        same(by_loop(loop, model, encoded[:, half:], after, carry, confidence), wanted)


def test_the_property_test_meets_labels_and_silence(make, speak):
    found = [
        transducer_greedy(
            make("lstm", 1, bias=bias), *speak("lstm", 4, 11, 1)
        ).lengths.sum()
        for bias in (-3, 0, 4)
    ]
    assert found[0] > found[1] > found[2] >= 0 and found[1] > 4


@pytest.mark.parametrize("durations", DURATIONS)
@pytest.mark.parametrize("kind", ["stateless", "lstm", "foreign"])
def test_whatever_lies_in_the_buffers_cannot_matter(make, speak, same, kind, durations):
    model = make(kind, 7, durations=durations)
    encoded, lengths = speak(kind, 3, 9, 7)
    wanted = transducer_greedy(
        model, encoded, lengths, strategy="one_by_one", confidence=True
    )
    loop = loop_for(8, 16, model, encoded, True)
    with torch.inference_mode():
        for tensor in (
            loop.encoded,
            loop.confidence,
            loop.state.predicted,
            *state_tensors(loop.state.state),
        ):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
        for tensor in (
            loop.outputs,
            loop.counts,
            loop.lengths,
            loop.state.time,
            loop.state.symbols,
            loop.host_flags,
            loop.active,
        ):
            tensor.fill_(3)
    same(by_loop(loop, model, encoded, lengths, confidence=True), wanted)


def test_results_do_not_change_when_the_buffers_do(make, speak, uncaptured):
    model, store = make("lstm", 3), graphs.GraphCache()
    first = by_graphs(store, model, *speak("lstm", 4, 11, 3), confidence=True)
    kept = [part.clone() for part in (*first.parts(), *state_tensors(first.carry))]
    by_graphs(store, model, *speak("lstm", 4, 11, 4), confidence=True)
    assert len(uncaptured) == 1
    for now, then in zip(
        (*first.parts(), *state_tensors(first.carry)), kept, strict=True
    ):
        assert torch.equal(now, then)
    assert not any(part.is_inference() for part in first.parts())


@torch.inference_mode()
def test_the_flag_is_read_one_replay_late(make, speak):
    loop = loop_for(2, 16, make("lstm", 3), speak("lstm", 2, 9, 3)[0])
    for needed in (1, 2, 5):
        calls = []

        def turns(calls=calls, needed=needed):
            calls.append(len(calls) + 1)
            loop.active.fill_(len(calls) < needed)

        loop.repeat(turns)
        assert len(calls) == needed + 1


@pytest.mark.parametrize("mode", ["step", "full"])
def test_nothing_to_hear_gives_nothing(make, uncaptured, mode):
    model, encoded = make("lstm", 3), torch.zeros(3, 0, 4, dtype=torch.float64)
    found = by_graphs(
        graphs.GraphCache(), model, encoded, torch.zeros(3, dtype=torch.int64), mode
    )
    assert found.tokens() == [[], [], []]
    assert found.labels.shape == (3, 0)


# ---- what is kept, and until when


def test_a_captured_loop_serves_what_fits_and_the_one_used_least_recently_goes(
    make, speak, same, uncaptured, monkeypatch
):
    monkeypatch.setattr(graphs, "KEEP", 2)
    monkeypatch.setattr(graphs, "MIN_ROWS", 2)
    monkeypatch.setattr(graphs, "MIN_FRAMES", 8)
    model, store = make("lstm", 3), graphs.GraphCache()
    captured = []
    for B, T in [
        (4, 11),
        (3, 16),
        (2, 7),
        (4, 17),
        (3, 9),
        (1, 5),
        (2, 5),
        (4, 30),
        (4, 11),
    ]:
        encoded, lengths = speak("lstm", B, T, 3)
        same(
            by_graphs(store, model, encoded, lengths),
            transducer_greedy(model, encoded, lengths, strategy="one_by_one"),
        )
        captured.append(len(uncaptured))
    #  four rows, again, two, four with more room, again, one which drops two, that again drops four, which comes again, again
    assert captured == [1, 1, 2, 3, 3, 4, 5, 6, 6]
    assert len(store.loops) == 2 and store.trusted == set(store.loops)


def test_sizes_are_rounded_up_coarsely():
    rounded = [
        graphs.rounded(*size)
        for size in [(1, 0), (2, 1), (8, 512), (9, 513), (64, 1500), (65, 400)]
    ]
    assert rounded == [(1, 512), (8, 512), (8, 512), (16, 1024), (64, 2048), (128, 512)]


def test_a_stream_of_all_sizes_is_served_by_a_handful_of_loops(make, uncaptured):
    model, store, draw = (
        make("lstm", 3),
        graphs.GraphCache(),
        torch.Generator().manual_seed(0),
    )
    for _ in range(100):
        B, T = (int(torch.randint(1, most, (), generator=draw)) for most in (65, 700))
        by_graphs(
            store,
            model,
            torch.zeros(B, T, 4, dtype=torch.float64),
            torch.zeros(B, dtype=torch.int64),
            "step",
        )
    assert (
        len(uncaptured) <= 9
    )  # four numbers of rows, of which each grew once at most, and a single utterance
    assert len(store.loops) <= 5 <= graphs.KEEP


@pytest.mark.parametrize("change", [
    {"max_symbols": 3}, {"window": 2}, {"confidence": True}, {"mode": "full"}, {"dtype": torch.float32}, {"batch": 9},
])  # fmt: skip
def test_what_a_graph_has_fixed_asks_for_another(make, speak, uncaptured, change):
    model, store, (encoded, lengths) = (
        make("lstm", 3),
        graphs.GraphCache(),
        speak("lstm", 4, 11, 3),
    )
    by_graphs(store, model, encoded, lengths, "step")
    with torch.autocast("cpu", torch.bfloat16):
        by_graphs(store, model, encoded, lengths, "step")
    assert len(uncaptured) == 2
    change = dict(change)
    if change.pop("batch", None):
        encoded, lengths = speak("lstm", 9, 11, 3)
    mode, dtype = change.pop("mode", "step"), change.pop("dtype", encoded.dtype)
    with torch.autocast(
        "cpu", torch.bfloat16, enabled=dtype != encoded.dtype
    ):  # else float32 meets float64 weights
        by_graphs(store, model, encoded.to(dtype), lengths, mode, **change)
    assert len(uncaptured) == 3


def test_weights_that_move_are_captured_again_and_weights_that_change_are_not(
    make, speak, same, uncaptured
):
    model, store, (encoded, lengths) = (
        make("lstm", 3),
        graphs.GraphCache(),
        speak("lstm", 4, 11, 3),
    )

    def check(captures):
        same(
            by_graphs(store, model, encoded, lengths),
            transducer_greedy(model, encoded, lengths, strategy="one_by_one"),
        )
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
    encoded = encoded.float()
    check(4)
    model.encoder.requires_grad_(False)
    for part in model.encoder.parameters():  # no turn reads the encoder
        part.data = part.data.clone()
    check(4)
    model.predictor.register_buffer("another", torch.ones(1))
    check(5)


@pytest.mark.parametrize("failure", ["capture", "other labels"])
def test_auto_goes_on_without_graphs_and_says_why(
    make, speak, same, uncaptured, monkeypatch, failure
):
    model, store, (encoded, lengths) = (
        make("lstm" if failure == "other labels" else "foreign", 3).float(),
        graphs.GraphCache(),
        speak("lstm", 4, 11, 3),
    )
    encoded, tries = encoded.float(), []

    def broken(loop, greedy, mode, stream):
        tries.append(mode)
        if failure == "capture":
            try:
                raise RuntimeError(
                    "operation not permitted when stream is capturing\nmore of it"
                )
            finally:
                raise ValueError("and then the capture could not end")
        return lambda: (eager(loop, greedy)(), loop.outputs[0, 0, 0].add_(1))

    monkeypatch.setattr(graphs, "capture", broken)
    reason = {
        "capture": "graphs='step': capture failed, RuntimeError: operation not permitted when stream is capturing",
        "other labels": "the captured loop found other labels than the plain one",
    }[failure]
    wanted = transducer_greedy(model, encoded, lengths, strategy="one_by_one")
    for _ in range(2):
        found = by_graphs(store, model, encoded, lengths)
        same(found, wanted)
        assert found.impl == f"windowed_looping, graphs=off: {reason}"
    assert tries == ["full", "step"]
    assert not store.loops
    if failure != "other labels":  # a mode by name is tried again, and is not compared
        with pytest.raises(RuntimeError) as error:
            by_graphs(store, model, encoded, lengths, "step")
        assert str(error.value) == reason


def test_auto_compares_the_first_result_of_every_size_and_no_other(
    make, speak, uncaptured, monkeypatch
):
    model, store, plain = make("lstm", 3), graphs.GraphCache(), []
    decode = graphs.windowed_looping.decode
    monkeypatch.setattr(graphs, "MIN_FRAMES", 16)
    monkeypatch.setattr(
        graphs.windowed_looping, "decode", lambda *a: plain.append(1) or decode(*a)
    )
    by_graphs(store, model, *speak("lstm", 4, 11, 3), "step")
    seen = [len(plain)]
    for B, T, seed in [
        (4, 11, 3),
        (4, 11, 4),
        (9, 14, 3),
        (12, 16, 4),
        (9, 17, 3),
        (9, 17, 4),
    ]:
        found = by_graphs(store, model, *speak("lstm", B, T, seed))
        assert found.impl == "windowed_looping, graphs=full"
        seen.append(len(plain))
    assert seen == [0, 1, 1, 2, 2, 3, 3]


def test_graphs_go_with_the_model_or_when_told(make):
    first, second = make("lstm", 3), make("lstm", 3)
    kept = graphs.cache_of(first)
    assert graphs.cache_of(first) is kept is not graphs.cache_of(second)
    release_graphs(first)
    assert first not in graphs.MODELS and second in graphs.MODELS
    kept = graphs.cache_of(first)
    release_graphs(first)
    again = graphs.cache_of(first)
    assert again is not kept
    del first
    gc.collect()
    assert list(graphs.MODELS) == [second]
    release_graphs()
    assert not graphs.MODELS


class AsOnGpu(torch.Tensor):
    """A tensor of the CPU that says otherwise."""

    is_cuda = True


def test_a_model_that_is_no_module_is_refused_with_the_reason(make, speak):
    net, (encoded, lengths) = make("lstm", 3), speak("lstm", 4, 11, 3)
    model = SimpleNamespace(blank=net.blank, predict=net.predict, join=net.join)
    encoded = encoded.as_subclass(AsOnGpu)
    reason = (
        "the model is no torch.nn.Module, so a change of its weights could not be seen"
    )
    for mode in ("step", "full"):
        with pytest.raises(RuntimeError) as error:
            transducer_greedy(model, encoded, lengths, graphs=mode)
        assert str(error.value) == reason
    found = transducer_greedy(model, encoded, lengths)
    assert found.impl == f"windowed_looping, graphs=off: {reason}"
    assert (
        found.tokens()
        == transducer_greedy(net, encoded, lengths, graphs="off").tokens()
    )
    assert not graphs.MODELS


def test_a_captured_loop_does_not_keep_the_model_alive(
    make, speak, uncaptured, monkeypatch
):
    gone = []
    monkeypatch.setattr(graphs, "capture", lambda *_: lambda: None)
    model, store = make("lstm", 3), graphs.GraphCache()
    by_graphs(store, model, *speak("lstm", 4, 11, 3), "step")
    weakref.finalize(model, gone.append, 1)
    del model
    gc.collect()
    assert gone and len(store.loops) == 1


# ---- the door


@pytest.mark.parametrize(("change", "wanted"), [
    ({"graphs": "fast"}, "graphs: expected one of 'auto', 'off', 'step', 'full', got 'fast'."),
    ({"graphs": "step"}, "graphs: expected 'auto' or 'off' with windowed_looping on cpu, got 'step'. "
     "Only windowed_looping runs as a graph, on a CUDA device."),
    ({"graphs": "full", "strategy": "label_looping"}, "graphs: expected 'auto' or 'off' with label_looping on cpu, got 'full'. "
     "Only windowed_looping runs as a graph, on a CUDA device."),
])  # fmt: skip
def test_a_mode_that_cannot_run_is_one_line(make, speak, change, wanted):
    with pytest.raises(ValueError) as error:
        transducer_greedy(make("lstm", 3), *speak("lstm", 2, 5, 3), **change)
    assert str(error.value) == wanted


def test_on_a_cpu_auto_is_off(make, speak):
    model, batch = make("lstm", 3), speak("lstm", 2, 5, 3)
    assert (
        transducer_greedy(model, *batch).impl
        == transducer_greedy(model, *batch, graphs="off").impl
        == "windowed_looping"
    )
    assert not graphs.MODELS
