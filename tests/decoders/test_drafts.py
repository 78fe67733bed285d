"""Drafts of a CTC head: impossible labels are removed, and the result of attention does not change."""

import random
import sys
from pathlib import Path

import pytest
import torch

from asrkit.decoders import Hypotheses, aed_greedy, ctc_beam, ctc_draft, ctc_greedy

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import (
    EOS,
    OPTIONS,
    Story,
    V,
    as_draft,
    frames,
    random_frames,
    random_model,
    same,
)

BOS = 1


def test_labels_that_cannot_occur_in_a_text_are_removed():
    rows = [
        [(3, 0, 1), (EOS, 2, 2), (V, 4, 1), (5, 6, 3)],
        [(BOS, 0, 1)],
        [(4, 1, 1), (6, 3, 2)],
        [],
    ]
    found = Hypotheses.from_lists(rows, [torch.zeros(())] * 4, "by hand")
    draft = ctc_draft(Story(), found)
    assert draft.labels.tolist() == [[3, 5], [-1, -1], [4, 6], [-1, -1]]
    assert draft.frames.tolist() == [[0, 6], [-1, -1], [1, 3], [-1, -1]]
    assert draft.durations.tolist() == [[1, 3], [-1, -1], [1, 2], [-1, -1]]
    assert draft.lengths.tolist() == [2, 0, 2, 0]
    assert draft.impl == "by hand, as a draft"
    assert torch.equal(draft.scores, found.scores)


@pytest.mark.parametrize("B", [1, 7])
@pytest.mark.parametrize("seed", range(6))
def test_any_draft_of_a_ctc_head_gives_the_text_without_a_draft(B, seed):
    encoded, lengths = random_frames(B, 12, least=1)
    model = random_model()
    wanted = aed_greedy(model, encoded, lengths, **OPTIONS)
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(B, 12, V + 1, generator=generator, dtype=torch.float64)
    scores = scores.log_softmax(-1)
    for found in (ctc_greedy(scores, lengths), ctc_beam(scores, lengths, width=3)):
        draft = ctc_draft(model, found)
        got = aed_greedy(model, encoded, lengths, draft=draft, **OPTIONS)
        same(got, wanted)
        assert "draft" in got.impl or not draft.labels.shape[1]


def test_a_right_draft_with_special_tokens_in_between_costs_one_call():
    batch = frames(4, 6, least=1)
    story = Story()
    wanted = aed_greedy(story, *batch, max_labels=9)
    assert wanted.lengths.max() > 1
    mixed = [[t for label in row for t in (BOS, label, V)] for row in wanted.tokens()]
    story.calls.clear()
    draft = ctc_draft(story, as_draft(mixed))
    same(aed_greedy(story, *batch, max_labels=9, draft=draft), wanted)
    assert len(story.calls) == 1
    # unfiltered drafts take more calls, and give the same text
    ends = [[*row, EOS, EOS] for row in wanted.tokens()]
    for rows in (mixed, ends):
        same(aed_greedy(story, *batch, max_labels=9, draft=as_draft(rows)), wanted)


def other(token):
    """A wrong token."""
    return 3 + (token - 2) % (V - 3)


def mistaken(row, seed, share):
    """A text with tokens that are wrong, too many or missing."""
    rng = random.Random(seed)
    found = []
    for token in row:
        wrong = rng.choice([[other(token)], [other(token), token], []])
        found += wrong if rng.random() < share else [token]
    return found


@pytest.mark.parametrize("share", [0.05, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("B", [1, 5])
def test_drafts_continue_after_mistakes_and_nothing_changes(B, share):
    calls = without = 0
    for seed in range(4):
        batch = frames(B, 60, seed, least=1)
        # of seed 0 no text ends before its limit
        story = Story(seed, eos_share=2 * seed)
        options = {"max_labels": 40, "confidence": True}
        wanted = aed_greedy(story, *batch, **options)
        without += len(story.calls)
        rows = [mistaken(row, seed + n, share) for n, row in enumerate(wanted.tokens())]
        story.calls.clear()
        same(aed_greedy(story, *batch, draft=as_draft(rows), **options), wanted)
        calls += len(story.calls)
    assert calls <= (0.6 if (B, share) == (1, 0.05) else 1) * without


def test_a_text_that_fills_its_room_waits_for_others_whose_drafts_continue():
    """Their drafts have no room in its state, and must not overwrite its last token."""
    compared = 0
    for seed in range(20):
        story = Story(seed, eos_share=4)
        batch = frames(3, 60, seed, least=60)
        first, *others = aed_greedy(story, *batch, max_labels=40).tokens()
        most = len(first)
        if 3 < most <= min(map(len, others)):
            compared += 1
            wanted = aed_greedy(story, *batch, max_labels=most)
            rows = [[*first[:-1], other(first[-1])]]
            rows += [[other(row[0]), *row[1:]] for row in wanted.tokens()[1:]]
            same(
                aed_greedy(story, *batch, max_labels=most, draft=as_draft(rows)), wanted
            )
    assert compared
