"""Whether weights are where a captured loop reads them: asked before every replay, so it has to be cheap, and to see everything."""

import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from asrkit.decoders.transducer import graph_capture, graphs, loop_cache
from asrkit.decoders.transducer.graph_loop import GraphLoop
from asrkit.decoders.transducer.steps import GreedyModel, GreedyOptions
from asrkit.decoders.transducer.weights import Watch
from asrkit.models import ConvConfig, LSTMConfig, StatelessConfig, TransducerConfig, TransducerModel


def model_of(predictor, layers=1):
    sizes = {
        "encoder": ConvConfig(width=4, layers=layers),
        "predictor": predictor,
        "joint_width": 4,
    }
    return TransducerModel(TransducerConfig(vocab_size=5, dropout=0.1, **sizes)).eval()


def watched(net, model):
    """A watch of `model` on what a turn of `net` reads, as a capture makes it."""
    with torch.inference_mode():
        greedy, encoded = GreedyModel(net), torch.zeros(2, 8, 4)
        loop = GraphLoop(2, 8, greedy, encoded, greedy.initial_carry(encoded), GreedyOptions())
        with graph_capture.CaptureGuard() as seen:
            loop.turn(greedy)
    return Watch(model, seen.storages_read)


def swap(module, name, value):
    setattr(module, name, value)


CHANGES = {
    "a weight of its own": lambda net: swap(
        net.output, "bias", nn.Parameter(net.output.bias.clone())
    ),
    "a weight that another holds still": lambda net: swap(
        net,
        "kept",
        [net.output.weight, swap(net.output, "weight", nn.Parameter(net.output.weight.clone()))],
    ),
    "a submodule": lambda net: swap(net, "output", nn.Linear(4, 6)),
    "a submodule's submodule": lambda net: swap(net.predictor, "embedding", nn.Embedding(6, 128)),
    "a submodule that is gone": lambda net: delattr(net, "predictor_projection"),
    "another dtype": lambda net: net.bfloat16(),
    "another dtype of one part": lambda net: net.predictor.double(),
    "another shape in one place": lambda net: swap(
        net.output.weight, "data", net.output.weight.data.view(4, 6)
    ),
    "another place": lambda net: swap(net.output.weight, "data", net.output.weight.data.clone()),
    "the mode": lambda net: net.train(),
    "the mode of what has no weights": lambda net: net.dropout.train(),
    "a method": lambda net: swap(net, "join", lambda *given: net.output(given[0])),
}
UNSEEN = {
    "a weight in place": lambda net: net.output.weight.data.add_(1),
    "what no turn reads": lambda net: net.encoder.double(),
    "the mode of what no turn reads": lambda net: net.encoder.train(),
    "a head": lambda net: swap(net.ctc_head, "weight", nn.Parameter(torch.zeros(6, 4))),
}


@pytest.mark.parametrize("predictor", [LSTMConfig(layers=2), StatelessConfig()], ids=repr)
@pytest.mark.parametrize("change", CHANGES)
def test_a_watch_sees(predictor, change):
    net = model_of(predictor)
    watch = watched(net, net)
    assert watch.still(net)
    CHANGES[change](net)
    assert not watch.still(net)


@pytest.mark.parametrize("change", UNSEEN)
def test_a_watch_is_not_disturbed_by(change):
    net = model_of(LSTMConfig())
    watch = watched(net, net)
    UNSEEN[change](net)
    assert watch.still(net)


WRAPPERS = {
    "an object": lambda net: SimpleNamespace(inner=[SimpleNamespace(net=net)]),
    "methods": lambda net: SimpleNamespace(predict=net.predict, join=net.join),
    "closures": lambda net: SimpleNamespace(
        predict=lambda *given: net.predict(*given), join=lambda *given: net.join(*given)
    ),
    "a dict": lambda net: {"net": net},
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "change", ["a weight of its own", "a submodule", "another dtype", "the mode"]
)
def test_a_watch_sees_through(wrapper, change):
    net = model_of(LSTMConfig())
    model = WRAPPERS[wrapper](net)
    watch = watched(net, model)
    assert watch.still(model)
    CHANGES[change](net)
    assert not watch.still(model)


def test_a_method_of_another_net_is_seen():
    net, other = model_of(LSTMConfig()), model_of(LSTMConfig())
    model = SimpleNamespace(predict=net.predict, join=net.join)
    watch = watched(net, model)
    model.join = other.join
    assert not watch.still(model)


def calls_of(function):
    """Calls of Python's and C's functions that it makes."""
    seen = []
    sys.setprofile(
        lambda frame, event, argument: seen.append(event) if event in ("call", "c_call") else None
    )
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(seen)


def test_a_look_costs_the_same_whatever_the_encoder_is():
    small, large = (model_of(LSTMConfig(), layers) for layers in (1, 40))
    found = []
    for net in (small, large):
        store = graphs.GraphCache()
        store.watch = watched(net, net)
        found.append(
            (calls_of(lambda net=net, store=store: store.follow(net)), len(store.watch.steps))
        )
        assert calls_of(lambda net=net: list(loop_cache.fingerprint(net))) > 10 * found[0][0] * (
            net is large
        )
    assert found[0] == found[1]
    assert found[0][0] <= 250 and found[0][1] <= 30, found


def test_what_a_look_finds_changed_is_looked_at_whole_and_loops_stay_if_nothing_moved(
    make, speak, monkeypatch
):
    model, store, batch, whole = make("lstm", 3), graphs.GraphCache(), speak("lstm", 4, 11, 3), []
    monkeypatch.setattr(graphs, "capture", lambda loop, greedy, mode: lambda: None)
    plain = loop_cache.fingerprint
    monkeypatch.setattr(loop_cache, "fingerprint", lambda held: whole.append(1) or plain(held))
    with torch.inference_mode():
        greedy = GreedyModel(model)
        for number in range(6):
            if number == 3:
                model.note = object()
            carry = greedy.initial_carry(batch[0])
            store.replay(graphs.DecoderCall(greedy, *batch, carry, GreedyOptions()), "step")
    assert len(whole) == 2  # at first, and when there was one more attribute
    assert len(store.loops) == 1


def test_a_watch_keeps_nothing_alive():
    net = model_of(LSTMConfig())
    net.predictor.owner = [net]
    watch, gone = watched(net, net), weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None and watch.steps
