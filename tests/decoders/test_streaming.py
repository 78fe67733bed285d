"""Frames that come in pieces: wherever an utterance is cut, its pieces say what the whole says."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asrkit.decoders import transducer_greedy
from asrkit.decoders.states import state_tensors
from asrkit.decoders.transducer import STRATEGIES
from asrkit.decoders.transducer.steps import Carry

NAMES = sorted(STRATEGIES)
CASES = [
    ("stateless", ()),
    ("lstm", ()),
    ("lstm", (0, 1, 2, 4, 8)),
    ("foreign", (0, 3)),
    ("foreign", (2,)),
    ("table", (0, 7)),
]


def pieces(encoded, lengths, cuts):
    """Chunks (frames (B, T', E), lengths (B,)) of encoded (B, T, E), cut for each utterance at its own row of cuts (B, n)."""
    edges = torch.cat(
        [torch.zeros_like(lengths)[:, None], cuts.sort(1).values, lengths[:, None]], 1
    )
    for start, end in zip(edges.T, edges.T[1:], strict=False):
        size = end - start
        chunk = torch.full(
            (len(encoded), int(size.max()) + 1, encoded.shape[-1]),
            math.nan,
            dtype=encoded.dtype,
        )
        for b in range(len(encoded)):
            chunk[b, : size[b]] = encoded[b, start[b] : end[b]]
        yield chunk, size


def rows(found):
    """(label, frame, duration, confidence) of each label, a list an utterance."""
    parts = (found.labels, found.frames, found.durations, found.confidence)
    columns = zip(*(part.tolist() for part in parts), strict=True)
    return [
        [*zip(*(part[:n] for part in one), strict=True)]
        for one, n in zip(columns, found.lengths.tolist(), strict=True)
    ]


def same_rows(found, wanted):
    """Everything exactly, confidence to 1e-5."""
    for ours, theirs in zip(found, wanted, strict=True):
        assert [row[:3] for row in ours] == [row[:3] for row in theirs]
        assert [row[3] for row in ours] == pytest.approx(
            [row[3] for row in theirs], abs=1e-5
        )


@pytest.mark.parametrize(("kind", "durations"), CASES)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    B=st.integers(1, 6),
    T=st.integers(0, 14),
    n=st.integers(1, 6),
    most=st.sampled_from((1, 2, 5)),
)
def test_pieces_say_what_the_whole_says_whoever_decodes_which_in_what_company(
    make, speak, kind, durations, seed, B, T, n, most
):
    model, (encoded, lengths) = (
        make(kind, seed, durations=durations, bias=0.5),
        speak(kind, B, T, seed),
    )
    how = {"max_symbols": most, "confidence": True}
    whole = transducer_greedy(model, encoded, lengths, strategy="one_by_one", **how)
    generator = torch.Generator().manual_seed(seed)
    cuts = (torch.rand(B, n, generator=generator) * (lengths[:, None] + 1)).long()
    said, scores, carry, order = (
        [[] for _ in range(B)],
        torch.zeros(B),
        None,
        torch.arange(B),
    )
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
            said[b] += new
        scores[order] += found.scores
        mixed = torch.randperm(B, generator=generator)
        order, carry = order[mixed], found.carry.select(mixed)
        if B > 1:
            carry = Carry.join(
                [carry.select(slice(0, 1)), carry.select(slice(1, None))]
            )
    same_rows(said, rows(whole))
    torch.testing.assert_close(scores, whole.scores, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(
        state_tensors(carry), state_tensors(whole.carry.select(order)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, check_dtype=True)


@pytest.mark.parametrize("strategy", NAMES)
def test_a_jump_over_several_pieces_lands_where_it_would_have(strategy):
    model, frames = Jumper(), torch.arange(12.0)[None, :, None]
    whole = transducer_greedy(model, frames, torch.tensor([12]), strategy=strategy)
    assert whole.frames.tolist() == [[0, 8]] and whole.carry.ahead.tolist() == [4]
    carry, found, ahead = None, [], []
    for start in range(0, 12, 2):
        piece = transducer_greedy(
            model,
            frames[:, start : start + 2],
            torch.tensor([2]),
            strategy=strategy,
            carry=carry,
        )
        carry = piece.carry
        found += piece.frames[0].tolist()
        ahead.append(int(carry.ahead))
        assert int(carry.frames) == start + 2
    assert found == [0, 8] and ahead == [6, 4, 2, 0, 6, 4]


class Jumper:
    """Says label 0 wherever it looks, and jumps eight frames."""

    blank, durations = 1, (8,)

    def predict(self, labels, state=None):
        return labels[:, None].float(), None

    def join(self, encoded, predicted):
        return torch.tensor([1.0, 0.0, 0.0]).expand(
            *(encoded + predicted).shape[:-1], 3
        )


@pytest.mark.parametrize("strategy", NAMES)
def test_a_frame_that_is_full_at_the_end_of_a_piece_is_not_asked_again(
    make, speak, strategy
):
    model, (encoded, _) = make("table", 1, bias=-6.0), speak("table", 1, 8, 1)
    whole = transducer_greedy(
        model, encoded, torch.tensor([8]), strategy=strategy, max_symbols=2
    )
    assert int(whole.lengths) > 12
    carry, labels = None, []
    for t in range(8):
        piece = transducer_greedy(
            model,
            encoded[:, t : t + 1],
            torch.tensor([1]),
            strategy=strategy,
            max_symbols=2,
            carry=carry,
        )
        carry, labels = piece.carry, labels + piece.tokens()[0]
    assert labels == whole.tokens()[0]


@pytest.mark.parametrize("strategy", NAMES)
def test_no_frames_change_nothing_but_what_is_said(make, speak, strategy):
    model, (encoded, _) = make("lstm", 2), speak("lstm", 3, 6, 2)
    before = transducer_greedy(
        model, encoded, torch.tensor([6, 3, 0]), strategy=strategy
    )
    after = transducer_greedy(
        model,
        encoded[:, :0],
        torch.zeros(3, dtype=torch.long),
        strategy=strategy,
        carry=before.carry,
    )
    assert after.tokens() == [[], [], []] and after.scores.tolist() == [0, 0, 0]
    for ours, theirs in zip(
        state_tensors(after.carry), state_tensors(before.carry), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_carry_outlives_the_frames_and_the_call_that_it_came_from(make, speak):
    model, (encoded, lengths) = make("lstm", 2), speak("lstm", 3, 6, 2)
    first = transducer_greedy(model, encoded, lengths)
    kept = [tensor.clone() for tensor in state_tensors(first.carry)]
    for _ in range(2):
        transducer_greedy(model, encoded + 1, lengths, carry=first.carry)
        encoded.add_(1)
    for tensor, copy in zip(state_tensors(first.carry), kept, strict=True):
        assert torch.equal(tensor, copy)


def bad(make, speak):
    model, (encoded, lengths) = make("lstm", 2), speak("lstm", 3, 6, 2)
    carry = transducer_greedy(model, encoded, lengths).carry
    short = carry._replace(
        state=carry.state and tuple(part[:2] for part in carry.state)
    )
    return model, encoded, lengths, {
        "carry: expected B=3 utterances, got [2]. Regroup it with select and join.": carry.select(slice(0, 2)),
        "carry: expected B=3 utterances, got [2, 3]. Regroup it with select and join.": short,
    }  # fmt: skip


@pytest.mark.parametrize("strategy", NAMES)
def test_a_carry_that_does_not_fit_is_one_line(make, speak, strategy):
    model, encoded, lengths, wrong = bad(make, speak)
    for message, carry in wrong.items():
        with pytest.raises(ValueError) as error:
            transducer_greedy(model, encoded, lengths, strategy=strategy, carry=carry)
        assert str(error.value) == message


def test_a_state_whose_first_dimension_is_not_the_batch_is_refused(make, speak):
    model, (encoded, lengths) = make("foreign", 2), speak("foreign", 3, 6, 2)
    model.predict = lambda labels, state=None: (torch.zeros(3, 6), torch.zeros(2, 3, 6))
    with pytest.raises(
        ValueError,
        match=r"^model.predict: expected tensors with B=3 as first dimension, got another\.",
    ):
        transducer_greedy(model, encoded, lengths)
