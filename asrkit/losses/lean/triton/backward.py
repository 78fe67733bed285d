"""Second pass, on a run of tiles: the logits' gradient and the hidden layer as matrices, then the
gradients of both halves.

Between the two kernels stands one product of the library, gradient^T @ hidden, which is the
weight's gradient. Sums over tiles are atomic additions in float32, so their order, and with it the
last bits, may differ from call to call.
"""

import triton
import triton.language as tl

from asrkit.losses.lean.triton.forward import tile_logits, write_hidden
from asrkit.losses.lean.triton.tile import (
    FRAMES_OF,
    LABELS_OF,
    ROWS,
    VARIED,
    hidden_layer,
    locate,
    nodes_of,
    product,
)


@triton.jit
def active_posteriors(blank_posterior, label_posterior, node, valid, skip):
    """Posteriors of blank and of the label at nodes (n,), which nodes are active, and whether any
    is.

    A node is not where both posteriors together are no larger than `skip`; they are 0 then.

    Args:
        blank_posterior, label_posterior: (N,).
        node, valid: from `nodes_of`.
        skip: the largest posterior that is left out.
    """
    at_blank = tl.load(blank_posterior + node, mask=valid, other=0.0)
    at_label = tl.load(label_posterior + node, mask=valid, other=0.0)
    active = valid & ~(at_blank + at_label <= skip)  # NaN counts
    at_blank = tl.where(active, at_blank, 0.0)
    at_label = tl.where(active, at_label, 0.0)
    return at_blank, at_label, active, tl.max(active.to(tl.int32)) > 0


@triton.jit(do_not_specialize=VARIED)
def by_logits(
    encoded,
    predicted,
    weight,
    bias,
    targets,
    table,
    hidden,
    gradient,
    log_z,
    blank_posterior,
    label_posterior,
    incoming,
    by_bias,
    first_tile,
    B,
    T,
    U1,
    D,
    DEPTH,
    V,
    WIDE,
    blank,
    skip,
    seed,
    least,
    keep,
    BATCH: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    is_tanh: tl.constexpr,
    drops: tl.constexpr,
    TF32: tl.constexpr,
):
    """Write the gradient over the logits (tiles, ROWS, WIDE) and the hidden layer (tiles, ROWS,
    DEPTH), the logits being computed on the way.

    Without an active node nothing is multiplied, and the gradient is 0.

    Args:
        encoded, predicted: both halves of the joint, (B, T, D) and (B, U1, D).
        weight, bias: of the output layer, (V and more, DEPTH) and (V,).
        targets: (B, U).
        table: (B, 8), of asrkit.losses.nodes.Nodes.
        hidden, gradient: where to write.
        log_z: (N,), from the first pass.
        blank_posterior, label_posterior: (N,) of each node.
        incoming: (B,), gradient of the losses.
        by_bias: (WIDE,), to which the gradient's sums over nodes are added.
        first_tile: number of the run's first tile in the batch.
        B, T, U1, D: sizes of both halves.
        DEPTH, WIDE: D and the outputs, padded.
        V: tokens.
        blank: index of the blank.
        skip: the largest posterior of a node that is left out.
        seed, least, keep: of dropout: the seed, `threshold` of asrkit.losses.dropout, and the
            factor of what is kept.
        BATCH: a power of two, at least B.
        BV, BK: outputs and columns at a time.
        is_tanh, drops, TF32: as for `hidden_layer` and `product`.
    """
    slot = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, ROWS)
    hidden += slot * ROWS * DEPTH
    gradient += slot * ROWS * WIDE
    b, t0, u0 = locate(first_tile + tl.program_id(0), table, B, BATCH)
    t, u, node, valid, has_label = nodes_of(b, t0, u0, table)
    at_blank, at_label, active, any_active = active_posteriors(
        blank_posterior, label_posterior, node, valid, skip
    )
    scale = tl.load(incoming + b)
    at_blank *= scale
    at_label *= scale
    label = tl.load(targets + b * (U1 - 1) + u, mask=has_label, other=-1)
    # infinite, and so exp(x - normaliser) 0, where nothing is to be done
    normaliser = tl.load(log_z + node, mask=active, other=float("inf"))
    write_hidden(
        hidden,
        encoded,
        predicted,
        b,
        t,
        u,
        valid,
        seed,
        least,
        keep,
        T,
        U1,
        D,
        DEPTH,
        BK,
        is_tanh,
        drops,
    )
    for first in range(0, WIDE, BV):
        v = first + tl.arange(0, BV)
        grad = tl.zeros((ROWS, BV), tl.float32)
        if any_active:
            x, v = tile_logits(hidden, weight, bias, first, V, DEPTH, BV, BK, TF32)
            grad = (at_blank + at_label)[:, None] * tl.exp(x - normaliser[:, None])
            grad -= tl.where((v == blank)[None, :], at_blank[:, None], 0.0)
            grad -= tl.where(v[None, :] == label[:, None], at_label[:, None], 0.0)
            tl.atomic_add(by_bias + v, tl.sum(grad, axis=0), mask=v < WIDE, sem="relaxed")
        tl.store(
            gradient + r[:, None] * WIDE + v[None, :],
            grad.to(gradient.dtype.element_ty),
            mask=(v < WIDE)[None, :],
        )


