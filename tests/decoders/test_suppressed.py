"""Suppressed tokens: never written, whatever decodes; nothing else changes."""

import sys
from pathlib import Path

import pytest
import torch

from asrkit.decoders import (
    Suppressing,
    aed_beam,
    aed_greedy,
)
from asrkit.models import AEDConfig, AEDModel, ConvConfig

sys.path.insert(0, str(Path(__file__).parent))
from attention_oracle import aed_beam_reference, aed_greedy_reference

PROMPT = [1, 4, 5]


@pytest.fixture(autouse=True)
def small_batches(one_thread):
    """Every test of this file starts on one thread."""


@pytest.fixture
def model():
    torch.manual_seed(3)
    config = AEDConfig(
        vocab_size=11, pad=0, bos=1, eos=2, encoder=ConvConfig(bins=4, width=6, layers=1), width=8,
        heads=2, layers=2, most=16,
    )  # fmt: skip
    made = AEDModel(config).double().eval()
    torch.nn.init.normal_(made.output_bias, std=0.5)
    made.positions.mul_(8)  # else every token is the last one again
    return made


@pytest.fixture
def frames():
    generator = torch.Generator().manual_seed(0)
    encoded = torch.randn(5, 7, 8, generator=generator, dtype=torch.float64)
    return encoded, torch.tensor([7, 1, 4, 7, 0])


def written_out(model, encoded, length, never, first, most):
    """Greedy labels of one utterance by the definition: the best token that may be written."""
    text = list(PROMPT)
    while len(text) - len(PROMPT) < most:
        with torch.no_grad():
            logits = model.logits(
                encoded[None, :length], torch.tensor([length]), torch.tensor([text])
            )
        row = logits[0, -1]
        barred = {*never} | ({*first} if len(text) == len(PROMPT) else set())
        row[[*barred]] = -torch.inf
        token = int(row.argmax())
        if token == model.eos:
            break
        text.append(token)
    return text[len(PROMPT) :]


def sets(model, frames):
    """Tokens to suppress that the model would write: the commonest, and first ones of texts."""
    rows = aed_greedy(model, *frames, prompt=PROMPT, most=6).tokens()
    first = sorted({row[0] for row in rows if row})
    all_ = [token for row in rows for token in row]
    return [max({*all_} - {model.eos}, key=all_.count)], first


def test_greedy_takes_the_best_token_that_may_be_written(model, frames):
    never, first = sets(model, frames)
    quiet = Suppressing(model, always=never, first=first, prompt_tokens=3)
    wanted = [
        written_out(model, encoded, length, never, first, 6) if length else []
        for encoded, length in zip(frames[0], frames[1].tolist(), strict=True)
    ]
    found = aed_greedy(quiet, *frames, prompt=PROMPT, most=6)
    assert found.tokens() == wanted
    assert (
        aed_greedy_reference(quiet, *frames, prompt=PROMPT, most=6).tokens() == wanted
    )
    plain = aed_greedy(model, *frames, prompt=PROMPT, most=6)
    assert plain.tokens() != wanted
    drafted = aed_greedy(quiet, *frames, prompt=PROMPT, most=6, draft=plain)
    assert drafted.tokens() == wanted


def test_scores_are_those_of_the_tokens_that_are_left(model, frames):
    never, _ = sets(model, frames)
    quiet = Suppressing(model, always=never, first=[], prompt_tokens=3)
    found = aed_greedy(quiet, *frames, prompt=PROMPT, most=1, confidence=True)
    assert found.confidence.isfinite().all()
    with torch.no_grad():
        logits = model.logits(frames[0][:1], frames[1][:1], torch.tensor([PROMPT]))[
            0, -1
        ]
        logits[never] = -torch.inf
    best = logits.log_softmax(-1).max()
    torch.testing.assert_close(found.scores[0], best.float())


def test_a_beam_writes_no_suppressed_token_either(model, frames):
    never, first = sets(model, frames)
    quiet = Suppressing(model, always=never, first=first, prompt_tokens=3)
    found = aed_beam(quiet, *frames, prompt=PROMPT, width=4, most=6)
    reference = aed_beam_reference(quiet, *frames, prompt=PROMPT, width=4, most=6)
    assert found.tokens() == reference.tokens()
    for row in found.tokens():
        assert not {*row} & {*never}
        assert not row or row[0] not in first
    assert (
        found.tokens()
        != aed_beam(model, *frames, prompt=PROMPT, width=4, most=6).tokens()
    )


def test_nothing_suppressed_changes_nothing(model, frames):
    quiet = Suppressing(model, always=[], first=[], prompt_tokens=3)
    for way in ({}, {"confidence": True}):
        plain = aed_greedy(model, *frames, prompt=PROMPT, most=6, **way)
        same = aed_greedy(quiet, *frames, prompt=PROMPT, most=6, **way)
        for one, other in zip(plain.parts(), same.parts(), strict=True):
            assert torch.equal(one, other)


def test_a_token_that_no_text_begins_with_may_follow(model, frames):
    _, first = sets(model, frames)
    quiet = Suppressing(model, always=[], first=first, prompt_tokens=3)
    rows = aed_greedy(quiet, *frames, prompt=PROMPT, most=12).tokens()
    assert {*first} & {token for row in rows for token in row[1:]}


def test_what_cannot_be_suppressed_is_refused(model):
    for said, settings in {
        "^always: expected tokens from 0 to below V=11": {"always": [11]},
        "^first: expected tokens from 0 to below V=11": {"first": [-1]},
    }.items():
        with pytest.raises(ValueError, match=said):
            Suppressing(
                model, **{"always": [], "first": [], "prompt_tokens": 1} | settings
            )
