"""`Case`, one benchmark, and `Suite`, a generator of cases."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from asrkit.workbench.measure.comparison import Arms, Comparison
from asrkit.workbench.records import Measurement, Record

__all__ = ["Arms", "Case", "PeerArms", "Suite", "study_params"]


@dataclass(frozen=True, kw_only=True)
class PeerArms:
    """Arms of other packages that join a case; each runs in its own process.

    Attributes:
        request: arguments of `peers.processes.Peers.arms`.
        ours: our arm that the peers' times are divided by, if it runs.
        against: peer name to another arm of ours that this peer's time is divided by.
        params: params of the peers' records.
        logits: logits of a loss, which its peers draw from the same seed.
    """

    request: Mapping[str, Any]
    ours: str = "numba_cpu"
    against: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    logits: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Case(Comparison):
    """One benchmark of a suite: arms to compare and time, or a function that measures.

    A case has `arms` or `measure`; without either it is skipped.

    Attributes:
        measure: yields measurements; replaces the arms.
        peers: arms of other packages.
        more: yields further measurements once the arms are timed.
    """

    measure: Callable[[], Iterable[Measurement]] | None = None
    peers: PeerArms | None = None
    more: Callable[[], Iterable[Measurement]] = tuple

    @property
    def title(self) -> str:
        """`what`, shape, and dtype unless it is float32, as in "rnnt-loss 2×40×11×28 bfloat16"."""
        shape = "×".join(map(str, self.params.get("shape", ())))
        dtype = str(self.params.get("dtype", "")).replace("float32", "")
        return " ".join(filter(None, (self.what, shape, dtype)))

    @classmethod
    def refused(cls, what: str, error: Exception) -> "Case":
        """A case that fails, because it could not be built."""
        error = error.with_traceback(None)  # which would keep tensors alive

        def fail() -> Iterator[Measurement]:
            raise error

        return cls(what=what, measure=fail)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A suite. Each module of `benchmarks.suites` declares one, and `SUITES` there lists them.

    Attributes:
        name: as in `python -m benchmarks NAME`.
        cases: yields the cases; takes device, quick and the options of this suite, such as `ranks`
            of batching.
        gpu_tests: test files of its kernels; `python -m benchmarks all` runs their tests marked
            `gpu` first on CUDA.
        cpu_only: whether nothing in it runs on a GPU.
        takes_peers: whether `cases` also takes peers (`peers.processes.Peers`, or None).
        share: weight by which `python -m benchmarks all --minutes` divides the time.
        rows: rows of the suite's own table, made from its records. Such a suite is resumed: a case
            is not measured if the file of the records has one with its params, by the same machine
            and commit. `python -m benchmarks all` omits the suite.
    """

    name: str
    cases: Callable[..., Iterator[Case]]
    gpu_tests: tuple[str, ...] = ()
    cpu_only: bool = False
    takes_peers: bool = False
    share: float = 1.0
    rows: Callable[[Sequence[Record]], list[dict[str, Any]]] | None = None


def study_params(device: str, quick: bool, **params: Any) -> dict[str, Any]:
    """Params that all records of a claim's study share.

    Args:
        device: "cpu" or "cuda".
        quick: whether sizes are toy sizes, which settle no claim. On a CPU they may be so without
            --quick.
        **params: further params.
    """
    shared = {"weights": "random", "threads": torch.get_num_threads(), "device": device}
    toy = {"quick": True} if quick else {}
    return {**shared, "suite": "claims", **toy, **params}
