"""Planted texts: every way of decoding by attention says what was planted, and scores tell who lost something."""

import pytest
import torch

from asrkit.decoders import aed_beam, aed_greedy, ctc_greedy
from asrkit.models.attention_memory import CROSS, PAST, KeptPast
from asrkit.workbench.bench.planted_attention import (
    EOS,
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_rounding_is_far_from_changing_a_choice(dtype, seed):
    plan = planted_text(planted_decoder(seed=seed, **SMALL), 4, 50, seed=seed).to("cpu", dtype)
    for b, labels in enumerate(plan.labels):
        watched = Watched(plan.model)
        row = slice(b, b + 1)
        found = aed_greedy(watched, plan.encoded[row], plan.lengths[row], prompt=plan.prompt)
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


def test_a_decoder_that_loses_keys_of_the_past_has_other_scores(decoder, monkeypatch):
    """The script alone would not tell: what says it asks by position and looks at frames."""
    plan = planted_text(decoder, 3, 40)
    given = (plan.model, plan.encoded, plan.lengths)
    wanted = aed_greedy(*given)
    mix = KeptPast.mix

    def forgetful(self, number, layer, x, span):
        self.keys_values[number][:, 0] = 0
        return mix(self, number, layer, x, span)

    monkeypatch.setattr(KeptPast, "mix", forgetful)
    found = aed_greedy(*given)
    assert found.tokens() == wanted.tokens() == plan.labels
    assert (found.scores - wanted.scores).norm() > 2e-3 * wanted.scores.norm()


def test_a_beam_says_the_same(decoder):
    plan = planted_text(decoder, 3, 30)
    found = aed_beam(plan.model, plan.encoded, plan.lengths, width=3)
    assert found.tokens() == plan.labels


def test_labels_are_as_dense_as_asked_for_and_end_before_eos(decoder):
    plan = planted_text(decoder, 40, 50)
    frames = sum(plan.lengths.tolist())
    assert 0.22 < sum(map(len, plan.labels)) / frames < 0.3  # 3.5 labels at 12.5 frames a second
    for labels, places, length in zip(plan.labels, plan.frames, plan.lengths, strict=True):
        assert places == sorted(set(places)) and all(place < length - 1 for place in places)
        assert EOS not in labels


def test_a_plan_hangs_on_its_seeds_only():
    state = torch.get_rng_state()
    one, same, other = (planted_decoder(seed=seed, **SMALL) for seed in (1, 1, 2))
    for a, b in zip(one.model.parameters(), same.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.codes, other.codes)
    first, again, another = (planted_text(one, 3, 30, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.encoded, again.encoded) and first.labels != another.labels
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("errors", [0.0, 0.2, 1.0])
def test_the_ctc_head_mishears_the_share_that_was_asked_for(decoder, errors):
    plan = planted_text(decoder, 30, 50)
    ctc = ctc_text(plan, errors)
    rows = zip(ctc.argmax(-1), plan.frames, plan.labels, strict=True)
    wrong = torch.cat([best[frames] != torch.tensor(labels) for best, frames, labels in rows])
    assert wrong.double().mean() == pytest.approx(errors, rel=0.2)
    if not errors:
        assert ctc_greedy(ctc, plan.lengths).tokens() == plan.labels


@pytest.mark.parametrize(("call", "wanted"), [
    (lambda: planted_decoder(**SMALL | {"width": 96}),
     "width: expected at least 100 for V=33 and most=64, got 96."),
    (lambda: planted_decoder(**SMALL | {"heads": 3}),
     "width, heads: expected a multiple of an even number of heads, got (112, 3)."),
    (lambda: planted_decoder(**SMALL | {"V": 5}),
     "V, most: expected whole numbers of at least 6 and 2, got (5, 64)."),
    (lambda: planted_text(planted_decoder(**SMALL), 0, 40),
     "B, T: expected whole numbers of at least 1 and 4, got (0, 40)."),
    (lambda: planted_text(planted_decoder(**SMALL), 1, 60, prompt=5),
     "prompt: expected 1 to most - T = 4 tokens, got 5. Make a decoder with a larger most."),
    (lambda: ctc_text(planted_text(planted_decoder(**SMALL), 1, 9), 2.0),
     "errors: expected a share from 0 to 1, got 2.0."),
])  # fmt: skip
def test_bad_input_is_one_line(call, wanted):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == wanted
