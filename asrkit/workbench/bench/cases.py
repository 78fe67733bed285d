"""A case of a benchmark: rival arms on the same inputs, and the check that comes before any
measurement.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from asrkit.decoders import Hypotheses
from asrkit.workbench.bench.guards import synchronize
from asrkit.workbench.bench.rivals.peer_encoders import sketch
from asrkit.workbench.bench.rivals.peers import Answer, Rival
from asrkit.workbench.profiling import peak_memory
from asrkit.workbench.records import Measurement

Arms = Mapping[str, Callable[..., Any]]
NONE = re.compile(r"(?!)")  # what an arm or case is left out for: nothing


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arms that must return what the first one returns."""

    what: str  # claim or benchmark id
    arms: Arms
    params: dict[str, Any]
    of_arm: Mapping[str, dict[str, Any]] = field(
        default_factory=dict
    )  # params of one arm; its `tolerance` counts for it
    setups: Arms = field(
        default_factory=dict
    )  # makes an arm's argument, anew for each call and outside the time
    ratios: Sequence[tuple[str, str]] | None = None  # (slow, fast) pairs; None: the last two arms
    proof: Arms | None = (
        # what to check instead, where float32 rounding or layout keeps the arms from being alike
        None
    )
    tolerance: float = (
        1e-5  # distance of floats from the first arm's, over their norm; integers must be equal
    )
    memory: bool = False
    warmup: int = 3  # rounds that do not count
    least_s: float = 1.0  # what an arm's repeats may take, however little time is left
    peers: Mapping[str, Any] | None = (
        None  # asked of rivals in their own processes, see asrkit.workbench.bench.rivals.peers
    )
    ours: str = "numba_cpu"  # the arm that they are set against, if it runs
    against: Mapping[str, str] = field(
        default_factory=dict
    )  # another of ours for a rival of this name
    of_peers: Mapping[str, Any] = field(default_factory=dict)  # params of each of them
    logits: Tensor | None = None  # what rival losses make for themselves
    more: Callable[[], Iterable[Measurement]] = (
        tuple  # what else is measured of it, after the times
    )

    def once(self, name: str) -> Callable[[], Any]:
        """The arm with its setup done: one call is left."""
        return partial(self.arms[name], *([self.setups[name]()] if name in self.setups else []))

    def run(self, name: str) -> Any:
        """What the arm returns."""
        return self.once(name)()


def rows(B: int, T: int, D: int, device: str) -> tuple[Tensor, Tensor]:
    """Random (B, T, D) and lengths (B,) as in a bucketed batch: from T down to T / 2."""
    made = torch.randn(B, T, D, generator=torch.Generator().manual_seed(0))
    return made.to(device), torch.linspace(T, T / 2, B).long().to(device)


class Refused(NamedTuple):
    """A case that could not be made: its turn says why."""

    what: str
    why: Exception

    def __str__(self) -> str:
        return self.what

    def measurements(self) -> NoReturn:
        """Nothing: it raises."""
        raise self.why


class Seen(NamedTuple):
    """What the check of an arm found out beside its result."""

    peak_B: int | None = None
    told: Mapping[str, int] = {}  # by a rival


def observe(arm: Callable[..., Any], device: str, *, memory: bool) -> tuple[Any, Seen]:
    """What an arm returns in one call, and the peak of its memory in bytes where that is asked for."""
    if isinstance(arm, Rival):
        answer = arm(observe=True)
        return answer, Seen(answer.peak_B, answer.told)
    found = list[Any]()
    peak = peak_memory(lambda: found.append(arm()), device=device) if memory else None
    return found[0] if memory else arm(), Seen(peak)


def check(case: Case, device: str = "cpu") -> dict[str, Seen]:
    """What was seen of each arm; AssertionError unless every arm returns what the first does."""
    seen, wrong = compared(case, device)
    assert not wrong, " ".join(wrong.values())
    return seen


class First(NamedTuple):
    """The arm that the others are compared with."""

    name: str
    found: Sequence[Tensor]  # what it returned
    known: Sequence[Tensor]  # what rivals know it by, see `digest`; none where there are no rivals


def compared(case: Case, device: str = "cpu") -> tuple[dict[str, Seen], dict[str, str]]:
    """What was seen of each arm, and why some are wrong: they raise, or return what the first,
    which must not raise, does not.

    RuntimeError where an arm's error has ended the GPU's context: no arm after it could be judged.

    Memory beside the inputs: the first arm's result, and one other arm's peak, or its result and 24
    MiB. Logits of (64, 500, 101, 1024) in float32 are 13.2 GB, and so is a gradient: 3 x 13.2 = 40
    GB. torchaudio's arm, with two of that size at its peak, would make it 53, but its offsets end
    before.
    """
    seen, wrong, first = dict[str, Seen](), dict[str, str](), None
    for name in case.proof or case.arms:
        try:
            first = _judged(case, name, device, first, seen)
        except (AssertionError, RuntimeError, ValueError) as error:
            if first is None or isinstance(error, torch.OutOfMemoryError):
                raise
            synchronize(device)  # raises if what went wrong has ended the GPU's context
            wrong[name] = (
                str(error)
                if isinstance(error, AssertionError)
                else f"{case.what}: {name} fails: {error}"
            )
    if case.memory and case.proof:
        seen = {
            name: observe(case.once(name), device, memory=True)[1]
            for name in case.arms
            if name not in wrong
        }
    return seen, wrong


