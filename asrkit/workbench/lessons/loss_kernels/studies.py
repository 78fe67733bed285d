"""Studies on small lattices: sums in low precision, FastEmit, TDT's penalty, k2's pruning.

They run in seconds and need no network: the logits are random, free parameters, or those of one
utterance.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from asrkit.losses import rnnt_loss, tdt_loss
from asrkit.losses.rnnt import reference
from asrkit.workbench.lessons.loss_kernels.versions import Targets, random_lattices

UNREACHED = -3e4  # nats of a node that no path reaches: float16 ends at -65504
IN_FORMAT = "in the format"
IN_FLOAT64 = "float64"
DESCENT_STEPS = 40
DESCENT_RATE = 2.0


def arc_log_probs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities in nats of blank arcs (T, U1) and label arcs (T, U) of one lattice.

    Args:
        logits: (T, U1, V); blank is the last token.
        labels: (U,), int64.
    """
    log_probs = logits.log_softmax(-1)
    index = labels.expand(len(log_probs), -1)[..., None]
    label_logp = log_probs[:, :-1].gather(-1, index)[..., 0]
    return log_probs[..., -1], label_logp


def loss_summed_in(dtype: torch.dtype, blank_logp: Tensor, label_logp: Tensor) -> Tensor:
    """The loss of one lattice in nats, float64, with every sum of the recursion in `dtype`.

    The recursion goes from one anti-diagonal to the next, as on a GPU.

    Args:
        dtype: Of the arcs' log-probabilities and of the sums.
        blank_logp: (T, U1).
        label_logp: (T, U).
    """
    U1 = blank_logp.shape[1]
    above_last_row = torch.nn.functional.pad(label_logp, (0, 1), value=-1e4)
    blank_diagonals = _by_diagonal(blank_logp.to(dtype))
    label_diagonals = _by_diagonal(above_last_row.to(dtype))
    alpha = torch.full((U1,), UNREACHED, dtype=dtype)
    alpha[0] = 0
    for blank, label in zip(blank_diagonals, label_diagonals, strict=True):
        from_below = (alpha + label).roll(1)
        alpha = torch.logaddexp(alpha + blank, from_below).clamp(min=UNREACHED)
    return -alpha[-1].double()


def _by_diagonal(arcs: Tensor) -> Tensor:
    """(T, U1) -> (T + U1 - 1, U1): row k holds the arcs that leave anti-diagonal k."""
    T, U1 = arcs.shape
    u = torch.arange(U1)
    t = torch.arange(T + U1 - 1)[:, None] - u
    inside = (t >= 0) & (t < T)
    return torch.where(inside, arcs[t.clamp(0, T - 1), u], -1e4)


