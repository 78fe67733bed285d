"""Greedy CTC: worked examples, batched against sequential, padding and company that cannot matter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asrkit.decoders import ctc_greedy, ctc_greedy_sequential

BOTH = [ctc_greedy, ctc_greedy_sequential]


def one_hot(rows, V, blank=-1):
    """Log-probs (B, T, V) whose best path is `rows` ('_' is blank), and their lengths."""
    T = max(map(len, rows))
    logits = torch.zeros(len(rows), T, V)
    for b, row in enumerate(rows):
        for t, symbol in enumerate(row):
            logits[b, t, blank % V if symbol == "_" else int(symbol)] = 5
    return logits.log_softmax(-1), torch.tensor([len(row) for row in rows])


def same(a, b):
    for name in ("labels", "lengths", "frames"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=0)
    torch.testing.assert_close(a.scores, b.scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decode", BOTH)
def test_repeats_merge_unless_a_blank_parts_them(decode):
    rows = ["00_011", "____", "1", "", "_2_2_", "012210", "0"]
    found = decode(*one_hot(rows, 4))
    assert found.tokens() == [[0, 0, 1], [], [1], [], [2, 2], [0, 1, 2, 1, 0], [0]]
    assert [row[:n] for row, n in zip(found.frames.tolist(), found.lengths.tolist(), strict=True)] == [
        [0, 3, 4], [], [0], [], [1, 3], [0, 1, 2, 4, 5], [0]]  # fmt: skip
    best = 5 - math.log(math.exp(5) + 3)
    torch.testing.assert_close(found.scores, torch.tensor([len(row) * best for row in rows]))
    assert found.labels.shape == found.frames.shape == (7, 5)
    assert (found.labels[1] == -1).all()


@pytest.mark.parametrize("decode", BOTH)
def test_blank_may_be_any_index(decode):
    assert decode(*one_hot(["1_12"], 4, blank=0), blank=0).tokens() == [[1, 1, 2]]
    assert decode(*one_hot(["1_13"], 4, blank=2), blank=2).tokens() == [[1, 1, 3]]
    assert decode(*one_hot(["1_13"], 4, blank=2), blank=-2).tokens() == [[1, 1, 3]]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(0, 12), st.integers(1, 5), st.floats(-3, 3))
def test_batched_equals_sequential_whatever_lies_in_the_padding(seed, B, T, V, bias):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, V, generator=g)
    logits[..., -1] += bias
    log_probs, lengths = logits.log_softmax(-1), torch.randint(0, T + 1, (B,), generator=g)
    wanted = ctc_greedy_sequential(log_probs, lengths)
    same(ctc_greedy(log_probs, lengths), wanted)
    for b in range(B):
        log_probs[b, lengths[b] :] = math.nan if b % 2 else math.inf
    same(ctc_greedy(log_probs, lengths), wanted)
    same(ctc_greedy(log_probs.transpose(0, 1).contiguous().transpose(0, 1), lengths), wanted)


def test_half_precision_adds_up_its_scores_in_float32():
    log_probs, lengths = one_hot(["01_2" * 200], 4)
    for decode in BOTH:
        found = decode(log_probs.bfloat16(), lengths)
        assert found.scores.dtype == torch.float32
        torch.testing.assert_close(found.scores, log_probs.bfloat16().float().amax(-1).sum(1))


def test_a_hypothesis_may_serve_as_target_of_a_loss():
    found = ctc_greedy(*one_hot(["01", "2_"], 4))
    assert not found.labels.is_inference()
    assert not found.scores.is_inference()


@pytest.mark.parametrize("decode", BOTH)
@pytest.mark.parametrize(("change", "wanted"), [
    ({"log_probs": torch.zeros(2, 3)}, "log_probs: expected shape (B, T, V), got (2, 3)."),
    ({"log_probs": torch.zeros(0, 3, 4), "lengths": torch.zeros(0).long()},
     "log_probs: expected at least one utterance, got (0, 3, 4)."),
    ({"lengths": torch.tensor([3])}, "lengths: expected shape (B=2), got (1,)."),
    ({"lengths": torch.tensor([2, 4])}, "lengths: expected 0 to T=3 frames, got 2 to 4."),
    ({"lengths": torch.tensor([-1, 3])}, "lengths: expected 0 to T=3 frames, got -1 to 3."),
    ({"lengths": torch.zeros(2, device="meta").long()}, "lengths: expected a tensor on cpu, got meta."),
    ({"blank": 4}, "blank: expected an index of V=4 tokens, got 4."),
    ({"blank": 0.5}, "blank: expected an index of V=4 tokens, got 0.5."),
    ({"lengths": torch.tensor([3.0, 2.5])}, "lengths: expected int32 or int64, got torch.float32."),
])  # fmt: skip
def test_bad_input_is_one_line(decode, change, wanted):
    with pytest.raises(ValueError) as error:
        decode(**{"log_probs": torch.zeros(2, 3, 4), "lengths": torch.tensor([3, 2]), **change})
    assert str(error.value) == wanted
