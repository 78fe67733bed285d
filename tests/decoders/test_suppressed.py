"""Suppressed tokens: no decoder writes them, and nothing else changes."""

import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from asrkit.decoders import Suppressing, aed_beam, aed_greedy
from asrkit.decoders.attention import TimedMemory, Timestamps

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import WIDTH, random_model
from attention_oracle import aed_beam_reference, aed_greedy_reference

HOW = {"prompt": [1, 4, 5], "max_labels": 6}


@pytest.fixture
def model():
    model = random_model(3)
    torch.nn.init.normal_(model.output_bias, std=0.5)
    return model


@pytest.fixture
def frames():
    generator = torch.Generator().manual_seed(0)
    encoded = torch.randn(5, 7, WIDTH, generator=generator, dtype=torch.float64)
    return encoded, torch.tensor([7, 1, 4, 7, 0])


@pytest.fixture
def never(model, frames):
    """The token that the model writes most often."""
    rows = aed_greedy(model, *frames, **HOW).tokens()
    written = [token for row in rows for token in row]
    return [max(written, key=written.count)]


@pytest.fixture
def first(model, frames):
    """The tokens that the model begins texts with."""
    rows = aed_greedy(model, *frames, **HOW).tokens()
    return sorted({row[0] for row in rows if row})


def written_out(model, encoded, length, never, first):
    """Greedy labels of one utterance by the definition: the best token that may be written."""
    text = []
    while len(text) < HOW["max_labels"]:
        tokens = torch.tensor([HOW["prompt"] + text])
        own = encoded[None, :length], torch.tensor([length])
        with torch.no_grad():
            logits = model.logits(*own, tokens)[0, -1]
        logits[never if text else never + first] = -torch.inf
        token = int(logits.argmax())
        if token == model.eos:
            break
        text.append(token)
    return text


def test_greedy_takes_the_best_token_that_may_be_written(model, frames, never, first):
    quiet = Suppressing(model, always=never, first=first, prompt_tokens=3)
    wanted = [
        written_out(model, encoded, length, never, first) if length else []
        for encoded, length in zip(frames[0], frames[1].tolist(), strict=True)
    ]
    assert aed_greedy(quiet, *frames, **HOW).tokens() == wanted
    assert aed_greedy_reference(quiet, *frames, **HOW).tokens() == wanted
    plain = aed_greedy(model, *frames, **HOW)
    assert plain.tokens() != wanted
    assert aed_greedy(quiet, *frames, draft=plain, **HOW).tokens() == wanted
    # tokens that no text begins with may occur later
    assert {*first} & {token for row in wanted for token in row[1:]}


def test_scores_are_normalised_over_the_remaining_tokens(model, frames, never):
    quiet = Suppressing(model, always=never, first=[], prompt_tokens=3)
    found = aed_greedy(quiet, *frames, **HOW | {"max_labels": 1}, confidence=True)
    assert found.confidence.isfinite().all()
    encoded, lengths = frames
    with torch.no_grad():
        prompt = torch.tensor([HOW["prompt"]])
        logits = model.logits(encoded[:1], lengths[:1], prompt)[0, -1]
    logits[never] = -torch.inf
    best = logits.log_softmax(-1).max()
    torch.testing.assert_close(found.scores[0], best.float())


def test_a_beam_writes_no_suppressed_token_either(model, frames, never, first):
    quiet = Suppressing(model, always=never, first=first, prompt_tokens=3)
    found = aed_beam(quiet, *frames, **HOW)
    assert found.tokens() == aed_beam_reference(quiet, *frames, **HOW).tokens()
    assert found.tokens() != aed_beam(model, *frames, **HOW).tokens()
    for row in found.tokens():
        assert not {*row} & {*never}
        assert not {*row[:1]} & {*first}


def test_nothing_suppressed_changes_nothing(model, frames):
    quiet = Suppressing(model, always=[], first=[], prompt_tokens=3)
    plain = aed_greedy(model, *frames, confidence=True, **HOW)
    same = aed_greedy(quiet, *frames, confidence=True, **HOW)
    for one, other in zip(plain.parts(), same.parts(), strict=True):
        assert torch.equal(one, other)


def test_a_text_does_not_begin_after_the_highest_allowed_timestamp(model, frames):
    rest = {"always": [], "first": [], "prompt_tokens": 3}
    timed = Timestamps(model, no_times=6, most_first=1, **rest)
    model.output_bias.data[8:] = torch.tensor([50.0, 60.0, 70.0])
    texts = aed_greedy(timed, *frames, **HOW).tokens()
    assert {row[0] for row in texts if row} == {8}


class Indifferent(torch.nn.Module):
    """All text tokens are always equally likely, and so are all timestamps."""

    bos, eos, vocab_size = 1, 5, 11

    def __init__(self, times=-50.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.times = times  # logit of a timestamp

    def prefill(self, encoded, lengths):
        return lengths

    def init_state(self, memory, room):
        return Place(torch.zeros_like(memory))

    def step(self, tokens, state, memory, *, reach=None):
        logits = torch.zeros(*tokens.shape, self.vocab_size)
        logits[..., 7:] = self.times
        return logits, Place(state.place + tokens.shape[1])


class Place(NamedTuple):
    place: torch.Tensor


@pytest.mark.parametrize("text, begins", [
    ([8], None),  # the first segment
    ([7, 3, 8], None),  # which ends
    ([7, 3, 8, 9], 2),  # another one begins on frame 2
    ([7, 3, 8, 8], 1),
    ([7, 3, 8, 8, 3], None),  # and has text
])  # fmt: skip
def test_a_later_segment_that_begins_early_has_text(text, begins):
    """Timestamps 7 to 10 are frames 0 to 3, and token 5 is the end."""
    timed = Timestamps(Indifferent(), no_times=6, most_first=None, always=[], first=[], prompt_tokens=3)  # fmt: skip
    until = torch.arange(5)
    with torch.no_grad():
        memory = TimedMemory(torch.full((5,), 7), until)
        state = timed.init_state(memory, 9)
        for tokens in ([HOW["prompt"]], *([[token]] for token in text)):
            logits, state = timed.step(
                torch.tensor(tokens).expand(5, -1), state, memory
            )
    may_end = logits[:, -1, 5] == 0
    wanted = until <= begins if begins is not None else torch.ones(5, dtype=torch.bool)
    assert torch.equal(may_end, wanted)


@pytest.mark.parametrize("times, text, allowed", [
    (-50.0, [], {7, 8, 9, 10}),  # a text begins with a timestamp
    (-50.0, [8], {0, 1, 2, 3, 4, 5}),  # words follow, or the end
    (-50.0, [8, 3], {0, 1, 2, 3, 4, 5, 9, 10}),  # and a later timestamp
    (-50.0, [8, 3, 9], {5, 9, 10}),  # the end, or another segment
    (0.0, [8, 3], {9, 10}),  # both timestamps together are likelier than a word
])  # fmt: skip
def test_timestamps_are_around_segments_and_never_go_back(times, text, allowed):
    timed = Timestamps(Indifferent(times), no_times=6, most_first=None, always=[], first=[], prompt_tokens=3)  # fmt: skip
    memory = TimedMemory(torch.tensor([7]), torch.tensor([0]))
    state = timed.init_state(memory, 9)
    for tokens in ([HOW["prompt"]], *([[token]] for token in text)):
        logits, state = timed.step(torch.tensor(tokens), state, memory)
    assert {*(logits[0, -1] > -100).nonzero()[:, 0].tolist()} == allowed
