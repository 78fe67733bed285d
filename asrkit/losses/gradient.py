"""The one autograd node behind every loss on given logits: scores of the nodes, the lattice, the
gradient over the logits.

LogitRows (asrkit.losses.logit_rows) turn logits into scores and shares into gradients; a lattice
(asrkit.losses.rnnt, .tdt) turns scores into shares. Backward recomputes the softmax from the
logits, so the only large tensor made is the gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from asrkit.losses import huge_pages as pages
from asrkit.losses.nodes import ArcLogProbs, ArcPosteriors, LatticeOptions, Nodes

Lattice = Callable[[ArcLogProbs, Nodes, LatticeOptions, bool], ArcPosteriors]


class Saved(NamedTuple):
    """What the gradient needs beside the logits: z and shares (N,), and the finished gradient by
    duration logits (N, n).
    """

    log_z: Tensor
    blank_posterior: Tensor
    label_posterior: Tensor
    duration_gradient: Tensor | None


class LogitRows(Protocol):
    """The two passes over the logits that an implementation brings."""

    def arc_log_probs(
        self, logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions
    ) -> ArcLogProbs:
        """Scores of all nodes."""

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
        """Write the gradient over all of `out`, padding included; `out` may be `logits`.

        At a node: softmax (blank_posterior + label_posterior) - blank_posterior at blank - label_posterior at the label,
        clamped, times `incoming` (B,).
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
        scores = rows.arc_log_probs(logits, targets, nodes, options)
        shares = lattice(scores.lowered(options.sigma), nodes, options, ctx.needs_input_grad[0])
        if shares.label_posterior is not None:
            ctx.save_for_backward(
                logits,
                targets,
                scores.log_z,
                shares.blank_posterior,
                shares.label_posterior,
                duration_gradient(scores, shares),
            )
            ctx.rest, ctx.spent = (nodes, options, rows), False
        return -shares.log_likelihood.to(torch.promote_types(logits.dtype, torch.float32))

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
            ctx.spent, out = True, logits.detach()
            torch.autograd.graph.increment_version(
                logits
            )  # who else saved the logits shall hear that they are gone
        else:
            out = pages.empty_like(logits)
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
    """Negative log-likelihood in nats, (B,); without shares where no gradient will be asked for."""
    given = (
        logits if torch.is_grad_enabled() else logits.detach()
    )  # inside forward nothing tells no_grad from training
    return LatticeLoss.apply(given, targets, nodes, options, rows, lattice)


def duration_gradient(scores: ArcLogProbs, shares: ArcPosteriors) -> Tensor | None:
    """Gradient over the duration logits, (N, n): softmax times the share of the node, less the
    share of the duration.
    """
    if scores.duration_logp is None:
        return None
    if shares.duration_posterior is None:  # a lattice without durations over logits that have some
        return torch.zeros_like(scores.duration_logp)
    return (
        scores.duration_logp.exp() * shares.duration_posterior.sum(1, keepdim=True)
        - shares.duration_posterior
    )


def refuse_second_derivative() -> None:
    """For backward passes: RuntimeError under create_graph, where the missing term would go unseen."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "this loss has no second derivative. Take the gradient without create_graph=True."
        )
