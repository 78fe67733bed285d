"""Greedy decoding by attention: every way finds what the definition finds, with and without a draft."""

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
    heard,
    random_model,
    same,
)
from attention_oracle import aed_greedy_reference

# ---- what the definition says


@pytest.mark.parametrize("B", [1, 2, 7, 33])
def test_a_story_is_told_as_the_definition_says(B):
    story = Story(B)
    for T in (1, 5):
        encoded, lengths = frames(B, T, B)
        wanted = aed_greedy_reference(story, encoded, lengths, confidence=True)
        found = aed_greedy(story, encoded, lengths, confidence=True)
        same(found, wanted)
        assert found.impl == "attention" + (
            f"; no end in {int((~wanted.ended).sum())} of {B}"
            * (not wanted.ended.all())
        )


@pytest.fixture(scope="module")
def defined():
    """Batches of random models, and what the definition finds."""
    batches = []
    for seed, (B, T) in enumerate([(1, 1), (5, 6), (33, 3)]):
        model = random_model(seed, eos=3.0)
        batch = heard(B, T, seed)
        batches.append((model, batch, aed_greedy_reference(model, *batch, **OPTIONS)))
    return batches


def test_a_model_finds_what_the_definition_finds_with_and_without_a_draft(defined):
    for model, batch, wanted in defined:
        same(aed_greedy(model, *batch, **OPTIONS), wanted)
        draft = as_draft([row[:2] for row in wanted.tokens()])
        same(aed_greedy(model, *batch, draft=draft, **OPTIONS), wanted)


class Watched(Story):
    """A story that remembers how many rows each call had."""

    def follow(self, tokens, state, memory, *, reach):
        self.rows = [*getattr(self, "rows", []), len(tokens)]
        return super().follow(tokens, state, memory, reach=reach)


@pytest.mark.parametrize("sorted_by_length", [False, True])
def test_rows_that_have_ended_leave_the_batch(sorted_by_length):
    encoded, lengths = frames(33, 5, least=1)
    if sorted_by_length:  # those that go on lie in front, and need no copy
        texts = aed_greedy(Story(1), encoded, lengths).lengths
        order = texts.argsort(descending=True)
        encoded, lengths = encoded[order], lengths[order]
    before = encoded.clone(), lengths.clone()
    for options in ({}, {"confidence": True}, {"most": 3}):
        story = Watched(1)
        found = aed_greedy(story, encoded, lengths, **options)
        same(found, aed_greedy_reference(Story(1), encoded, lengths, **options))
        assert story.rows == sorted(story.rows, reverse=True)
        going = [int((found.lengths >= step).sum()) for step in range(len(story.rows))]
        assert all(
            rows <= 1 + going / 0.75
            for rows, going in zip(story.rows, going, strict=True)
        )
    assert torch.equal(encoded, before[0]) and torch.equal(lengths, before[1])


def test_what_is_compared_has_texts_of_many_lengths(defined):
    lengths = [length for _, _, wanted in defined for length in wanted.lengths.tolist()]
    assert len(set(lengths)) > 4  # silence, labels and what the limit cuts off
    assert len({tuple(row) for _, _, wanted in defined for row in wanted.tokens()}) > 8


def test_labels_are_the_best_tokens_of_teacher_forcing_behind_prompts_of_any_length():
    model = random_model(eos=3.0)
    encoded, lengths = heard(4, 6, least=1)
    for P in (1, 5, 9):
        prompt = torch.randint(3, V, (4, P), generator=torch.Generator().manual_seed(P))
        found = aed_greedy(model, encoded, lengths, prompt=prompt, most=7)
        same(
            found, aed_greedy_reference(model, encoded, lengths, prompt=prompt, most=7)
        )
        tokens = torch.cat([prompt, found.labels.clamp(min=0)], 1)
        with torch.no_grad():
            logp = model.logits(encoded, lengths, tokens).log_softmax(-1)[:, P - 1 :]
        for b, labels in enumerate(found.tokens()):
            said = [*labels, EOS] if found.ended[b] else labels
            assert logp[b].argmax(-1)[: len(said)].tolist() == said
            score = sum(logp[b, u, token] for u, token in enumerate(said))
            torch.testing.assert_close(
                found.scores[b].double(), score, rtol=1e-5, atol=1e-5
            )


