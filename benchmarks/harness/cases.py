"""What a suite yields and how it is registered: `Case`, one benchmark, and `Suite`, a generator of
cases.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from asrkit.workbench.measure.comparison import Arms, Comparison
from asrkit.workbench.records import Measurement

__all__ = ["Arms", "Case", "PeerArms", "Suite"]


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
class Case(Comparison):
    """One benchmark of a suite: arms to compare and time, or a function that measures.

    Of `arms`, `measure` and `refused` exactly one says what to do. A case whose `arms` are empty is
    skipped.

    Attributes:
        measure: yields measurements itself; it replaces arms.
        refused: why the case could not be made; the run reports it as a failure.
        peers: arms of other packages, if any fit.
        more: yields measurements of the case beside times, once these are taken.
    """

    measure: Callable[[], Iterable[Measurement]] | None = None
    refused: str = ""
    peers: PeerArms | None = None
    more: Callable[[], Iterable[Measurement]] = tuple

    @property
    def title(self) -> str:
        """`what`, shape, and dtype unless it is float32, as in "rnnt-loss 2×40×11×28 bfloat16"."""
        shape = "×".join(map(str, self.params.get("shape", ())))
        dtype = str(self.params.get("dtype", "")).replace("float32", "")
        return " ".join(filter(None, (self.what, shape, dtype)))


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A suite as the runner knows it. A module of suites declares one; `bench.SUITES` lists them.

    Attributes:
        name: as in `python -m benchmarks NAME`.
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
