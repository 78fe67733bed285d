"""Greedy decoding by attention equals its definition, with and without a draft."""

import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from asrkit.decoders import aed_greedy

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import (
    EOS,
    OPTIONS,
    WIDTH,
    Story,
    V,
    as_draft,
    frames,
    random_frames,
    random_model,
    same,
)
from attention_oracle import aed_greedy_reference

# ---- the definition


@pytest.mark.parametrize("B", [1, 2, 7, 33])
@pytest.mark.parametrize("T", [1, 5])
def test_a_table_decodes_as_the_definition_does(B, T):
    story = Story(B)
    batch = frames(B, T, B)
    wanted = aed_greedy_reference(story, *batch, confidence=True)
    found = aed_greedy(story, *batch, confidence=True)
    same(found, wanted)
    missing = int((~wanted.ended).sum())
    assert found.impl == "attention" + f"; no end in {missing} of {B}" * (missing > 0)


@pytest.mark.parametrize(("B", "T"), [(1, 1), (5, 6), (33, 3)])
def test_a_model_decodes_as_the_definition_with_and_without_a_draft(B, T):
    model = random_model(B, eos=3.0)
    batch = random_frames(B, T, B)
    wanted = aed_greedy_reference(model, *batch, **OPTIONS)
    same(aed_greedy(model, *batch, **OPTIONS), wanted)
    draft = as_draft([row[:2] for row in wanted.tokens()])
    same(aed_greedy(model, *batch, draft=draft, **OPTIONS), wanted)


class Watched(Story):
    """A story that records the number of rows of each call."""

    def step(self, tokens, state, memory, *, reach):
        self.rows = [*getattr(self, "rows", []), len(tokens)]
        return super().step(tokens, state, memory, reach=reach)


@pytest.mark.parametrize("sorted_by_length", [False, True])
@pytest.mark.parametrize("options", [{"confidence": True}, {"max_labels": 3}])
def test_finished_rows_leave_the_batch(sorted_by_length, options):
    encoded, lengths = frames(33, 5, least=1)
    if sorted_by_length:  # active rows are the leading ones, and need no copy
        texts = aed_greedy(Story(1), encoded, lengths).lengths
        order = texts.argsort(descending=True)
        encoded, lengths = encoded[order], lengths[order]
    before = encoded.clone(), lengths.clone()
    story = Watched(1)
    found = aed_greedy(story, encoded, lengths, **options)
    same(found, aed_greedy_reference(Story(1), encoded, lengths, **options))
    for step, rows in enumerate(story.rows):
        active = int((found.lengths >= step).sum())
        assert rows <= 1 + active / 0.75
    assert torch.equal(encoded, before[0])
    assert torch.equal(lengths, before[1])


@pytest.mark.parametrize("P", [1, 5, 9])
def test_labels_are_the_best_tokens_of_teacher_forcing_after_prompts_of_any_length(P):
    model = random_model(eos=3.0)
    encoded, lengths = random_frames(4, 6, least=1)
    prompt = torch.randint(3, V, (4, P), generator=torch.Generator().manual_seed(P))
    options = {"prompt": prompt, "max_labels": 7}
    found = aed_greedy(model, encoded, lengths, **options)
    same(found, aed_greedy_reference(model, encoded, lengths, **options))
    tokens = torch.cat([prompt, found.labels.clamp(min=0)], 1)
    with torch.no_grad():
        logp = model.logits(encoded, lengths, tokens).log_softmax(-1)[:, P - 1 :]
    for b, labels in enumerate(found.tokens()):
        tokens = [*labels, EOS] if found.ended[b] else labels
        assert logp[b].argmax(-1)[: len(tokens)].tolist() == tokens
        score = sum(logp[b, u, token].item() for u, token in enumerate(tokens))
        assert found.scores[b].item() == pytest.approx(score, rel=1e-5, abs=1e-5)


def test_one_prompt_serves_the_whole_batch_and_the_default_is_bos():
    story = Story(3)
    batch = frames(4, 5)
    of_all = aed_greedy(story, *batch, prompt=[1, 4, 5])
    same(aed_greedy(story, *batch, prompt=[[1, 4, 5]] * 4), of_all)
    same(aed_greedy(story, *batch, prompt=torch.tensor([1, 4, 5])), of_all)
    plain = aed_greedy(story, *batch)
    same(aed_greedy(story, *batch, prompt=[1]), plain)
    assert plain.tokens() != of_all.tokens()


def test_neither_padding_nor_the_rest_of_the_batch_changes_a_token():
    model = random_model(4, eos=3.0)
    encoded, lengths = random_frames(6, 7, 4)
    options = {"confidence": True, "max_labels": 12}
    wanted = aed_greedy(model, encoded, lengths, **options)
    padding = torch.arange(7) >= lengths[:, None]
    poisoned = encoded.masked_fill(padding[..., None], torch.nan)
    same(aed_greedy(model, poisoned, lengths, **options), wanted)
    for b in range(6):
        row = slice(b, b + 1)
        alone = aed_greedy(model, encoded[row], lengths[row], **options)
        assert alone.tokens()[0] == wanted.tokens()[b]
        score = wanted.scores[row]
        torch.testing.assert_close(alone.scores, score, rtol=1e-5, atol=1e-5)


