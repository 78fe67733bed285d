"""Drafts of a CTC head: what no text holds is left out, and attention's result does not change."""

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
    heard,
    random_model,
    same,
)

pytestmark = pytest.mark.usefixtures("one_thread")
BOS = 1


def test_labels_that_no_text_holds_are_left_out_and_the_rest_moves_up():
    rows = [
        [(3, 0, 1), (EOS, 2, 2), (V, 4, 1), (5, 6, 3)],
        [(BOS, 0, 1)],
        [(4, 1, 1), (6, 3, 2)],
        [],
    ]
    given = Hypotheses.from_lists(rows, [torch.zeros(())] * 4, "by hand")
    draft = ctc_draft(Story(), given)
    assert draft.tokens() == [[3, 5], [], [4, 6], []]
    assert draft.labels.tolist() == [[3, 5], [-1, -1], [4, 6], [-1, -1]]
    assert draft.frames.tolist() == [[0, 6], [-1, -1], [1, 3], [-1, -1]]
    assert draft.durations.tolist() == [[1, 3], [-1, -1], [1, 2], [-1, -1]]
    assert draft.impl == "by hand, as a draft" and torch.equal(
        draft.scores, given.scores
    )


def test_nothing_heard_is_an_empty_draft():
    draft = ctc_draft(Story(), as_draft([[], []]))
    assert draft.labels.shape == (2, 0) and draft.tokens() == [[], []]


@pytest.mark.parametrize("B", [1, 7])
def test_whatever_a_ctc_head_hears_the_text_is_that_without_a_draft(B):
    encoded, lengths = heard(B, 12, least=1)
    model = random_model()
    wanted = aed_greedy(model, encoded, lengths, **OPTIONS)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        scores = 3 * torch.randn(B, 12, V + 1, generator=generator, dtype=torch.float64)
        scores = scores.log_softmax(-1)
        for found in (ctc_greedy(scores, lengths), ctc_beam(scores, lengths, width=3)):
            draft = ctc_draft(model, found)
            got = aed_greedy(model, encoded, lengths, draft=draft, **OPTIONS)
            same(got, wanted)
            assert "draft" in got.impl or not draft.labels.shape[1]


def test_a_head_that_hears_the_text_and_special_tokens_between_costs_one_call():
    encoded, lengths = frames(4, 6, least=1)
    wanted = aed_greedy(Story(), encoded, lengths, most=9)
    # as a CTC head's labels may be
    rows = [
        [token for label in row for token in (BOS, label, V)] for row in wanted.tokens()
    ]
    story = Story()
    draft = ctc_draft(story, as_draft(rows))
    got = aed_greedy(story, encoded, lengths, most=9, draft=draft)
    assert got.tokens() == wanted.tokens() and wanted.lengths.max() > 1
    assert len(story.calls) == 1
    # as they are they take more calls, and say the same
    got = aed_greedy(story, encoded, lengths, most=9, draft=as_draft(rows))
    assert got.tokens() == wanted.tokens()
    ends = [[*row, EOS, EOS] for row in wanted.tokens()]
    got = aed_greedy(story, encoded, lengths, most=9, draft=as_draft(ends))
    assert got.tokens() == wanted.tokens() and got.ended.equal(wanted.ended)


def mistaken(row, seed, share):
    """A text with tokens that are wrong, too many or missing."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for token in row:
        kind = torch.rand(2, generator=generator).tolist()
        other = 3 + (token - 2) % (V - 3)  # another one
        if kind[0] >= share:
            found.append(token)
        elif kind[1] < 0.4:
            found.append(other)
        elif kind[1] < 0.7:
            found += [other, token]
    return found


@pytest.mark.parametrize("share", [0.05, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("B", [1, 5])
def test_behind_mistakes_a_draft_goes_on_and_nothing_changes(B, share):
    calls = without = 0
    for seed in range(4):
        encoded, lengths = frames(B, 60, seed, least=1)
        story = Story(
            seed, eos_share=2 * seed
        )  # of seed 0 no text ends before its limit
        wanted = aed_greedy(story, encoded, lengths, most=40, confidence=True)
        without += len(story.calls)
        rows = [mistaken(row, seed + n, share) for n, row in enumerate(wanted.tokens())]
        story.calls.clear()
        draft = as_draft(rows)
        got = aed_greedy(story, encoded, lengths, most=40, draft=draft, confidence=True)
        same(got, wanted)
        calls += len(story.calls)
    assert calls <= (0.6 if (B, share) == (1, 0.05) else 1) * without


def test_a_text_that_fills_its_room_waits_for_others_whose_drafts_go_on():
    """What is checked of theirs has no room in its state, and must not be put over its last token."""
    for seed in range(20):
        story = Story(seed, eos_share=4)
        encoded, lengths = frames(3, 60, seed, least=60)
        longest = aed_greedy(story, encoded, lengths, most=40)
        first, *others = longest.tokens()
        if not 3 < len(first) <= min(map(len, others)):
            continue
        wanted = aed_greedy(story, encoded, lengths, most=len(first))
        rows = [[*first[:-1], 3 + (first[-1] - 2) % (V - 3)]]
        rows += [[3 + (row[0] - 2) % (V - 3), *row[1:]] for row in wanted.tokens()[1:]]
        got = aed_greedy(story, encoded, lengths, most=len(first), draft=as_draft(rows))
        same(got, wanted)


@pytest.mark.parametrize(("change", "calls"), [
    (lambda row: [*row[:9], 3 + (row[9] - 2) % (V - 3), *row[10:]], [43, 17, 16]),
    (lambda row: [*row[:9], 3 + (row[9] - 2) % (V - 3), *row[9:-1]], [43, 17, 15, 1]),
], ids=["wrong", "too many"])  # fmt: skip
def test_behind_a_mistake_a_call_checks_sixteen_tokens(change, calls):
    encoded, lengths = frames(1, 60)
    story = Story(0, eos_share=0)
    wanted = aed_greedy(story, encoded, lengths, most=42)
    draft = as_draft([change(*wanted.tokens())])
    story.calls.clear()
    got = aed_greedy(story, encoded, lengths, most=42, draft=draft)
    assert got.tokens() == wanted.tokens()
    assert story.calls == calls
