"""The autograd function behind every loss on given logits: forward to the loss, backward to the
gradient over the logits.

Forward:  logits --arc_log_probs--> arc log-probabilities --lattice--> loss, posteriors of the arcs.
Backward: posteriors --gradient--> gradient over the logits. At a node whose blank and label arcs
have posteriors p_blank and p_label it is

    (p_blank + p_label) softmax[v] - p_blank [v = blank] - p_label [v = label]    for logit v.

Each implementation is a file with these three functions; the reference has a lattice alone.
Backward recomputes the softmax from the logits, so the gradient is the only large tensor made.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.losses.lattice import ArcLogProbs, ArcPosteriors, LatticeOptions, Nodes, as_index
from asrkit.memory import KEPT_MEMORY

# lattice(arcs, nodes, options, grad): without `grad` the posteriors stay None
Recursions = Callable[[ArcLogProbs, Nodes, LatticeOptions, bool], ArcPosteriors]
# Smaller gradients become 0 on a CPU: products below float32's normal range take up to a hundred
# times as long.
TINY = 1e-35
LARGE = 32 << 20  # bytes up to which malloc reuses memory (glibc's largest mmap threshold)
_kept: deque[Tensor] = deque(maxlen=1)  # its append and pop are safe between threads


class Saved(NamedTuple):
    """What the gradient needs beside the logits.

    `log_z`, `blank_posterior` and `label_posterior` are (N,); `duration_gradient` (N, n) is the
    finished gradient over the duration logits, n = 0 for RNN-T.
    """

    log_z: Tensor
    blank_posterior: Tensor
    label_posterior: Tensor
    duration_gradient: Tensor


def lattice_loss(
    impl: str, logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions
) -> Tensor:
    """Negative log-likelihood in nats, (B,), differentiable by the logits.

    Args:
        impl: a file of asrkit.losses, checked.
        logits: (B, T, U1, V + n), or packed (N, V); V tokens, then n durations.
        targets: (B, U).
        nodes: where the lattice's nodes lie in `logits`, once these are contiguous.
        options: of the loss, checked.
    """
    rows = kernels = import_module(f"asrkit.losses.{impl}")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.contiguous()
    if impl == "reference":
        rows = import_module("asrkit.losses.wavefront")
        logits = logits.double()
    if not torch.is_grad_enabled():
        logits = logits.detach()  # inside forward nothing tells no_grad from training
    targets = as_index(targets, logits.device)
    return LatticeLoss.apply(logits, targets, nodes, options, rows, kernels.lattice).to(dtype)


class LatticeLoss(torch.autograd.Function):
    """Negative log-likelihood in nats, (B,), float64, of checked arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        nodes: Nodes,
        options: LatticeOptions,
        rows: Any,
        lattice: Recursions,
    ) -> Tensor:
        """Losses of `logits`; see `lattice_loss`. `rows` is the file with the other two steps.

        `ctx` keeps what the gradient needs, where the logits need one.
        """
        arcs = rows.arc_log_probs(logits, targets, nodes, options)
        posteriors = sum_paths(lattice, arcs, nodes, options, ctx.needs_input_grad[0])
        if posteriors.label_posterior is not None:
            ctx.save_for_backward(logits, targets, *to_save(arcs, posteriors))
            ctx.rest = (nodes, options, rows)
            ctx.spent = False
        return -posteriors.log_likelihood.to(logits.device)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        check_backward(incoming[0])
        nodes, options, rows = ctx.rest
        if ctx.spent:
            raise RuntimeError(
                "overwrite_logits: the gradient of this graph already lies over the logits. "
                "Pass overwrite_logits=False to take it more than once."
            )
        logits, targets, *saved = ctx.saved_tensors
        if options.overwrite_logits:
            ctx.spent = True
            out = logits.detach()
            # other functions that saved the logits must fail instead of using the gradient for them
            torch.autograd.graph.increment_version(logits)
        else:
            out = empty_like(logits)
        rows.gradient(logits, out, targets, nodes, options, Saved(*saved), incoming[0])
        if 0 < options.clamp < inf:  # inf times an incoming 0 would be NaN
            for b, limit in enumerate(options.clamp * incoming[0].abs()):
                nodes.grid(out, b).clamp_(-limit, limit)
        return (out, *[None] * 5)


def sum_paths(
    lattice: Recursions, arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool
) -> ArcPosteriors:
    """What `lattice` makes of the `arcs`: TDT's with tokens `sigma` nats lower, as it trains, or
    RNN-T's where this call was drawn to take them.
    """
    if options.as_rnnt:
        arcs = replace(arcs, duration_logp=arcs.duration_logp[:, :0])
        options = replace(options, durations=())
    elif options.sigma:
        blank_logp = arcs.blank_logp - options.sigma
        label_logp = arcs.label_logp - options.sigma
        arcs = replace(arcs, blank_logp=blank_logp, label_logp=label_logp)
    return lattice(arcs, nodes, options, grad)


def to_save(arcs: ArcLogProbs, posteriors: ArcPosteriors) -> tuple[Any, ...]:
    """The fields of `Saved`, from forward.

    The gradient over the duration logits is softmax times the posterior of the node, minus the
    posterior of the duration.
    """
    by_duration = posteriors.duration_posterior
    if by_duration is None:  # an RNN-T lattice, perhaps over logits that have durations
        duration_gradient = torch.zeros_like(arcs.duration_logp)
    else:
        softmax = arcs.duration_logp.exp()
        duration_gradient = softmax * by_duration.sum(1, keepdim=True) - by_duration
    both = (posteriors.blank_posterior, posteriors.label_posterior)
    return arcs.log_z, *both, duration_gradient


def check_backward(incoming: Tensor) -> None:
    """Raise RuntimeError in a backward pass under create_graph, whose result would lack a term, or
    under is_grads_batched, as the kernels take one gradient.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "this loss has no second derivative. Take the gradient without create_graph=True."
        )
    if torch._C._functorch.is_legacy_batchedtensor(incoming):
        raise RuntimeError(
            "this loss takes one gradient in a call. Take each without is_grads_batched=True."
        )


def empty_like(tensor: Tensor) -> Tensor:
    """torch.empty_like for a contiguous tensor; a large one may lie in memory of an earlier one.

    The first touch of fresh memory costs a page fault for each page of 4 KiB. For a gradient the
    size of the joint that takes longer than its arithmetic. malloc reuses blocks of up to 32 MiB by
    itself; here one larger block of a CPU is kept. It is lent to one gradient at a time: while any
    tensor lies in it, the next gradient gets memory of its own.
    """
    if tensor.device.type != "cpu" or tensor.nbytes <= LARGE:
        return torch.empty_like(tensor)
    try:
        block = _kept.pop()
    except IndexError:
        block = torch.empty(0, dtype=torch.uint8, device="cpu")
    if block.nbytes < tensor.nbytes:
        del block  # before more is asked for
        block = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
    view = block.numpy()
    returned = weakref.finalize(view, _kept.append, block)
    returned.atexit = False
    # The storage owns `view`, so it ends with the last tensor that uses the storage.
    storage = torch.from_numpy(view).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage).resize_(tensor.shape)


def release_gradient_memory() -> None:
    """Free the memory that is kept for the next large gradient."""
    _kept.clear()


KEPT_MEMORY.append(release_gradient_memory)
