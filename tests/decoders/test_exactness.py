"""Every strategy equals the definition, label by label and frame by frame, in any batch."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asrkit.decoders import transducer_greedy
from asrkit.decoders.transducer import STRATEGIES

DURATIONS = {  # of each kind of model
    "stateless": [(), (0, 1, 2, 3, 4)],
    "lstm": [(), (0, 1, 2, 4, 8)],
    "foreign": [(), (1, 2)],
    "table": [(), (2,), (0, 3)],
}


class Walk(NamedTuple):
    """One utterance, decoded by `walk`."""

    rows: list[tuple[int, int, int, float]]  # label, frame, duration, confidence
    score: float  # of the path


def walk(model, frames, max_symbols):
    """The definition, in float64 and without code of asrkit.decoders; frames (T, E)."""
    durations = tuple(getattr(model, "durations", ()))
    rows = []
    score = 0.0
    predicted, state = model.predict(torch.tensor([model.blank]), None)
    t = here = 0
    while t < len(frames):
        logits = model.join(frames[t : t + 1], predicted)[0].double()
        logp = logits[: len(logits) - len(durations)].log_softmax(0)
        label = int(logp.argmax())
        score += float(logp[label])
        jump = 0 if label != model.blank else 1
        if durations:
            spans = logits[len(logp) :].log_softmax(0)
            jump = durations[int(spans.argmax())]
            score += float(spans.max())
        if label == model.blank:
            jump = max(1, jump)
        else:
            rows.append((label, t, jump if durations else 0, math.exp(logp[label])))
            predicted, state = model.predict(torch.tensor([label]), state)
            here += 1
            if here == max_symbols:
                jump = max(1, jump)
        t += jump
        here = 0 if jump else here
    return Walk(rows, score)


def agree(found, walks, confidence=False):
    """Tokens, frames and durations exactly, scores and confidence to 1e-5, and -1 in the padding."""
    assert found.lengths.tolist() == [len(one.rows) for one in walks]
    N = found.labels.shape[1]
    assert max(len(one.rows) for one in walks) == N

    def column(number):
        return [
            [row[number] for row in one.rows] + [-1] * (N - len(one.rows))
            for one in walks
        ]

    for number, part in enumerate((found.labels, found.frames, found.durations)):
        assert part.tolist() == column(number)
    wanted = torch.tensor([one.score for one in walks])
    torch.testing.assert_close(found.scores, wanted, rtol=1e-5, atol=1e-5)
    assert (found.confidence is None) != confidence
    if found.confidence is not None:
        sure = torch.tensor(column(3)).view(found.confidence.shape)
        torch.testing.assert_close(found.confidence, sure, rtol=0, atol=1e-5)


def soil(encoded, lengths):
    """The same frames with NaN and infinity after the end of every utterance."""
    soiled = encoded.clone()
    for b, length in enumerate(lengths.tolist()):
        soiled[b, length:] = (math.nan, math.inf, -math.inf)[b % 3]
    return soiled


@pytest.mark.parametrize("kind", DURATIONS)
@given(
    data=st.data(),
    seed=st.integers(0, 10**6),
    B=st.integers(1, 9),
    T=st.integers(0, 12),
    bias=st.sampled_from((-6.0, -2.0, 0.0, 1.0, 2.0, 4.0)),
    max_symbols=st.sampled_from((1, 2, 3, 5, 10)),
    window=st.sampled_from((1, 2, 3, 5, 6, 8, 17, 64)),
    confidence=st.booleans(),
    blank=st.sampled_from((0, 2, 4)),
)
def test_every_strategy_and_window_decodes_as_the_definition_in_any_batch(
    make,
    speak,
    kind,
    data,
    seed,
    B,
    T,
    bias,
    max_symbols,
    window,
    confidence,
    blank,
):
    durations = data.draw(st.sampled_from(DURATIONS[kind]))
    model = make(kind, seed, durations=durations, bias=bias, blank=blank)
    encoded, lengths = speak(kind, B, T, seed)
    with torch.inference_mode():
        walks = [
            walk(model, encoded[b, :length], max_symbols)
            for b, length in enumerate(lengths.tolist())
        ]
    soiled = soil(encoded, lengths)
    how = {"max_symbols": max_symbols, "confidence": confidence, "window": window}
    generator = torch.Generator().manual_seed(seed)
    company = torch.randperm(B, generator=generator)[: 1 + seed % B]
    for strategy in STRATEGIES:
        found = transducer_greedy(model, soiled, lengths, strategy=strategy, **how)
        agree(found, walks, confidence)
        some = soiled[company], lengths[company]
        found = transducer_greedy(model, *some, strategy=strategy, **how)
        agree(found, [walks[b] for b in company], confidence)


@pytest.mark.parametrize("durations", [(), (0, 1, 2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scores_follow_one_rule_in_every_dtype_a_float32_softmax_of_the_logits(
    make, speak, strategy, durations
):
    model = make("table", 7, durations=durations)
    encoded, lengths = speak("table", 6, 30, 7)
    how = {"strategy": strategy, "confidence": True, "max_symbols": 3}
    wanted = transducer_greedy(model, encoded.double(), lengths, **how)
    assert wanted.lengths.sum() > 20
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = transducer_greedy(model, encoded.to(dtype), lengths, **how)
        assert found.tokens() == wanted.tokens()
        assert torch.equal(found.durations, wanted.durations)
        assert found.scores.dtype == found.confidence.dtype == torch.float32
        torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(
            found.confidence, wanted.confidence, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_decoding_ends_with_nan_which_only_changes_the_score_of_its_utterance(
    make, speak, strategy
):
    encoded, _ = speak("foreign", 3, 5, 1)
    encoded[0, 2] = torch.nan
    found = transducer_greedy(
        make("foreign", 1, bias=-2),
        encoded,
        torch.tensor([5, 5, 3]),
        strategy=strategy,
        max_symbols=3,
    )
    assert found.scores.isnan().tolist() == [True, False, False]
    assert found.lengths.max() <= 15
