"""Whether the arms of a case return the same, before any of them is timed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders import Hypotheses
from asrkit.workbench.bench.cases import Case
from asrkit.workbench.bench.peers.peer_encoders import sketch
from asrkit.workbench.bench.peers.processes import Answer, Peer
from asrkit.workbench.measure import peak_memory

CHUNK = 2**20  # elements, or one row, converted to float64 at a time


class Observation(NamedTuple):
    """What the comparison of an arm found out beside its result."""

    peak_B: int | None = None  # memory, if it was asked for
    params: Mapping[str, Any] = {}  # of its records: which implementation ran


def check(case: Case, device: str = "cpu") -> dict[str, Observation]:
    """Observations of the arms by name; AssertionError unless all return what the first returns."""
    observations, failures = compare_arms(case, device)
    assert not failures, " ".join(failures.values())
    return observations


def compare_arms(case: Case, device: str = "cpu") -> tuple[dict[str, Observation], dict[str, str]]:
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


def _observe(case: Case, name: str, device: str) -> tuple[Any, Observation]:
    """The result of an arm, None if it is not compared, and what was observed."""
    arm = case.arms.get(name)
    if isinstance(arm, Peer):
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


def _expect_equal(case: Case, first: str, wanted: Any, name: str, got: Any) -> None:
    """Raise AssertionError where an arm's result is not the first one's."""
    head = f"{case.what}: {name} disagrees with {first}, so it was not measured."
    tolerance = case.arm_params.get(name, {}).get("tolerance", case.tolerance)
    theirs = _tensors(got)
    ours = _tensors(wanted)
    if isinstance(got, Answer):
        assert case.peers
        ours = digest(wanted, case.peers.logits)
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


def digest(result: Any, logits: Tensor | None) -> tuple[Tensor, ...]:
    """The small part of a result that a peer in another process sends back to be compared.

    Args:
        result: Hypotheses; or (cost, gradient) of a loss; or (frames, lengths) of an encoder.
        logits: the logits of a loss, None for the others.

    Returns:
        Labels, lengths and frames of hypotheses, whose scores differ between packages. Cost, norm
        of the gradient, and gradient times logits of a loss. A sketch of an encoder's frames, and
        their lengths.
    """
    if isinstance(result, Hypotheses):
        return result.labels, result.lengths, result.frames
    if logits is None:
        return sketch(*result), result[1]
    cost, gradient = result
    product = gradient * logits.detach()
    return cost, gradient.norm(), product.sum()


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
