"""k2's pruned transducer loss, as a readable reference: the joint is computed on a band only.

Most nodes of a lattice lie on no likely path. A simple joint, whose logits are a sum of the
encoder's and the predictor's, needs no tensor over T, U and V: its normaliser is a matrix product.
Its posteriors choose `span` consecutive rows for each frame, and the full joint is computed there.
The memory falls from T U1 V to T span V numbers. In exchange, paths that leave the band are lost,
so the loss is an upper bound of the exact one, and the simple joint has to be trained too.

Source: F. Kuang, L. Guo, W. Kang, L. Lin, M. Luo, Z. Yao, D. Povey, "Pruned RNN-T for fast,
memory-efficient ASR training", arXiv 2206.13236, sections 3.1 and 3.2. They choose each frame's
rows on their own and mend the result; here the best connected band is searched for.
"""

from math import inf

import torch
from torch import Tensor

from asrkit.losses.rnnt.reference import as_tensor, backward_variables, gradient
from asrkit.shapes import expect


def simple_arc_log_probs(
    encoded: Tensor, predicted: Tensor, labels: Tensor, *, blank: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities in nats of blank arcs (T, U1) and label arcs (T, U) of the simple joint.

    The logits of node (t, u) are encoded[t] + predicted[u], and
    log sum_v exp(encoded[t, v] + predicted[u, v]) is the logarithm of a product of two matrices.

    Args:
        encoded: The encoder's logits, (T, V).
        predicted: The predictor's logits, (U1, V).
        labels: (U,), int64.
        blank: Index of blank.
    """
    largest_encoded = encoded.amax(-1, keepdim=True)
    largest_predicted = predicted.amax(-1, keepdim=True)
    sums = (encoded - largest_encoded).exp() @ (predicted - largest_predicted).exp().T
    normaliser = sums.log() + largest_encoded + largest_predicted.T  # (T, U1)
    blank_logits = encoded[:, blank, None] + predicted[:, blank]
    label_logits = encoded[:, labels] + predicted[:-1].gather(-1, labels[:, None]).T
    return blank_logits - normaliser, label_logits - normaliser[:, :-1]


def band(posterior: Tensor, span: int) -> Tensor:
    """First row of each frame's rows, (T,), int64: the band with the most posterior in it.

    The band begins at row 0 and ends with the last row. From one frame to the next it rises by less
    than `span` rows, so that the rows of neighbouring frames overlap.

    Args:
        posterior: Probability that a path visits a node, (T, U1).
        span: Rows of each frame.

    Raises:
        ValueError: No band of that many rows connects both ends.
    """
    T, U1 = posterior.shape
    expect(1 <= span <= U1, "span", f"from 1 to the {U1} rows", span)
    last = U1 - span
    remedy = "Take more rows."
    enough = (T - 1) * (span - 1) >= last
    expect(enough, "span", f"rows that reach row {U1 - 1} in {T} frames", span, remedy)
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


def rows_of(starts: Tensor, span: int) -> Tensor:
    """Rows of the lattice that a band holds, (T, span): where the full joint is computed.

    Args:
        starts: First row of each frame, (T,).
        span: Rows of each frame.
    """
    return starts[:, None] + torch.arange(span, device=starts.device)


def rnnt_loss_in_band(logits: Tensor, labels: Tensor, starts: Tensor, *, blank: int) -> Tensor:
    """Loss in nats of the paths inside a band, a float64 scalar with a gradient.

    It is never below the exact loss, and equal to it where the band is the whole lattice.

    Args:
        logits: The joint's logits in the band, (T, span, V).
        labels: (U,), int64.
        starts: First row of each frame, (T,), from `band`.
        blank: Index of blank.
    """
    T, span, _ = logits.shape
    U = len(labels)
    rows = rows_of(starts, span)
    log_probs = logits.double().log_softmax(-1)
    next_label = labels[rows.clamp(max=max(U - 1, 0))] if U else rows
    in_band = (log_probs[..., blank], log_probs.gather(-1, next_label[..., None])[..., 0])
    lattices = []
    for arcs in in_band:
        lattice = torch.full((T, U + 1), -inf, dtype=torch.float64)
        lattice.scatter_(1, rows, arcs.detach())
        lattices.append(lattice)
    blank_list = lattices[0].tolist()
    label_list = lattices[1][:, :U].tolist()
    by_blank, by_label = (as_tensor(part) for part in gradient(blank_list, label_list))
    by_label = torch.cat([by_label.view(T, U), torch.zeros(T, 1, dtype=torch.float64)], 1)
    loss = torch.tensor(-backward_variables(blank_list, label_list)[0][0], dtype=torch.float64)
    for arcs, derivative in zip(in_band, (by_blank, by_label), strict=True):
        # the value is that of the lattice, the gradient that of the arcs
        loss = loss + ((arcs - arcs.detach()) * derivative.gather(1, rows)).sum()
    return loss
