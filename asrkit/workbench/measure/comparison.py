"""Arms that must return the same result: each is compared with the first before they are timed."""

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
    """Arms to compare and time. The first is the reference for the results of the others.

    Attributes:
        what: name of the benchmark in its records.
        arms: name to a call without arguments, or with the argument that its setup returns.
        params: params of every record; "shape" and "dtype" also name the case in messages.
        arm_params: params of one arm's records, over `params`; "tolerance" applies to that arm.
        setups: arm name to an untimed call that returns the arm's argument, before each call.
        ratios: (slow, fast) pairs whose ratio is recorded; None: the last two arms.
        compared_arms: arms to compare instead of the timed ones, if rounding or another layout
            makes the timed results differ. They may return nothing if the timed arms do different
            work.
        tolerance: largest norm of a difference of floats, relative to the norm of the first arm's
            result; integers must be equal.
        memory: whether the peak memory of each arm is recorded.
        warmup: untimed rounds of calls.
        digest: digest of the first arm's result, as a `RemoteArm` returns it; None without one.
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


@dataclass(frozen=True, kw_only=True)
class Answer(Sample):
    """Times of one call of a `RemoteArm`; if observed also a digest of its result, and its peak
    memory in bytes.
    """

    digest: tuple[Tensor, ...] = ()
    peak_B: int | None = None


class RemoteArm:
    """An arm that runs in another process."""

    def __call__(self, observe: bool = False) -> Answer:
        """The times of one call; with `observe` also the digest of its result."""
        raise NotImplementedError


class Observation(NamedTuple):
    """Facts about an arm from its comparison."""

    peak_B: int | None = None  # peak memory, if measured
    params: Mapping[str, Any] = {}  # for its records: the implementation that ran


def check(case: Comparison, device: str = "cpu") -> dict[str, Observation]:
    """Observations of the arms by name; AssertionError unless all return what the first returns."""
    observations, failures = compare_arms(case, device)
    assert not failures, " ".join(failures.values())
    return observations


def compare_arms(
    case: Comparison, device: str = "cpu"
) -> tuple[dict[str, Observation], dict[str, str]]:
    """Compare every arm with the first. If there are `compared_arms`, other arms are only observed.

    Memory: the inputs, the first arm's result, and one other arm's result or peak. Logits of
    (64, 500, 101, 1024) in float32 take 13.2 GB, their gradient as much.

    Returns:
        (observations, failure messages), each keyed by arm name.

    Raises:
        Exception: any error of the first arm.
        torch.OutOfMemoryError: from any arm.
        RuntimeError: an arm's error ended the GPU's context, so later arms cannot be compared.
    """
    first, *others = {**(case.compared_arms or {}), **case.arms}
    reference, observation = _observe(case, first, device)
    observations = {first: observation}
    failures: dict[str, str] = {}
    for name in others:
        try:
            result, observation = _observe(case, name, device)
            if result is not None:
                _expect_equal(case, first, reference, name, result)
            observations[name] = observation
        except torch.OutOfMemoryError:
            raise
        except AssertionError as error:
            failures[name] = str(error)
        except Exception as error:  # an arm that fails does not end the comparison
            if device == "cuda":
                torch.cuda.synchronize(device)  # raises if the error has ended the GPU's context
            failures[name] = f"{case.what}: {name} fails: {error}"
        result = None  # frees it before the next arm runs
    return observations, failures


def _observe(case: Comparison, name: str, device: str) -> tuple[Any, Observation]:
    """The result of an arm (None if it is not compared), and its observation."""
    arm = case.arms.get(name)
    if isinstance(arm, RemoteArm):
        answer = arm(observe=True)
        return answer, Observation(answer.peak_B)
    peak_B = peak_memory(case.once(name), device=device) if case.memory else None
    result = None
    if not case.compared_arms:
        result = case.once(name)()
    elif name in case.compared_arms:
        result = case.compared_arms[name]()
    impl = getattr(result, "impl", "")
    return result, Observation(peak_B, {"ran": impl} if impl else {})


def _expect_equal(case: Comparison, first: str, reference: Any, name: str, result: Any) -> None:
    """Raise AssertionError if an arm's result differs from the first arm's."""
    head = f"{case.what}: {name} disagrees with {first}, so it was not measured."
    tolerance = case.arm_params.get(name, {}).get("tolerance", case.tolerance)
    parts = _tensors(result)
    reference_parts = _tensors(reference)
    if isinstance(result, Answer):
        assert case.digest
        reference_parts = case.digest(reference)
    assert parts or case.compared_arms, f"{case.what}: {name} returns nothing to compare."
    for x, y in zip(reference_parts, parts, strict=True):
        assert x.shape == y.shape, f"{head} Shapes {tuple(x.shape)} and {tuple(y.shape)}."
        if not x.is_floating_point():
            assert torch.equal(x, y.to(x.device)), f"{head} Integers differ."
            continue
        difference, size = apart(x, y)
        assert difference <= tolerance * size < math.inf, (
            f"{head} They are {difference:.2g} apart, of {size:.2g};"
            f" the tolerance is {tolerance:g} of that."
        )


def _tensors(result: Any) -> Sequence[Tensor]:
    """The tensors of a result in which arms must agree."""
    if isinstance(result, Hypotheses):
        return result.parts()
    if isinstance(result, Answer):
        return result.digest
    return [torch.as_tensor(part) for part in result if not isinstance(part, str)]


def apart(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Norms of x - y and of x, in float64.

    They are computed in chunks, because gigabytes of logits leave no memory for a copy.
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
