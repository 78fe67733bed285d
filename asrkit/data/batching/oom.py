"""Search for the largest batch of each bucket that fits into memory.

Like NeMo's OOMptimizer (scripts/speech_recognition/oomptimizer.py), which doubles, halves and
bisects. Here the memory of each step also predicts the next size: it is about proportional to the
number of utterances, so the line through a step meets the budget near the largest batch.
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

# Share of a GPU's free memory, as in NeMo; fragments and other allocations need the rest.
FREE_SHARE = 0.9
START = 4  # utterances of the first step
PREDICTED = 4  # steps of a bucket whose size is predicted; later ones bisect
UNBOUNDED = 2**31  # more utterances than any step tries
# Messages of allocators that are out of memory; the last one is cuFFT's for its workspace.
OUT_OF_MEMORY = r"out of memory|can't allocate memory|bad_alloc|ALLOC_FAILED|CUFFT_INTERNAL_ERROR"
TrainingStep = Callable[[int, float, int], object]


class Trial(NamedTuple):
    """One training step on n utterances of `seconds` and `tokens` each."""

    n: int
    seconds: float
    tokens: int
    bytes: int | None  # memory of the step; None if an allocation failed
    ok: bool  # whether it stayed within the budget


@dataclass(frozen=True, kw_only=True)
class OOMResult:
    """Result of a search, and its steps.

    Attributes:
        table: The buckets with the sizes found.
        budget_bytes: Largest memory of a step.
        trials: The training steps without the first, which creates the optimizer's state.
    """

    table: Buckets
    budget_bytes: int
    trials: list[Trial]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each bucket: seconds, tokens, size found, steps, share of the budget."""
        rows = []
        columns = (self.table.seconds, self.table.tokens, self.table.sizes)
        for seconds, tokens, size in zip(*map(np.ndarray.tolist, columns), strict=True):
            trials = [trial for trial in self.trials if trial[1:3] == (seconds, tokens)]
            used = [trial.bytes for trial in trials if trial.n == size and trial.bytes]
            row = {"seconds": seconds, "tokens": tokens, "found": size, "steps": len(trials)}
            rows.append(row | {"filled": used[0] / self.budget_bytes})
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
    """The largest batch size of each bucket whose training step fits into memory.

    A step fails if an allocation fails, or if it takes more than `budget_bytes` beyond what was
    allocated before: the weights, and the optimizer's state, which a first step creates. Each
    step starts without gradients, as after zero_grad(). A step that clears them after its forward
    pass takes more in training than here.

    Args:
        step: `step(n, seconds, tokens)` runs a whole training step on n such utterances.
        buckets: The table whose sizes are searched for, such as from buckets_2d.
        budget_bytes: Largest memory of a step. On a GPU the default is 0.9 of the free memory. On a
            CPU it is required, and counted as by peak_memory: torch's tensors to the byte, nothing
            of NumPy, Numba and BLAS. Stay below the memory of the machine: Linux ends a process
            rather than refuse an allocation.
        device: Device that the step computes on.
        tolerance: A size n is found when n passes and some n' > n fails, with n' = n + 1 or
            (n' - n) / n' <= tolerance.
        state: The modules, optimizers and other objects with a state_dict that `step` changes.
            They, their gradients and torch's random numbers are restored when this returns or
            raises.
        progress: Show a progress bar.

    Raises:
        ValueError: An invalid argument, or not even one utterance of a bucket fits.
    """
    from tqdm import tqdm  # lazily, so that a machine without it can import asrkit

    expect(isinstance(buckets, Buckets), "buckets", "asrkit.data.Buckets", type(buckets).__name__)
    known = budget_bytes is not None or torch.device(device).type == "cuda"
    expect(known, "budget_bytes", "a number of bytes for a step", None)
    expect(0 <= tolerance < 1, "tolerance", "a share from 0 to below 1", tolerance)
    sizes = buckets.sizes.copy()
    seconds = buckets.seconds.tolist()
    tokens = buckets.tokens.tolist()
    with _restored(state, device) as parameters:
        trials = _Trials(step=step, device=device, parameters=parameters)
        trials.run(1, seconds[0], tokens[0])  # creates the optimizer's state
        trials.done.clear()
        if budget_bytes is None:
            free, _ = torch.cuda.mem_get_info(device)
            # torch's allocator reserves some for later
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            budget_bytes = int(FREE_SHARE * free)
        trials.budget = budget_bytes
        padded_s = START * seconds[-1]
        for k in tqdm(range(len(buckets))[::-1], "buckets", disable=not progress):
            start = int(padded_s / seconds[k])
            sizes[k] = trials.largest(seconds[k], tokens[k], start, tolerance)
            padded_s = sizes[k] * seconds[k]
    table = replace(buckets, sizes=sizes)
    return OOMResult(table=table, budget_bytes=budget_bytes, trials=trials.done)


@dataclass(kw_only=True)
class _Trials:
    """The training steps of a search, and their memory."""

    step: TrainingStep
    device: str
    parameters: list[Tensor]
    budget: int = 2**62
    done: list[Trial] = field(default_factory=list)

    def largest(self, seconds: float, tokens: int, start: int, tolerance: float) -> int:
        """The largest n that passes, up to the tolerance; `start` is the first n tried.

        The first steps take the n at which memory proportional to n would meet the budget. After a
        few, and once one has failed, bisection continues.
        """
        low = 0
        high = UNBOUNDED
        n = start
        predictions = PREDICTED
        while high - low > max(1, tolerance * high):
            n = min(max(n, low + 1), high - 1)
            trial = self.run(n, seconds, tokens)
            if trial.ok:
                low = n
            else:
                high = n
            predictions = 0 if trial.bytes is None else predictions - 1
            if high < UNBOUNDED and predictions <= 0:
                n = (low + high) // 2
            elif trial.bytes is not None:
                # a little beyond, so that a pass below and a failure above end the search
                beyond = tolerance / 2 if trial.ok else -tolerance / 2
                n = int(n * self.budget / trial.bytes * (1 + beyond))
        return low

    def run(self, n: int, seconds: float, tokens: int) -> Trial:
        """Run one step and free its gradients and activations; the model stays updated."""
        used = None
        try:
            used = peak_memory(lambda: self.step(n, seconds, tokens), device=self.device)
        except (RuntimeError, MemoryError) as error:
            is_out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
            if not is_out_of_memory and not re.search(OUT_OF_MEMORY, str(error)):
                raise
        finally:
            for parameter in self.parameters:
                parameter.grad = None
        if used is None:
            # frames of the traceback may keep the error, and so each other and the step's tensors
            gc.collect()
        remedy = "Pass the device that it computes on."
        expect(used != 0, "step", f"tensors on {self.device!r}", "none", remedy)
        trial = Trial(n, seconds, tokens, used, used is not None and used <= self.budget)
        self.done.append(trial)
        expect(
            trial.ok or n > 1,
            "budget_bytes",
            f"room for one utterance of {seconds:g} s and {tokens} tokens",
            "a step that takes more",
            "Split or remove such utterances, or raise it.",
        )
        return trial


@contextmanager
def _restored(state: Sequence[Any], device: str) -> Iterator[list[Tensor]]:
    """Restore everything in `state`, gradients and random numbers at the end of the block.

    Yields the modules' parameters, without gradients. Copies are kept in host memory.
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
            # not after each trial: the allocator frees its reserve before it fails, and training
            # has fragments too
            if is_cuda:
                torch.cuda.empty_cache()