def rounding_errors(
    lengths: Sequence[int], formats: Mapping[str, torch.dtype], *, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Relative errors of loss and gradient against float64, two rows for each length and format.

    One row has logits in the format and the package's float64 sums, compared with the reference on
    the same rounded logits. The other has the sums in the format as well. "rounding alone" is what
    rounding the logits does to the loss, before anything is computed.

    Args:
        lengths: Frames T of the lattices; each has 11 rows and 16 tokens.
        formats: Name -> dtype.
        seed: Of logits and labels.
    """
    for T in lengths:
        logits, targets = random_lattices(1, T, 11, 16, seed=seed)
        exact = _exact(logits, targets)
        for name, dtype in formats.items():
            rounded = logits.detach().to(dtype).requires_grad_()
            exact_of_rounded = _exact(rounded, targets)
            ours = _value_and_gradient(rnnt_loss(rounded, *targets), rounded)
            errors = _relative_errors(ours, exact_of_rounded)
            # The logits were drawn in float32, where there is no rounding.
            errors["rounding alone"] = _relative_errors(exact_of_rounded, exact)["loss"] or nan
            yield {"T": T, "format": name, "sums": IN_FLOAT64, **errors}
            arcs = arc_log_probs(logits[0], targets[0][0])
            naive = _value_and_gradient(loss_summed_in(dtype, *arcs), logits)
            yield {"T": T, "format": name, "sums": IN_FORMAT, **_relative_errors(naive, exact)}


def _value_and_gradient(loss: Tensor, leaf: Tensor) -> tuple[float, Tensor]:
    return loss.item(), torch.autograd.grad(loss, leaf)[0].double()


def _exact(logits: Tensor, targets: Targets) -> tuple[float, Tensor]:
    wide = logits.detach().double().requires_grad_()
    return _value_and_gradient(rnnt_loss(wide, *targets, impl="reference"), wide)


def _relative_errors(found: tuple[float, Tensor], exact: tuple[float, Tensor]) -> dict[str, float]:
    gradient_error = (found[1] - exact[1]).norm() / exact[1].norm()
    return {
        "loss": abs(found[0] - exact[0]) / exact[0],
        "gradient": float(gradient_error),
    }


def label_posteriors_after_descent(labels: Tensor, T: int, fastemit_lambda: float) -> Tensor:
    """Posteriors of the label arcs (T, U) after gradient descent on the logits themselves.

    The logits are free parameters: all are 0 at first, then 40 steps follow at a rate of 2.

    Args:
        labels: (U,), int64.
        T: Frames.
        fastemit_lambda: Strength of FastEmit; 0 leaves the gradient as it is.
    """
    U = len(labels)
    V = int(labels.max()) + 2  # the labels, and blank as the last token
    logits = torch.zeros(1, T, U + 1, V, requires_grad=True)
    lengths = (torch.tensor([T]), torch.tensor([U]))
    for _ in range(DESCENT_STEPS):
        loss = rnnt_loss(logits, labels[None], *lengths, fastemit_lambda=fastemit_lambda)
        gradient = torch.autograd.grad(loss, logits)[0]
        logits = (logits - DESCENT_RATE * gradient).detach().requires_grad_()
    blank_logp, label_logp = arc_log_probs(logits.detach()[0], labels)
    _, label_gradient = reference.gradient(blank_logp.tolist(), label_logp.tolist())
    return -torch.tensor(label_gradient)


def expected_frames(label_posteriors: Tensor) -> Tensor:
    """The frame at which each label is expected, (U,).

    Args:
        label_posteriors: Posteriors of the label arcs, (T, U).
    """
    frames = torch.arange(len(label_posteriors))[:, None]
    return (frames * label_posteriors).sum(0) / label_posteriors.sum(0)


def expected_tokens(
    sigma: float, T: int, U: int, durations: Sequence[int], *, step: float = 1e-3
) -> float:
    """Tokens of a TDT alignment on average, where all logits are equal.

    It is the derivative of the loss with respect to sigma, by a central difference.

    Args:
        sigma: Nats that the loss subtracts for each token.
        T: Frames.
        U: Labels.
        durations: Frames that a token may advance.
        step: Half the distance of the two values of sigma.
    """
    logits = torch.zeros(1, T, U + 1, 4 + len(durations), dtype=torch.float64)
    labels = torch.zeros(1, U, dtype=torch.long)
    lengths = (torch.tensor([T]), torch.tensor([U]))
    above, below = (
        tdt_loss(logits, labels, *lengths, durations=tuple(durations), sigma=value).item()
        for value in (sigma + step, sigma - step)
    )
    return (above - below) / (2 * step)


def band(posterior: Tensor, span: int) -> Tensor:
    """First row of each frame's rows, (T,), int64: the band with the most posterior in it.

    The band begins at row 0 and ends with the last row. From one frame to the next it rises by less
    than `span` rows, so that the rows of neighbouring frames overlap. The paper (arXiv 2206.13236,
    section 3.2) chooses each frame's rows on their own and mends the result; here the best
    connected band is searched for.

    Args:
        posterior: Probability that a path visits a node, (T, U1).
        span: Rows of each frame, enough for such a band.
    """
    last = posterior.shape[1] - span
    inside = posterior.unfold(1, span, 1).sum(-1).tolist()  # (T, last + 1)
    best = [inside[0][0]] + [-inf] * last
    came_from = []
    for row in inside[1:]:
        previous = [
            max(range(max(0, start - span + 1), start + 1), key=best.__getitem__)
            for start in range(last + 1)
        ]
        best = [best[origin] + value for origin, value in zip(previous, row, strict=True)]
        came_from.append(previous)
    starts = [last]
    for previous in reversed(came_from):
        starts.append(previous[starts[-1]])
    return torch.tensor(starts[::-1])


def nats_lost_in_band(logits: Tensor, labels: Tensor, spans: Sequence[int]) -> list[float]:
    """How many nats the loss grows by when the joint is computed in a band of rows alone.

    The band is chosen by the exact posteriors, the best that a simple joint could do. Outside of it
    no arc is possible.

    Args:
        logits: Of one lattice, (T, U1, V); blank is the last token.
        labels: (U,), int64.
        spans: Rows of each frame in the band.
    """
    blank_logp, label_logp = arc_log_probs(logits, labels)
    arcs = (blank_logp.tolist(), label_logp.tolist())
    alpha = torch.tensor(reference.forward_variables(*arcs), dtype=torch.float64)
    beta = torch.tensor(reference.backward_variables(*arcs), dtype=torch.float64)
    posterior = (alpha + beta - beta[0, 0]).exp()
    rows = torch.arange(logits.shape[1])
    lost = []
    for span in spans:
        first = band(posterior, span)[:, None]
        outside = (rows < first) | (rows >= first + span)  # (T, U1)
        by_blank = blank_logp.masked_fill(outside, -inf)
        by_label = label_logp.masked_fill(outside[:, :-1], -inf)
        kept = reference.backward_variables(by_blank.tolist(), by_label.tolist())[0][0]
        lost.append(beta[0, 0].item() - kept)
    return lost
