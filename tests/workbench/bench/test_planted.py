"""Planted models: every strategy decodes what was planted, with a margin, at the density of speech."""

import pytest
import torch

from asrkit.decoders import ctc_greedy, transducer_greedy
from asrkit.decoders.transducer import STRATEGIES
from asrkit.workbench.bench.planted import ctc_log_probs, planted, speech

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"V": 33, "width": 240}
DURATIONS = [(), (0, 1, 2, 3, 4), (0, 1, 2, 4, 8)]


class Watched:
    """A model that notes by how much the best token, and the best duration, is ahead of the next."""

    def __init__(self, model):
        self.blank, self.durations, self.predict = (
            model.blank,
            model.durations,
            model.predict,
        )
        self.model, self.margin = model, float("inf")

    def join(self, encoded, predicted):
        logits = self.model.join(encoded, predicted)
        for part in logits.split([self.blank + 1, len(self.durations)], -1):
            if part.shape[-1]:
                first, second = part.float().topk(2).values.unbind(-1)
                self.margin = min(self.margin, (first - second).min().item())
        return logits


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("durations", DURATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_strategy_finds_what_was_planted(strategy, durations, dtype):
    plan = planted(5, 60, durations=durations, **SMALL)
    found = transducer_greedy(
        plan.model.to(dtype), plan.encoded.to(dtype), plan.lengths, strategy=strategy
    )
    assert found.tokens() == plan.labels
    assert [
        row[:n]
        for row, n in zip(found.frames.tolist(), found.lengths.tolist(), strict=True)
    ] == plan.frames
    assert all(plan.labels) and plan.lengths.tolist() == [60, 52, 45, 37, 30]


@pytest.mark.parametrize("durations", DURATIONS, ids=str)
@pytest.mark.parametrize(
    ("B", "T", "sizes"), [(5, 60, SMALL), (2, 125, {})], ids=["small", "full size"]
)
def test_rounding_is_far_from_changing_a_choice(durations, B, T, sizes):
    for seed in range(3):
        plan = planted(B, T, durations=durations, seed=seed, **sizes)
        for dtype in (torch.float32, torch.bfloat16):
            watched = Watched(plan.model.to(dtype))
            found = transducer_greedy(
                watched, plan.encoded.to(dtype), plan.lengths, strategy="one_by_one"
            )
            assert found.tokens() == plan.labels
            assert watched.margin > 4  # nats


def test_labels_lie_as_in_speech():
    frames = [speech(10_000, 0.28, seed) for seed in range(4)]
    assert sum(map(len, frames)) / 40_000 == pytest.approx(0.28, rel=0.05)
    gaps = torch.cat([torch.tensor(row).diff() for row in frames])
    assert (
        gaps.min() == 0 and (gaps > 12).any()
    )  # two on a frame, and pauses of more than a second
    assert (
        gaps.double().std() > gaps.double().mean()
    )  # in bursts: a Poisson process has the same of both at most
    assert max(torch.bincount(torch.tensor(frames[0]))) == 2


def test_ctc_finds_the_same_labels():
    plan = planted(5, 60, **SMALL)
    found = ctc_greedy(ctc_log_probs(plan), torch.full((5,), 60))
    assert found.tokens() == plan.labels


@pytest.mark.parametrize(("change", "wanted"), [
    ({"durations": (1, 2)}, "durations: expected none, or 0 and 1 among them, got (1, 2)."),
    ({"width": 200}, "width: expected at least 224 units for V=33, got 200."),
    ({"B": 0}, "B, T, V: expected whole numbers of at least 1, 2 and 6, got (0, 40, 33)."),
    ({"labels_per_second": float("nan")},
     "labels_per_second, frames_per_second: expected above 0, two labels a frame at most, got (nan, 12.5)."),
    ({"labels_per_second": 30.0},
     "labels_per_second, frames_per_second: expected above 0, two labels a frame at most, got (30.0, 12.5)."),
])  # fmt: skip
def test_bad_input_is_one_line(change, wanted):
    with pytest.raises(ValueError) as error:
        planted(**{"B": 3, "T": 40, "durations": (0, 1), **SMALL, **change})
    assert str(error.value) == wanted
