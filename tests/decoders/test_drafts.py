"""Drafts of a CTC head: what no text holds is left out, and attention's result does not change."""

import sys
from pathlib import Path

import pytest
import torch

from asrkit.decoders import Hypotheses, aed_greedy, ctc_beam, ctc_draft, ctc_greedy

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import EOS, OPTIONS, Story, V, as_draft, frames, heard, random_model, same

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
    assert draft.impl == "by hand, as a draft" and torch.equal(draft.scores, given.scores)


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
    rows = [[token for label in row for token in (BOS, label, V)] for row in wanted.tokens()]
    story = Story()
    got = aed_greedy(story, encoded, lengths, most=9, draft=ctc_draft(story, as_draft(rows)))
    assert got.tokens() == wanted.tokens() and wanted.lengths.max() > 1
    assert len(story.calls) == 1


def test_bad_input_is_one_line():
    with pytest.raises(
        ValueError, match=r"^heard: expected Hypotheses, got list\. Try ctc_greedy\.$"
    ):
        ctc_draft(Story(), [[1]])
    with pytest.raises(ValueError, match="^model: expected bos, eos, most"):
        ctc_draft(object(), as_draft([[1]]))
