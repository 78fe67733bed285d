"""Greedy transducer decoding: a scripted model, strategies against each other, a model that is not ours."""

import inspect
import math
from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asrkit.decoders import transducer_greedy
from asrkit.decoders.nests import choose
from asrkit.decoders.transducer import STRATEGIES

BOTH = sorted(STRATEGIES)
Cell = namedtuple("Cell", "hidden")


class Foreign(nn.Module):
    """A random GRU transducer that shares no code with asrkit; its state is a nest of every kind the protocol allows."""

    def __init__(self, V, E, P, seed, blank=None, bias=0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.blank = V - 1 if blank is None else blank
        self.embedding, self.cell = nn.Embedding(V, P), nn.GRUCell(P, P)
        self.encoded, self.out = nn.Linear(E, P), nn.Linear(P, V)
        with torch.no_grad():
            self.out.weight.mul_(4)
            self.out.bias[self.blank] += bias
        self.double()

    def predict(self, labels, state=None):
        hidden = None if state is None else state["cell"][0].hidden
        hidden = self.cell(self.embedding(labels), hidden)
        return hidden, {"cell": [Cell(hidden)], "last": (labels[:, None], None)}

    def join(self, encoded, predicted):
        return self.out((self.encoded(encoded) + predicted).tanh())


class Scripted:
    """Emits, on each frame, the labels that the frame itself spells as digits; counts its calls."""

    blank = 9

    def __init__(self):
        self.joined = 0

    def predict(self, labels, state=None):
        counts = torch.zeros(len(labels), dtype=torch.long) if state is None else state + 1
        return counts[:, None], counts

    def join(self, encoded, predicted):
        self.joined += 1
        counts = predicted.expand(*encoded.shape[:-1], 1).flatten().tolist()
        logits = torch.zeros(len(counts), 10)
        for row, (frame, count) in enumerate(zip(encoded.flatten(0, -2).tolist(), counts, strict=True)):
            start, spelled = int(frame[0]), [int(x) for x in frame[1:] if x >= 0]
            at = count - start
            logits[row, spelled[at] if 0 <= at < len(spelled) else self.blank] = 3
        return logits.view(*encoded.shape[:-1], 10)


def script(*utterances):
    """Frames (B, T, 5) for Scripted: labels emitted before this frame, then up to four labels; and lengths."""
    T = max(map(len, utterances))
    encoded = torch.full((len(utterances), T, 5), math.nan)
    for b, frames in enumerate(utterances):
        before = 0
        for t, spelled in enumerate(frames):
            encoded[b, t] = torch.tensor([before, *map(int, spelled), *[-1] * (4 - len(spelled))])
            before += len(spelled)
    return encoded.nan_to_num(0), torch.tensor([len(frames) for frames in utterances])


def same(a, b):
    for name in ("labels", "lengths", "frames"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=0)
    torch.testing.assert_close(a.scores, b.scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", BOTH)
def test_a_scripted_model_is_followed_to_the_letter(strategy):
    encoded, lengths = script(["1", "", "23", ""], ["", "", ""], [], ["4567"])
    found = transducer_greedy(Scripted(), encoded, lengths, strategy=strategy)
    assert found.tokens() == [[1, 2, 3], [], [], [4, 5, 6, 7]]
    assert found.frames.tolist() == [[0, 2, 2, -1], [-1] * 4, [-1] * 4, [0, 0, 0, 0]]
    each = 3 - math.log(math.exp(3) + 9)  # every step of a script has the same log-probability; blanks count too
    torch.testing.assert_close(found.scores, torch.tensor([7.0, 3, 0, 5]) * each)
    assert found.impl == strategy


@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize(("max_symbols", "wanted", "steps"), [
    (1, [4], 1), (2, [4, 5], 2), (4, [4, 5, 6, 7], 4), (5, [4, 5, 6, 7], 5), (10, [4, 5, 6, 7], 5)])  # fmt: skip
def test_max_symbols_ends_a_frame_without_a_blank_in_the_score(strategy, max_symbols, wanted, steps):
    found = transducer_greedy(Scripted(), *script(["4567"]), strategy=strategy, max_symbols=max_symbols)
    assert found.tokens() == [wanted]
    torch.testing.assert_close(found.scores, torch.tensor([steps * (3 - math.log(math.exp(3) + 9))]))


def test_frame_looping_calls_the_joint_as_often_as_the_most_talkative_utterance_needs():
    utterances = (["12", "", "3"], ["", "456", ""], ["", "", ""])
    together = Scripted()
    transducer_greedy(together, *script(*utterances), strategy="frame_looping")
    assert together.joined == 3 + 4 + 2  # labels of the longest, and one blank, at each frame
    alone = Scripted()
    transducer_greedy(alone, *script(*utterances), strategy="one_by_one")
    assert alone.joined == (3 + 3) + (3 + 3) + 3


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 7), st.integers(1, 4), st.floats(-4, 4), st.booleans())
def test_strategies_agree_on_every_batch_whatever_lies_in_the_padding(seed, B, T, max_symbols, bias, first):
    model = Foreign(5, 4, 6, seed, blank=0 if first else None, bias=bias)
    g = torch.Generator().manual_seed(seed)
    encoded = 2 * torch.randn(B, T, 4, generator=g, dtype=torch.float64)
    lengths = torch.randint(0, T + 1, (B,), generator=g)
    wanted = transducer_greedy(model, encoded, lengths, strategy="one_by_one", max_symbols=max_symbols)
    for b in range(B):
        encoded[b, lengths[b] :] = math.nan
    found = transducer_greedy(model, encoded, lengths, max_symbols=max_symbols)
    same(found, wanted)
    order = torch.randperm(B, generator=g)
    moved = transducer_greedy(model, encoded[order], lengths[order], max_symbols=max_symbols)
    assert moved.tokens() == [wanted.tokens()[b] for b in order]
    torch.testing.assert_close(moved.scores, wanted.scores[order], rtol=1e-5, atol=1e-5)


