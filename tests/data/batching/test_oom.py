"""oom_search against steps whose memory is known to the byte, and allocators that give up."""

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from asrkit.data import Buckets
from asrkit.data.batching.oom import oom_search

BUDGET = 4_000_000


@pytest.fixture(autouse=True, scope="module")
def little_to_collect():
    """Collecting garbage after a failed step looks at no more than what these tests made."""
    gc.freeze()
    yield
    gc.unfreeze()


def table(*cells: tuple[float, int]) -> Buckets:
    seconds, tokens = zip(*cells, strict=True)
    return Buckets(np.array(seconds), np.array(tokens), np.ones(len(cells)))


CELLS = table(
    *[(seconds, seconds * rate) for seconds in range(1, 25, 4) for rate in (2, 5, 9)]
)
FEW = table((1, 4), (7, 28), (23, 92))
SHAPES = {
    "sum of terms": lambda n, D, U: (
        300_000 + n * (5_000 + 2_000 * D + 300 * U + 7 * D * U)
    ),
    "two peaks": lambda n, D, U: 300_000 + max(n * D * 9_000, n * D * U * 900, 700_000),
    "squared": lambda n, D, U: 10_000 + 40 * (n * D) ** 2 + n * U,
    "stairs": lambda n, D, U: 2**17 * (1 + n * (D + U) // 30),
    "root": lambda n, D, U: 1_000 + 20_000 * (n * D) ** 0.7,
}


def allocates(shape):
    """A step that takes exactly the bytes of a shape."""

    def step(n, seconds, tokens):
        torch.zeros(int(SHAPES[shape](n, seconds, tokens)), dtype=torch.uint8)

    return step


def find(step, buckets, **changes):
    return oom_search(
        step, buckets, **{"budget_bytes": BUDGET, "progress": False} | changes
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.3])
def test_the_largest_sizes_are_found_as_well_as_promised_and_in_few_steps(
    shape, tolerance
):
    result = find(allocates(shape), CELLS, tolerance=tolerance)
    assert np.array_equal(result.table.seconds, CELLS.seconds)
    assert np.array_equal(result.table.tokens, CELLS.tokens)
    for row in result.rows():
        cell = (row["seconds"], row["tokens"])
        n = row["found"]
        fails_at = next(
            m for m in itertools.count(n) if int(SHAPES[shape](m, *cell)) > BUDGET
        )
        assert fails_at > n
        assert fails_at == n + 1 or fails_at - n <= 1.01 * tolerance * fails_at / (
            1 - tolerance
        )
        assert row["filled"] == int(SHAPES[shape](n, *cell)) / BUDGET
    assert sum(row["steps"] for row in result.rows()) == len(result.trials)
    if tolerance == 0.05:
        assert len(result.trials) <= 6 * len(CELLS)
        assert shape != "sum of terms" or len(result.trials) <= 4 * len(CELLS)


def fails(error, most=500):
    """A step that takes little, and in which an allocator gives up beyond `most` padded seconds."""

    def step(n, seconds, tokens):
        held = torch.zeros(int(1_000 * n * seconds), dtype=torch.uint8)
        if n * seconds > most:
            error()
        return held

    return step


def too_much():
    torch.empty(2**60, dtype=torch.uint8)


def cuda_has_none():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def cublas_has_none():
    raise RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    )


