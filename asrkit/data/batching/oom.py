"""Search for the largest batch of each bucket that training survives.

The job of NeMo's OOMptimizer (scripts/speech_recognition/oomptimizer.py), which starts at 32
utterances, doubles or halves them until a step fails or passes, bisects, and takes twice the size
found as the start of the next shorter bucket. Here a memory model, fitted to a few small steps,
predicts where to start, which takes about two steps a bucket.
"""

import gc
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asrkit.data.batching.buckets import ENDLESS, Buckets
from asrkit.data.batching.padding import TERMS, Cost, Limit
from asrkit.data.batching.snapshot import restored
from asrkit.runtime import peak_memory
from asrkit.shapes import expect

# Of a GPU's free memory, as in NeMo: fragments, and what is allocated beside torch, need some.
FREE_SHARE = 0.9
PROBE_SHARE = 0.2  # of the budget, for the largest probe of a shape
PLAIN_START = 32  # utterances, as in NeMo
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
        predicted: Sizes that the memory model predicted, (K,); None for a plain search.
        cost: The memory model, fitted to `probes`; None for a plain search.
        budget_bytes: What a step may take.
        probes: Small steps that the model was fitted to; none for a plain search.
        attempts: Steps that sizes were tried with.
    """

    table: Buckets
    predicted: np.ndarray | None
    cost: Cost | None
    budget_bytes: int
    probes: list[Trial]
    attempts: list[Trial]

    @property
    def steps(self) -> int:
        """Number of training steps, the one for warming up included."""
        return 1 + len(self.probes) + len(self.attempts)

    @property
    def errors(self) -> np.ndarray:
        """Predicted bytes / bytes taken - 1 for each attempt of which the bytes are known.

        The model was not fitted to these attempts.
        """
        if self.cost is None:
            return np.array([])
        known = [trial for trial in self.attempts if trial.bytes]
        return np.array([self.cost(*trial[:3]) / trial.bytes - 1 for trial in known])

    def rows(self) -> list[dict[str, Any]]:
        """A row a bucket: seconds, tokens, predicted and found size, steps, share of the budget."""
        return [self._row(k, *shape) for k, shape in enumerate(_shapes(self.table))]

    def _row(self, k: int, seconds: float, tokens: int) -> dict[str, Any]:
        size = int(self.table.sizes[k])
        trials = [trial for trial in self.attempts if trial[1:3] == (seconds, tokens)]
        taken = [trial.bytes for trial in trials if trial.n == size and trial.bytes]
        predicted = None
        if self.predicted is not None:
            predicted = int(self.predicted[k])
        filled = None
        if taken:
            filled = taken[0] / self.budget_bytes
        return {
            "seconds": seconds,
            "tokens": tokens,
            "predicted": predicted,
            "found": size,
            "steps": len(trials),
            "filled": filled,
        }


def memory_model(trials: Iterable[Trial]) -> Cost:
    """Memory of a training step in bytes, as a Cost fitted to trials.

    Non-negative least squares of the relative errors, so that small and large trials count alike.
    The terms are the smallest set whose error (root mean square) is within 0.1 % of the best. So a
    term that the trials cannot tell from another one, such as tokens where they follow from
    seconds, is left out, the later one first.
    """
    known = [trial[:4] for trial in trials if trial.bytes is not None]
    n, D, U, taken = np.array(known, dtype=np.float64).T
    terms = np.stack([np.ones_like(n), n, n * D, n * U, n * D * D, n * D * U], 1)
    columns = terms / taken[:, None]
    scale = np.linalg.norm(columns, axis=0).clip(1e-300)
    fits = _fits(columns / scale)
    best_error = min(error for error, _, _ in fits)
    good = [fit for fit in fits if fit[0] <= best_error + 1e-3]
    error, chosen, values = min(good, key=lambda fit: (len(fit[1]), round(fit[0], 9)))
    names = ["per_batch", *TERMS]
    coefficients = {
        names[term]: float(value)
        for term, value in zip(chosen, values / scale[chosen], strict=True)
    }
    source = f"fitted to {len(n)} training steps, {100 * error:.1f} % off in the root mean square"
    return Cost(name="memory of a step", unit="B", source=source, **coefficients)


def _fits(columns: np.ndarray) -> list[tuple[float, list[int], np.ndarray]]:
    """(error, terms, values) of every set of terms that has a fit without negative values.

    The best fit without negative values is the unconstrained fit of its own terms, so trying all
    sets finds it.
    """
    fits = []
    count = columns.shape[1]
    ones = np.ones(len(columns))
    for size in range(1, count + 1):
        for combination in combinations(range(count), size):
            terms = list(combination)
            values, _, rank, _ = np.linalg.lstsq(columns[:, terms], ones, rcond=1e-6)
            if rank == len(terms) and (values >= 0).all():
                errors = columns[:, terms] @ values - 1
                fits.append((float(np.sqrt(np.mean(errors**2))), terms, values))
    return fits


def oom_search(
    step: TrainingStep,
    buckets: Buckets,
    *,
    budget_bytes: int | None = None,
    device: str = "cpu",
    tolerance: float = 0.05,
    state: Sequence[Any] = (),
    search: Literal["predicted", "plain"] = "predicted",
    progress: bool = True,
) -> OOMResult:
    """The largest batch size of each bucket with which a training step is survived.

    Longest bucket first. What passes at one shape passes at shorter ones, and what fails there
    fails at longer ones. A step fails where an allocator gives up, or where it takes more than
    `budget_bytes` beyond what was allocated before it: weights, and the optimizer's state, which a
    first step makes. Each step begins without gradients, as after zero_grad(); one that clears
    them only after its forward pass takes more in training than here.

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
            They, their gradients and torch's random numbers are bit for bit as before when this
            returns or raises.
        search: "predicted" uses a memory model; "plain" doubles and bisects, as NeMo does.
        progress: Show a progress bar.

    Raises:
        ValueError: A wrong argument, or not one utterance of a bucket fits.
    """
    _check_arguments(step, buckets, budget_bytes, device, tolerance, search)
    with restored(state, device) as parameters:
        trials = _Trials(step, device, parameters, tolerance)
        return _search(trials, buckets, budget_bytes, search, progress)


def _search(
    trials: "_Trials", buckets: Buckets, budget_bytes: int | None, search: str, progress: bool
) -> OOMResult:
    """Run the steps of a search; see oom_search."""
    from tqdm import tqdm  # lazily, so that a machine without it can import asrkit

    shapes = _shapes(buckets)
    probe_shapes = _probe_shapes(buckets) if search == "predicted" else []
    predicted = None
    sizes = np.ones_like(buckets.sizes)
    total = len(probe_shapes) + len(shapes)
    bar = tqdm(total=total, desc="largest batches", unit="shape", disable=not progress)
    with bar:
        trials.bar = bar
        trials.run(1, *shapes[0])  # makes the optimizer's state, compiles kernels
        if budget_bytes is None:
            budget_bytes = int(FREE_SHARE * _free_bytes(trials.device))
        trials.budget = budget_bytes
        for shape in probe_shapes:
            trials.probe(*shape)
        probes = trials.done[1:]
        if search == "predicted":
            trials.cost = memory_model(probes)
            predicted = Limit(trials.cost, budget_bytes).largest(buckets.seconds, buckets.tokens)
        start = PLAIN_START
        for k in reversed(range(len(shapes))):
            sizes[k] = trials.largest(*shapes[k], start=start)
            start = 2 * int(sizes[k])
    return OOMResult(
        table=replace(buckets, sizes=sizes),
        predicted=predicted,
        cost=trials.cost,
        budget_bytes=budget_bytes,
        probes=probes,
        attempts=trials.done[1 + len(probes) :],
    )


def _check_arguments(
    step: TrainingStep,
    buckets: Buckets,
    budget_bytes: int | None,
    device: str,
    tolerance: float,
    search: str,
) -> None:
    expect(callable(step), "step", "a function of (n, seconds, tokens)", type(step).__name__)
    is_table = isinstance(buckets, Buckets)
    expect(is_table, "buckets", "asrkit.data.Buckets", type(buckets).__name__)
    expect(
        buckets.tokens.max() < ENDLESS,
        "buckets",
        "tokens for every cell",
        "a cell without",
        "Make them with buckets_2d.",
    )
    has_default = torch.device(device).type == "cuda"
    known = budget_bytes is not None or has_default
    expect(known, "budget_bytes", "how many bytes a step may take", None)
    expect(budget_bytes is None or budget_bytes > 0, "budget_bytes", "above 0", budget_bytes)
    expect(0 <= tolerance < 1, "tolerance", "a share from 0 to below 1", tolerance)
    expect(search in ("predicted", "plain"), "search", "predicted or plain", repr(search))


class _Trials:
    """The training steps of a search, what they took, and what follows from them."""

    bar: Any  # tqdm's progress bar, which advances once a shape

    def __init__(
        self, step: TrainingStep, device: str, parameters: list[Tensor], tolerance: float
    ) -> None:
        self.step = step
        self.device = device
        self.parameters = parameters
        self.tolerance = tolerance
        self.budget = 2**62
        self.room = 2.0**62  # bytes there are, as far as allocators that gave up have told
        self.correction = 1.0  # bytes taken / predicted at the last step
        self.cost: Cost | None = None  # the memory model; None for a plain search
        self.done: list[Trial] = []

    def run(self, n: int, seconds: float, tokens: int) -> Trial:
        """Run one step and free its gradients and activations; the model keeps the update.

        Args:
            n: Utterances of the batch.
            seconds: Length of each.
            tokens: Tokens of each.

        Raises:
            ValueError: Not even one utterance fits.
        """
        taken = self._bytes_taken(n, seconds, tokens)
        remedy = "Pass the device that it computes on."
        expect(taken != 0, "step", f"tensors on {self.device!r}", "none", remedy)
        fits = taken is not None and taken <= self.budget
        trial = Trial(n, seconds, tokens, taken, fits)
        self.done.append(trial)
        self.bar.set_postfix(steps=len(self.done))
        if n == 1 and not trial.ok:
            self._refuse(trial)
        return trial

    def _bytes_taken(self, n: int, seconds: float, tokens: int) -> int | None:
        """Bytes that a step took; None where an allocator gave up."""
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
        return taken

    def _refuse(self, trial: Trial) -> None:
        """Raise ValueError: not even one utterance fits."""
        if trial.bytes is None:
            needed = "more than there is"
        else:
            mib = 2**20
            needed = f"{trial.bytes / mib:.1f} MiB, more than {self.budget / mib:.1f}"
        expect(
            False,
            "budget_bytes",
            f"room for one utterance of {trial.seconds:g} s and {trial.tokens} tokens",
            f"a step that takes {needed}",
            "Split such utterances, or leave them out.",
        )

    def probe(self, seconds: float, tokens: int) -> None:
        """Run steps of a shape for the memory model: small, but large enough to tell its slopes.

        One utterance first, then as many as take half of the probes' share of the budget or more.
        That stays in bounds: bytes that a batch takes only once do not grow with it.
        """
        share = PROBE_SHARE * self.budget
        last = self.run(1, seconds, tokens)
        while last.bytes is not None and (last.n == 1 or last.bytes < share / 2):
            got = f"{last.bytes} for {last.n}"
            expect(last.n < UNBOUNDED, "step", "more bytes for more utterances", got)
            last = self.run(max(last.n + 1, int(last.n * share / last.bytes)), seconds, tokens)
        if last.bytes is None and last.n > 2:
            self.run(2, seconds, tokens)
        self.bar.update()

    def aim(self, seconds: float, tokens: int) -> int:
        """The largest n that the model predicts, corrected by its error at the last step."""
        assert self.cost is not None
        most = min(self.budget, self.room) / self.correction
        return int(Limit(self.cost, most).largest(seconds, tokens))

    def learn(self, trial: Trial) -> None:
        """Correct the model; or, where an allocator gave up, the room that is believed to be."""
        assert self.cost is not None
        predicted = self.cost(*trial[:3])
        if trial.bytes is None:
            self.room = min(self.room, self.correction * predicted)
        else:
            self.correction = trial.bytes / predicted

    def bounds(self, seconds: float, tokens: int) -> tuple[int, int]:
        """Sizes of a shape that pass and that fail, as follows from trials at other shapes."""
        low = 0
        high = UNBOUNDED
        for trial in self.done:
            as_long = trial.seconds >= seconds and trial.tokens >= tokens
            as_short = trial.seconds <= seconds and trial.tokens <= tokens
            if trial.ok and as_long:
                low = max(low, trial.n)
            if not trial.ok and as_short:
                high = min(high, trial.n)
        return low, high

    def largest(self, seconds: float, tokens: int, *, start: int) -> int:
        """The largest n that passes, up to the tolerance.

        From the model's prediction, or from `start` without a model, in growing strides until one
        step has passed and one failed, then by bisection.

        Args:
            seconds: Length of each utterance.
            tokens: Tokens of each.
            start: The first n tried where there is no model.
        """
        if self.cost is None:
            size = self._largest_plain(seconds, tokens, start)
        else:
            size = self._largest_predicted(seconds, tokens)
        self.bar.update()
        return size

    def _largest_plain(self, seconds: float, tokens: int, start: int) -> int:
        interval = _Interval(0, UNBOUNDED, self.tolerance)
        n = start
        while interval.is_open:
            trial = self.run(interval.inside(n), seconds, tokens)
            interval.narrow(trial)
            n = interval.stride_on(trial, first_stride=trial.n)
        return interval.low

    def _largest_predicted(self, seconds: float, tokens: int) -> int:
        interval = _Interval(*self.bounds(seconds, tokens), self.tolerance)
        n = self.aim(seconds, tokens)
        aims = 2  # how often the corrected model may aim anew
        while interval.is_open:
            trial = self.run(interval.inside(n), seconds, tokens)
            interval.narrow(trial)
            # What fails so far above ends the search, or what passes so far below.
            near = max(1, int(self.tolerance * trial.n))
            self.learn(trial)
            n = self.aim(seconds, tokens)
            if trial.bytes is not None:
                aims -= 1
                least = interval.low + near if trial.ok else interval.low
                if aims >= 0 and n > least:
                    continue
            n = interval.stride_on(trial, first_stride=near)
        return interval.low


class _Interval:
    """Between the largest size that passed and the smallest that failed, which strides narrow."""

    def __init__(self, low: int, high: int, tolerance: float) -> None:
        self.low = low
        self.high = high
        self.tolerance = tolerance
        self.stride = 0

    @property
    def is_open(self) -> bool:
        """Whether the sizes are further apart than the tolerance allows."""
        return self.high - self.low > max(1, self.tolerance * self.high)

    def inside(self, n: int) -> int:
        """`n`, or the nearest size between both ends."""
        return min(max(n, self.low + 1), self.high - 1)

    def narrow(self, trial: Trial) -> None:
        """Move one end to the size that was tried."""
        if trial.ok:
            self.low = trial.n
        else:
            self.high = trial.n

    def stride_on(self, trial: Trial, *, first_stride: int) -> int:
        """The next size: a stride further, twice as long each time, but not beyond the middle."""
        self.stride = 2 * self.stride or first_stride
        middle = (self.low + self.high) // 2
        if trial.ok:
            return min(self.low + self.stride, middle)
        return max(self.high - self.stride, middle)


def _shapes(buckets: Buckets) -> list[tuple[float, int]]:
    """(seconds, tokens) of each bucket."""
    return list(zip(buckets.seconds.tolist(), buckets.tokens.tolist(), strict=True))


def _probe_shapes(buckets: Buckets) -> list[tuple[float, int]]:
    """Shapes to fit the memory model to: a model that is right there is right in between.

    Of the shortest, middle and longest buckets those with fewest and with most tokens.
    """
    seconds = np.unique(buckets.seconds)
    shapes = []
    for k in (0, len(seconds) // 2, -1):
        same = [shape for shape in _shapes(buckets) if shape[0] == seconds[k]]
        shapes += [same[0], same[-1]]
    return list(dict.fromkeys(shapes))


def _free_bytes(device: str) -> int:
    """Bytes that a GPU has left, with those that torch's allocator holds for later."""
    free, _ = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allocated = torch.cuda.memory_allocated(device)
    return free + reserved - allocated
