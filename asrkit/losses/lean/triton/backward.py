"""Second pass, on a run of tiles: the logits' gradient and the hidden layer as matrices, then the
gradient by both halves.

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
def shares_of(blank_posterior, label_posterior, node, valid, skip):
    """Shares of blank and of the label at nodes (n,), 0 where both together are no larger than
    `skip`; and whether any is left.
    """
    stay, emit = (
        tl.load(blank_posterior + node, mask=valid, other=0.0),
        tl.load(label_posterior + node, mask=valid, other=0.0),
    )
    active = valid & ~(stay + emit <= skip)  # NaN counts
    return (
        tl.where(active, stay, 0.0),
        tl.where(active, emit, 0.0),
        active,
        tl.max(active.to(tl.int32)) > 0,
    )


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
    z,
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
    """Gradient over the logits (tiles, ROWS, WIDE), made of them as they are computed, and the
    hidden layer (tiles, ROWS, DEPTH).

    Sums over nodes are added to by_bias (WIDE,). Without an active node nothing is multiplied, and
    the gradient is 0.
    """
    slot, r = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    hidden, gradient = hidden + slot * ROWS * DEPTH, gradient + slot * ROWS * WIDE
    b, t0, u0 = locate(first_tile + tl.program_id(0), table, B, BATCH)
    t, u, node, valid, has_label = nodes_of(b, t0, u0, table)
    stay, emit, active, any_active = shares_of(blank_posterior, label_posterior, node, valid, skip)
    scale = tl.load(incoming + b)
    stay, emit = stay * scale, emit * scale
    label = tl.load(targets + b * (U1 - 1) + u, mask=has_label, other=-1)
    here = tl.load(
        z + node, mask=active, other=float("inf")
    )  # exp(x - here) is 0 where nothing is to be done
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
        v, grad = first + tl.arange(0, BV), tl.zeros((ROWS, BV), tl.float32)
        if any_active:
            x, v = tile_logits(hidden, weight, bias, first, V, DEPTH, BV, BK, TF32)
            grad = (stay + emit)[:, None] * tl.exp(x - here[:, None])
            grad -= tl.where((v == blank)[None, :], stay[:, None], 0.0)
            grad -= tl.where(v[None, :] == label[:, None], emit[:, None], 0.0)
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
    """Gradient over the n duration logits, finished in duration_gradient (N, n), into columns V, V + 1,
    ... of by_logits' result.
    """
    r, i = tl.arange(0, ROWS), tl.arange(0, BN)
    b, t0, u0 = locate(first_tile + tl.program_id(0), table, B, BATCH)
    t, u, node, valid, has_label = nodes_of(b, t0, u0, table)
    stay, emit, active, any_active = shares_of(blank_posterior, label_posterior, node, valid, skip)
    here = active[:, None] & (i < n)[None, :]
    grad = tl.load(
        duration_gradient + node[:, None] * n + i[None, :], mask=here, other=0.0
    ) * tl.load(incoming + b)
    tl.atomic_add(by_bias + V + i, tl.sum(grad, axis=0), mask=i < n, sem="relaxed")
    place = (
        gradient + tl.program_id(0).to(tl.int64) * ROWS * WIDE + r[:, None] * WIDE + V + i[None, :]
    )
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
    """gradient @ weight, times the slope of the hidden layer, summed over a tile's labels and over
    its frames.

    The first sums are added to by_encoded (B, T, D), the others to by_predicted (B, U1, D). A
    program takes BD columns of a tile.
    """
    r, k, across = tl.arange(0, ROWS), tl.arange(0, BK), tl.cdiv(DEPTH, BD)
    tile, d = (
        tl.program_id(0) // across,
        tl.program_id(0) % across * BD + tl.arange(0, BD),
    )  # neighbours read the same gradient
    b, t0, u0 = locate(first_tile + tile, table, B, BATCH)
    t, u, node, valid, has_label = nodes_of(b, t0, u0, table)
    stay, emit, active, any_active = shares_of(blank_posterior, label_posterior, node, valid, skip)
    if any_active:
        left = gradient + tile.to(tl.int64) * ROWS * WIDE + r[:, None] * WIDE + k[None, :]
        grad = product(
            left, weight + k[:, None] * DEPTH + d[None, :], DEPTH, d < DEPTH, WIDE, BK, TF32
        )
        y, slope = hidden_layer(
            encoded, predicted, b, t, u, d, valid, seed, least, keep, T, U1, D, is_tanh, drops
        )
        grad = tl.reshape(grad * slope, (FRAMES_OF, LABELS_OF, BD))
        frames, labels = t0 + tl.arange(0, FRAMES_OF), u0 + tl.arange(0, LABELS_OF)
        row_e, row_p = (b * T + frames).to(tl.int64) * D, (b * U1 + labels).to(tl.int64) * D
        to_e, to_p = (
            (frames < T)[:, None] & (d < D)[None, :],
            (labels < U1)[:, None] & (d < D)[None, :],
        )
        tl.atomic_add(
            by_encoded + row_e[:, None] + d[None, :], tl.sum(grad, axis=1), mask=to_e, sem="relaxed"
        )
        tl.atomic_add(
            by_predicted + row_p[:, None] + d[None, :],
            tl.sum(grad, axis=0),
            mask=to_p,
            sem="relaxed",
        )
