"""Every strategy gives what the definition gives: label by label, frame by frame, alone and in any company."""

import math
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asrkit.decoders import transducer_greedy
from asrkit.decoders.transducer import STRATEGIES

KINDS = ("stateless", "lstm", "foreign", "table")
DURATIONS = ((), (0, 1, 2, 3, 4), (0, 1, 2, 4, 8), (1, 2), (0,), (2,), (0, 3))
CASES = [
    (kind, durations)
    for kind in KINDS
    for durations in DURATIONS
    if durations != (0,) or kind in ("foreign", "table")
]
WINDOWS = (1, 2, 3, 5, 6, 8, 17, 64)
SYMBOLS = (1, 2, 3, 5, 10)


class Walk(NamedTuple):
    """One utterance, decoded by `walk`: four numbers a label, the score of the path, and what happened on the way."""

    rows: list[tuple[int, int, int, float]]  # label, frame, duration, confidence
    score: float
    events: Counter


def walk(model, frames, max_symbols):
    """The definition, in float64 and without a line of asrkit.decoders; frames (T, E)."""
    durations, rows, score, events = (
        tuple(getattr(model, "durations", ())),
        [],
        0.0,
        Counter(),
    )
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
            events["blank of duration 0"] += jump == 0
            jump = max(1, jump)
        else:
            rows.append(
                (
                    label,
                    t,
                    jump if durations else 0,
                    math.exp(logp[label]),
                )
            )
            predicted, state = model.predict(torch.tensor([label]), state)
            here += 1
            if jump == 0 and here == max_symbols:
                events["frame is full"] += 1
                jump = 1
        t, here = t + jump, 0 if jump else here
        events["lands beyond the end"] += t > len(frames)
        events["jumps over frames"] += jump > 1
    events["labels"] += len(rows)
    events["says nothing"] += not rows
    return Walk(rows, score, events)


def agree(found, walks, confidence=False):
    """Tokens, frames and durations exactly, scores and confidence to 1e-5, and -1 wherever there is no label."""
    assert found.lengths.tolist() == [len(one.rows) for one in walks]
    N = found.labels.shape[1]
    assert max(len(one.rows) for one in walks) == N
    for column, part in enumerate((found.labels, found.frames, found.durations)):
        assert part.tolist() == [
            [row[column] for row in one.rows] + [-1] * (N - len(one.rows))
            for one in walks
        ]
    wanted = torch.tensor([one.score for one in walks], dtype=torch.float64)
    torch.testing.assert_close(found.scores.double(), wanted, rtol=1e-5, atol=1e-5)
    assert found.scores.dtype == torch.float32
    assert (found.confidence is None) != confidence
    if found.confidence is not None:
        sure = [
            [row[3] for row in one.rows] + [-1] * (N - len(one.rows)) for one in walks
        ]
        torch.testing.assert_close(
            found.confidence,
            torch.tensor(sure).view(found.confidence.shape),
            rtol=0,
            atol=1e-5,
        )


def soil(encoded, lengths):
    """The same frames with NaN and infinity behind the end of every utterance."""
    soiled = encoded.clone()
    for b, length in enumerate(lengths.tolist()):
        soiled[b, length:] = (math.nan, math.inf, -math.inf)[b % 3]
    return soiled


def case():
    """What a random case is drawn from: seed, B, T, bias of blank, max_symbols, window, confidence, where blank is."""
    bias = st.sampled_from((-6.0, -2.0, 0.0, 1.0, 2.0, 4.0))
    sizes = st.integers(0, 10**6), st.integers(1, 17), st.integers(0, 12)
    how = (
        st.sampled_from(SYMBOLS),
        st.sampled_from(WINDOWS),
        st.booleans(),
    )
    return st.tuples(*sizes, bias, *how, st.sampled_from((0, 2, 4)))


