"""Greedy CTC: worked examples, batched against sequential, padding and company that cannot matter, work that is counted."""

import math
import sys
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asrkit.decoders import ctc_greedy, ctc_greedy_sequential
from asrkit.decoders.ctc import IMPLS, numba_cpu
from asrkit.workbench.measure import launch_profile

BATCHED = {impl: partial(ctc_greedy, impl=impl) for impl in IMPLS}
BOTH = [
    pytest.param(decode, id=name)
    for name, decode in {**BATCHED, "sequential": ctc_greedy_sequential}.items()
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def one_hot(rows, V, blank=-1):
    """Log-probs (B, T, V) whose best path is `rows` ('_' is blank), and their lengths."""
    T = max(map(len, rows))
    logits = torch.zeros(len(rows), T, V)
    for b, row in enumerate(rows):
        for t, symbol in enumerate(row):
            logits[b, t, blank % V if symbol == "_" else int(symbol)] = 5
    return logits.log_softmax(-1), torch.tensor([len(row) for row in rows])


def same(a, b):
    for name in ("labels", "lengths", "frames", "durations"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=0)
    torch.testing.assert_close(a.scores, b.scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decode", BOTH)
def test_repeats_merge_unless_a_blank_parts_them(decode):
    rows = ["00_011", "____", "1", "", "_2_2_", "012210", "0"]
    found = decode(*one_hot(rows, 4))
    assert found.tokens() == [[0, 0, 1], [], [1], [], [2, 2], [0, 1, 2, 1, 0], [0]]
    assert [row[:n] for row, n in zip(found.frames.tolist(), found.lengths.tolist(), strict=True)] == [
        [0, 3, 4], [], [0], [], [1, 3], [0, 1, 2, 4, 5], [0]]  # fmt: skip
    assert [row[:n] for row, n in zip(found.durations.tolist(), found.lengths.tolist(), strict=True)] == [
        [2, 1, 2], [], [1], [], [1, 1], [1, 1, 2, 1, 1], [1]]  # fmt: skip
    best = 5 - math.log(math.exp(5) + 3)
    torch.testing.assert_close(
        found.scores, torch.tensor([len(row) * best for row in rows])
    )
    assert found.labels.shape == found.frames.shape == (7, 5)
    assert all(
        (part[1] == -1).all() for part in (found.labels, found.frames, found.durations)
    )


@pytest.mark.parametrize("decode", BOTH)
def test_blank_may_be_any_index(decode):
    assert decode(*one_hot(["1_12"], 4, blank=0), blank=0).tokens() == [[1, 1, 2]]
    assert decode(*one_hot(["1_13"], 4, blank=2), blank=2).tokens() == [[1, 1, 3]]
    assert decode(*one_hot(["1_13"], 4, blank=2), blank=-2).tokens() == [[1, 1, 3]]


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 6), st.integers(0, 12), st.integers(1, 70), st.floats(-3, 3), st.sampled_from(DTYPES),
    st.booleans(),
)  # fmt: skip
def test_batched_equals_sequential_whatever_lies_in_the_padding(
    seed, B, T, V, bias, dtype, coarse
):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, V, generator=g)
    logits[..., -1] += bias
    logits = (
        logits.round() if coarse else logits.log_softmax(-1)
    )  # rounded: many equals, zeros of either sign among them
    log_probs, lengths = logits.to(dtype), torch.randint(0, T + 1, (B,), generator=g)
    wanted = ctc_greedy_sequential(log_probs, lengths)
    for decode in BATCHED.values():
        same(decode(log_probs, lengths), wanted)
    for b in range(B):
        log_probs[b, lengths[b] :] = math.nan if b % 2 else math.inf
    for decode in BATCHED.values():
        same(decode(log_probs, lengths), wanted)
        same(
            decode(
                log_probs.transpose(0, 1).contiguous().transpose(0, 1), lengths.int()
            ),
            wanted,
        )
        same(
            decode(log_probs.transpose(1, 2).contiguous().transpose(1, 2), lengths),
            wanted,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [
    [1.0, math.nan, 2.0, math.nan], [-math.inf, -math.inf], [-1.0, -0.0, 0.0], [-2.0, 0.0, -0.0], [math.inf, math.nan],
    [-math.inf, -7e4, 1e-7], [-1e-7, 0.0], [-3.0, -2.0, -2.0], [math.inf, math.inf], [-math.nan, 5.0],
], ids=str)  # fmt: skip
def test_the_compiled_maximum_is_that_of_torch_for_odd_numbers_too(row, dtype):
    given = torch.tensor(row, dtype=torch.float64).to(dtype)[None, None]
    wanted, found = given.max(-1), numba_cpu.best_tokens(given, torch.tensor([1]))
    torch.testing.assert_close(found, tuple(wanted), rtol=0, atol=0, equal_nan=True)


