"""What decoders by attention refuse: one line that names the argument, and no error of torch."""

import copy
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asrkit.decoders import (
    Suppressing,
    aed_beam,
    aed_beam_reference,
    aed_greedy,
    aed_greedy_reference,
    aed_rescore,
    aed_rescore_reference,
    ctc_beam,
)

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import EOS, Story, V, as_draft, heard, random_model, same

DOORS = {
    "greedy": aed_greedy,
    "greedy reference": aed_greedy_reference,
    "beam": aed_beam,
    "beam reference": aed_beam_reference,
}
BEAMS = (aed_beam, aed_beam_reference)
RESCORERS = (aed_rescore, aed_rescore_reference)


def listened(seed=0):
    """Log-probabilities of a CTC head about 3 utterances of 6 frames."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 6, V + 1, dtype=torch.float64, generator=generator)
    return scores.log_softmax(-1)


def refused(message, call, *given, **options):
    """Expect ValueError with a message that begins so, in one line."""
    with pytest.raises(ValueError) as error:
        call(*given, **options)
    text = str(error.value)
    assert text.startswith(message), text
    assert "\n" not in text


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_frames_of_another_dtype_than_the_weights_are_refused_by_name(name, dtype):
    encoded, lengths = heard(3, 6)
    wanted = f"encoded: expected torch.float64, as the model's weights are, got {dtype}. Pass "
    refused(wanted, DOORS[name], random_model(), encoded.to(dtype), lengths)
    quiet = Suppressing(random_model(), always=[3], first=[], prompt_tokens=1)
    refused(wanted, DOORS[name], quiet, encoded.to(dtype), lengths)


def test_under_autocast_frames_may_have_another_dtype():
    encoded, lengths = heard(3, 6, dtype=torch.float32)
    model = random_model(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        memory = model.remember(encoded.bfloat16(), lengths)
    assert memory.like().dtype == torch.bfloat16


@pytest.mark.parametrize("name", DOORS)
def test_a_prompt_without_tokens_is_refused_as_such(name):
    encoded, lengths = heard(3, 6)
    for empty in ([], [[], [], []]):
        wanted = "prompt: expected 1 to 31 tokens, so that a label fits in most=32, got 0."
        refused(wanted, DOORS[name], random_model(), encoded, lengths, prompt=empty)


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([[V, 3]], f"tokens: expected ids from 0 to below V={V}, got 3 to {V}."),
        ([[3, -1]], f"tokens: expected ids from 0 to below V={V}, got -1 to 3."),
        ([[3.0, 1.0]], "tokens: expected int32 or int64, got torch.float32."),
    ],
)
def test_tokens_that_the_model_has_not_are_refused_by_each_of_its_calls(tokens, message):
    model = random_model()
    encoded, lengths = heard(1, 6)
    tokens = torch.tensor(tokens)
    with torch.no_grad():
        memory = model.remember(encoded, lengths)
        refused(message, model.logits, encoded, lengths, tokens)
        refused(message, model.looks, tokens, memory)
        refused(message, model.follow, tokens, model.begin(memory, 4), memory)
        long = torch.ones(1, 33, dtype=torch.int64)
        refused("tokens: expected 1 to most=32 of them, got 33.", model.looks, long, memory)
        refused("room: expected 1 to most=32 tokens, got 2.0.", model.begin, memory, 2.0)


DAMAGED = [
    ({"lengths": torch.tensor([2, 1, 3])}, ".lengths: expected 0 to N=2 labels, got 1 to 3."),
    ({"lengths": torch.tensor([2, -1, 0])}, ".lengths: expected 0 to N=2 labels, got -1 to 2."),
    ({"lengths": torch.tensor([2.0, 1, 0])}, ": expected int32 or int64 lengths, got torch.float32"),
    ({"lengths": torch.tensor([2, 1])}, ".lengths: expected shape (B=3), got (2,)."),
    ({"scores": torch.zeros(2)}, ".scores: expected shape (B=3), got (2,)."),
    ({"labels": torch.zeros(3, 2)}, ": expected int32 or int64 labels, got torch.float32."),
    ({"labels": torch.tensor([3, 4, 5])}, ".labels: expected shape (B, N), got (3,)."),
]  # fmt: skip


@pytest.mark.parametrize("damage, message", DAMAGED)
def test_damaged_hypotheses_are_refused_as_drafts_and_as_texts(damage, message):
    encoded, lengths = heard(3, 6)
    texts = as_draft([[3, 4], [5], []])
    damaged = replace(texts, **damage)
    refused(f"draft{message}", aed_greedy, random_model(), encoded, lengths, draft=damaged)
    for rescore in RESCORERS:
        refused(f"texts{message}", rescore, random_model(), encoded, lengths, damaged)
        second = replace(texts, alternatives=(damaged,))
        refused("texts.alternatives" + message, rescore, random_model(), encoded, lengths, second)


@pytest.mark.parametrize("rescore", RESCORERS)
def test_alternatives_of_another_batch_or_kind_are_refused(rescore):
    encoded, lengths = heard(3, 6)
    texts = as_draft([[3, 4], [5], []])
    for other, message in (
        (as_draft([[3]]), "texts.alternatives: expected hypotheses of B=3 utterances, got 1."),
        ([[3], [4], []], "texts.alternatives: expected Hypotheses, got list."),
    ):
        given = replace(texts, alternatives=(other,))
        refused(message, rescore, random_model(), encoded, lengths, given)


@pytest.mark.parametrize("search", BEAMS)
def test_penalties_without_a_meaning_and_ctc_of_whole_numbers_are_refused(search):
    encoded, lengths = heard(3, 6)
    model = random_model()
    for penalty in (-1, math.nan, 10.5, 1e9, 10**400, "1", True):
        message = "length_penalty: expected a number from 0 to 10, got "
        refused(message, search, model, encoded, lengths, length_penalty=penalty)
    wanted = "ctc: expected log-probabilities of a float dtype, got torch.int64."
    refused(wanted, search, model, encoded, lengths, ctc=listened().long())


def test_where_ctc_has_no_weight_both_beams_find_what_attention_alone_finds():
    encoded, lengths = heard(3, 6)
    model = random_model()
    alone = aed_beam(model, encoded, lengths)
    for search in BEAMS:
        same(search(model, encoded, lengths, ctc=listened(), ctc_weight=0), alone)


@pytest.mark.parametrize("ctc_weight", [0.3, 1.0])
def test_nan_of_ctc_is_no_empty_text_that_came_to_its_end(ctc_weight):
    encoded, _ = heard(3, 6)
    lengths = torch.tensor([6, 4, 5])
    ctc = listened()
    ctc[0, 5, 3] = torch.nan
    ctc[1, 4:] = torch.nan  # padding
    model = random_model()
    options = {"ctc_weight": ctc_weight, "nbest": 2}
    found, wanted = (search(model, encoded, lengths, ctc=ctc, **options) for search in BEAMS)
    same(found, wanted)
    whole = aed_beam(model, encoded, lengths, ctc=listened(), **options)
    assert found.tokens()[1:] == whole.tokens()[1:]
    assert found.tokens()[0] == []
    assert found.scores[0] == -torch.inf and not found.ended[0]


def test_a_model_that_is_no_module_cannot_be_suppressed():
    wanted = "model: expected a torch.nn.Module, got Story."
    refused(wanted, Suppressing, Story(), always=[], first=[EOS], prompt_tokens=1)


def test_a_copy_of_a_model_decodes_like_it():
    encoded, lengths = heard(3, 6)
    model = random_model()
    quiet = Suppressing(model, always=[5], first=[EOS], prompt_tokens=1)
    for one in (model, quiet):
        same(aed_greedy(copy.deepcopy(one), encoded, lengths), aed_greedy(one, encoded, lengths))


def test_whole_texts_are_rescored_as_before():
    encoded, lengths = heard(3, 6)
    texts = ctc_beam(listened(), lengths, width=4, nbest=3)
    narrow = replace(texts, labels=texts.labels.int(), lengths=texts.lengths.int())
    found = aed_rescore(random_model(), encoded, lengths, narrow)
    assert found.tokens() == aed_rescore_reference(random_model(), encoded, lengths, texts).tokens()
