"""One loss of a peer in a process of its own, run by the Python of `make peers`: a request a line
in, an answer a line out.

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
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Loss = Callable[..., Tensor]


def inputs(shape: Sequence[int], durations: int = 0, device: str = "cpu") -> tuple[Tensor, ...]:
    """Logits (B, T, U1, V + durations), targets (B, U) and both lengths (B,), seeded with 0.

    All utterances are full; blank is V - 1.

    Args:
        shape: (B, T, U1, V).
        durations: how many a TDT model has; 0 for RNN-T.
        device: of all tensors.
    """
    B, T, U1, V = shape
    draw = torch.Generator(device).manual_seed(0)
    logits = torch.randn(B, T, U1, V + durations, device=device, generator=draw)
    targets = torch.randint(0, V - 1, (B, U1 - 1), device=device, generator=draw)
    frames = torch.full((B,), T, device=device)
    labels = torch.full((B,), U1 - 1, device=device)
    return logits, targets, frames, labels


def torchaudio(blank: int) -> Loss:
    """torchaudio.functional.rnnt_loss, which stands in for a peer where none is installed."""
    from torchaudio.functional import rnnt_loss

    def loss(logits: Tensor, *targets: Tensor) -> Tensor:
        integers = [tensor.int() for tensor in targets]
        return rnnt_loss(logits, *integers, blank=blank, reduction="none")

    return loss


def warprnnt_numba(blank: int) -> Loss:
    """The Numba port of warp-transducer; on a CPU it loops over tensors in Python."""
    from warprnnt_numba import RNNTLossNumba

    module = RNNTLossNumba(blank=blank, reduction="none")

    def loss(logits: Tensor, *targets: Tensor) -> Tensor:
        return module(logits, *[tensor.int() for tensor in targets])

    return loss


def _stub_nemo() -> None:
    sys.path.append(str(Path(__file__).parent))
    from nemo_stubs import stub_nemo_losses

    stub_nemo_losses()


def nemo_numba(blank: int) -> Loss:
    """NeMo's own copy of that port, its default loss."""
    _stub_nemo()
    from nemo.collections.asr.parts.numba.rnnt_loss.rnnt_pytorch import RNNTLossNumba

    return RNNTLossNumba(blank=blank, reduction="none")


def nemo_pytorch(blank: int) -> Loss:
    """NeMo's RNN-T loss in plain torch, node by node."""
    _stub_nemo()
    from nemo.collections.asr.losses.rnnt_pytorch import RNNTLossPytorch

    return RNNTLossPytorch(blank, "none")


def transformers_tdt(blank: int, durations: list[int]) -> Loss:
    """The TDT loss of transformers' Parakeet: NeMo's plain torch by anti-diagonals. Its RNN-T loss
    is torchaudio's.

    NeMo's own TDT losses are left out: one needs CUDA, the other takes minutes for a lattice of 200
    by 101 nodes.
    """
    from transformers.loss.loss_tdt import tdt_loss

    def loss(logits: Tensor, *targets: Tensor) -> Tensor:
        tokens = logits[..., : blank + 1]
        jumps = logits[..., blank + 1 :]
        return tdt_loss(tokens, jumps, *targets, blank, durations, reduction="none")

    return loss


PEERS: dict[str, tuple[str, Callable[..., Loss]]] = {
    "torchaudio": ("torchaudio", torchaudio),
    "warprnnt_numba": ("warprnnt_numba", warprnnt_numba),
    "nemo_numba": ("nemo_toolkit", nemo_numba),
    "nemo_pytorch": ("nemo_toolkit", nemo_pytorch),
    "transformers_tdt": ("transformers", transformers_tdt),
}


@functools.lru_cache(1)
def _prepared(
    peer: str, shape: tuple[int, ...], durations: tuple[int, ...]
) -> tuple[Loss, tuple[Tensor, ...]]:
    """The peer's loss, and its inputs."""
    logits, *targets = inputs(shape, len(durations))
    _, make = PEERS[peer]
    blank = shape[-1] - 1
    if durations:
        loss = make(blank, [*durations])
    else:
        loss = make(blank)
    return loss, (logits.requires_grad_(), *targets)


def serve(peer: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request, as above."""
    torch.set_num_threads(request["threads"])
    shape = tuple(request["shape"])
    loss, batch = _prepared(peer, shape, tuple(request["durations"]))
    logits = batch[0]
    before = None
    if request["observe"]:
        before = _resident("VmRSS", forget=True)
    wall_start = time.perf_counter_ns()
    cpu_start = time.process_time_ns()
    costs = loss(*batch)
    (gradient,) = torch.autograd.grad(costs.mean(), logits)
    cpu_ns = time.process_time_ns() - cpu_start
    wall_ns = time.perf_counter_ns() - wall_start
    package, _ = PEERS[peer]
    answer = {
        "wall_ms": wall_ns / 1e6,
        "cpu_ms": cpu_ns / 1e6,
        "version": f"{package} {version(package)}",
    }
    if request["observe"]:
        answer["peak_B"] = None
        if before is not None:
            answer["peak_B"] = max(0, (_resident("VmHWM") or 0) - before)
        answer["digest"] = [
            costs.mean().item(),
            gradient.norm().item(),
            torch.sum(gradient * logits).item(),
        ]
    return answer


def _resident(field: str, forget: bool = False) -> int | None:
    """Bytes of memory this process holds (VmRSS), or held at most (VmHWM) since it was last asked
    to forget; None but on Linux.
    """
    try:
        if forget:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    (line,) = [line for line in status.splitlines() if line.startswith(field)]
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
