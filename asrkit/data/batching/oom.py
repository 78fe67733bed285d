"""The largest batch of each bucket that training survives: foreseen from a few small steps, found
by real ones.

The job of NeMo's OOMptimizer (scripts/speech_recognition/oomptimizer.py), which starts at 32
utterances, doubles or halves them until a step fails or passes, bisects, and takes twice the size
found as the start of the next shorter bucket. A model of the memory starts beside the goal instead,
and takes about two steps a bucket.
"""

import gc
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from asrkit.data.batching.buckets import ENDLESS, Buckets
from asrkit.data.batching.padding import TERMS, Cost, Limit
from asrkit.runtime import peak_memory
from asrkit.shapes import expect

# of a GPU's free memory, as in NeMo: fragments, and what is allocated beside torch, need some
FREE_SHARE = 0.9
PROBE_SHARE = 0.2  # of the budget, for the largest probe of a shape
PLAIN_START = 32  # utterances, as in NeMo
# cuFFT's word for no workspace
GAVE_UP = r"out of memory|can't allocate memory|bad_alloc|ALLOC_FAILED|CUFFT_INTERNAL_ERROR"
Step = Callable[[int, float, int], object]


class Trial(NamedTuple):
    """One training step: n utterances of (seconds, tokens), the bytes it took, None where an
    allocator gave up, and if it fits.
    """

    n: int
    seconds: float
    tokens: int
    bytes: int | None
    ok: bool


@dataclass(frozen=True, kw_only=True)
class OOMResult:
    """`table` has the sizes found, `predicted` (K,) those that the memory model `cost` (fitted to
    `probes`) foresaw.

    Where `search` was "plain" there are no probes, and `cost` and `predicted` are None.
    """

    table: Buckets
    predicted: np.ndarray | None
    cost: Cost | None
    budget_bytes: int
    probes: list[Trial]
    attempts: list[Trial]

    @property
    def steps(self) -> int:
        """Training steps run, the one for warming up included."""
        return 1 + len(self.probes) + len(self.attempts)

    @property
    def errors(self) -> np.ndarray:
        """Bytes foreseen / taken - 1 in each attempt of which the bytes are known; none of them
        took part in the fit.
        """
        seen = [trial for trial in self.attempts if trial.bytes and self.cost]
        return np.array([self.cost(*trial[:3]) / trial.bytes - 1 for trial in seen])  # type: ignore[misc]

    def rows(self) -> list[dict[str, Any]]:
        """A row a bucket: seconds, tokens, predicted, found, steps it took, and the share of the
        budget that it fills.
        """
        rows = []
        for k, (seconds, tokens) in enumerate(_cells(self.table)):
            tried, found = (
                [trial for trial in self.attempts if trial[1:3] == (seconds, tokens)],
                int(self.table.sizes[k]),
            )
            filled = next(
                (
                    trial.bytes / self.budget_bytes
                    for trial in tried
                    if trial.n == found and trial.bytes
                ),
                None,
            )
            predicted = None if self.predicted is None else int(self.predicted[k])
            told = {"predicted": predicted, "found": found, "steps": len(tried), "filled": filled}
            rows.append({"seconds": seconds, "tokens": tokens, **told})
        return rows


def memory_model(trials: Iterable[Trial]) -> Cost:
    """Bytes of a step as a Cost: non-negative least squares of the relative errors, so that small
    and large trials count alike.

    Of all sets of terms the smallest one whose error (root mean square) is within 0.1 % of the
    best, so a term the trials cannot tell from another, such as tokens from seconds where one
    follows from the other, is left out, the later first.
    """
    known = [trial[:4] for trial in trials if trial.bytes is not None]
    n, D, U, taken = np.array(known, dtype=np.float64).T
    columns = np.stack([np.ones_like(n), n, n * D, n * U, n * D * D, n * D * U], 1) / taken[:, None]
    columns /= (scale := np.linalg.norm(columns, axis=0).clip(1e-300))
    fits = []
    for terms in (list(terms) for count in range(1, 7) for terms in combinations(range(6), count)):
        values, _, rank, _ = np.linalg.lstsq(columns[:, terms], np.ones_like(n), rcond=1e-6)
        if (
            rank == len(terms) and (values >= 0).all()
        ):  # the best without negative values is the plain best of its own terms
            fits.append(
                (
                    float(np.sqrt(np.mean((columns[:, terms] @ values - 1) ** 2))),
                    terms,
                    values / scale[terms],
                )
            )
    near = [fit for fit in fits if fit[0] <= min(fits, key=lambda fit: fit[0])[0] + 1e-3]
    error, terms, values = min(near, key=lambda fit: (len(fit[1]), round(fit[0], 9)))
    found = {
        ["per_batch", *TERMS][term]: float(value) for term, value in zip(terms, values, strict=True)
    }
    source = f"fitted to {len(n)} training steps, {error:.1%} off in the root mean square"
    return Cost(name="memory of a step", unit="B", source=source, **found)


