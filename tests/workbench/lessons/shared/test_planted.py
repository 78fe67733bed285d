"""Planted models: every decoder finds the planted labels, with a margin, at the density of speech."""

import pytest
import torch

from asrkit.decoders import aed_greedy, ctc_greedy, transducer_greedy
from asrkit.decoders.transducer import STRATEGIES
from asrkit.workbench.lessons.shared.planted import (
    ctc_log_probs,
    label_frames,
    planted,
    planted_decoder,
    planted_text,
)

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"V": 33, "width": 240}
SMALL_DECODER = {"V": 33, "width": 112, "layers": 3, "heads": 2, "most": 64}
DURATIONS = [(), (0, 1, 2, 3, 4), (0, 1, 2, 4, 8)]


@pytest.fixture(scope="module")
def decoder():
    return planted_decoder(**SMALL_DECODER)


class Watched:
    """A model that records the smallest margin of the best token, and of the best duration."""

    def __init__(self, model):
        self.model, self.margin = model, float("inf")

    def __getattr__(self, name):
        return getattr(self.model, name)

    def watch(self, logits):
        first, second = logits.float().topk(2).values.unbind(-1)
        self.margin = min(self.margin, (first - second).min().item())

    def join(self, encoded, predicted):
        logits = self.model.join(encoded, predicted)
        for part in logits.split([self.blank + 1, len(self.durations)], -1):
            if part.shape[-1]:
                self.watch(part)
        return logits

    def step(self, *given, **options):
        logits, state = self.model.step(*given, **options)
        self.watch(logits[:, -1])
        return logits, state


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("durations", [(), (0, 1, 2, 4, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_strategy_finds_the_planted_labels(strategy, durations, dtype):
    plan = planted(5, 60, durations=durations, **SMALL).to("cpu", dtype)
    assert plan.lengths.tolist() == [60, 52, 45, 37, 30]
    assert all(plan.labels)
    found = transducer_greedy(plan.model, plan.encoded, plan.lengths, strategy=strategy)
    assert found.tokens() == plan.labels
    rows = zip(found.frames.tolist(), found.lengths.tolist(), strict=True)
    assert [row[:n] for row, n in rows] == plan.frames


@pytest.mark.parametrize("durations", DURATIONS, ids=str)
@pytest.mark.parametrize("sizes", [SMALL, {}, {**SMALL, "layers": 2}], ids=str)
def test_rounding_does_not_change_a_choice(durations, sizes):
    plan = planted(2, 60, durations=durations, seed=1, **sizes)
    for dtype in (torch.float32, torch.bfloat16):
        rounded = plan.to("cpu", dtype)
        watched = Watched(rounded.model)
        inputs = (watched, rounded.encoded, rounded.lengths)
        found = transducer_greedy(*inputs, strategy="one_by_one")
        assert found.tokens() == plan.labels
        assert watched.margin > 4  # nats


@pytest.mark.parametrize("durations", DURATIONS, ids=str)
def test_joints_are_those_of_the_definition(durations):
    plan = planted(4, 60, durations=durations, lengths=[60, 1, 30, 2], **SMALL)
    calls = []
    watched = Watched(plan.model)
    watched.join = lambda *inputs: calls.append(1) or plan.model.join(*inputs)
    transducer_greedy(watched, plan.encoded, plan.lengths, strategy="one_by_one")
    assert len(calls) == plan.joints()


def test_labels_are_distributed_as_in_speech():
    frames = torch.tensor(label_frames(10_000, 0))
    assert len(frames) / 10_000 == pytest.approx(0.28, rel=0.05)
    assert max(torch.bincount(frames)) == 2
    gaps = frames.diff().double()
    assert gaps.max() > 12  # pauses of more than a second
    # in bursts: a Poisson process has the same of both at most
    assert gaps.std() > gaps.mean()


def test_ctc_finds_the_same_labels_within_the_utterances():
    plan = planted(40, 60, **SMALL)
    found = ctc_greedy(ctc_log_probs(plan), plan.lengths)
    assert found.tokens() == plan.labels


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_rounding_does_not_change_a_token(dtype):
    decoder = planted_decoder(seed=1, **SMALL_DECODER)
    for T in (50, 25):
        plan = planted_text(decoder, 1, T, seed=T).to("cpu", dtype)
        watched = Watched(plan.model)
        found = aed_greedy(watched, plan.encoded, plan.lengths, prompt=plan.prompt)
        assert found.tokens() == plan.labels
        assert watched.margin > 2  # nats


@pytest.mark.parametrize("B, T, sizes", [
    (1, 4, SMALL_DECODER),  # no labels
    (5, 40, SMALL_DECODER),
    (2, 60, {"V": 5248, "width": 512, "layers": 2, "heads": 8}),
    (2, 125, {"layers": 12}),
])  # fmt: skip
def test_attention_finds_texts_of_the_smallest_sizes_to_the_published(B, T, sizes):
    plan = planted_text(planted_decoder(**sizes), B, T, prompt=2)
    assert plan.lengths.tolist() == torch.linspace(T, T // 2, B).long().tolist()
    found = aed_greedy(plan.model, plan.encoded, plan.lengths, prompt=plan.prompt)
    assert found.tokens() == plan.labels
    assert found.ended.all()


@pytest.mark.parametrize("errors", [0.0, 0.2, 1.0])
def test_the_ctc_head_gets_the_requested_share_wrong(decoder, errors):
    plan = planted_text(decoder, 30, 50)
    best = ctc_log_probs(plan, errors).argmax(-1)
    rows = zip(best, plan.frames, plan.labels, strict=True)
    wrong = [row[frames] != torch.tensor(labels) for row, frames, labels in rows]
    assert torch.cat(wrong).double().mean() == pytest.approx(errors, rel=0.2)


def test_a_width_too_small_for_distinct_codes_is_refused():
    with pytest.raises(
        ValueError, match="^width: expected at least 224 units for V=33"
    ):
        planted(3, 40, durations=(0, 1), V=33, width=200)
    wanted = "width: expected at least 100 for V=33 and most=64"
    with pytest.raises(ValueError, match=wanted):
        planted_decoder(**SMALL_DECODER | {"width": 96})
