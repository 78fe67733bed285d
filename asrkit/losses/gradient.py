"""The autograd function behind every loss on given logits: forward to the loss, backward to the
gradient over the logits.

Forward:  logits --logit_rows.arc_log_probs--> arc log-probabilities --lattice--> loss, posteriors.
Backward: arc posteriors --logit_rows.gradient--> gradient over the logits. At a node whose blank
and label arcs have posteriors p_blank and p_label it is

    (p_blank + p_label) softmax[v] - p_blank [v = blank] - p_label [v = label]    for logit v.

The lattices are in asrkit.losses.rnnt and asrkit.losses.tdt, one file an implementation; the passes
over the logits, where the gradient is written, are in asrkit.losses.logit_rows. Backward
recomputes the softmax from the logits, so the gradient is the only large tensor that is made.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from asrkit.losses import gradient_memory
from asrkit.losses.nodes import ArcLogProbs, ArcPosteriors, LatticeOptions, Nodes

# lattice(arcs, nodes, options, grad): without `grad` the posteriors stay None
Lattice = Callable[[ArcLogProbs, Nodes, LatticeOptions, bool], ArcPosteriors]


class Saved(NamedTuple):
    """What the gradient needs beside the logits.

    `log_z`, `blank_posterior` and `label_posterior` are (N,); `duration_gradient` (N, n) is the
    finished gradient over the duration logits, None for RNN-T.
    """

    log_z: Tensor
    blank_posterior: Tensor
    label_posterior: Tensor
    duration_gradient: Tensor | None


class LogitRows(Protocol):
    """The two passes over the logits: what each file of asrkit.losses.logit_rows brings."""

    def arc_log_probs(
        self, logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions
    ) -> ArcLogProbs:
        """Arc log-probabilities of all `nodes`, from `logits`, `targets` (B, U) and `options`."""

    def gradient(
        self,
        logits: Tensor,
        out: Tensor,
        targets: Tensor,
        nodes: Nodes,
        options: LatticeOptions,
        saved: Saved,
        incoming: Tensor,
    ) -> None:
        """Write the gradient over all of `out`, padding included (0 there).

        Args:
            logits: the logits of the forward pass.
            out: where to write; a tensor like `logits`, or `logits` itself.
            targets: (B, U), int64.
            nodes: where the nodes of `logits` lie.
            options: of the loss; each element is clamped to +-options.clamp.
            saved: from the forward pass.
            incoming: (B,), gradient over the losses, multiplied in after the clamp.
        """


class LatticeLoss(torch.autograd.Function):
    """Negative log-likelihood in nats, (B,), of checked arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        nodes: Nodes,
        options: LatticeOptions,
        rows: LogitRows,
        lattice: Lattice,
    ) -> Tensor:
        """Losses of `logits`; see `lattice_loss` for targets, nodes, options, rows and lattice.

        `ctx` keeps what the gradient needs, where the logits need one.
        """
        arcs = rows.arc_log_probs(logits, targets, nodes, options)
        posteriors = lattice(arcs.lowered(options.sigma), nodes, options, ctx.needs_input_grad[0])
        if posteriors.label_posterior is not None:
            ctx.save_for_backward(
                logits,
                targets,
                arcs.log_z,
                posteriors.blank_posterior,
                posteriors.label_posterior,
                duration_gradient(arcs, posteriors),
            )
            ctx.rest = (nodes, options, rows)
            ctx.spent = False
        return -posteriors.log_likelihood.to(torch.promote_types(logits.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        refuse_second_derivative()
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
            out = gradient_memory.empty_like(logits)
        rows.gradient(logits, out, targets, nodes, options, Saved(*saved), incoming[0])
        return (out, *[None] * 5)


def lattice_loss(
    logits: Tensor,
    targets: Tensor,
    nodes: Nodes,
    options: LatticeOptions,
    rows: LogitRows,
    lattice: Lattice,
) -> Tensor:
    """Negative log-likelihood in nats, (B,), differentiable by the logits.

    Args:
        logits: (B, T, U1, V + n), or packed (N, V); V tokens, then n durations.
        targets: (B, U), int64.
        nodes: where the lattice's nodes lie in `logits`.
        options: of the loss, checked.
        rows: the passes over the logits, a module of asrkit.losses.logit_rows.
        lattice: the recursions, from one of the modules of asrkit.losses.rnnt or .tdt.
    """
    if not torch.is_grad_enabled():
        logits = logits.detach()  # inside forward nothing tells no_grad from training
    return LatticeLoss.apply(logits, targets, nodes, options, rows, lattice)


def kernel_loss(
    logits: Tensor,
    targets: Tensor,
    nodes: Nodes,
    options: LatticeOptions,
    rows: LogitRows,
    lattice: Lattice,
) -> Tensor:
    """As `lattice_loss`, for kernels that need the numbers of a node to be adjacent in memory.

    Takes logits, targets, nodes, options, rows and lattice as `lattice_loss` does; copies logits
    whose last dimension has another stride than 1.
    """
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    return lattice_loss(logits, targets, nodes.strided_like(logits), options, rows, lattice)


def duration_gradient(arcs: ArcLogProbs, posteriors: ArcPosteriors) -> Tensor | None:
    """Gradient over the duration logits, (N, n); None where there are none.

    It is softmax times the posterior of the node, minus the posterior of the duration.
    """
    if arcs.duration_logp is None:
        return None
    by_duration = posteriors.duration_posterior
    if by_duration is None:  # an RNN-T lattice over logits that have durations (TDT's omega)
        return torch.zeros_like(arcs.duration_logp)
    return arcs.duration_logp.exp() * by_duration.sum(1, keepdim=True) - by_duration


def refuse_second_derivative() -> None:
    """Raise RuntimeError in a backward pass under create_graph, whose result would lack a term."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "this loss has no second derivative. Take the gradient without create_graph=True."
        )
