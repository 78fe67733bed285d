"""Device functions of the kernels: where a tile of nodes lies, its hidden layer, a matrix product.

A tile is FRAMES_OF x LABELS_OF nodes of one utterance: neighbours in both directions, so that what
the gradient adds to one frame (or one row of labels) is summed over the tile first. Row r of a tile
is node (t0 + r // LABELS_OF, u0 + r % LABELS_OF). The mask of dropout is that of
asrkit.losses.dropout, whose hash stands here once more in Triton.
"""

import triton
import triton.language as tl

from asrkit import runtime
from asrkit.losses import dropout, nodes

FRAMES_OF = tl.constexpr(16)  # of a tile
LABELS_OF = tl.constexpr(8)  # of a tile
ROWS = tl.constexpr(128)  # their product
FRAMES = tl.constexpr(nodes.FRAMES)
LABELS = tl.constexpr(nodes.LABELS)
FIRST_NODE = tl.constexpr(nodes.FIRST_NODE)
TABLE_COLUMNS = tl.constexpr(8)  # of the table of asrkit.losses.nodes.Nodes
INTERPRETED = tl.constexpr(runtime.INTERPRETED)
# Arguments that are not worth a kernel for each value.
VARIED = [
    "B",
    "T",
    "U1",
    "V",
    "outputs",
    "n",
    "blank",
    "first_tile",
    "turns",
    "seed",
    "least",
]
FIRST = tl.constexpr(dropout.FIRST)
SECOND = tl.constexpr(dropout.SECOND)
GOLDEN = tl.constexpr(dropout.GOLDEN)


@triton.jit
def locate(tile, table, B, BATCH: tl.constexpr):
    """Utterance of a tile, its first frame and its first lattice row.

    A tile beyond the last has no valid node.

    Args:
        tile: number of the tile in the batch.
        table: (B, 8), of asrkit.losses.nodes.Nodes.
        B: utterances.
        BATCH: a power of two, at least B.
    """
    i = tl.arange(0, BATCH)
    row = table + i * TABLE_COLUMNS
    frames = tl.load(row + FRAMES, mask=i < B, other=0).to(tl.int32)
    labels = tl.load(row + LABELS, mask=i < B, other=-1).to(tl.int32)
    across = tl.cdiv(labels + 1, LABELS_OF)
    tiles = tl.cdiv(frames, FRAMES_OF) * across  # of each utterance
    is_before = tl.cumsum(tiles) <= tile
    b = tl.minimum(tl.sum(is_before.to(tl.int32)), B - 1)
    place = tile - tl.sum(tl.where(i < b, tiles, 0))
    across = tl.sum(tl.where(i == b, across, 0))
    t0 = place // across * FRAMES_OF
    u0 = place % across * LABELS_OF
    return b, t0, u0


@triton.jit
def nodes_of(b, t0, u0, table):
    """Of a tile's rows (ROWS,): frame, lattice row, index among all nodes, whether there is such a
    node, and whether it has a next label.

    Args:
        b, t0, u0: what `locate` returns.
        table: (B, 8), of asrkit.losses.nodes.Nodes.
    """
    r = tl.arange(0, ROWS)
    t = t0 + r // LABELS_OF
    u = u0 + r % LABELS_OF
    row = table + b * TABLE_COLUMNS
    T = tl.load(row + FRAMES)
    U = tl.load(row + LABELS)
    node = tl.load(row + FIRST_NODE) + t * (U + 1) + u
    valid = (t < T) & (u <= U)
    has_label = valid & (u < U)
    return t, u, node, valid, has_label


@triton.jit
def hidden_layer(
    encoded,
    predicted,
    b,
    t,
    u,
    d,
    valid,
    seed,
    least,
    keep,
    T,
    U1,
    D,
    is_tanh: tl.constexpr,
    drops: tl.constexpr,
):
    """Hidden layer of nodes (n,) at columns `d` (k,), and its derivative by the sum of both halves:
    (n, k) each, float32.

    Args:
        encoded, predicted: both halves of the joint, (B, T, D) and (B, U1, D).
        b: the utterance.
        t, u: frame and lattice row of each node.
        d: the columns.
        valid: whether there is such a node.
        seed, least, keep: of dropout: the seed, `threshold` of asrkit.losses.dropout, and the
            factor of what is kept.
        T, U1, D: sizes of both halves.
        is_tanh: whether the activation is tanh; else it is relu.
        drops: whether there is dropout.
    """
    here = valid[:, None] & (d < D)[None, :]
    encoded_row = (b * T + t).to(tl.int64) * D
    predicted_row = (b * U1 + u).to(tl.int64) * D
    encoded_place = encoded_row[:, None] + d[None, :]
    predicted_place = predicted_row[:, None] + d[None, :]
    x = tl.load(encoded + encoded_place, mask=here, other=0.0).to(tl.float32)
    x += tl.load(predicted + predicted_place, mask=here, other=0.0).to(tl.float32)
    if is_tanh:
        y = _tanh(x)
        slope = 1.0 - y * y
    else:
        y = tl.where(x < 0, 0.0, x)  # NaN passes
        slope = tl.where(x > 0, 1.0, 0.0)
    if drops:
        scale = tl.where(_kept(b, t, u, d, seed, least), keep, 0.0)
        y *= scale
        slope *= scale
    return y, slope


@triton.jit
def product(left, right, right_step, is_column, K, BK: tl.constexpr, TF32: tl.constexpr):
    """left (n, K) @ right (K, m) in float32, from pointers to their first BK columns and rows.

    Args:
        left: pointers to (n, BK).
        right: pointers to (BK, m).
        right_step: numbers from one row of `right` to the next.
        is_column: (m,), false for columns of `right` that do not exist.
        K: length of the sums.
        BK: terms of a sum at a time.
        TF32: whether float32 may be multiplied as TF32.
    """
    total = tl.zeros((left.shape[0], right.shape[1]), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(left + k)
        y = tl.load(right + k * right_step, mask=is_column[None, :], other=0.0)
        if INTERPRETED:  # the interpreter multiplies bfloat16 as bit patterns
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        total = tl.dot(x, y, total, input_precision="tf32" if TF32 else "ieee")
    return total


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    return tl.where(x >= 0, 1.0, -1.0) * (1.0 - e) / (1.0 + e)


@triton.jit
def _kept(b, t, u, d, seed, least):
    """Whether dropout keeps elements `d` (k,) of nodes (n,): bool (n, k)."""
    key = _hash32(seed.to(tl.uint32) + b.to(tl.uint32))
    key = _hash32(key + t.to(tl.uint32))
    key = _hash32(key + u.to(tl.uint32))
    columns = d.to(tl.uint32) * GOLDEN
    bits = _hash32(key[:, None] ^ columns[None, :])
    return bits >= least.to(tl.uint32)


@triton.jit
def _hash32(x):
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 15)) * SECOND
    return x ^ (x >> 16)