def test_a_large_batch_is_shared_among_threads_and_comes_out_the_same(monkeypatch):
    log_probs, lengths = (
        torch.randn(7, 9, 5, generator=torch.Generator().manual_seed(0)),
        torch.tensor([9, 0, 3, 9, 8, 1, 9]),
    )
    monkeypatch.setattr(numba_cpu, "PARALLEL_FROM", 1)
    for threads in (1, 2, 3, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        same(
            ctc_greedy(log_probs, lengths, impl="numba_cpu"),
            ctc_greedy_sequential(log_probs, lengths),
        )


def python_work(function):
    """Calls that Python itself makes, of its own functions and of others', during one call; not those of other threads."""
    calls = [0]

    def count(frame, event, argument):
        return calls.__setitem__(0, calls[0] + event.endswith("call"))

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls[0]


SIZES = [(2, 5, 4), (64, 5, 4), (2, 300, 4), (64, 300, 4)]


def speaking(B, T, V):
    """Log-probs whose best token changes on every frame: no blank, a label a frame."""
    logits = torch.zeros(B, T, V)
    logits[:, torch.arange(T), torch.arange(T) % 2] = 5
    return logits, torch.full((B,), T)


@pytest.mark.parametrize("impl", IMPLS)
def test_python_does_no_work_an_utterance_a_frame_or_a_label(impl):
    BATCHED[impl](*speaking(2, 5, 4))  # compiled now
    assert (
        len({python_work(partial(BATCHED[impl], *speaking(*size))) for size in SIZES})
        == 1
    )
    one_by_one = [
        python_work(partial(ctc_greedy_sequential, *speaking(*size))) for size in SIZES
    ]
    assert (
        one_by_one[0] + 62 * 3 <= one_by_one[1]
    )  # this way of counting would have seen it


def test_launches_do_not_grow_and_a_gpu_is_waited_for_twice():
    counted = [
        launch_profile(partial(BATCHED["batched"], *speaking(*size))) for size in SIZES
    ]
    assert len({found.launches for found in counted}) == 1
    assert counted[0].launches <= 36
    assert [found.syncs for found in counted] == [2] * 4
    loop = [
        launch_profile(partial(ctc_greedy_sequential, *speaking(*size)))
        for size in SIZES[:2]
    ]
    assert loop[1].launches >= loop[0].launches + 62 * 2
    assert loop[1].syncs >= loop[0].syncs + 62


def test_what_ran_is_in_the_result_and_auto_is_compiled_on_a_cpu():
    assert ctc_greedy(*one_hot(["01"], 3)).impl == "numba_cpu"
    assert ctc_greedy(*one_hot(["01"], 3), impl="batched").impl == "batched"
    with pytest.raises(
        ValueError,
        match="^impl: expected one of 'auto', 'batched', 'numba_cpu', got 'cuda'.$",
    ):
        ctc_greedy(*one_hot(["01"], 3), impl="cuda")


def test_half_precision_adds_up_its_scores_in_float32():
    log_probs, lengths = one_hot(["01_2" * 200], 4)
    for decode in (*BATCHED.values(), ctc_greedy_sequential):
        found = decode(log_probs.bfloat16(), lengths)
        assert found.scores.dtype == torch.float32
        torch.testing.assert_close(
            found.scores, log_probs.bfloat16().float().amax(-1).sum(1)
        )


@pytest.mark.parametrize("decode", BOTH)
def test_a_hypothesis_may_serve_as_target_of_a_loss(decode):
    log_probs, lengths = one_hot(["01", "2_"], 4)
    assert not any(
        part.is_inference()
        for part in decode(log_probs.requires_grad_(), lengths).parts()
    )


@pytest.mark.parametrize("decode", BOTH)
@pytest.mark.parametrize(("change", "wanted"), [
    ({"log_probs": torch.zeros(2, 3)}, "log_probs: expected shape (B, T, V), got (2, 3)."),
    ({"lengths": torch.tensor([2, 4])}, "lengths: expected 0 to T=3 frames, got 2 to 4."),
    ({"blank": 4}, "blank: expected an index of V=4 tokens, got 4."),
    ({"lengths": torch.tensor([3.0, 2.5])}, "lengths: expected int32 or int64, got torch.float32."),
])  # fmt: skip
def test_bad_input_is_one_line(decode, change, wanted):
    with pytest.raises(ValueError) as error:
        decode(
            **{
                "log_probs": torch.zeros(2, 3, 4),
                "lengths": torch.tensor([3, 2]),
                **change,
            }
        )
    assert str(error.value) == wanted
