"""The autograd function of every loss that takes logits.

Forward:  logits --arc_log_probs--> arc log-probabilities --lattice--> loss, arc posteriors.
Backward: arc posteriors --gradient--> gradient over the logits. At a node whose blank and label
arcs have posteriors p_blank and p_label, the gradient over logit v is

    (p_blank + p_label) softmax[v] - p_blank [v = blank] - p_label [v = label].

Each implementation is a file with these three functions. Of reference.py only `lattice` is used
here (its `gradient` is over the arcs); the two passes over the logits are those of wavefront.py.
Backward recomputes the softmax from the logits, so the gradient is the only large tensor that is
allocated.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from math import inf
from typing import Any

import torch
from torch import Tensor

from asrkit.losses.arguments import as_index
from asrkit.losses.gradient_memory import empty_like
from asrkit.losses.lattice import ArcLogProbs, ArcPosteriors, LatticeOptions, Nodes, Saved

# lattice(arcs, nodes, options, grad): without `grad` the posteriors are None
Recursions = Callable[[ArcLogProbs, Nodes, LatticeOptions, bool], ArcPosteriors]


def lattice_loss(
    impl: str, logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions
) -> Tensor:
    """Negative log-likelihood in nats, (B,), differentiable with respect to the logits.

    Args:
        impl: Name of a file of asrkit.losses, already checked.
        logits: (B, T, U1, V + n), or packed (N, V + n): V tokens, then n durations.
        targets: (B, U).
        nodes: Positions of the lattice nodes in contiguous `logits`.
        options: Checked options of the loss.
    """
    passes = kernels = import_module(f"asrkit.losses.{impl}")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.contiguous()
    if impl == "reference":
        passes = import_module("asrkit.losses.wavefront")
        logits = logits.double()
    if not torch.is_grad_enabled():
        logits = logits.detach()  # forward() cannot see no_grad, so it is applied here
    targets = as_index(targets, logits.device)
    return LatticeLoss.apply(logits, targets, nodes, options, passes, kernels.lattice).to(dtype)


class LatticeLoss(torch.autograd.Function):
    """Negative log-likelihood in nats, (B,), float64, of checked arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        nodes: Nodes,
        options: LatticeOptions,
        passes: Any,
        lattice: Recursions,
    ) -> Tensor:
        """Return the losses of `logits`; `passes` is the module with both passes over the logits.

        If the logits require a gradient, `ctx` saves what backward needs.
        """
        arcs = passes.arc_log_probs(logits, targets, nodes, options)
        posteriors = sum_paths(lattice, arcs, nodes, options, ctx.needs_input_grad[0])
        if posteriors.label_posterior is not None:
            ctx.save_for_backward(logits, targets, *Saved.from_forward(arcs, posteriors))
            ctx.rest = (nodes, options, passes)
            ctx.spent = False
        return -posteriors.log_likelihood.to(logits.device)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        check_backward(incoming[0])
        nodes, options, passes = ctx.rest
        if ctx.spent:
            raise RuntimeError(
                "overwrite_logits: the gradient of this graph was already written over the logits. "
                "Pass overwrite_logits=False to take it more than once."
            )
        logits, targets, *saved = ctx.saved_tensors
        if options.overwrite_logits:
            ctx.spent = True
            out = logits.detach()
            # other functions that saved the logits must fail, not read the gradient in their place
            torch.autograd.graph.increment_version(logits)
        else:
            out = empty_like(logits)
        passes.gradient(logits, out, targets, nodes, options, Saved(*saved), incoming[0])
        if 0 < options.clamp < inf:  # inf times an incoming 0 would be NaN
            for b, limit in enumerate(options.clamp * incoming[0].abs()):
                nodes.grid(out, b).clamp_(-limit, limit)
        return (out, *[None] * 5)


def sum_paths(
    lattice: Recursions, arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool
) -> ArcPosteriors:
    """Return the result of `lattice` on the `arcs` that this call of the loss uses.

    For TDT, the tokens' log-probabilities are lowered by `sigma` nats. If the call drew the RNN-T
    loss (`as_rnnt`), the durations and sigma are ignored.
    """
    if options.as_rnnt:
        arcs = arcs._replace(duration_logp=arcs.duration_logp[:, :0])
        options = replace(options, durations=())
    elif options.sigma:
        blank_logp = arcs.blank_logp - options.sigma
        label_logp = arcs.label_logp - options.sigma
        arcs = arcs._replace(blank_logp=blank_logp, label_logp=label_logp)
    return lattice(arcs, nodes, options, grad)


def check_backward(incoming: Tensor) -> None:
    """Raise RuntimeError under create_graph or is_grads_batched.

    A second derivative would lack a term, and the kernels take one incoming gradient.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "this loss has no second derivative. Take the gradient without create_graph=True."
        )
    if torch._C._functorch.is_legacy_batchedtensor(incoming):
        raise RuntimeError(
            "this loss takes one gradient in a call. Take each without is_grads_batched=True."
        )
