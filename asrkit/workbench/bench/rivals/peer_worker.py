"""One rival loss in a process of its own, run by the Python of `make peers`: a request a line in,
an answer a line out.

    python -P peer_worker.py warprnnt_numba
    {"shape": [1, 4, 3, 5], "durations": [], "threads": 1, "observe": true}
    {"wall_ms": ..., "cpu_ms": ..., "digest": [...], "peak_B": ..., "version": "..."}

A request is one call, forward and backward of the mean. With "observe" the answer has a digest, the
mean loss, the norm of the gradient and its product with the logits, and the peak memory beyond what
was held before: the process's, for torch's profiler takes gigabytes to follow losses that make a
tensor a node. What fails answers {"error": ...}. Nothing of asrkit is imported here;
asrkit.workbench.bench imports `inputs`, so both sides work on the same numbers.
"""

import functools
import json
import os
import sys
import time
import types
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Loss = Callable[..., Tensor]


def inputs(shape: Sequence[int], durations: int = 0, device: str = "cpu") -> tuple[Tensor, ...]:
    """Logits (B, T, U1, V + durations), targets (B, U) and both lengths (B,), full; blank is V - 1.
    Seeded with 0.
    """
    B, T, U1, V = shape
    made: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    logits, targets = (
        torch.randn(B, T, U1, V + durations, **made),
        torch.randint(0, V - 1, (B, U1 - 1), **made),
    )
    return (
        logits,
        targets,
        torch.full((B,), T, device=device),
        torch.full((B,), U1 - 1, device=device),
    )


def torchaudio(blank: int) -> Loss:
    """torchaudio.functional.rnnt_loss, which stands in for a peer where none is installed."""
    from torchaudio.functional import rnnt_loss

    return lambda logits, *rest: rnnt_loss(
        logits, *(one.int() for one in rest), blank=blank, reduction="none"
    )


def warprnnt_numba(blank: int) -> Loss:
    """The Numba port of warp-transducer; on a CPU it loops over tensors in Python."""
    from warprnnt_numba import RNNTLossNumba

    loss = RNNTLossNumba(blank=blank, reduction="none")
    return lambda logits, *rest: loss(logits, *(one.int() for one in rest))


def nemo_numba(blank: int) -> Loss:
    """NeMo's own copy of that port, its default loss."""
    _bare_nemo()
    from nemo.collections.asr.parts.numba.rnnt_loss.rnnt_pytorch import RNNTLossNumba

    return RNNTLossNumba(blank=blank, reduction="none")


def nemo_pytorch(blank: int) -> Loss:
    """NeMo's RNN-T loss in plain torch, node by node."""
    _bare_nemo()
    from nemo.collections.asr.losses.rnnt_pytorch import RNNTLossPytorch

    return RNNTLossPytorch(blank, "none")


def transformers_tdt(blank: int, durations: list[int]) -> Loss:
    """The TDT loss of transformers' Parakeet: NeMo's plain torch by anti-diagonals. Its RNN-T loss
    is torchaudio's.

    NeMo's own TDT losses are left out: one needs CUDA, the other takes minutes for a lattice of 200
    by 101 nodes.
    """
    from transformers.loss.loss_tdt import tdt_loss

    V = blank + 1
    return lambda logits, *rest: tdt_loss(
        logits[..., :V], logits[..., V:], *rest, blank, durations, reduction="none"
    )


PEERS: dict[str, tuple[str, Callable[..., Loss]]] = {
    "torchaudio": ("torchaudio", torchaudio),
    "warprnnt_numba": ("warprnnt_numba", warprnnt_numba),
    "nemo_numba": ("nemo_toolkit", nemo_numba),
    "nemo_pytorch": ("nemo_toolkit", nemo_pytorch),
    "transformers_tdt": ("transformers", transformers_tdt),
}


def _bare_nemo() -> None:
    """Let NeMo's losses be imported without the package around them, which wants lightning, hydra
    and forty more.
    """
    if "nemo" not in sys.modules:
        (root,) = [path for path in map(Path, sys.path) if (path / "nemo").is_dir()]
        for name in (
            "",
            ".core",
            ".core.classes",
            ".collections",
            *(".collections.asr" + end for end in ("", ".losses", ".parts", ".parts.numba")),
        ):
            module = sys.modules["nemo" + name] = types.ModuleType("nemo" + name)
            module.__path__ = [str(root / ("nemo" + name).replace(".", "/"))]
        sys.modules["nemo.core.classes"].Loss = torch.nn.Module  # type: ignore[attr-defined]


@functools.lru_cache(1)
def _prepared(
    peer: str, shape: tuple[int, ...], durations: tuple[int, ...]
) -> tuple[Loss, tuple[Tensor, ...]]:
    logits, *rest = inputs(shape, len(durations))
    make = PEERS[peer][1]
    return make(shape[-1] - 1, [*durations]) if durations else make(shape[-1] - 1), (
        logits.requires_grad_(),
        *rest,
    )


def serve(peer: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request, as above."""
    torch.set_num_threads(request["threads"])
    loss, given = _prepared(peer, tuple(request["shape"]), tuple(request["durations"]))
    before = _resident("VmRSS", forget=True) if request["observe"] else None
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    costs = loss(*given)
    (gradient,) = torch.autograd.grad(costs.mean(), given[0])
    cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
    answer = {
        "wall_ms": wall / 1e6,
        "cpu_ms": cpu / 1e6,
        "version": f"{PEERS[peer][0]} {version(PEERS[peer][0])}",
    }
    if request["observe"]:
        answer["peak_B"] = None if before is None else max(0, (_resident("VmHWM") or 0) - before)
        answer["digest"] = [
            costs.mean().item(),
            gradient.norm().item(),
            torch.sum(gradient * given[0]).item(),
        ]
    return answer


def _resident(field: str, forget: bool = False) -> int | None:
    """Bytes of memory this process holds (VmRSS) or held at most (VmHWM) since it was told to
    forget; None but on Linux.
    """
    try:
        if forget:
            Path("/proc/self/clear_refs").write_text("5")
        (line,) = [
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(field)
        ]
    except OSError:
        return None
    return 1024 * int(line.split()[1])


def answer_requests(serve: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer until the requests end. What a peer prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = serve(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    answer_requests(functools.partial(serve, sys.argv[1]))