def oom_search(
    step: Step,
    buckets: Buckets,
    *,
    budget_bytes: int | None = None,
    device: str = "cpu",
    tolerance: float = 0.05,
    state: Sequence[Any] = (),
    search: Literal["predicted", "plain"] = "predicted",
    progress: bool = True,
) -> OOMResult:
    """The batch size of each bucket: the largest n whose `step(n, seconds, tokens)`, a whole
    training step, is survived.

    A size n is found when n passes and some n' > n fails, with n' = n + 1 or (n' - n) / n' <=
    tolerance. Longest bucket first; what passes at one shape passes at shorter ones, what fails
    there fails at longer ones. search="plain" is the way of NeMo.

    A step fails where an allocator gives up, or where it takes more than `budget_bytes` beyond what
    was there before it: weights, and the optimizer's state, which a first step makes. On a GPU the
    default is 0.9 of what is free then. On a CPU it has to be given, and counts as peak_memory
    does: torch's tensors to the byte, nothing of NumPy, Numba and BLAS. Stay below what the machine
    has: where memory runs out, Linux rather ends a process than refuses it more.

    state: the modules and optimizers that `step` changes, and whatever else with a state_dict.
    They, their gradients and torch's random numbers are bit for bit as before when this returns or
    raises. Each step begins without gradients, as after zero_grad(); one that clears them only
    after its forward pass takes more in training than here.
    """
    kind = torch.device(device).type
    expect(callable(step), "step", "a function of (n, seconds, tokens)", type(step).__name__)
    expect(isinstance(buckets, Buckets), "buckets", "asrkit.data.Buckets", type(buckets).__name__)
    expect(
        buckets.tokens.max() < ENDLESS,
        "buckets",
        "tokens for every cell",
        "a cell without",
        "Make them with buckets_2d.",
    )
    expect(
        budget_bytes is not None or kind == "cuda",
        "budget_bytes",
        "how many bytes a step may take",
        None,
    )
    expect(budget_bytes is None or budget_bytes > 0, "budget_bytes", "above 0", budget_bytes)
    expect(0 <= tolerance < 1, "tolerance", "a share from 0 to below 1", tolerance)
    expect(search in ("predicted", "plain"), "search", "predicted or plain", repr(search))
    cells, predicted, sizes = _cells(buckets), None, np.ones_like(buckets.sizes)
    shapes = _corners(buckets) if search == "predicted" else []
    bar = tqdm(
        total=len(shapes) + len(cells), desc="largest batches", unit="shape", disable=not progress
    )
    with bar, _restored(state, device) as parameters:
        trials = _Trials(step, device, parameters, tolerance, bar)
        trials.run(1, *cells[0])  # makes the optimizer's state, compiles kernels
        trials.budget = int(FREE_SHARE * _free(device)) if budget_bytes is None else budget_bytes
        for shape in shapes:
            trials.probe(*shape)
        probes = trials.done[1:]
        if search == "predicted":
            trials.cost = memory_model(probes)
            predicted = Limit(trials.cost, trials.budget).largest(buckets.seconds, buckets.tokens)
        for k in reversed(range(len(cells))):
            sizes[k] = trials.largest(
                *cells[k], start=2 * int(sizes[k + 1]) if k + 1 < len(cells) else PLAIN_START
            )
    return OOMResult(
        table=replace(buckets, sizes=sizes),
        predicted=predicted,
        cost=trials.cost,
        budget_bytes=trials.budget,
        probes=probes,
        attempts=trials.done[1 + len(probes) :],
    )