def _judged(
    case: Case, name: str, device: str, first: First | None, seen: dict[str, Seen]
) -> First:
    """The first arm; AssertionError where this one is another. What it returned is let go here,
    before the next arm runs.
    """
    arm = (case.proof or case.arms)[name]
    whole = case.proof or isinstance(arm, Rival)
    got, seen[name] = observe(
        arm if whole else case.once(name), device, memory=case.memory and not case.proof
    )
    if first is None:
        known = digest(got, case.logits) if case.peers else ()
        return First(name, got.parts() if isinstance(got, Hypotheses) else got, known)
    if isinstance(got, Answer):
        _compare(case, name, first.name, got.digest, first.known)
    else:
        _compare(
            case, name, first.name, got.parts() if isinstance(got, Hypotheses) else got, first.found
        )
    return first


def digest(result: Any, logits: Tensor | None) -> tuple[Tensor, ...]:
    """What a rival's result is known by. Of hypotheses labels, lengths and frames, for rivals
    differ in their scores.

    Of a loss and its gradient three numbers: cost, norm of the gradient, and gradient times logits.
    Of an encoder's frames a sketch, and their lengths.
    """
    if isinstance(result, Hypotheses):
        return result.labels, result.lengths, result.frames
    if logits is None:
        return sketch(*result), result[1]
    cost, gradient = result
    return cost, gradient.norm(), torch.sum(gradient * logits.detach())


def _compare(case: Case, name: str, first: str, found: Any, wanted: Any) -> None:
    tolerance = case.of_arm.get(name, {}).get("tolerance", case.tolerance)
    head = f"{case.what}: {name} disagrees with {first}, so it was not measured."
    for x, y in zip(wanted, found, strict=True):
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        assert x.shape == y.shape, f"{head} Shapes {tuple(x.shape)} and {tuple(y.shape)}."
        if not x.is_floating_point():
            assert torch.equal(x, y.to(x.device)), f"{head} Integers differ."
            continue
        off, size = apart(x, y)
        assert off <= tolerance * size, (
            f"{head} They are {off:.2g} apart, of {size:.2g}; {tolerance:g} of that is let pass."
        )


CHUNK = 2**20  # numbers: 8 MiB in float64


def apart(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Norms of x - y and of x, in float64 and chunk by chunk: where these fill gigabytes there is
    no room for a copy of either.
    """
    norm, off, size = (
        partial(torch.linalg.vector_norm, dtype=torch.float64),
        list[Tensor](),
        list[Tensor](),
    )
    for a, b in chunks(x, y):
        off.append(norm(a.double() - b.to(a.device)))
        size.append(norm(a))
    return norm(torch.stack(off)).item(), norm(torch.stack(size)).item()


def chunks(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of two tensors of one shape, of up to CHUNK numbers each, whatever their strides are."""
    if x.numel() <= CHUNK:
        yield x, y
    elif x.is_contiguous() and y.is_contiguous():
        yield from zip(x.view(-1).split(CHUNK), y.view(-1).split(CHUNK), strict=True)
    elif x.numel() > CHUNK * len(x):  # its rows are longer than a chunk
        for a, b in zip(x, y, strict=True):
            yield from chunks(a, b)
    else:
        rows = CHUNK * len(x) // x.numel()
        yield from zip(x.split(rows), y.split(rows), strict=True)


class Check(NamedTuple):
    """One comparison: `call` raises where it disagrees. Those of a `group` share a process."""

    group: str
    name: str
    vouches: str  # a pattern: the arms and cases that are left out where it fails; "" for none
    call: Callable[[], object]


def near(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """AssertionError unless tensors are alike to `tolerance` of the largest value wanted, and
    integers are equal.
    """
    for ours, theirs in zip(found, wanted, strict=True):
        a, b = ours.detach().cpu(), theirs.detach().cpu()
        assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
        if not b.is_floating_point():
            assert torch.equal(a, b), f"integers differ in {(a != b).sum()} of {a.numel()} places"
            continue
        a, b = a.double(), b.double()
        off = torch.where(
            (a == b) | (a.isnan() & b.isnan()), 0, (a - b).abs()
        )  # infinities may be equal
        size = b[b.isfinite()].abs().amax().item() if b.isfinite().any() else 0.0
        worst = off.amax().item() if off.numel() else 0.0
        assert worst <= tolerance * max(1.0, size), (
            f"{worst:.2g} apart, of {size:.2g}; {tolerance:g} of that is let pass"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")