@pytest.mark.parametrize(
    "error",
    [too_much, cuda_has_none, cublas_has_none, lambda: np.empty(2**60, dtype=np.uint8)],
)
@pytest.mark.parametrize(
    "budget_bytes", [600_000, 30_000_000]
)  # near the truth, and no help
def test_an_allocator_that_gives_up_is_survived_and_bounds_the_size(
    error, budget_bytes
):
    result = find(fails(error), FEW, budget_bytes=budget_bytes, tolerance=0)
    assert result.table.sizes.tolist() == [500, 500 // 7, 500 // 23]
    assert {trial.bytes is None for trial in result.trials if not trial.ok} == {True}


def test_tensors_of_a_failed_step_are_gone_before_the_next_even_if_frames_hold_the_error():
    alive: list[weakref.ref] = []

    def step(n, seconds, tokens):
        assert not any(ref() is not None for ref in alive), (
            "a step before still holds memory"
        )
        held = torch.zeros(int(1_000 * n * seconds), dtype=torch.uint8)
        alive.append(weakref.ref(held))
        if n * seconds > 500:
            try:
                too_much()
            except RuntimeError as error:
                kept = error  # frame -> error -> traceback -> frame
                raise kept from None

    gc.disable()
    try:
        assert not all(
            trial.ok for trial in find(step, FEW, budget_bytes=600_000).trials
        )
    finally:
        gc.enable()


class Stop(Exception):
    """Not for lack of memory."""


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("end", [None, Stop, KeyboardInterrupt])
def test_all_is_bit_for_bit_as_before_however_the_search_ends(trained, end):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    seen = []

    def step(n, seconds, tokens):
        assert all(p.grad is None for p in model.parameters())
        held = torch.zeros(int(1_000 * n * seconds), dtype=torch.uint8)
        model(torch.randn(n + 1, 4)).square().sum().backward()
        optimizer.step()
        schedule.step()
        seen.append(n)
        if end and len(seen) == 4:
            raise end("a shape does not match")
        if n * seconds > 500:
            too_much()
        return held

    def everything():
        tensors = [*model.state_dict().values(), torch.get_rng_state()]
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        moments = optimizer.state_dict()
        for state in moments.pop("state").values():
            tensors += state.values()
        return [tensor.clone() for tensor in tensors], repr(
            (moments, schedule.state_dict())
        )

    if trained:
        step(3, 1.0, 1)
    tensors, plain = everything()
    state = (model, optimizer, schedule)
    if end is None:
        assert find(step, FEW, budget_bytes=600_000, state=state).table.sizes[0] > 400
    else:
        with pytest.raises(end, match="a shape does not match"):
            find(step, FEW, budget_bytes=600_000, state=state)
    assert len(seen) >= 4
    tensors_after, plain_after = everything()
    assert plain_after == plain
    assert all(map(torch.equal, tensors_after, tensors)) and len(tensors_after) == len(
        tensors
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"step": lambda *_: None},
            "step: expected tensors on 'cpu', got none. Pass the device",
        ),
        ({"buckets": [(1.0, 4)]}, r"buckets: expected asrkit.data.Buckets, got list\."),
        (
            {"budget_bytes": None},
            "budget_bytes: expected how many bytes a step may take, got None",
        ),
        (
            {"budget_bytes": 400_000},
            "budget_bytes: expected room for one utterance of 21 s and 189 tokens, got a step that "
            "takes more. S",
        ),
        (
            {"step": fails(too_much, most=0)},
            "budget_bytes: expected room for .* got a step that takes more",
        ),
        (
            {"tolerance": 1.0},
            r"tolerance: expected a share from 0 to below 1, got 1\.0\.",
        ),
    ],
)
def test_bad_input_is_one_line(change, said):
    given = {"step": allocates("sum of terms"), "buckets": CELLS} | change
    with pytest.raises(ValueError, match=f"^{said}"):
        find(**given)


@pytest.mark.gpu
def test_a_gpu_gives_nine_tenths_of_what_it_has_left_and_its_own_failures_count():
    def step(n, seconds, tokens):
        torch.empty(int(n * seconds * 2**28), dtype=torch.uint8, device="cuda")

    free = torch.cuda.mem_get_info()[0]
    result = oom_search(step, table((1, 0), (4, 0)), device="cuda", progress=False)
    assert 0.8 * free < result.budget_bytes <= 0.9 * free
    assert 0.9 < result.table.sizes[0] * 2**28 / result.budget_bytes <= 1
    beyond = oom_search(
        step, table((1, 0), (4, 0)), device="cuda", budget_bytes=2**50, progress=False
    )
    assert any(trial.bytes is None for trial in beyond.trials)
    assert torch.cuda.memory_allocated() == 0
