"""Suppressed tokens: never written, whatever decodes; nothing else changes."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

from asrkit.decoders import Suppressing, aed_beam, aed_greedy
from asrkit.decoders.attention import Timestamps
from asrkit.transcribe.whisper import greedy

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import WIDTH, random_model
from attention_oracle import aed_beam_reference, aed_greedy_reference

HOW = {"prompt": [1, 4, 5], "most": 6}


@pytest.fixture
def model():
    made = random_model(3)
    torch.nn.init.normal_(made.output_bias, std=0.5)
    return made


@pytest.fixture
def frames():
    generator = torch.Generator().manual_seed(0)
    encoded = torch.randn(5, 7, WIDTH, generator=generator, dtype=torch.float64)
    return encoded, torch.tensor([7, 1, 4, 7, 0])


@pytest.fixture
def never(model, frames):
    """The token that the model writes most."""
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
    while len(text) < HOW["most"]:
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
    # what no text begins with may follow
    assert {*first} & {token for row in wanted for token in row[1:]}


def test_scores_are_those_of_the_tokens_that_are_left(model, frames, never):
    quiet = Suppressing(model, always=never, first=[], prompt_tokens=3)
    found = aed_greedy(quiet, *frames, **HOW | {"most": 1}, confidence=True)
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


def test_a_text_begins_with_no_time_above_the_highest_that_is_allowed(model, frames):
    rest = {"always": [], "first": [], "prompt_tokens": 3}
    timed = Timestamps(model, no_times=6, most_first=1, **rest)
    model.output_bias.data[8:] = torch.tensor([50.0, 60.0, 70.0])
    texts = aed_greedy(timed, *frames, **HOW).tokens()
    assert {row[0] for row in texts if row} == {8}


@pytest.mark.parametrize("until", [0, 2, 4])
def test_a_segment_that_begins_early_is_not_left_without_text(frames, until):
    """Timestamps 7 to 10 are frames 0 to 3, and the end, 5, is likelier than a token of the text."""
    rest = {"always": [], "first": [], "prompt_tokens": 3}
    model = random_model(3)
    model.eos = 5  # the last token of the text, as in a Whisper
    timed = Timestamps(model, no_times=6, most_first=1, **rest)
    model.output_bias.data[5] = 40.0
    encoded, lengths = frames
    prompts = torch.tensor([HOW["prompt"]]).expand(len(encoded), -1)
    with torch.inference_mode():
        memory = timed.remember(encoded, lengths, torch.full((5,), until))
        rows = greedy(timed, memory, lengths, prompts, confidence=False).tokens()
    texts = [row for row, length in zip(rows, lengths, strict=True) if length]
    assert {len(row) == 1 for row in texts} == {until < 2}  # a timestamp, then the end
    for row in texts:
        for time, token in itertools.pairwise([*row, 5]):
            begins = time > 6 and token == 5 and (len(row) == 1 or row[-2] > 6)
            assert not begins or time - 7 >= until