def test_one_prompt_is_that_of_all_and_none_is_bos():
    story = Story(3)
    encoded, lengths = frames(4, 5)
    of_all = aed_greedy(story, encoded, lengths, prompt=[1, 4, 5])
    same(aed_greedy(story, encoded, lengths, prompt=[[1, 4, 5]] * 4), of_all)
    same(aed_greedy(story, encoded, lengths, prompt=torch.tensor([1, 4, 5])), of_all)
    plain = aed_greedy(story, encoded, lengths)
    same(aed_greedy(story, encoded, lengths, prompt=[1]), plain)
    assert plain.tokens() != of_all.tokens()


def test_neither_padding_nor_the_rest_of_the_batch_changes_a_token():
    model = random_model(4, eos=3.0)
    encoded, lengths = heard(6, 7, 4)
    ways = {"confidence": True, "most": 12}
    wanted = aed_greedy(model, encoded, lengths, **ways)
    behind = torch.arange(7) >= lengths[:, None]
    found = aed_greedy(
        model, encoded.masked_fill(behind[..., None], torch.nan), lengths, **ways
    )
    same(found, wanted)
    for b in range(6):
        row = slice(b, b + 1)
        alone = aed_greedy(model, encoded[row], lengths[row], **ways)
        assert alone.tokens()[0] == wanted.tokens()[b]
        torch.testing.assert_close(
            alone.scores, wanted.scores[row], rtol=1e-5, atol=1e-5
        )


def test_texts_without_end_are_returned_and_flagged_and_eos_behind_the_limit_counts():
    encoded, lengths = frames(8, 5, least=1)
    whole = aed_greedy(Story(1), encoded, lengths)
    longest = int(whole.lengths.max())
    assert longest > 3
    for most in (1, 3, longest):
        cut = aed_greedy(Story(1), encoded, lengths, most=most)
        same(cut, aed_greedy_reference(Story(1), encoded, lengths, most=most))
        assert cut.tokens() == [labels[:most] for labels in whole.tokens()]
        assert cut.ended.tolist() == (whole.ended & (whole.lengths <= most)).tolist()
        missing = int((~cut.ended).sum())
        assert (f"no end in {missing} of 8" in cut.impl) == (missing > 0)
    endless = Story(1, eos_share=0)
    found = aed_greedy(endless, encoded, lengths)
    assert (
        found.lengths.tolist() == (lengths + 50).tolist()
    )  # 50 more than it has frames
    far = torch.cat([encoded] * 10, 1)
    found = aed_greedy(endless, far, torch.full((8,), 50))
    assert (
        found.lengths.tolist() == [63] * 8
    )  # what there are positions for, behind bos


def test_nan_ends_a_row_and_is_said_and_the_others_go_on():
    encoded, lengths = frames(16, 5, least=1)
    story = Story(2, nan_share=10)
    found = aed_greedy(story, encoded, lengths, confidence=True)
    same(found, aed_greedy_reference(story, encoded, lengths, confidence=True))
    broken = found.scores.isnan()
    assert 0 < broken.sum() < 16
    assert not (found.ended & broken).any()
    assert f"; no end in {int((~found.ended).sum())} of 16" in found.impl
    model = random_model(4, eos=3.0)
    encoded, lengths = heard(3, 7, 4, least=1)
    wanted = aed_greedy(model, encoded, lengths, most=9)
    encoded[1, 0] = torch.nan
    found = aed_greedy(model, encoded, lengths, most=9)
    assert found.tokens() == [wanted.tokens()[0], [], wanted.tokens()[2]]
    assert found.scores.isnan().tolist() == [False, True, False]


def test_nothing_to_hear_gives_nothing():
    for T, confidence in product((0, 3), (False, True)):
        encoded = torch.zeros(2, T, WIDTH)
        lengths = torch.zeros(2, dtype=torch.int32)
        found = aed_greedy(random_model(dtype=torch.float32), encoded, lengths)
        assert found.tokens() == [[], []]
        assert found.scores.tolist() == [0, 0]
        assert found.ended.all()
        found = aed_greedy(Story(), encoded, lengths, confidence=confidence)
        assert (found.confidence is None) != confidence


def test_results_are_ordinary_tensors_and_modes_stay():
    encoded, lengths = heard(3, 4)
    model = random_model(dropout=0.5)
    for training in (True, False):
        model.train(training)
        model.encoder.eval()
        before = [module.training for module in model.modules()]
        found = aed_greedy(model, encoded, lengths, confidence=True)
        assert not any(part.is_inference() for part in (*found.parts(), found.ended))
        assert [module.training for module in model.modules()] == before


