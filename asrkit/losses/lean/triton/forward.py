"""First pass: log-normaliser and log-probabilities of blank and next label of every node, in one
launch. No logit reaches memory.
"""

import triton
import triton.language as tl

from asrkit.losses.lean.triton.tile import ROWS, VARIED, hidden_layer, locate, nodes_of, product


@triton.jit
def write_hidden(
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
    BK: tl.constexpr,
    is_tanh: tl.constexpr,
    drops: tl.constexpr,
):
    """Write the hidden layer of a tile into `hidden` (ROWS, DEPTH), zeros from column D on.

    All threads of the block may read it afterwards.

    Args:
        hidden: where to write.
        encoded, predicted: both halves of the joint, (B, T, D) and (B, U1, D).
        b, t, u, valid: the tile's nodes, from `locate` and `nodes_of`.
        seed, least, keep: of dropout: the seed, `threshold` of asrkit.losses.dropout, and the
            factor of what is kept.
        T, U1, D: sizes of both halves.
        DEPTH: D, padded.
        BK: columns at a time.
        is_tanh, drops: as for `hidden_layer`.
    """
    r = tl.arange(0, ROWS)
    for k in range(0, DEPTH, BK):
        d = k + tl.arange(0, BK)
        y, slope = hidden_layer(
            encoded, predicted, b, t, u, d, valid, seed, least, keep, T, U1, D, is_tanh, drops
        )
        tl.store(hidden + r[:, None] * DEPTH + d[None, :], y.to(hidden.dtype.element_ty))
    tl.debug_barrier()


@triton.jit
def tile_logits(
    hidden, weight, bias, first, V, DEPTH, BV: tl.constexpr, BK: tl.constexpr, TF32: tl.constexpr
):
    """Logits (ROWS, BV) of outputs first, first + 1, ... below V, and -inf beyond; which outputs
    these are.

    Args:
        hidden: (ROWS, DEPTH), of the tile.
        weight, bias: of the output layer, (V and more, DEPTH) and (V,).
        first: the first output.
        V: end of the outputs.
        DEPTH: D, padded.
        BV, BK: outputs and columns at a time.
        TF32: whether float32 may be multiplied as TF32.
    """
    r = tl.arange(0, ROWS)
    k = tl.arange(0, BK)
    v = tl.arange(0, BV) + first
    left = hidden + r[:, None] * DEPTH + k[None, :]
    right = weight + v[None, :] * DEPTH + k[:, None]
    x = product(left, right, 1, v < V, DEPTH, BK, TF32)
    return x + tl.load(bias + v, mask=v < V, other=-float("inf"))[None, :], v


@triton.jit(do_not_specialize=VARIED)
def scores(
    encoded,
    predicted,
    weight,
    bias,
    targets,
    table,
    hidden,
    log_z,
    blank_logp,
    label_logp,
    duration_logp,
    turns,
    B,
    T,
    U1,
    D,
    DEPTH,
    V,
    outputs,
    n,
    blank,
    seed,
    least,
    keep,
    BATCH: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    is_tanh: tl.constexpr,
    drops: tl.constexpr,
    TF32: tl.constexpr,
):
    """Write the arcs' log-probabilities of all nodes.

    Args:
        encoded, predicted: both halves of the joint, (B, T, D) and (B, U1, D).
        weight, bias: of the output layer, (V + n and more, DEPTH) and (V + n,).
        targets: (B, U).
        table: (B, 8), of asrkit.losses.nodes.Nodes.
        hidden: (programs, ROWS, DEPTH); each program has its own part, which L2 holds.
        log_z, blank_logp, label_logp: where to write, (N,).
        duration_logp: where to write, (N, n).
        turns: tiles of a program.
        B, T, U1, D: sizes of both halves.
        DEPTH: D, padded.
        V, outputs, n: tokens, outputs, and durations among these.
        blank: index of the blank.
        seed, least, keep: of dropout: the seed, `threshold` of asrkit.losses.dropout, and the
            factor of what is kept.
        BATCH: a power of two, at least B.
        BV, BK: outputs and columns at a time.
        BN: a power of two, at least n; 0 without durations.
        is_tanh, drops, TF32: as for `hidden_layer` and `product`.
    """
    hidden += tl.program_id(0).to(tl.int64) * ROWS * DEPTH
    for turn in range(turns):
        b, t0, u0 = locate(turn * tl.num_programs(0) + tl.program_id(0), table, B, BATCH)
        t, u, node, valid, has_label = nodes_of(b, t0, u0, table)
        label = tl.load(targets + b * (U1 - 1) + u, mask=has_label, other=-1)
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
        # finite, so that rows of -inf do not become NaN on the way
        largest = tl.full((ROWS,), -3e38, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        at_blank = tl.zeros((ROWS,), tl.float32)
        at_label = tl.zeros((ROWS,), tl.float32)
        for first in range(0, V, BV):
            x, v = tile_logits(hidden, weight, bias, first, V, DEPTH, BV, BK, TF32)
            above = tl.maximum(largest, tl.max(x, axis=1))
            total = total * tl.exp(largest - above) + tl.sum(tl.exp(x - above[:, None]), axis=1)
            largest = above
            at_blank += tl.sum(tl.where((v == blank)[None, :], x, 0.0), axis=1)
            at_label += tl.sum(tl.where(v[None, :] == label[:, None], x, 0.0), axis=1)
        normaliser = largest + tl.log(total)
        # an overflow is not a missing path
        normaliser = tl.where(tl.abs(normaliser) == float("inf"), float("nan"), normaliser)
        label_or_none = tl.where(has_label, at_label - normaliser, -float("inf"))
        tl.store(log_z + node, normaliser, mask=valid)
        tl.store(blank_logp + node, at_blank - normaliser, mask=valid)
        tl.store(label_logp + node, label_or_none, mask=valid)
        if BN > 0:
            x, v = tile_logits(hidden, weight, bias, V, outputs, DEPTH, BN, BK, TF32)
            x -= tl.max(x, axis=1)[:, None]
            x -= tl.log(tl.sum(tl.exp(x), axis=1))[:, None]
            tl.store(
                duration_logp + node[:, None] * n + (v - V)[None, :],
                x,
                mask=valid[:, None] & (v < outputs)[None, :],
            )
        tl.debug_barrier()  # the next tile's hidden layer takes this one's place
