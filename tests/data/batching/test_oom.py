"""oom_search against steps whose memory is known to the byte, and against allocators that really give up."""

import gc
import json
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from asrkit.data.batching.buckets import ENDLESS, Buckets
from asrkit.data.batching.oom import OOMResult, Trial, memory_model, oom_search
from asrkit.data.batching.padding import Cost, Limit

KNOWN = Cost(
    name="known", unit="B", source="this test", per_batch=300_000, per_utterance=5_000, per_second=2_000, per_token=300,
    per_second2=50, per_pair=7,
)  # fmt: skip
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


ONE = table(*[(seconds, 4 * seconds) for seconds in range(1, 25, 2)])
TWO = table(*[(seconds, seconds * rate) for seconds in range(1, 25, 4) for rate in (2, 5, 9)])
FEW = table((1, 4), (7, 28), (23, 92))


def allocates(cost):
    """A step that takes exactly cost(n, seconds, tokens) bytes."""

    def step(n, seconds, tokens):
        torch.zeros(int(cost(n, seconds, tokens)), dtype=torch.uint8)

    return step


def find(step, buckets, **changes) -> OOMResult:
    return oom_search(step, buckets, **{"budget_bytes": BUDGET, "progress": False} | changes)


def test_the_memory_model_recovers_what_the_steps_were_made_of():
    shapes = [(1, 1), (1, 9), (9, 18), (9, 81), (21, 42), (21, 189)]
    trials = [Trial(n, D, U, int(KNOWN(n, D, U)), True) for D, U in shapes for n in (1, 7)]
    found = memory_model(
        [*trials, Trial(9, 21, 189, None, False)]
    )  # where an allocator gave up nothing is known
    for term in (
        "per_batch",
        "per_utterance",
        "per_second",
        "per_token",
        "per_second2",
        "per_pair",
    ):
        assert getattr(found, term) == pytest.approx(getattr(KNOWN, term), rel=1e-6), term
    assert found.source == "fitted to 12 training steps, 0.0 % off in the root mean square"


def test_what_probes_cannot_tell_apart_is_left_out_and_what_they_saw_is_foreseen_all_the_same():
    trials = [Trial(n, D, 4 * D, int(KNOWN(n, D, 4 * D)), True) for D in (1, 9, 21) for n in (1, 7)]
    found = memory_model(trials)
    assert found.per_token == found.per_pair == 0  # as seconds, as seconds squared
    assert found.per_second == pytest.approx(
        2_000 + 4 * 300, rel=1e-6
    ) and found.per_second2 == pytest.approx(78, rel=1e-6)
    assert found(5, 13, 52) == pytest.approx(KNOWN(5, 13, 52))
    nearly = [Trial(n, D, D, 1000 * n * D + (n + D) % 2, True) for D in (1, 9, 21) for n in (1, 7)]
    assert (
        memory_model(nearly).formula.endswith(" D) B") and "+" not in memory_model(nearly).formula
    )  # and no dust of other terms


def test_small_and_large_trials_weigh_the_same_in_the_fit_and_nothing_is_below_zero():
    trials = [
        Trial(1, 1, 0, 1_000, True),
        Trial(1000, 1, 0, 900_000, True),
        Trial(10, 1, 0, 12_000, True),
    ]
    found = memory_model(trials)
    errors = [found(*trial[:3]) / trial.bytes - 1 for trial in trials]
    assert max(map(abs, errors)) < 0.2  # unweighted squares are 1.5 off at the smallest
    falling = memory_model(
        [Trial(1, 1, 0, 1_000, True), Trial(2, 1, 0, 800, True)]
    )  # a plain fit has -200 an utterance
    assert falling.per_utterance == 0 and 800 <= falling.per_batch <= 1_000


