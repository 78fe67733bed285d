"""Search for the largest batch of each bucket that training survives.

The job of NeMo's OOMptimizer (scripts/speech_recognition/oomptimizer.py), which doubles, halves and
bisects. Here each step also says where to look next: memory grows about in proportion to the number
of utterances, so the straight line through a step meets the budget near the largest batch.
"""

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from asrkit.data.batching.buckets import Buckets
from asrkit.memory import peak_memory
from asrkit.shapes import expect

# Of a GPU's free memory, as in NeMo: fragments, and what is allocated beside torch, need some.
FREE_SHARE = 0.9
START = 4  # utterances of the first step
AIMS = 4  # steps of a bucket that aim; later ones bisect
UNBOUNDED = 2**31  # utterances: more than any step is tried with
# Messages of an allocator that gives up; the last is what cuFFT says when its workspace does not
# fit.
GAVE_UP = r"out of memory|can't allocate memory|bad_alloc|ALLOC_FAILED|CUFFT_INTERNAL_ERROR"
TrainingStep = Callable[[int, float, int], object]


class Trial(NamedTuple):
    """One training step on n utterances of `seconds` and `tokens` each."""

    n: int
    seconds: float
    tokens: int
    bytes: int | None  # that the step took; None where an allocator gave up
    ok: bool  # whether it stayed within the budget


@dataclass(frozen=True, kw_only=True)
class OOMResult:
    """What a search found, and from which steps.

    Attributes:
        table: The buckets with the sizes found.
        budget_bytes: What a step may take.
        trials: The training steps, without the first, which makes the optimizer's state.
    """

    table: Buckets
    budget_bytes: int
    trials: list[Trial]

    def rows(self) -> list[dict[str, Any]]:
        """A row a bucket: seconds, tokens, size found, steps, share of the budget."""
        rows = []
        columns = (self.table.seconds, self.table.tokens, self.table.sizes)
        for seconds, tokens, size in zip(*map(np.ndarray.tolist, columns), strict=True):
            trials = [trial for trial in self.trials if trial[1:3] == (seconds, tokens)]
            taken = [trial.bytes for trial in trials if trial.n == size and trial.bytes]
            row = {"seconds": seconds, "tokens": tokens, "found": size, "steps": len(trials)}
            rows.append(row | {"filled": taken[0] / self.budget_bytes})
        return rows


def oom_search(
    step: TrainingStep,
    buckets: Buckets,
    *,
    budget_bytes: int | None = None,
    device: str = "cpu",
    tolerance: float = 0.05,
    state: Sequence[Any] = (),
    progress: bool = True,
) -> OOMResult:
    """The largest batch size of each bucket with which a training step is survived.

    A step fails where an allocator gives up, or where it takes more than `budget_bytes` beyond what
    was allocated before it: weights, and the optimizer's state, which a first step makes. Each step
    begins without gradients, as after zero_grad(); one that clears them only after its forward pass
    takes more in training than here.

    Args:
        step: `step(n, seconds, tokens)` runs a whole training step on n such utterances.
        buckets: The table whose sizes are searched for; buckets_2d makes one.
        budget_bytes: What a step may take. By default 0.9 of what is free on a GPU. On a CPU it has
            to be given, and counts as peak_memory does: torch's tensors to the byte, nothing of
            NumPy, Numba and BLAS. Stay below what the machine has: where memory runs out, Linux
            would sooner end the process than refuse it more.
        device: That the step computes on.
        tolerance: A size n is found when n passes and some n' > n fails, with n' = n + 1 or
            (n' - n) / n' <= tolerance.
        state: The modules and optimizers that `step` changes, and whatever else with a state_dict.
            They, their gradients and torch's random numbers are as before when this returns or
            raises.
        progress: Show a progress bar.

    Raises:
        ValueError: A wrong argument, or not one utterance of a bucket fits.
    """
    from tqdm import tqdm  # lazily, so that a machine without it can import asrkit

    is_table = isinstance(buckets, Buckets)
    expect(is_table, "buckets", "asrkit.data.Buckets", type(buckets).__name__)
    known = budget_bytes is not None or torch.device(device).type == "cuda"
    expect(known, "budget_bytes", "how many bytes a step may take", None)
    expect(0 <= tolerance < 1, "tolerance", "a share from 0 to below 1", tolerance)
    sizes = buckets.sizes.copy()
    seconds = buckets.seconds.tolist()
    tokens = buckets.tokens.tolist()
    with _restored(state, device) as parameters:
        trials = _Trials(step=step, device=device, parameters=parameters)
        trials.run(1, seconds[0], tokens[0])  # makes the optimizer's state
        trials.done.clear()
        if budget_bytes is None:
            free, _ = torch.cuda.mem_get_info(device)
            # torch's allocator holds some for later
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            budget_bytes = int(FREE_SHARE * free)
        trials.budget = budget_bytes
        padded_s = START * seconds[-1]
        for k in tqdm(reversed(range(len(buckets))), "buckets", disable=not progress):
            start = int(padded_s / seconds[k])
            sizes[k] = trials.largest(seconds[k], tokens[k], start, tolerance)
            padded_s = sizes[k] * seconds[k]
    table = replace(buckets, sizes=sizes)
    return OOMResult(table=table, budget_bytes=budget_bytes, trials=trials.done)