@pytest.mark.parametrize(("kind", "durations"), CASES)
@settings(max_examples=40, deadline=None)  # over a thousand with those of CASES
@given(drawn=case())
def test_every_strategy_and_window_gives_what_the_definition_gives_in_any_batch(
    make, speak, kind, durations, drawn
):
    seed, B, T, bias, max_symbols, window, confidence, blank = drawn
    model = make(kind, seed, durations=durations, bias=bias, blank=blank)
    encoded, lengths = speak(kind, B, T, seed)
    with torch.inference_mode():
        walks = [
            walk(model, encoded[b, :length], max_symbols)
            for b, length in enumerate(lengths.tolist())
        ]
    how = {"max_symbols": max_symbols, "confidence": confidence}
    soiled = soil(encoded, lengths)
    for strategy in STRATEGIES:
        found = transducer_greedy(
            model, soiled, lengths, strategy=strategy, window=window, **how
        )
        agree(found, walks, confidence)
    company = torch.randperm(B, generator=torch.Generator().manual_seed(seed))[
        : 1 + seed % B
    ]
    for strategy in [*STRATEGIES][
        : len(STRATEGIES) - 1
    ]:  # the last decodes one by one, whoever else is there
        found = transducer_greedy(
            model,
            soiled[company],
            lengths[company],
            strategy=strategy,
            window=window,
            **how,
        )
        agree(found, [walks[b] for b in company], confidence)


@pytest.mark.parametrize("durations", DURATIONS)
def test_what_the_random_cases_are_meant_to_hit_does_occur(make, speak, durations):
    events = Counter()
    for seed in range(12):
        model = make(
            "foreign" if seed % 2 else "table",
            seed,
            durations=durations,
            bias=(-6.0, 0.0, 2.0)[seed % 3],
        )
        encoded, lengths = speak("foreign" if seed % 2 else "table", 4, 12, seed)
        with torch.inference_mode():
            for b, length in enumerate(lengths.tolist()):
                events += walk(model, encoded[b, :length], SYMBOLS[seed % 5]).events
    wanted = {"labels", "says nothing"}
    wanted |= {"frame is full"} if not durations or 0 in durations else set()
    wanted |= {"blank of duration 0"} if 0 in durations else set()
    wanted |= (
        {"jumps over frames", "lands beyond the end"}
        if durations and max(durations) > 1
        else set()
    )
    assert {name for name, count in events.items() if count} == wanted