@pytest.mark.parametrize(
    "buckets",
    [ONE, TWO, table((1, 8), (5, 8), (90, 8)), table((8, 0))],
    ids=["1D", "2D", "same", "one"],
)
def test_at_tolerance_zero_sizes_are_exact_and_take_two_steps_a_bucket(buckets):
    result = find(allocates(KNOWN), buckets, tolerance=0)
    exact = Limit(KNOWN, BUDGET).largest(buckets.seconds, buckets.tokens)
    assert result.table.sizes.tolist() == exact.tolist() and np.array_equal(
        result.table.tokens, buckets.tokens
    )
    assert np.abs(result.predicted - exact).max() <= 1 and np.abs(result.errors).max() < 1e-3
    assert len(result.attempts) <= 2 * len(buckets) + 2 and result.steps == 1 + len(
        result.probes
    ) + len(result.attempts)
    for shape in {trial[1:3] for trial in result.probes}:  # they tell something, and are cheap
        assert (
            0.1 * BUDGET
            <= max(trial.bytes for trial in result.probes if trial[1:3] == shape)
            < 0.4 * BUDGET
        )


SHAPES = {
    "two peaks": lambda n, D, U: 300_000 + max(n * D * 9_000, n * D * U * 900, 700_000),
    "squared": lambda n, D, U: 10_000 + 40 * (n * D) ** 2 + n * U,
    "steps": lambda n, D, U: 2**17 * (1 + n * (D + U) // 30),
    "root": lambda n, D, U: 1_000 + 20_000 * (n * D) ** 0.7,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("search", "tolerance"),
    [("predicted", 0.0), ("predicted", 0.05), ("predicted", 0.3), ("plain", 0.05)],
)
def test_memory_of_another_form_is_found_as_well_as_promised(shape, tolerance, search):
    cost, fits = SHAPES[shape], lambda n, cell: int(SHAPES[shape](n, *cell)) <= BUDGET
    result = find(allocates(cost), TWO, tolerance=tolerance, search=search)
    for n, cell in zip(
        result.table.sizes.tolist(), zip(TWO.seconds, TWO.tokens, strict=True), strict=True
    ):
        largest = next(n for n in range(1, 10_000) if not fits(n + 1, cell))
        assert fits(n, cell) and (
            n == largest or largest + 1 - n <= tolerance * 1.01 * (largest + 1) / (1 - tolerance)
        )
        if tolerance == 0:
            assert n == largest


def test_a_model_of_the_memory_saves_steps_and_the_plain_search_makes_none():
    for shape, buckets, share in (
        (KNOWN, ONE, 0.6),
        (KNOWN, TWO, 0.6),
        (SHAPES["two peaks"], ONE, 0.8),
    ):
        predicted, plain = (
            find(allocates(shape), buckets, search=search) for search in ("predicted", "plain")
        )
        assert predicted.steps < share * plain.steps
        assert (
            plain.cost is None
            and plain.predicted is None
            and len(plain.errors) == len(plain.probes) == 0
        )
        assert plain.attempts[0].n == 32 and plain.attempts[0].seconds == buckets.seconds[-1]


def test_what_passed_at_a_longer_bucket_is_not_tried_again_at_a_shorter_one():
    only_seconds = Cost(name="", unit="B", source="", per_batch=1000, per_second=10_000)
    result = find(allocates(only_seconds), table((8, 10), (8, 20), (8, 30)), tolerance=0)
    assert result.table.sizes.tolist() == [49, 49, 49]
    assert [trial.n for trial in result.attempts if trial.tokens < 30] == [50, 50]


def test_rows_say_what_was_predicted_found_and_filled():
    result = find(allocates(KNOWN), ONE)
    rows = result.rows()
    assert [row["found"] for row in rows] == result.table.sizes.tolist() and rows[0][
        "seconds"
    ] == 1.0
    assert [row["predicted"] for row in rows] == result.predicted.tolist()
    assert sum(row["steps"] for row in rows) == len(result.attempts)
    for row in rows:
        assert row["filled"] == pytest.approx(
            KNOWN(row["found"], row["seconds"], row["tokens"]) / BUDGET, abs=1e-6
        )
        assert 0.9 < row["filled"] <= 1


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
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.mark.parametrize(
    "error", [too_much, cuda_has_none, cublas_has_none, lambda: np.empty(2**60, dtype=np.uint8)]
)
@pytest.mark.parametrize("budget_bytes", [600_000, 30_000_000])  # near the truth, and no help
def test_an_allocator_that_gives_up_is_survived_and_bounds_the_size(error, budget_bytes):
    result = find(fails(error), FEW, budget_bytes=budget_bytes, tolerance=0)
    assert result.table.sizes.tolist() == [500, 500 // 7, 500 // 23]
    assert {trial.bytes is None for trial in result.attempts if not trial.ok} == {True}


LIMITED = """
import json, re, resource, sys
import numpy as np, torch
from asrkit.data.batching.buckets import Buckets
from asrkit.data.batching.oom import oom_search
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Tanh())
optimizer = torch.optim.Adam(model.parameters())
def step(n, seconds, tokens):
    model(torch.ones(n, 1, int(25_000 * seconds))).square().mean().backward()
    optimizer.step()
step(1, 1.0, 1)
np.linalg.lstsq(np.ones((9, 3)), np.ones(9))  # OpenBLAS ends the process when it finds no room at its first use
peak = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (peak + 2**28, peak + 2**28))
before = [value.clone() for value in model.state_dict().values()]
buckets = Buckets([2.0, 4.0, 8.0], [1, 1, 1], [1, 1, 1])
found = oom_search(step, buckets, budget_bytes=2**29, state=(model, optimizer), progress=False)
same = all(map(torch.equal, before, model.state_dict().values()))
print(json.dumps([found.table.sizes.tolist(), sum(trial.bytes is None for trial in found.attempts), same]))
"""


def test_real_failures_of_the_allocator_under_a_limit_of_the_process_are_survived():
    alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=300, env=alone
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sizes, failures, same = json.loads(done.stdout.splitlines()[-1])
    assert failures >= 2 and same
    assert (
        sizes == sorted(sizes, reverse=True) and sizes[-1] > 4 and 1.5 < sizes[1] / sizes[2] < 2.7
    )


def test_tensors_of_a_failed_step_are_gone_before_the_next_even_if_frames_hold_the_error():
    alive: list[weakref.ref] = []

    def step(n, seconds, tokens):
        assert not any(ref() is not None for ref in alive), (
            "a step before this one still holds memory"
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
        assert not all(trial.ok for trial in find(step, FEW, budget_bytes=600_000).attempts)
    finally:
        gc.enable()


class Model(nn.Module):
    """Something of everything that a step may change."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.frozen = (
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Dropout(0.5).eval(),
        )
        self.register_buffer("passing", torch.zeros(3), persistent=False)
        self.gain = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x):
        """x (n, 4) as it goes through."""
        self.passing = torch.cat([self.passing, x.detach().mean()[None]])
        self.frozen.train()
        return self.norm(self.linear(x)) * self.gain


class Wide(torch.optim.Optimizer):
    """Momentum in float32 whatever the weights are, and a rate that moves."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        """One."""
        for group in self.param_groups:
            group["lr"] *= 0.9
            for p in group["params"]:
                momentum = self.state[p].setdefault(
                    "momentum", torch.zeros_like(p, dtype=torch.float32)
                )
                momentum.add_(p.grad)
                p.sub_(group["lr"] * momentum)


def everything(model, optimizers, schedule):
    """Objects, and copies of their contents."""
    tensors = [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        tensors += [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    plain = (
        [[{**group, "params": 0} for group in optimizer.param_groups] for optimizer in optimizers],
        schedule.state_dict(),
    )
    kinds = [
        (len(optimizer.state), [[*state] for state in optimizer.state.values()])
        for optimizer in optimizers
    ]
    training = [module.training for module in model.modules()]
    return (
        [*map(id, tensors)],
        [t.clone() for t in [*tensors, torch.get_rng_state()]],
        repr((plain, kinds, training)),
    )


class Stop(Exception):
    """Not for lack of memory."""


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("end", [None, Stop, KeyboardInterrupt, RuntimeError])
def test_all_is_bit_for_bit_as_before_however_the_search_ends(trained, end):
    torch.manual_seed(1)
    model = Model()
    optimizers = (
        torch.optim.AdamW(model.linear.parameters()),
        Wide([*model.norm.parameters(), model.gain]),
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9)
    seen = []

    def step(n, seconds, tokens):
        assert all(p.grad is None for p in model.parameters())
        held = torch.zeros(int(1_000 * n * seconds), dtype=torch.uint8)
        model(torch.randn(n + 1, 4)).float().square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        schedule.step()
        seen.append(n)
        if end and len(seen) == 9:
            raise end("a shape does not match")
        if n * seconds > 500:
            too_much()
        return held

    if trained:
        step(3, 1.0, 1)
        model.frozen.eval()
    before = everything(model, optimizers, schedule)
    state = (model, *optimizers, schedule)
    if end is None:
        assert find(step, FEW, budget_bytes=600_000, state=state).table.sizes[0] > 400
    else:
        with pytest.raises(end, match="a shape does not match"):
            find(step, FEW, budget_bytes=600_000, state=state)
    assert len(seen) >= 9
    after = everything(model, optimizers, schedule)
    assert after[0] == before[0] and after[2] == before[2]
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(after[1], before[1], strict=True)
    )


@pytest.mark.parametrize("search", ["predicted", "plain"])
def test_a_bucket_of_which_not_one_utterance_fits_is_named(search):
    said = r"^budget_bytes: expected room for one utterance of 23 s and 92 tokens, got a step that takes 0\.4 MiB, more than 0\.4\. S"
    with pytest.raises(ValueError, match=said):
        find(allocates(KNOWN), ONE, budget_bytes=400_000, search=search)
    with pytest.raises(
        ValueError,
        match=r"one utterance of 1 s and 4 tokens, got a step that takes more than there is",
    ):
        find(fails(too_much, most=0), ONE, search=search)


@pytest.mark.parametrize("change, said", [
    ({"step": 3}, r"^step: expected a function of \(n, seconds, tokens\), got int\.$"),
    ({"step": lambda *_: None}, r"^step: expected tensors on 'cpu', got none\. Pass the device"),
    ({"step": lambda *_: torch.zeros(9)}, r"^step: expected more bytes for more utterances, got 36 for \d{10,}\.$"),
    ({"buckets": [(1.0, 4)]}, r"^buckets: expected asrkit.data.Buckets, got list\.$"),
    ({"buckets": table((1.0, 4), (2.0, ENDLESS))}, r"^buckets: expected tokens for every cell, got a cell without\."),
    ({"budget_bytes": None}, r"^budget_bytes: expected how many bytes a step may take, got None\.$"),
    ({"budget_bytes": 0}, r"^budget_bytes: expected above 0, got 0\.$"),
    ({"tolerance": 1.0}, r"^tolerance: expected a share from 0 to below 1, got 1\.0\.$"),
    ({"tolerance": -0.1}, r"^tolerance: expected a share"),
    ({"search": "fast"}, r"^search: expected predicted or plain, got 'fast'\.$"),
    ({"state": [torch.zeros(3)]}, r"^state: expected modules, optimizers and others with a state_dict, got Tensor\.$"),
])  # fmt: skip
def test_bad_input_is_one_line(change, said):
    step, buckets = (
        change.pop(name, other) for name, other in (("step", allocates(KNOWN)), ("buckets", ONE))
    )
    with pytest.raises(ValueError, match=said):
        find(step, buckets, **change)


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
    assert (
        any(trial.bytes is None for trial in beyond.attempts)
        and beyond.table.sizes[0] >= result.table.sizes[0]
    )
    assert torch.cuda.memory_allocated() == 0