@triton.jit(do_not_specialize=VARIED)
def by_durations(
    table,
    gradient,
    blank_posterior,
    label_posterior,
    duration_gradient,
    incoming,
    by_bias,
    first_tile,
    B,
    V,
    n,
    WIDE,
    skip,
    BATCH: tl.constexpr,
    BN: tl.constexpr,
):
    """Write the gradient over the n duration logits, finished in duration_gradient (N, n), into
    columns V, V + 1, ... of what by_logits wrote.

    Args:
        table: (B, 8), of asrkit.losses.nodes.Nodes.
        gradient: (tiles, ROWS, WIDE), where to write.
        duration_gradient: (N, n).
        blank_posterior, label_posterior: (N,) of each node.
        incoming: (B,), gradient of the losses.
        by_bias: (WIDE,), to which the gradient's sums over nodes are added.
        first_tile: number of the run's first tile in the batch.
        B: utterances.
        V, n: tokens and durations.
        WIDE: the outputs, padded.
        skip: the largest posterior of a node that is left out.
        BATCH, BN: powers of two, at least B and n.
    """
    slot = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, ROWS)
    i = tl.arange(0, BN)
    b, t0, u0 = locate(first_tile + tl.program_id(0), table, B, BATCH)
    t, u, node, valid, has_label = nodes_of(b, t0, u0, table)
    at_blank, at_label, active, any_active = active_posteriors(
        blank_posterior, label_posterior, node, valid, skip
    )
    here = active[:, None] & (i < n)[None, :]
    finished = duration_gradient + node[:, None] * n + i[None, :]
    grad = tl.load(finished, mask=here, other=0.0) * tl.load(incoming + b)
    tl.atomic_add(by_bias + V + i, tl.sum(grad, axis=0), mask=i < n, sem="relaxed")
    place = gradient + slot * ROWS * WIDE + r[:, None] * WIDE + V + i[None, :]
    tl.store(place, grad.to(gradient.dtype.element_ty), mask=(i < n)[None, :])


@triton.jit(do_not_specialize=VARIED)
def by_halves(
    encoded,
    predicted,
    weight,
    table,
    gradient,
    blank_posterior,
    label_posterior,
    by_encoded,
    by_predicted,
    first_tile,
    B,
    T,
    U1,
    D,
    DEPTH,
    WIDE,
    skip,
    seed,
    least,
    keep,
    BATCH: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    is_tanh: tl.constexpr,
    drops: tl.constexpr,
    TF32: tl.constexpr,
):
    """Add gradient @ weight, times the slope of the hidden layer, to the gradients of both halves.

    Its sums over a tile's labels go to by_encoded (B, T, D), those over its frames to by_predicted
    (B, U1, D). A program takes BD columns of a tile; its neighbours read the same gradient.

    Args:
        encoded, predicted: both halves of the joint, (B, T, D) and (B, U1, D).
        weight: of the output layer, (WIDE, DEPTH).
        table: (B, 8), of asrkit.losses.nodes.Nodes.
        gradient: (tiles, ROWS, WIDE), over the logits.
        blank_posterior, label_posterior: (N,) of each node.
        by_encoded, by_predicted: where to add.
        first_tile: number of the run's first tile in the batch.
        B, T, U1, D: sizes of both halves.
        DEPTH, WIDE: D and the outputs, padded.
        skip: the largest posterior of a node that is left out.
        seed, least, keep: of dropout: the seed, `threshold` of asrkit.losses.dropout, and the
            factor of what is kept.
        BATCH: a power of two, at least B.
        BD: columns of a program.
        BK: outputs at a time.
        is_tanh, drops, TF32: as for `hidden_layer` and `product`.
    """
    r = tl.arange(0, ROWS)
    k = tl.arange(0, BK)
    across = tl.cdiv(DEPTH, BD)
    tile = tl.program_id(0) // across
    d = tl.program_id(0) % across * BD + tl.arange(0, BD)
    b, t0, u0 = locate(first_tile + tile, table, B, BATCH)
    t, u, node, valid, has_label = nodes_of(b, t0, u0, table)
    at_blank, at_label, active, any_active = active_posteriors(
        blank_posterior, label_posterior, node, valid, skip
    )
    if any_active:
        left = gradient + tile.to(tl.int64) * ROWS * WIDE + r[:, None] * WIDE + k[None, :]
        grad = product(
            left, weight + k[:, None] * DEPTH + d[None, :], DEPTH, d < DEPTH, WIDE, BK, TF32
        )
        y, slope = hidden_layer(
            encoded, predicted, b, t, u, d, valid, seed, least, keep, T, U1, D, is_tanh, drops
        )
        grad = tl.reshape(grad * slope, (FRAMES_OF, LABELS_OF, BD))
        frames = t0 + tl.arange(0, FRAMES_OF)
        labels = u0 + tl.arange(0, LABELS_OF)
        encoded_row = (b * T + frames).to(tl.int64) * D
        predicted_row = (b * U1 + labels).to(tl.int64) * D
        tl.atomic_add(
            by_encoded + encoded_row[:, None] + d[None, :],
            tl.sum(grad, axis=1),
            mask=(frames < T)[:, None] & (d < D)[None, :],
            sem="relaxed",
        )
        tl.atomic_add(
            by_predicted + predicted_row[:, None] + d[None, :],
            tl.sum(grad, axis=0),
            mask=(labels < U1)[:, None] & (d < D)[None, :],
            sem="relaxed",
        )
