"""Whether the arms of a case return the same, before any of them is timed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders import Hypotheses
from asrkit.workbench.bench.cases import Case
from asrkit.workbench.bench.peers.peer_encoders import sketch
from asrkit.workbench.bench.peers.processes import Answer, Peer
from asrkit.workbench.measure import peak_memory

CHUNK = 2**20  # elements converted to float64 at a time: 8 MiB


class Observation(NamedTuple):
    """What the comparison of an arm found out beside its result.

    peak_B is its peak memory in bytes, None if it was not asked for. params are those of its
    records: for decoders which implementation ran.
    """

    peak_B: int | None = None
    params: Mapping[str, Any] = {}


class Reference(NamedTuple):
    """Name and result of the first arm, and the digest that peers are compared with."""

    name: str
    result: Sequence[Tensor]
    digest: Sequence[Tensor]


def check(case: Case, device: str = "cpu") -> dict[str, Observation]:
    """Observations of the arms by name; AssertionError unless all return what the first returns."""
    observations, failures = compare_arms(case, device)
    assert not failures, " ".join(failures.values())
    return observations


def compare_arms(case: Case, device: str = "cpu") -> tuple[dict[str, Observation], dict[str, str]]:
    """Compare every arm with the first.

    Held beside the inputs are the first arm's result and one other arm's peak, or its result and
    24 MiB. Logits of (64, 500, 101, 1024) in float32 take 13.2 GB, their gradient as much: 40 GB.

    Returns:
        (observations, failure messages), each keyed by arm name.

    Raises:
        Exception: any error of the first arm.
        torch.OutOfMemoryError: from any arm.
        RuntimeError: an arm's error ended the GPU's context, so no later arm can be judged.
    """
    observations: dict[str, Observation] = {}
    failures: dict[str, str] = {}
    reference: Reference | None = None
    for name in case.compared_arms or case.arms:
        try:
            if reference is None:
                reference, observations[name] = _reference(case, name, device)
            else:
                observations[name] = _judge(case, name, device, reference)
        except (AssertionError, RuntimeError, ValueError) as error:
            if reference is None or isinstance(error, torch.OutOfMemoryError):
                raise
            if device.startswith("cuda"):
                torch.cuda.synchronize(device)  # raises if the error has ended the GPU's context
            if isinstance(error, AssertionError):
                failures[name] = str(error)
            else:
                failures[name] = f"{case.what}: {name} fails: {error}"
    if case.memory and case.compared_arms:
        for name in case.arms:
            if name not in failures:
                _, observations[name] = observe(case.once(name), device, memory=True)
    return observations, failures


def observe(arm: Callable[..., Any], device: str, *, memory: bool) -> tuple[Any, Observation]:
    """What one call of an arm returns, and an Observation of it.

    Args:
        arm: to call; a Peer observes itself in its own process.
        device: whose memory is watched.
        memory: whether peak memory is measured.
    """
    if isinstance(arm, Peer):
        answer = arm(observe=True)
        return answer, Observation(answer.peak_B)
    if not memory:
        result = arm()
        return result, Observation(params=_ran(result))
    results: list[Any] = []

    def call() -> None:
        results.append(arm())

    peak = peak_memory(call, device=device)
    return results[0], Observation(peak, _ran(results[0]))


def _ran(result: Any) -> dict[str, str]:
    """Which implementation gave a result, where the result says so."""
    impl = getattr(result, "impl", "")
    return {"ran": impl} if impl else {}


def _call(case: Case, name: str, device: str) -> tuple[Any, Observation]:
    arms = case.compared_arms or case.arms
    call = arms[name]
    if case.compared_arms is None and not isinstance(call, Peer):
        call = case.once(name)
    # the memory of arms that are only compared, and not timed, is of no interest
    memory = case.memory and not case.compared_arms
    return observe(call, device, memory=memory)


def _reference(case: Case, name: str, device: str) -> tuple[Reference, Observation]:
    result, observation = _call(case, name, device)
    known: Sequence[Tensor] = ()
    if case.peers:
        known = digest(result, case.peers.logits)
    return Reference(name, _tensors(result), known), observation


def _judge(case: Case, name: str, device: str, reference: Reference) -> Observation:
    """Raise AssertionError if the arm disagrees; its result is freed before the next arm runs."""
    result, observation = _call(case, name, device)
    if isinstance(result, Answer):
        _expect_equal(case, name, reference.name, reference.digest, result.digest)
    else:
        _expect_equal(case, name, reference.name, reference.result, _tensors(result))
    return observation


def _tensors(result: Any) -> Sequence[Tensor]:
    if isinstance(result, Hypotheses):
        return result.parts()
    return [part for part in result if not isinstance(part, str)]


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


def _expect_equal(
    case: Case, name: str, first: str, wanted: Iterable[Any], got: Iterable[Any]
) -> None:
    arm_params = case.arm_params.get(name, {})
    tolerance = arm_params.get("tolerance", case.tolerance)
    head = f"{case.what}: {name} disagrees with {first}, so it was not measured."
    for x, y in zip(wanted, got, strict=True):
        x = torch.as_tensor(x)
        y = torch.as_tensor(y)
        shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
        assert x.shape == y.shape, f"{head} Shapes {shapes}."
        if not x.is_floating_point():
            same = torch.equal(x, y.to(x.device))
            assert same, f"{head} Integers differ."
            continue
        difference, size = apart(x, y)
        assert difference <= tolerance * size, (
            f"{head} They are {difference:.2g} apart, of {size:.2g};"
            f" {tolerance:g} of that is let pass."
        )


def apart(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Norms of x - y and of x, in float64.

    Taken chunk by chunk: where these fill gigabytes there is no room for a copy of either.
    """
    differences: list[Tensor] = []
    sizes: list[Tensor] = []
    for a, b in chunks(x, y):
        difference = a.double() - b.to(a.device)
        differences.append(_norm(difference))
        sizes.append(_norm(a))
    whole_difference = _norm(torch.stack(differences))
    whole_size = _norm(torch.stack(sizes))
    return whole_difference.item(), whole_size.item()


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def chunks(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of two tensors of one shape, of up to CHUNK elements each, whatever their strides."""
    size = x.numel()
    if size <= CHUNK:
        yield x, y
        return
    if x.is_contiguous() and y.is_contiguous():
        flat_x = x.view(-1)
        flat_y = y.view(-1)
        yield from zip(flat_x.split(CHUNK), flat_y.split(CHUNK), strict=True)
        return
    row_size = size // len(x)
    if row_size <= CHUNK:
        rows = CHUNK // row_size
        yield from zip(x.split(rows), y.split(rows), strict=True)
        return
    for row_x, row_y in zip(x, y, strict=True):
        yield from chunks(row_x, row_y)


def near(got: Iterable[Tensor], wanted: Iterable[Tensor], tolerance: float = 1e-5) -> None:
    """Raise AssertionError unless tensors are equal up to `tolerance` of the largest value wanted.

    Args:
        got: tensors to judge.
        wanted: as many, of the same shapes; integers among them must be equal.
        tolerance: largest difference of a float, relative to the largest finite value wanted, or
            to 1 where that is smaller. Infinities and NaN must lie in the same places.
    """
    for ours, theirs in zip(got, wanted, strict=True):
        a = ours.detach().cpu()
        b = theirs.detach().cpu()
        _expect_near(a, b, tolerance)


def _expect_near(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Raise AssertionError unless two tensors on the CPU are as near as `near` says."""
    shapes = f"{tuple(got.shape)} and {tuple(wanted.shape)}"
    assert got.shape == wanted.shape, f"shapes {shapes}"
    if not wanted.is_floating_point():
        different = got != wanted
        count = different.sum()
        assert torch.equal(got, wanted), f"integers differ in {count} of {got.numel()} places"
        return
    got = got.double()
    wanted = wanted.double()
    equal = got == wanted  # infinities may be
    both_nan = got.isnan() & wanted.isnan()
    same = equal | both_nan
    difference = (got - wanted).abs()
    difference = difference.masked_fill(same, 0)
    finite = wanted[wanted.isfinite()]
    size = _largest(finite.abs())
    worst = _largest(difference)
    most = tolerance * max(1.0, size)
    assert worst <= most, f"{worst:.2g} apart, of {size:.2g}; {tolerance:g} of that is let pass"


def _largest(x: Tensor) -> float:
    """The largest element; 0 of none."""
    if not x.numel():
        return 0.0
    return x.amax().item()