def test_random_models_of_the_property_test_say_something():
    counts = []
    for bias in (-40, 0, 2):
        model, encoded = Foreign(5, 4, 6, 1, bias=bias), 2 * torch.randn(8, 20, 4, dtype=torch.float64)
        counts.append(int(transducer_greedy(model, encoded, torch.full((8,), 20), max_symbols=3).lengths.sum()))
    assert counts[0] == 8 * 20 * 3
    assert 0 < counts[2] < counts[1] < counts[0]


@pytest.mark.parametrize("strategy", BOTH)
def test_the_score_is_the_log_probability_of_the_path(strategy):
    model, encoded = Foreign(5, 4, 6, 3), torch.randn(1, 6, 4, dtype=torch.float64)
    found = transducer_greedy(model, encoded, torch.tensor([6]), strategy=strategy, max_symbols=3)
    steps = list(zip(found.labels[0].tolist(), found.frames[0].tolist(), strict=True))
    predicted, state = model.predict(torch.tensor([model.blank]))
    total = 0.0
    for t in range(6):
        here = [label for label, frame in steps if frame == t]
        for label in here + [model.blank] * (len(here) < 3):
            total += model.join(encoded[:, t], predicted).log_softmax(-1)[0, label].item()
            if label != model.blank:
                predicted, state = model.predict(torch.tensor([label]), state)
    assert found.scores.item() == pytest.approx(total, abs=1e-4)
    assert len(steps) > 0


def test_states_may_be_any_nest_and_are_replaced_only_where_told():
    old = {"a": (torch.zeros(3, 2), None), "b": [Cell(torch.zeros(3, 1, 2))]}
    new = {"a": (torch.ones(3, 2), None), "b": [Cell(torch.ones(3, 1, 2))]}
    mixed = choose(torch.tensor([True, False, True]), new, old)
    assert mixed["a"][0].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert mixed["a"][1] is None
    assert isinstance(mixed["b"][0], Cell)
    assert mixed["b"][0].hidden[:, 0, 0].tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match=r"^state: expected tensors in tuples, lists or dicts, got int\.$"):
        choose(torch.tensor([True]), (1,), (2,))


def test_strategies_share_one_signature_and_results_may_serve_a_loss():
    signatures = [inspect.signature(decode) for decode in STRATEGIES.values()]
    assert all(signature == signatures[0] for signature in signatures)
    for strategy in BOTH:
        found = transducer_greedy(Scripted(), *script(["12", "3"]), strategy=strategy)
        assert not any(part.is_inference() for part in (found.labels, found.frames, found.lengths, found.scores))


@pytest.mark.parametrize(("change", "wanted"), [
    ({"encoded": torch.zeros(2, 5)}, "encoded: expected shape (B, T, E), got (2, 5)."),
    ({"lengths": torch.tensor([1, 5])}, "lengths: expected 0 to T=3 frames, got 1 to 5."),
    ({"strategy": "fastest"},
     "strategy: expected one of 'label_looping', 'nested_loops', 'frame_looping', 'one_by_one', got 'fastest'."),
    ({"max_symbols": 0}, "max_symbols: expected at least 1, got 0."),
])  # fmt: skip
def test_bad_input_is_one_line(change, wanted):
    arguments = {"model": Scripted(), "encoded": torch.zeros(2, 3, 5), "lengths": torch.tensor([3, 2])}
    with pytest.raises(ValueError) as error:
        transducer_greedy(**{**arguments, **change})
    assert str(error.value) == wanted


def test_a_model_that_counts_blank_from_the_end_is_refused_rather_than_never_blank():
    model = Scripted()
    model.blank = -1
    with pytest.raises(ValueError, match=r"model.blank: expected an index from 0, got -1\. Count it from the front"):
        transducer_greedy(model, torch.zeros(2, 3, 5), torch.tensor([3, 2]))
