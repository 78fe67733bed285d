"""Planted texts: every way of decoding by attention says what was planted, and scores tell who lost something."""

import pytest
import torch

from asrkit.decoders import aed_greedy, ctc_greedy
from asrkit.models.attention_memory import CROSS, PAST
from asrkit.workbench.bench.planted_attention import (
    ctc_text,
    planted_decoder,
    planted_text,
)

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"V": 33, "width": 112, "layers": 3, "heads": 2, "most": 64}


@pytest.fixture(scope="module")
def decoder():
    return planted_decoder(**SMALL)


class Watched:
    """A model that notes by how much the best token is ahead of the next."""

    def __init__(self, model):
        self.model, self.margins = model, []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def follow(self, *given, **options):
        logits, state = self.model.follow(*given, **options)
        first, second = logits[:, -1].float().topk(2).values.unbind(-1)
        self.margins.append(first - second)
        return logits, state


@pytest.mark.parametrize("past", PAST)
@pytest.mark.parametrize("cross", CROSS)
def test_every_way_says_what_was_planted_and_with_the_same_scores(decoder, cross, past):
    plan = planted_text(decoder, 5, 40, prompt=3)
    given = (plan.model, plan.encoded, plan.lengths)
    found = aed_greedy(*given, prompt=plan.prompt, cross=cross, past=past)
    assert found.tokens() == plan.labels and found.ended.all()
    assert plan.lengths.tolist() == [40, 35, 30, 25, 20] and all(plan.labels)
    wanted = aed_greedy(*given, prompt=plan.prompt)
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("seed", range(3))
def test_rounding_is_far_from_changing_a_choice(dtype, seed):
    plan = planted_text(planted_decoder(seed=seed, **SMALL), 4, 50, seed=seed).to(
        "cpu", dtype
    )
    for b, labels in enumerate(plan.labels):
        watched = Watched(plan.model)
        row = slice(b, b + 1)
        found = aed_greedy(
            watched, plan.encoded[row], plan.lengths[row], prompt=plan.prompt
        )
        assert found.tokens() == [labels]
        assert len(watched.margins) == len(labels) + 1
        assert min(watched.margins) > 2  # nats


@pytest.mark.parametrize(("B", "T", "sizes"), [
    (1, 4, SMALL), (33, 20, SMALL), (2, 250, {"layers": 12}),
    (2, 125, {"V": 5248, "width": 512, "layers": 2, "heads": 8}),
], ids=["no labels", "many", "full size", "a large vocabulary"])  # fmt: skip
def test_sizes_from_the_smallest_to_the_published(B, T, sizes):
    plan = planted_text(planted_decoder(**sizes), B, T, prompt=2)
    found = aed_greedy(plan.model, plan.encoded, plan.lengths, prompt=plan.prompt)
    assert found.tokens() == plan.labels
    assert plan.steps() == 1 + found.lengths.max()


@pytest.mark.parametrize("errors", [0.0, 0.2, 1.0])
def test_the_ctc_head_mishears_the_share_that_was_asked_for(decoder, errors):
    plan = planted_text(decoder, 30, 50)
    ctc = ctc_text(plan, errors)
    rows = zip(ctc.argmax(-1), plan.frames, plan.labels, strict=True)
    wrong = torch.cat(
        [best[frames] != torch.tensor(labels) for best, frames, labels in rows]
    )
    assert wrong.double().mean() == pytest.approx(errors, rel=0.2)
    if not errors:
        assert ctc_greedy(ctc, plan.lengths).tokens() == plan.labels


def test_codes_that_cannot_be_kept_apart_are_refused():
    with pytest.raises(
        ValueError, match="width: expected at least 100 for V=33 and most=64"
    ):
        planted_decoder(**SMALL | {"width": 96})
