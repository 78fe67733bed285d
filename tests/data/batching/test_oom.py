"""oom_search with steps whose memory is known to the byte, and failing allocations."""

import copy
import gc
import itertools
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from asrkit.data import Buckets
from asrkit.data.batching.oom import oom_search

BUDGET = 4_000_000


@pytest.fixture(autouse=True, scope="module")
def little_to_collect():
    """Garbage collection after a failed step visits only the objects of these tests."""
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


def taken(shape, n, cell):
    """Bytes of n utterances of a cell."""
    return int(SHAPES[shape](n, cell["seconds"], cell["tokens"]))


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
def test_the_largest_sizes_are_found_within_the_tolerance_in_few_steps(
    shape, tolerance
):
    result = find(allocates(shape), CELLS, tolerance=tolerance)
    for row in result.rows():
        n = row["found"]
        assert row["filled"] == taken(shape, n, row) / BUDGET
        more = next(m for m in itertools.count(n) if taken(shape, m, row) > BUDGET)
        assert more > n
        near = 1.01 * tolerance * more / (1 - tolerance)
        assert more == n + 1 or more - n <= near
    assert sum(row["steps"] for row in result.rows()) == len(result.trials)
    if tolerance == 0.05:
        steps = 4 if shape == "sum of terms" else 6
        assert len(result.trials) <= steps * len(CELLS)


def fails(error, most=500):
    """A small step in which an allocation fails beyond `most` padded seconds."""

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
    "error, budget_bytes",
    [
        # close to the limit, which is no help
        (too_much, 72_000),
        (cuda_has_none, 72_000),
        (cublas_has_none, 3_600_000),
        (lambda: np.empty(2**60, dtype=np.uint8), 3_600_000),
    ],
)
def test_a_failed_allocation_bounds_the_size(error, budget_bytes):
    result = find(fails(error, 60), FEW, budget_bytes=budget_bytes, tolerance=0)
    assert result.table.sizes.tolist() == [60, 60 // 7, 60 // 23]
    assert {trial.bytes is None for trial in result.trials if not trial.ok} == {True}


def test_tensors_of_a_failed_step_are_freed_before_the_next_even_if_frames_keep_the_error():
    alive: list[weakref.ref] = []

    def step(n, seconds, tokens):
        assert not any(ref() is not None for ref in alive), "a step still holds memory"
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
        result = find(step, FEW, budget_bytes=600_000)
    finally:
        gc.enable()
    assert not all(trial.ok for trial in result.trials)


class Stop(Exception):
    """An error other than lack of memory."""


@pytest.mark.parametrize(
    "trained, end",
    [
        (False, None),
        (True, None),
        (True, Stop),
        (False, KeyboardInterrupt),
    ],
)
def test_state_is_restored_bit_for_bit_however_the_search_ends(trained, end):
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
        gradients = [parameter.grad for parameter in model.parameters()]
        states = [one.state_dict() for one in state]
        return copy.deepcopy([states, gradients, torch.get_rng_state()])

    state = (model, optimizer, schedule)
    if trained:
        step(3, 1.0, 1)
    before = everything()
    with pytest.raises(end, match="not match") if end else nullcontext():
        find(step, FEW, budget_bytes=600_000, state=state)
    assert len(seen) >= 4
    torch.testing.assert_close(everything(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"step": lambda *_: None},
            "step: expected tensors on 'cpu', got none. Pass the device",
        ),
        (
            {"budget_bytes": None},
            "budget_bytes: expected a number of bytes for a step, got None",
        ),
        (
            {"budget_bytes": 400_000},
            "budget_bytes: expected room for one utterance of 21 s and 189 tokens, got a step that takes more. S",
        ),
        (
            {"tolerance": 1.0},
            r"tolerance: expected a share from 0 to below 1, got 1\.0\.",
        ),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(change, message):
    arguments = {"step": allocates("sum of terms"), "buckets": CELLS} | change
    with pytest.raises(ValueError, match=f"^{message}"):
        find(**arguments)


@pytest.mark.gpu
def test_a_gpu_has_a_budget_of_nine_tenths_of_its_free_memory():
    def step(n, seconds, tokens):
        torch.empty(int(n * seconds * 2**28), dtype=torch.uint8, device="cuda")

    free = torch.cuda.mem_get_info()[0]
    on_gpu = {"buckets": table((1, 0), (4, 0)), "device": "cuda", "progress": False}
    result = oom_search(step, **on_gpu)
    assert 0.8 * free < result.budget_bytes <= 0.9 * free
    assert 0.9 < result.table.sizes[0] * 2**28 / result.budget_bytes <= 1
    beyond = oom_search(step, budget_bytes=2**50, **on_gpu)
    assert any(trial.bytes is None for trial in beyond.trials)
    assert torch.cuda.memory_allocated() == 0