@dataclass(kw_only=True)
class _Trials:
    """The training steps of a search, and what they took."""

    step: TrainingStep
    device: str
    parameters: list[Tensor]
    budget: int = 2**62
    done: list[Trial] = field(default_factory=list)

    def largest(self, seconds: float, tokens: int, start: int, tolerance: float) -> int:
        """The largest n that passes, up to the tolerance; `start` is the first n tried.

        Steps aim at where memory in proportion to n would meet the budget. What a few of them have
        not settled once one has failed, bisection does.
        """
        low = 0
        high = UNBOUNDED
        n = start
        aims = AIMS
        while high - low > max(1, tolerance * high):
            n = min(max(n, low + 1), high - 1)
            trial = self.run(n, seconds, tokens)
            if trial.ok:
                low = n
            else:
                high = n
            aims = 0 if trial.bytes is None else aims - 1
            if high < UNBOUNDED and aims <= 0:
                n = (low + high) // 2
            elif trial.bytes is not None:
                # a little beyond, so that what passed below and failed above end the search
                beyond = tolerance / 2 if trial.ok else -tolerance / 2
                n = int(n * self.budget / trial.bytes * (1 + beyond))
        return low

    def run(self, n: int, seconds: float, tokens: int) -> Trial:
        """Run one step and free its gradients and activations; the model keeps the update."""
        taken = None
        try:
            taken = peak_memory(lambda: self.step(n, seconds, tokens), device=self.device)
        except (RuntimeError, MemoryError) as error:
            is_out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
            if not is_out_of_memory and not re.search(GAVE_UP, str(error)):
                raise
        finally:
            for parameter in self.parameters:
                parameter.grad = None
        if taken is None:
            # Frames of the traceback may hold the error, and so each other and the step's tensors.
            gc.collect()
        remedy = "Pass the device that it computes on."
        expect(taken != 0, "step", f"tensors on {self.device!r}", "none", remedy)
        trial = Trial(n, seconds, tokens, taken, taken is not None and taken <= self.budget)
        self.done.append(trial)
        expect(
            trial.ok or n > 1,
            "budget_bytes",
            f"room for one utterance of {seconds:g} s and {tokens} tokens",
            "a step that takes more",
            "Split such utterances, or leave them out.",
        )
        return trial


@contextmanager
def _restored(state: Sequence[Any], device: str) -> Iterator[list[Tensor]]:
    """Put everything in `state`, gradients and random numbers back as they were at the end.

    Yields the modules' parameters, without gradients. Copies wait in host memory.
    """
    saved = []
    parameters: list[Tensor] = []
    for item in state:
        # a copy on the host
        copied = tree_map_only(Tensor, lambda x: x.detach().to("cpu", copy=True), item.state_dict())
        saved.append(copied)
        if isinstance(item, nn.Module):
            parameters += item.parameters()
    gradients = [parameter.grad for parameter in parameters]
    is_cuda = torch.device(device).type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        try:
            for parameter in parameters:
                parameter.grad = None
            yield parameters
        finally:
            for item, before in zip(state, saved, strict=True):
                item.load_state_dict(before)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            # Not after each trial: the allocator frees what it holds before it gives up, and
            # training has fragments as well.
            if is_cuda:
                torch.cuda.empty_cache()
