"""Losses of other packages, forward and backward of the mean; see peer_worker.py.

The answer is the mean loss, the norm of the gradient and its product with the logits. The suite
also imports `inputs`, so both sides compute on the same numbers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

Loss = Callable[..., Tensor]
Result = tuple[Tensor, Tensor]


def inputs(shape: Sequence[int], durations: int = 0, device: str = "cpu") -> tuple[Tensor, ...]:
    """Logits (B, T, U1, V + durations), targets (B, U) and both lengths (B,), seeded with 0.

    All utterances are full; blank is V - 1.

    Args:
        shape: (B, T, U1, V).
        durations: number of durations of a TDT model; 0 for RNN-T.
        device: device of all tensors.
    """
    B, T, U1, V = shape
    draw = torch.Generator(device).manual_seed(0)
    logits = torch.randn(B, T, U1, V + durations, device=device, generator=draw)
    targets = torch.randint(0, V - 1, (B, U1 - 1), device=device, generator=draw)
    frames = torch.full((B,), T, device=device)
    labels = torch.full((B,), U1 - 1, device=device)
    return logits, targets, frames, labels


def digest(result: Result, logits: Tensor) -> tuple[Tensor, ...]:
    """Cost, norm of the gradient, and gradient times logits."""
    cost, gradient = result
    product = gradient * logits.detach()
    return cost, gradient.norm(), product.sum()


def torchaudio(blank: int) -> Loss:
    """torchaudio.functional.rnnt_loss, a peer that every installation has."""
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


def fast_rnnt(blank: int) -> Loss:
    """The loss of k2's authors: log-probabilities by torch, the lattice in C++."""
    from fast_rnnt import rnnt_loss

    def loss(logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor) -> Tensor:
        starts = torch.zeros_like(labels)
        boundary = torch.stack([starts, starts, labels, frames], dim=1)
        return rnnt_loss(logits, targets, blank, boundary, reduction="none")

    return loss


def nemo_numba(blank: int) -> Loss:
    """NeMo's copy of that port, its default loss."""
    from benchmarks.peers.nemo_stubs import stub_nemo

    stub_nemo()
    from nemo.collections.asr.parts.numba.rnnt_loss.rnnt_pytorch import RNNTLossNumba

    return RNNTLossNumba(blank=blank, reduction="none")


def nemo_pytorch(blank: int) -> Loss:
    """NeMo's RNN-T loss in plain torch, node by node."""
    from benchmarks.peers.nemo_stubs import stub_nemo

    stub_nemo()
    from nemo.collections.asr.losses.rnnt_pytorch import RNNTLossPytorch

    return RNNTLossPytorch(blank, "none")


def transformers_tdt(blank: int, durations: Sequence[int]) -> Loss:
    """The TDT loss of transformers' Parakeet, in plain torch by anti-diagonals.

    NeMo's own TDT losses are not measured: one needs CUDA, the other takes minutes for a lattice of
    200 by 101 nodes.
    """
    from transformers.loss.loss_tdt import tdt_loss

    def loss(logits: Tensor, *targets: Tensor) -> Tensor:
        tokens = logits[..., : blank + 1]
        jumps = logits[..., blank + 1 :]
        return tdt_loss(tokens, jumps, *targets, blank, durations, reduction="none")

    return loss


def prepare(
    make: Callable[..., Loss], shape: Sequence[int], durations: Sequence[int]
) -> tuple[Callable[[], Result], Callable[[Result], dict[str, Any]]]:
    """The call of a loss, and the function that makes an answer of its result.

    Args:
        make: a function above; takes the blank and, if there are any, the durations.
        shape: (B, T, U1, V) of `inputs`.
        durations: durations of a TDT model; none for RNN-T.
    """
    logits, *targets = inputs(shape, len(durations))
    logits.requires_grad_()
    blank = shape[-1] - 1
    loss = make(blank, durations) if durations else make(blank)

    def call() -> Result:
        cost = loss(logits, *targets).mean()
        (gradient,) = torch.autograd.grad(cost, logits)
        return cost, gradient

    def answer(result: Result) -> dict[str, Any]:
        return {"digest": [part.item() for part in digest(result, logits)]}

    return call, answer


PEERS = {
    "torchaudio": ("torchaudio", partial(prepare, torchaudio)),
    "warprnnt_numba": ("warprnnt_numba", partial(prepare, warprnnt_numba)),
    "fast_rnnt": ("fast_rnnt", partial(prepare, fast_rnnt)),
    "nemo_numba": ("nemo_toolkit", partial(prepare, nemo_numba)),
    "nemo_pytorch": ("nemo_toolkit", partial(prepare, nemo_pytorch)),
    "transformers_tdt": ("transformers", partial(prepare, transformers_tdt)),
}