class _Trials:
    """Training steps of a search, what they took, and what follows from them."""

    def __init__(
        self, step: Step, device: str, parameters: list[Tensor], tolerance: float, bar: Any
    ) -> None:
        self.step, self.device, self.parameters, self.tolerance, self.bar = (
            step,
            device,
            parameters,
            tolerance,
            bar,
        )
        self.budget, self.room, self.off = (
            2**62,
            2.0**62,
            1.0,
        )  # off: bytes taken / foreseen, at the last step
        self.cost: Cost | None = None
        self.done: list[Trial] = []

    def run(self, n: int, seconds: float, tokens: int) -> Trial:
        """One step; nothing of it stays but what it did to the model."""
        taken = None
        try:
            taken = peak_memory(lambda: self.step(n, seconds, tokens), device=self.device)
        except (RuntimeError, MemoryError) as error:
            if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not re.search(
                GAVE_UP, str(error)
            ):
                raise
        finally:
            for parameter in self.parameters:
                parameter.grad = None
        if taken is None:
            # frames of the traceback may hold the error, and so each other and the tensors of the
            # step
            gc.collect()
        expect(
            taken != 0,
            "step",
            f"tensors on {self.device!r}",
            "none",
            "Pass the device that it computes on.",
        )
        self.done.append(
            Trial(n, seconds, tokens, taken, taken is not None and taken <= self.budget)
        )
        self.bar.set_postfix(steps=len(self.done))
        if n == 1 and not self.done[-1].ok:
            needed = (
                "more than there is"
                if taken is None
                else f"{taken / 2**20:.1f} MiB, more than {self.budget / 2**20:.1f}"
            )
            wanted = f"room for one utterance of {seconds:g} s and {tokens} tokens"
            expect(
                False,
                "budget_bytes",
                wanted,
                f"a step that takes {needed}",
                "Split such utterances, or leave them out.",
            )
        return self.done[-1]

    def probe(self, seconds: float, tokens: int) -> None:
        """One utterance, then as many as take half the share or more: in bounds, for what a batch
        takes once does not grow.
        """
        share, last = PROBE_SHARE * self.budget, self.run(1, seconds, tokens)
        while last.bytes is not None and (last.n == 1 or last.bytes < share / 2):
            expect(
                last.n < 2**31,
                "step",
                "more bytes for more utterances",
                f"{last.bytes} for {last.n}",
            )
            last = self.run(max(last.n + 1, int(last.n * share / last.bytes)), seconds, tokens)
        if last.bytes is None and last.n > 2:
            self.run(2, seconds, tokens)
        self.bar.update()

    def aim(self, seconds: float, tokens: int) -> int:
        """The largest n that the model foresees, corrected by how far it was off at the last step."""
        most = min(self.budget, self.room) / self.off
        limit = Limit(self.cost, most)  # type: ignore[arg-type]
        return int(limit.largest(seconds, tokens))

    def learn(self, trial: Trial) -> None:
        """Correct the model, or, where an allocator gave up, what is believed to be there."""
        foreseen = self.cost(*trial[:3])  # type: ignore[misc]
        if trial.bytes is None:
            self.room = min(self.room, self.off * foreseen)
        else:
            self.off = trial.bytes / foreseen

    def largest(self, seconds: float, tokens: int, *, start: int) -> int:
        """The largest n that passes, up to the tolerance: from the model's, or else from `start`,
        in growing strides until the other outcome, then by bisection."""
        shorter = [
            trial
            for trial in self.done
            if not trial.ok and trial.seconds <= seconds and trial.tokens <= tokens
        ]
        longer = [
            trial
            for trial in self.done
            if trial.ok and trial.seconds >= seconds and trial.tokens >= tokens
        ]
        plain = self.cost is None
        low = 0 if plain else max((trial.n for trial in longer), default=0)
        high = 2**31 if plain else min((trial.n for trial in shorter), default=2**31)
        n, stride, aims = start if plain else self.aim(seconds, tokens), 0, 2
        while high - low > max(1, self.tolerance * high):
            trial = self.run(min(max(n, low + 1), high - 1), seconds, tokens)
            low, high = (trial.n, high) if trial.ok else (low, trial.n)
            near = max(
                1, int(self.tolerance * trial.n)
            )  # what fails so far above ends the search, or passes so far below
            if not plain:
                self.learn(trial)
                n, aims = self.aim(seconds, tokens), aims - (trial.bytes is not None)
                if (
                    trial.bytes is not None
                    and aims >= 0
                    and (n > low + near if trial.ok else n > low)
                ):
                    continue
            stride = 2 * stride or (trial.n if plain else near)
            n = (
                min(low + stride, (low + high) // 2)
                if trial.ok
                else max(high - stride, (low + high) // 2)
            )
        self.bar.update()
        return low


def _cells(buckets: Buckets) -> list[tuple[float, int]]:
    return list(zip(buckets.seconds.tolist(), buckets.tokens.tolist(), strict=True))


def _corners(buckets: Buckets) -> list[tuple[float, int]]:
    """Where a model that is right is right in between: shortest, middle and longest cells of fewest
    and of most tokens.
    """
    seconds, cells = np.unique(buckets.seconds), _cells(buckets)
    ends = [[cell for cell in cells if cell[0] == seconds[k]] for k in (0, len(seconds) // 2, -1)]
    return list(dict.fromkeys(cell for same in ends for cell in (same[0], same[-1])))


def _free(device: str) -> int:
    """Bytes that a GPU has left, with those that torch's allocator holds for later."""
    return (
        torch.cuda.mem_get_info(device)[0]
        + torch.cuda.memory_reserved(device)
        - torch.cuda.memory_allocated(device)
    )


def _kept(value: Any) -> Callable[[], Any]:
    """A function that returns `value` as it is now: the same tensors, with the contents of now,
    which wait in host memory.
    """
    if isinstance(value, Tensor):
        content = value.detach().to("cpu", copy=True)
        return lambda: value.copy_(content)
    if isinstance(value, dict):
        parts = {key: _kept(part) for key, part in value.items()}
        return lambda: {key: part() for key, part in parts.items()}
    if isinstance(value, list | tuple):
        several = [_kept(part) for part in value]
        return lambda: type(value)(part() for part in several)
    return lambda: value


def _keep(one: Any) -> Callable[[], object]:
    """What puts a module, an optimizer, or another thing with a state_dict back as it is now."""
    if isinstance(one, nn.Module):
        parts = [
            (
                m,
                m.training,
                _kept(
                    {
                        **dict(m.named_parameters(recurse=False)),
                        **dict(m.named_buffers(recurse=False)),
                    }
                ),
            )
            for m in one.modules()
        ]

        def back() -> None:
            for module, training, tensors in parts:
                module.training = training
                for name, tensor in tensors().items():
                    setattr(module, name, tensor)
    elif isinstance(
        one, torch.optim.Optimizer
    ):  # not load_state_dict, which casts moments to the dtype of their weights
        moments = _kept(dict(one.state))
        groups = [
            (group, _kept({key: value for key, value in group.items() if key != "params"}))
            for group in one.param_groups
        ]

        def back() -> None:
            one.state.clear()
            one.state.update(moments())
            for group, settings in groups:
                group.update(settings())
    else:
        expect(
            hasattr(one, "state_dict"),
            "state",
            "modules, optimizers and others with a state_dict",
            type(one).__name__,
        )
        state = _kept(one.state_dict())

        def back() -> None:
            one.load_state_dict(state())

    return back


@contextmanager
def _restored(state: Sequence[Any], device: str) -> Iterator[list[Tensor]]:
    """The parameters in `state`, without gradients; however the block ends, all is as it was."""
    backs = [_keep(one) for one in state]
    groups = [
        group["params"]
        for one in state
        if isinstance(one, torch.optim.Optimizer)
        for group in one.param_groups
    ]
    parameters = [p for one in state if isinstance(one, nn.Module) for p in one.parameters()] + [
        p for group in groups for p in group
    ]
    gradients = [parameter.grad for parameter in parameters]
    cuda = torch.device(device).type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        try:
            for parameter in parameters:
                parameter.grad = None
            yield parameters
        finally:
            with torch.no_grad():
                for back in backs:
                    back()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            # and only here: before it gives up the allocator frees what it holds, and training has
            # fragments as well
            if cuda:
                torch.cuda.empty_cache()