@pytest.mark.parametrize("durations", [(), (0, 1, 2, 4, 8)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_utterances_come_out_alike_alone_and_in_each_batch_size_up_to_17(
    make, speak, strategy, durations
):
    model, (encoded, _) = make("lstm", 6, durations=durations), speak("lstm", 17, 20, 5)
    lengths = torch.tensor([20, 0, 13, 1, 0, 20, 7, 19, 2, 20, 0, 5, 11, 20, 3, 17, 6])
    encoded = soil(encoded, lengths)
    with torch.inference_mode():
        walks = [
            walk(model, encoded[b, :length], 3)
            for b, length in enumerate(lengths.tolist())
        ]
    assert sum(len(one.rows) > 2 for one in walks) > 5
    for B in range(1, 18):
        for rows in (slice(0, B), slice(17 - B, 17)):
            agree(
                transducer_greedy(
                    model,
                    encoded[rows],
                    lengths[rows],
                    strategy=strategy,
                    max_symbols=3,
                ),
                walks[rows],
            )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_of_zero_lengths_says_nothing_at_no_cost(make, speak, strategy):
    for T in (0, 3):
        encoded, _ = speak("foreign", 3, T, 0)
        found = transducer_greedy(
            make("foreign", 0),
            encoded * math.nan,
            torch.zeros(3, dtype=torch.int32),
            strategy=strategy,
        )
        assert found.tokens() == [[], [], []] and found.scores.tolist() == [0, 0, 0]
        assert found.carry.frames.tolist() == found.carry.ahead.tolist() == [0, 0, 0]


@pytest.mark.parametrize("durations", [(), (0, 1, 2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scores_follow_one_rule_in_every_dtype_a_float32_softmax_of_the_logits(
    make, speak, strategy, durations
):
    model, (encoded, lengths) = (
        make("table", 7, durations=durations),
        speak("table", 6, 30, 7),
    )
    results = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        found = transducer_greedy(
            model,
            encoded.to(dtype),
            lengths,
            strategy=strategy,
            confidence=True,
            max_symbols=3,
        )
        assert found.scores.dtype == found.confidence.dtype == torch.float32
        results[dtype] = found
    wanted = results.pop(torch.float64)
    assert wanted.lengths.sum() > 20
    for found in results.values():
        assert found.tokens() == wanted.tokens() and torch.equal(
            found.durations, wanted.durations
        )
        torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(
            found.confidence, wanted.confidence, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_and_durations_each_have_a_softmax_of_their_own(make, speak, strategy):
    model, (encoded, _) = make("table", 3, durations=(0, 1, 2)), speak("table", 1, 1, 3)
    found = transducer_greedy(
        model, encoded, torch.tensor([1]), strategy=strategy, max_symbols=1
    )
    each = [
        8 - math.log(math.exp(8) + others) for others in (4, 2)
    ]  # of 5 tokens, of 3 durations
    torch.testing.assert_close(found.scores, torch.tensor([sum(each)]))


def test_float32_modules_agree_where_no_margin_is_as_small_as_rounding(make, speak):
    compared = 0
    for seed in range(40):
        model = make(
            ("stateless", "lstm", "foreign")[seed % 3],
            seed,
            durations=DURATIONS[seed % 4],
            bias=0.5,
        ).float()
        encoded, lengths = speak("foreign", 9, 16, seed)
        encoded = encoded.float()
        with torch.inference_mode():
            walks = [
                walk(model, encoded[b, :length], 3)
                for b, length in enumerate(lengths.tolist())
            ]
        pairs = enumerate(zip(lengths.tolist(), walks, strict=True))
        margins = [
            margin(model, encoded[b, :length], one) for b, (length, one) in pairs
        ]
        wide = torch.tensor([b for b, one in enumerate(margins) if one > 1e-3])
        compared += len(wide)
        for strategy in STRATEGIES:
            found = transducer_greedy(
                model, encoded[wide], lengths[wide], strategy=strategy, max_symbols=3
            )
            agree(found, [walks[b] for b in wide])
    assert compared > 200


def margin(model, frames, walked):
    """The smallest lead of a best token or duration over the second, at every frame after every label: the path has no others."""
    leads, count = [math.inf], len(getattr(model, "durations", ()))
    predicted, state = model.predict(torch.tensor([model.blank]), None)
    for label in [None, *(row[0] for row in walked.rows)]:
        if label is not None:
            predicted, state = model.predict(torch.tensor([label]), state)
        for part in model.join(frames, predicted).detach().split([5, count], -1):
            if part.shape[-1] > 1 and len(part):
                best = part.topk(2).values
                leads.append(float((best[:, 0] - best[:, 1]).min()))
    return min(leads)


@pytest.mark.gpu
@pytest.mark.parametrize("durations", [(), (0, 1, 2, 4, 8)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gpu_writes_what_the_cpu_writes_with_the_same_scores(
    make, speak, strategy, durations
):
    model, (encoded, lengths) = (
        make("lstm", 5, durations=durations),
        speak("lstm", 9, 30, 5),
    )
    how = {"strategy": strategy, "confidence": True, "graphs": "off"}
    wanted = transducer_greedy(model, encoded, lengths, **how)
    found = transducer_greedy(model.cuda(), encoded.cuda(), lengths.cuda(), **how)
    assert found.tokens() == wanted.tokens()
    for ours, theirs in zip(found.parts(), wanted.parts(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)