def test_texts_without_eos_are_returned_and_flagged_and_eos_at_the_limit_counts():
    batch = frames(8, 5, least=1)
    whole = aed_greedy(Story(1), *batch)
    longest = int(whole.lengths.max())
    assert longest > 3
    for most in (1, 3, longest):
        cut = aed_greedy(Story(1), *batch, max_labels=most)
        same(cut, aed_greedy_reference(Story(1), *batch, max_labels=most))
        assert cut.tokens() == [labels[:most] for labels in whole.tokens()]
        assert cut.ended.tolist() == (whole.ended & (whole.lengths <= most)).tolist()


@pytest.mark.parametrize(("T", "most"), [(5, 55), (50, 63)])
def test_texts_have_50_labels_more_than_frames_at_most_and_no_more_than_positions(
    T, most
):
    encoded = torch.zeros(2, T, WIDTH)
    found = aed_greedy(Story(eos_share=0), encoded, torch.full((2,), T))
    assert found.lengths.tolist() == [most] * 2


def test_nan_ends_its_row_only_and_is_reported():
    batch = frames(16, 5, least=1)
    story = Story(2, nan_share=10)
    found = aed_greedy(story, *batch, confidence=True)
    same(found, aed_greedy_reference(story, *batch, confidence=True))
    broken = found.scores.isnan()
    assert 0 < broken.sum() < 16
    assert not (found.ended & broken).any()
    assert f"; no end in {int((~found.ended).sum())} of 16" in found.impl


def test_utterances_without_frames_have_no_labels():
    model = random_model(dtype=torch.float32)
    for T, confidence in product((0, 3), (False, True)):
        encoded = torch.zeros(2, T, WIDTH)
        lengths = torch.zeros(2, dtype=torch.int32)
        found = aed_greedy(model, encoded, lengths, confidence=confidence)
        assert found.tokens() == [[], []]
        assert found.scores.tolist() == [0, 0]
        assert found.ended.all()
        assert (found.confidence is None) != confidence


def test_results_are_ordinary_tensors_and_modes_do_not_change():
    model = random_model(dropout=0.5).train()
    model.encoder.eval()
    before = [module.training for module in model.modules()]
    found = aed_greedy(model, *random_frames(3, 4), confidence=True)
    assert not any(part.is_inference() for part in (*found.parts(), found.ended))
    assert [module.training for module in model.modules()] == before


def test_half_precision_and_autocast_decode():
    encoded, lengths = random_frames(3, 4, dtype=torch.bfloat16)
    options = {"max_labels": 5, "confidence": True}
    model = random_model(dtype=torch.bfloat16)
    found = aed_greedy(model, encoded, lengths, **options)
    with torch.autocast("cpu", torch.bfloat16):
        exact = random_model(dtype=torch.float32)
        cast = aed_greedy(exact, encoded.float(), lengths, **options)
    for hypotheses in (found, cast):
        assert hypotheses.scores.dtype == torch.float32
        assert hypotheses.scores.isfinite().all()
        assert hypotheses.lengths.max() > 0


# ---- drafts


def other(label):
    """A wrong label."""
    return 3 + (label - 2) % (V - 3)


DRAFTS = {  # how a right row is changed
    "empty": lambda row: [],
    "right": lambda row: row,
    "wrong at first": lambda row: [*map(other, row[:1]), *row[1:]],
    "wrong at last": lambda row: [*row[:-1], *map(other, row[-1:])],
    "all wrong": lambda row: [*map(other, row)],
    "beyond the end": lambda row: [*row, 5, 6, 7],
    "NaN is read as a token": lambda row: [*row, 0],  # the first of equals
    "beginning": lambda row: row[: len(row) // 2],
    "a different kind each": lambda row: (row, [4], row[:1], [*row, 4], [])[
        sum(row) % 5
    ],
    "endless": lambda row: [5] * 90,
}


@pytest.mark.parametrize("kind", ["story", "random", "nan"])
@pytest.mark.parametrize(("prompt", "most"), [(None, 12), ([1, 4, 5], 2)])
def test_a_draft_changes_nothing(kind, prompt, most):
    model = Story(5, nan_share=10 * (kind == "nan"))
    batch = frames(7, 6, 1)
    if kind == "random":
        model = random_model(1, eos=3.0)
        batch = random_frames(7, 6, 1)
    options = {"prompt": prompt, "max_labels": most, "confidence": True}
    wanted = aed_greedy(model, *batch, **options)
    for change in DRAFTS.values():
        draft = as_draft([change(row) for row in wanted.tokens()])
        same(aed_greedy(model, *batch, draft=draft, **options), wanted)


def test_a_right_draft_takes_one_call_and_a_wrong_one_no_more_than_none():
    story = Story(5)
    batch = frames(7, 6, 1, least=1)
    wanted = aed_greedy(story, *batch)
    longest = int(wanted.lengths.max())
    assert story.calls == [1] * (longest + 1)
    calls = {}
    for name, change in DRAFTS.items():
        story.calls.clear()
        draft = as_draft([change(row) for row in wanted.tokens()])
        found = aed_greedy(story, *batch, draft=draft)
        assert ("draft" in found.impl) == (name != "empty")
        calls[name] = list(story.calls)
    assert calls["right"] == [longest + 1]
    assert calls["beyond the end"] == [longest + 4]
    assert calls["wrong at last"] == [longest + 1, 1]
    assert calls["beginning"] == [longest // 2 + 1] + [1] * (longest - longest // 2)
    assert len(calls["all wrong"]) <= len(calls["empty"]) == longest + 1
