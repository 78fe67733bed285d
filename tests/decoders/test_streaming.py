"""Frames in pieces: wherever an utterance is cut, its pieces decode as the whole."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asrkit.decoders import transducer_greedy
from asrkit.decoders.states import state_tensors
from asrkit.decoders.transducer import STRATEGIES
from asrkit.decoders.transducer.steps import Carry

NAMES = sorted(STRATEGIES)
CASES = [
    ("stateless", ()),
    ("lstm", (0, 1, 2, 4, 8)),
    ("foreign", (2,)),
    ("table", (0, 7)),
]


def pieces(encoded, lengths, cuts):
    """Chunks (frames (B, T', E), lengths (B,)) of encoded (B, T, E), cut for each utterance at its own row of cuts (B, n)."""
    first = torch.zeros_like(lengths)[:, None]
    edges = torch.cat([first, cuts.sort(1).values, lengths[:, None]], 1)
    for start, end in zip(edges.T, edges.T[1:], strict=False):
        size = end - start
        B, _, E = encoded.shape
        chunk = encoded.new_full((B, int(size.max()) + 1, E), math.nan)
        for b in range(B):
            chunk[b, : size[b]] = encoded[b, start[b] : end[b]]
        yield chunk, size


def rows(found):
    """(label, frame, duration, confidence) of each label, one list per utterance."""
    parts = torch.stack(
        [found.labels, found.frames, found.durations, found.confidence], 2
    )
    return [
        part[:n] for part, n in zip(parts.tolist(), found.lengths.tolist(), strict=True)
    ]


@pytest.mark.parametrize(("kind", "durations"), CASES)
@given(
    seed=st.integers(0, 10**6),
    B=st.integers(1, 5),
    T=st.integers(0, 12),
    n=st.integers(1, 6),
    most=st.sampled_from((1, 2, 5)),
    bias=st.sampled_from((-6.0, 0.5)),
)
def test_pieces_decode_as_the_whole_by_any_strategy_in_any_batch(
    make, speak, kind, durations, seed, B, T, n, most, bias
):
    model = make(kind, seed, durations=durations, bias=bias)
    encoded, lengths = speak(kind, B, T, seed)
    how = {"max_symbols": most, "confidence": True}
    whole = transducer_greedy(model, encoded, lengths, strategy="one_by_one", **how)
    generator = torch.Generator().manual_seed(seed)
    cuts = (torch.rand(B, n, generator=generator) * (lengths[:, None] + 1)).long()
    labels = [[] for _ in range(B)]
    scores = torch.zeros(B)
    carry = None
    order = torch.arange(B)
    for turn, (chunk, size) in enumerate(pieces(encoded, lengths, cuts)):
        found = transducer_greedy(
            model,
            chunk[order],
            size[order],
            carry=carry,
            strategy=NAMES[(seed + turn) % len(NAMES)],
            window=1 + turn,
            **how,
        )
        for b, new in zip(order.tolist(), rows(found), strict=True):
            labels[b] += new
        scores[order] += found.scores
        mixed = torch.randperm(B, generator=generator)
        order = order[mixed]
        carry = found.carry.select(mixed)
        carry = Carry.join([carry.select(slice(1)), carry.select(slice(1, None))])
    for found, wanted in zip(labels, rows(whole), strict=True):
        assert [row[:3] for row in found] == [row[:3] for row in wanted]
        sure = [row[3] for row in wanted]
        assert [row[3] for row in found] == pytest.approx(sure, abs=1e-5)
    torch.testing.assert_close(scores, whole.scores, rtol=1e-5, atol=1e-5)
    wanted = state_tensors(whole.carry.select(order))
    for part, other in zip(state_tensors(carry), wanted, strict=True):
        torch.testing.assert_close(part, other, check_dtype=True)


def test_a_carry_stays_valid_after_its_frames_are_overwritten(make, speak):
    model = make("lstm", 2)
    encoded, lengths = speak("lstm", 3, 6, 2)
    first = transducer_greedy(model, encoded, lengths)
    kept = [tensor.clone() for tensor in state_tensors(first.carry)]
    for _ in range(2):
        transducer_greedy(model, encoded + 1, lengths, carry=first.carry)
        encoded.add_(1)
    for tensor, copy in zip(state_tensors(first.carry), kept, strict=True):
        assert torch.equal(tensor, copy)