def test_half_precision_and_autocast_decode():
    model = random_model(dtype=torch.bfloat16)
    exact = random_model(dtype=torch.float32)
    encoded, lengths = heard(3, 4, dtype=torch.bfloat16)
    options = {"most": 5, "confidence": True}
    found = aed_greedy(model, encoded, lengths, **options)
    with torch.autocast("cpu", torch.bfloat16):
        cast = aed_greedy(exact, encoded.float(), lengths, **options)
    for hypotheses in (found, cast):
        assert hypotheses.scores.dtype == torch.float32
        assert hypotheses.scores.isfinite().all()
        assert hypotheses.lengths.max() > 0


# ---- drafts


def drafts_of(rows):
    """Drafts that are right, wrong somewhere, too long or too short, by name."""
    other = [[3 + (label - 2) % (V - 3) for label in row] for row in rows]
    return {
        "empty": [[] for _ in rows],
        "right": rows,
        "wrong at first": [
            [*o[:1], *row[1:]] for row, o in zip(rows, other, strict=True)
        ],
        "wrong at last": [
            [*row[:-1], *o[-1:]] for row, o in zip(rows, other, strict=True)
        ],
        "all wrong": other,
        "behind the end": [[*row, 5, 6, 7] for row in rows],
        "beginning": [row[: len(row) // 2] for row in rows],
        "of its own kind each": [
            (row, o, row[:1], [*row, 4], [])[b % 5]
            for b, (row, o) in enumerate(zip(rows, other, strict=True))
        ],
        "endless": [[5] * 90 for _ in rows],
    }


@pytest.mark.parametrize("kind", ["story", "random", "nan"])
def test_a_draft_changes_nothing(kind):
    if kind == "random":
        model = random_model(1, eos=3.0)
        encoded, lengths = heard(7, 6, 1)
    else:
        model = Story(5, nan_share=10 * (kind == "nan"))
        encoded, lengths = frames(7, 6, 1)
    for prompt, most in [(None, 12), ([1, 4, 5], 12), ([1, 4, 5], 2)]:
        options = {"prompt": prompt, "most": most, "confidence": True}
        wanted = aed_greedy(model, encoded, lengths, **options)
        for rows in drafts_of(wanted.tokens()).values():
            draft = as_draft(rows)
            same(aed_greedy(model, encoded, lengths, draft=draft, **options), wanted)


def test_a_right_draft_takes_one_call_and_a_wrong_one_no_more_than_none():
    story = Story(5)
    encoded, lengths = frames(7, 6, 1, least=1)
    wanted = aed_greedy(story, encoded, lengths)
    longest = int(wanted.lengths.max())
    assert story.calls == [1] * (longest + 1)
    calls = {}
    for name, rows in drafts_of(wanted.tokens()).items():
        story.calls.clear()
        found = aed_greedy(story, encoded, lengths, draft=as_draft(rows))
        assert ("draft" in found.impl) == (name != "empty")
        calls[name] = list(story.calls)
    assert calls["right"] == [longest + 1]
    assert calls["behind the end"] == [longest + 4]
    assert calls["wrong at last"] == [longest + 1, 1]
    assert calls["beginning"] == [longest // 2 + 1] + [1] * (longest - longest // 2)
    assert len(calls["all wrong"]) <= len(calls["empty"]) == longest + 1


# ---- what is refused


@pytest.mark.parametrize(("changes", "said"), [
    ({"prompt": [1] * 64}, "^prompt: expected 1 to 63 tokens, so that a label fits in most=64, got 64"),
    ({"prompt": [11]}, "^prompt: expected tokens from 0 to below V=11, got 11 to 11"),
    ({"most": 0}, "^most: expected 1 to 63"),
    ({"draft": [[3], [3], [3]]}, "^draft: expected Hypotheses"),
    ({"draft": as_draft([[3], [3]])}, r"^draft.labels: expected shape \(B=3, N\), got \(2, 1\)"),
    ({"lengths": torch.tensor([1, 2, 5])}, "^lengths: expected 0 to T=4 frames"),
    ({"encoded": torch.zeros(3, 4, WIDTH).long()}, "^encoded: expected a float dtype of 16"),
    ({"encoded": torch.zeros(3, 4)}, "^encoded: expected shape"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(changes, said):
    call = {
        "encoded": torch.zeros(3, 4, WIDTH),
        "lengths": torch.tensor([4, 0, 2]),
    } | changes
    with pytest.raises(ValueError, match=said):
        aed_greedy(Story(), **call)


def test_a_model_of_another_kind_is_refused(make):
    batch = torch.zeros(1, 2, WIDTH), torch.tensor([2])
    with pytest.raises(
        ValueError, match=r"^model: .* without bos, eos, most, .*remember"
    ):
        aed_greedy(make("lstm", 0), *batch)
