"""The transducer loss as the textbook has it: loops over t and u, one utterance at a time, float64. Lesson and oracle.

A lattice has a node (t, u) for "frame t is read, u labels are out" and two arcs that leave it: blank, to (t+1, u), and
the next label, to (t, u+1). An alignment is a path from (0, 0) through the blank that leaves (T-1, U). The likelihood
is the sum over all C(T-1+U, U) paths of the products of their arcs; two recursions sum them in T U1 steps.
Below, blank (T, U1) and label (T, U) hold the log-probability of the arcs that leave each node.
Source: A. Graves, "Sequence Transduction with Recurrent Neural Networks", arXiv 1211.3711, sections 2.4 and 2.5.
"""

import numpy as np
import torch
from torch import Tensor

Lattice = np.ndarray


def forward_variables(blank: Lattice, label: Lattice) -> Lattice:
    """log alpha(t, u), (T, U1): probability of all ways from (0, 0) to (t, u).

    alpha(t, u) = alpha(t-1, u) blank(t-1, u) + alpha(t, u-1) label(t, u-1), from alpha(0, 0) = 1.
    """
    alpha = np.full(blank.shape, -np.inf)
    alpha[0, 0] = 0
    for t in range(alpha.shape[0]):
        for u in range(alpha.shape[1]):
            if t > 0:
                alpha[t, u] = alpha[t - 1, u] + blank[t - 1, u]
            if u > 0:
                alpha[t, u] = np.logaddexp(alpha[t, u], alpha[t, u - 1] + label[t, u - 1])
    return alpha


def backward_variables(blank: Lattice, label: Lattice) -> Lattice:
    """log beta(t, u), (T+1, U1): probability of all ways from (t, u) to the end; beta(0, 0) is the likelihood.

    beta(t, u) = beta(t+1, u) blank(t, u) + beta(t, u+1) label(t, u), from beta(T, U) = 1: the end, past the last frame.
    """
    T, U1 = blank.shape
    beta = np.full((T + 1, U1), -np.inf)
    beta[T, U1 - 1] = 0
    for t in reversed(range(T)):
        for u in reversed(range(U1)):
            beta[t, u] = beta[t + 1, u] + blank[t, u]
            if u + 1 < U1:
                beta[t, u] = np.logaddexp(beta[t, u], beta[t, u + 1] + label[t, u])
    return beta


def gradient(blank: Lattice, label: Lattice) -> tuple[Lattice, Lattice]:
    """Derivative of -log likelihood by the log-probability of each arc: blank arcs (T, U1), label arcs (T, U).

    It is minus the share of the likelihood that takes the arc: -alpha(t, u) blank(t, u) beta(t+1, u) / beta(0, 0)
    and -alpha(t, u) label(t, u) beta(t, u+1) / beta(0, 0).
    """
    alpha, beta = forward_variables(blank, label), backward_variables(blank, label)
    total = max(beta[0, 0], np.finfo(float).min)  # no path at all has no share, rather than 0 / 0
    by_blank = -np.exp(alpha + blank + beta[1:] - total)
    by_label = -np.exp(alpha[:, :-1] + label + beta[:-1, 1:] - total)
    return by_blank, by_label


def losses(logits: Tensor, targets: Tensor, lengths: Tensor, blank: int, clamp: float, fused_log_softmax: bool,
           fastemit_lambda: float) -> Tensor:
    """Negative log-likelihood in nats, (B,), of checked arguments (`lengths` (B, 2): frames, labels, on the host)."""
    costs, gradients = torch.zeros(len(lengths), dtype=torch.float64), torch.zeros(logits.shape, dtype=torch.float64)
    for b, (T, U) in enumerate(lengths.tolist()):
        scores, index = logits[b, :T, :U + 1].detach().double().cpu(), targets[b, :U].cpu().expand(T, U)[..., None]
        logp = scores.log_softmax(-1) if fused_log_softmax else scores  # (T, U1, V)
        arcs = logp[..., blank].numpy(), logp[:, :U].gather(-1, index)[..., 0].numpy()
        costs[b] = -backward_variables(*arcs)[0, 0]
        by_blank, by_label = map(torch.from_numpy, gradient(*arcs))
        grad = gradients[b, :T, :U + 1]
        grad[..., blank] = by_blank
        grad[:, :U].scatter_(-1, index, (1 + fastemit_lambda) * by_label[..., None])
        if fused_log_softmax:  # chain rule: d logp[k] / d logit[v] = (k == v) - softmax[v]
            grad -= logp.exp() * grad.sum(-1, keepdim=True)
        if clamp > 0:
            grad.clamp_(-clamp, clamp)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return _Given.apply(logits, costs.to(logits.device, dtype), gradients.to(logits))


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, costs, gradients):
        ctx.save_for_backward(gradients)
        return costs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, incoming):
        return ctx.saved_tensors[0] * incoming.to(ctx.saved_tensors[0])[:, None, None, None], None, None
