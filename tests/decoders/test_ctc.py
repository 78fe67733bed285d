"""Greedy CTC: worked examples, batched against sequential, padding, batches, launches."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asrkit.decoders import ctc_greedy, ctc_greedy_sequential
from asrkit.decoders.ctc import IMPLS, numba_cpu
from asrkit.workbench.measure import launch_profile

BATCHED = {impl: partial(ctc_greedy, impl=impl) for impl in IMPLS}
DECODERS = BATCHED | {"sequential": ctc_greedy_sequential}
BOTH = pytest.mark.parametrize("decode", DECODERS.values(), ids=DECODERS)
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
        assert torch.equal(getattr(a, name), getattr(b, name))
    torch.testing.assert_close(a.scores, b.scores, rtol=1e-5, atol=1e-5)


@BOTH
def test_repeats_merge_unless_a_blank_parts_them(decode):
    rows = ["00_011", "____", "1", "", "_2_2_", "012210"]
    found = decode(*one_hot(rows, 4))
    assert found.tokens() == [[0, 0, 1], [], [1], [], [2, 2], [0, 1, 2, 1, 0]]
    assert found.frames.tolist() == [
        [0, 3, 4, -1, -1],
        [-1] * 5,
        [0, -1, -1, -1, -1],
        [-1] * 5,
        [1, 3, -1, -1, -1],
        [0, 1, 2, 4, 5],
    ]
    assert found.durations.tolist() == [
        [2, 1, 2, -1, -1],
        [-1] * 5,
        [1, -1, -1, -1, -1],
        [-1] * 5,
        [1, 1, -1, -1, -1],
        [1, 1, 2, 1, 1],
    ]
    best = 5 - math.log(math.exp(5) + 3)
    wanted = torch.tensor([len(row) * best for row in rows])
    torch.testing.assert_close(found.scores, wanted)


@BOTH
def test_blank_may_be_any_index(decode):
    assert decode(*one_hot(["1_12"], 4, blank=0), blank=0).tokens() == [[1, 1, 2]]
    assert decode(*one_hot(["1_13"], 4, blank=2), blank=-2).tokens() == [[1, 1, 3]]


@given(
    seed=st.integers(0, 10**6),
    B=st.integers(1, 6),
    T=st.integers(0, 12),
    V=st.integers(1, 70),
    bias=st.floats(-3, 3),
    dtype=st.sampled_from(DTYPES),
    coarse=st.booleans(),
)
def test_batched_equals_sequential_with_anything_in_the_padding(
    seed, B, T, V, bias, dtype, coarse
):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, V, generator=g)
    logits[..., -1] += bias
    # rounded: many equals, zeros of either sign among them
    logits = logits.round() if coarse else logits.log_softmax(-1)
    log_probs = logits.to(dtype)
    lengths = torch.randint(0, T + 1, (B,), generator=g)
    wanted = ctc_greedy_sequential(log_probs, lengths)
    for b in range(B):
        log_probs[b, lengths[b] :] = math.nan if b % 2 else math.inf
    frames_first = log_probs.transpose(0, 1).contiguous().transpose(0, 1)
    frames_last = log_probs.transpose(1, 2).contiguous().transpose(1, 2)
    for decode in BATCHED.values():
        for scores in (log_probs, frames_first, frames_last):
            same(decode(scores, lengths.int()), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "row",
    [
        [1.0, math.nan, 2.0, math.nan],
        [-math.inf, -math.inf],
        [-1.0, -0.0, 0.0],
        [-2.0, 0.0, -0.0],
        [math.inf, math.nan],
        [-math.inf, -7e4, 1e-7],
        [-1e-7, 0.0],
        [-3.0, -2.0, -2.0],
        [-math.nan, 5.0],
    ],
    ids=str,
)
def test_the_compiled_maximum_is_that_of_torch_for_odd_numbers_too(row, dtype):
    scores = torch.tensor(row, dtype=torch.float64).to(dtype)[None, None]
    wanted = tuple(scores.max(-1))
    found = numba_cpu.best_tokens(scores, torch.tensor([1]))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_a_large_batch_gives_the_same_on_several_threads(threads):
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(7, 30, 5000, generator=generator)
    assert log_probs.numel() > numba_cpu.PARALLEL_FROM
    lengths = torch.tensor([30, 0, 3, 30, 28, 1, 30])
    torch.set_num_threads(threads)  # which small_batches undoes
    found = ctc_greedy(log_probs, lengths, impl="numba_cpu")
    same(found, ctc_greedy_sequential(log_probs, lengths))


def test_launches_do_not_grow_and_the_host_waits_twice_for_a_gpu():
    for B, T in [(2, 5), (64, 5), (2, 300)]:
        logits = torch.zeros(B, T, 4)
        logits[:, torch.arange(T), torch.arange(T) % 2] = 5  # a label on every frame
        lengths = torch.full((B,), T)
        counted = launch_profile(partial(BATCHED["batched"], logits, lengths))
        assert counted.launches <= 36
        assert counted.syncs == 2


def test_the_result_names_the_implementation_and_auto_compiles_for_large_batches():
    assert ctc_greedy(*one_hot(["01"], 3)).impl == "batched"
    assert ctc_greedy(*one_hot(["0"], 1 << 21)).impl == "numba_cpu"


@BOTH
def test_half_precision_adds_up_its_scores_in_float32(decode):
    log_probs, lengths = one_hot(["01_2" * 200], 4)
    half = log_probs.bfloat16()
    found = decode(half, lengths)
    assert found.scores.dtype == torch.float32
    wanted = half.float().amax(-1).sum(1)
    torch.testing.assert_close(found.scores, wanted)


@BOTH
def test_a_hypothesis_may_serve_as_target_of_a_loss(decode):
    log_probs, lengths = one_hot(["01", "2_"], 4)
    found = decode(log_probs.requires_grad_(), lengths)
    assert not any(part.is_inference() for part in found.parts())
