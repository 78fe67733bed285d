"""What a suite yields and how it is registered: `Case`, one benchmark, and `Suite`, a generator of
cases.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from asrkit.workbench.records import Measurement

Arms = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class PeerArms:
    """Arms of other packages that join a case; each runs in a process of its own.

    Attributes:
        request: what the processes are asked for, see `peers.processes.Peers.arms`.
        ours: our arm that the peers' times are divided by, if it runs.
        against: another arm of ours for the peer of this name.
        params: params of the peers' records.
        logits: the logits that a peer loss draws for itself, to compare gradients by.
    """

    request: Mapping[str, Any]
    ours: str = "numba_cpu"
    against: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    logits: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One benchmark of a suite: arms to compare and time, or a function that measures.

    Of `arms`, `measure` and `refused` exactly one says what to do. A case whose `arms` are empty is
    skipped. The first arm is the reference: the others must return what it returns.

    Attributes:
        what: name of the benchmark, which the records of its arms carry.
        arms: name to a call without arguments, or with the one that its setup makes.
        measure: yields measurements itself; it replaces arms.
        refused: why the case could not be made; the run reports it as a failure.
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
        peers: arms of other packages, if any fit.
        more: yields measurements of the case beside times, once these are taken.
    """

    what: str
    arms: Arms = field(default_factory=dict)
    measure: Callable[[], Iterable[Measurement]] | None = None
    refused: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    arm_params: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    setups: Arms = field(default_factory=dict)
    ratios: Sequence[tuple[str, str]] | None = None
    compared_arms: Arms | None = None
    tolerance: float = 1e-5
    memory: bool = False
    warmup: int = 3
    peers: PeerArms | None = None
    more: Callable[[], Iterable[Measurement]] = tuple

    @property
    def title(self) -> str:
        """`what`, shape, and dtype unless it is float32, as in "rnnt-loss 2×40×11×28 bfloat16"."""
        shape = "×".join(map(str, self.params.get("shape", ())))
        dtype = str(self.params.get("dtype", "")).replace("float32", "")
        return " ".join(filter(None, (self.what, shape, dtype)))

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
class Suite:
    """A suite as the runner knows it. A module of suites declares one; `bench.SUITES` lists them.

    Attributes:
        name: as in `asrkit bench NAME`.
        cases: called with device, quick and the options of this suite, such as `ranks` of batching;
            yields the suite's cases.
        gpu_tests: files with tests of its kernels, of which `bench all` runs those marked `gpu`
            first on CUDA.
        cpu_only: whether nothing of it runs on a GPU.
        takes_peers: whether `cases` takes peers (`peers.processes.Peers`, or None) too.
    """

    name: str
    cases: Callable[..., Iterator[Case]]
    gpu_tests: tuple[str, ...] = ()
    cpu_only: bool = False
    takes_peers: bool = False


def failure(title: str, error: Exception) -> str:
    """One line on why a case failed; an AssertionError says by itself which case it is about."""
    if isinstance(error, AssertionError):
        return str(error)
    return f"{title}: {type(error).__name__}: {error}"
