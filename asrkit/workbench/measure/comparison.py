"""Arms that have to return the same: each is compared with the first before any is timed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders import Hypotheses
from asrkit.workbench.measure.memory import peak_memory
from asrkit.workbench.measure.times import Sample

Arms = Mapping[str, Callable[..., Any]]
CHUNK = 2**20  # elements, or one row, converted to float64 at a time


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Arms to compare and time. The first is the reference: the others must return what it returns.

    Attributes:
        what: name of the benchmark, which the records of its arms carry.
        arms: name to a call without arguments, or with the one that its setup makes.
        params: params of every record; "shape" and "dtype" also name the case in messages.
        arm_params: params of one arm's records, over `params`; "tolerance" applies to that arm.
        setups: arm name to a call that makes the arm's argument, anew and untimed for each call.
        ratios: (slow, fast) pairs whose ratio is recorded; None takes the last two arms.
        compared_arms: what to compare instead of the timed arms, where float32 rounding or another
            layout keeps their results from being equal; these may return nothing, for timed arms
            that do different things.
        tolerance: largest norm of a difference of floats, relative to the norm of the first arm's;
            integers must be equal.
        memory: whether the peak memory of each arm is recorded.
        warmup: rounds of calls that do not count.
        digest: what a `RemoteArm` returns of the first arm's result; None without such arms.
    """

    what: str
    arms: Arms = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    arm_params: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    setups: Arms = field(default_factory=dict)
    ratios: Sequence[tuple[str, str]] | None = None
    compared_arms: Arms | None = None
    tolerance: float = 1e-5
    memory: bool = False
    warmup: int = 3
    digest: Callable[[Any], Sequence[Tensor]] | None = None

    def pairs(self) -> Sequence[tuple[str, str]]:
        """The (slow, fast) pairs whose ratio is recorded."""
        if self.ratios is not None:
            return self.ratios
        *_, slow, fast = self.arms
        return [(slow, fast)]

    def once(self, name: str) -> Callable[[], Any]:
        """The arm of this name after its setup: a call without arguments."""
        if name in self.setups:
            return partial(self.arms[name], self.setups[name]())
        return partial(self.arms[name])

    def run(self, name: str) -> Any:
        """What one call of the arm of this name returns."""
        return self.once(name)()


@dataclass(frozen=True, kw_only=True)
class Answer(Sample):
    """Times of one call of a `RemoteArm`; if it was observed, a digest of its result and its peak
    memory in bytes.
    """

    digest: tuple[Tensor, ...] = ()
    peak_B: int | None = None


class RemoteArm:
    """An arm that another process computes."""

    def __call__(self, observe: bool = False) -> Answer:
        """The times of one call; with `observe` also the digest of its result."""
        raise NotImplementedError


class Observation(NamedTuple):
    """What the comparison of an arm found out beside its result."""

    peak_B: int | None = None  # memory, if it was asked for
    params: Mapping[str, Any] = {}  # of its records: which implementation ran


def check(case: Comparison, device: str = "cpu") -> dict[str, Observation]:
    """Observations of the arms by name; AssertionError unless all return what the first returns."""
    observations, failures = compare_arms(case, device)
    assert not failures, " ".join(failures.values())
    return observations


def compare_arms(
    case: Comparison, device: str = "cpu"
) -> tuple[dict[str, Observation], dict[str, str]]:
    """Compare every arm with the first; arms beside `compared_arms` are only observed.

    Held beside the inputs are the first arm's result, and one other arm's result or its peak.
    Logits of (64, 500, 101, 1024) in float32 take 13.2 GB, their gradient as much.

    Returns:
        (observations, failure messages), each keyed by arm name.

    Raises:
        Exception: any error of the first arm.
        torch.OutOfMemoryError: from any arm.
        RuntimeError: an arm's error ended the GPU's context, so no later arm can be judged.
    """
    first, *others = {**(case.compared_arms or {}), **case.arms}
    wanted, observation = _observe(case, first, device)
    observations = {first: observation}
    failures: dict[str, str] = {}
    for name in others:
        try:
            got, observation = _observe(case, name, device)
            if got is not None:
                _expect_equal(case, first, wanted, name, got)
            observations[name] = observation
        except torch.OutOfMemoryError:
            raise
        except AssertionError as error:
            failures[name] = str(error)
        except Exception as error:  # whatever an arm raises, the others go on
            if device == "cuda":
                torch.cuda.synchronize(device)  # raises if the error has ended the GPU's context
            failures[name] = f"{case.what}: {name} fails: {error}"
        got = None  # freed before the next arm runs
    return observations, failures


def _observe(case: Comparison, name: str, device: str) -> tuple[Any, Observation]:
    """The result of an arm, None if it is not compared, and what was observed."""
    arm = case.arms.get(name)
    if isinstance(arm, RemoteArm):
        answer = arm(observe=True)
        return answer, Observation(answer.peak_B)
    peak_B = peak_memory(case.once(name), device=device) if case.memory else None
    result = None
    if not case.compared_arms:
        result = case.run(name)
    elif name in case.compared_arms:
        result = case.compared_arms[name]()
    impl = getattr(result, "impl", "")
    return result, Observation(peak_B, {"ran": impl} if impl else {})


def _expect_equal(case: Comparison, first: str, wanted: Any, name: str, got: Any) -> None:
    """Raise AssertionError where an arm's result is not the first one's."""
    head = f"{case.what}: {name} disagrees with {first}, so it was not measured."
    tolerance = case.arm_params.get(name, {}).get("tolerance", case.tolerance)
    theirs = _tensors(got)
    ours = _tensors(wanted)
    if isinstance(got, Answer):
        assert case.digest
        ours = case.digest(wanted)
    assert theirs or case.compared_arms, f"{case.what}: {name} returns nothing to compare."
    for x, y in zip(ours, theirs, strict=True):
        assert x.shape == y.shape, f"{head} Shapes {tuple(x.shape)} and {tuple(y.shape)}."
        if not x.is_floating_point():
            assert torch.equal(x, y.to(x.device)), f"{head} Integers differ."
            continue
        difference, size = apart(x, y)
        assert difference <= tolerance * size < math.inf, (
            f"{head} They are {difference:.2g} apart, of {size:.2g};"
            f" {tolerance:g} of that is let pass."
        )


def _tensors(result: Any) -> Sequence[Tensor]:
    """The parts of a result in which arms have to agree."""
    if isinstance(result, Hypotheses):
        return result.parts()
    if isinstance(result, Answer):
        return result.digest
    return [torch.as_tensor(part) for part in result if not isinstance(part, str)]


def apart(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Norms of x - y and of x, in float64.

    Taken chunk by chunk: where these fill gigabytes there is no room for a copy of either.
    """
    x, y = torch.atleast_1d(x, y)
    rows = max(1, CHUNK * len(x) // max(x.numel(), 1))
    differences: list[Tensor] = []
    sizes: list[Tensor] = []
    for a, b in zip(x.split(rows), y.split(rows), strict=True):
        differences.append(_norm(a.double() - b.to(a.device)))
        sizes.append(_norm(a))
    return _norm(torch.stack(differences)).item(), _norm(torch.stack(sizes)).item()


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64)
