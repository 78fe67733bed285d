"""The lean losses on a GPU, chunk by chunk: products by cuBLAS, and Triton's kernels between them.

A chunk is whole frames of consecutive utterances. In the first pass

    _hidden         writes the hidden layer H of its nodes, with dropout, and a 1 behind it;
    mm              makes their logits: the bias stands behind the weight;
    triton_rows     reads the arcs' log-probabilities from them.

After the lattice the second pass makes H and the logits again, and then

    triton_rows     turns the logits into their gradient G, in place;
    addmm           adds G^T H to the gradient of weight and bias, summed in float32;
    mm              makes the hidden layer's gradient G W;
    _halves         multiplies it by the slope and sums it over labels to the encoder's half and
                    over frames to the predictor's.

Memory: of a chunk of n nodes, n (V + 2 D) numbers in the weight's dtype; by default n V (or n D, if
larger) fills 256 MiB, and no chunk is smaller than a frame. V and D + 1 are rounded up to multiples
of 16 (a copy of the weight), so that every row is aligned. Logits are rounded to the weight's
dtype, as in a joint that is kept. Sums over frames are taken in any order.

On an H100 the losses agree with a joint that is kept, and in bfloat16 they are faster than one; on
a CPU they run in Triton's interpreter.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asrkit.losses import dropout
from asrkit.losses import triton_rows as rows
from asrkit.losses.lattice import ArcLogProbs, Nodes, Saved, upload
from asrkit.losses.lean.driver import NodeTiles
from asrkit.losses.triton_rows import FIRST_LOGIT_, FRAMES_, LABELS_, column

MULTIPLE = 16  # of rows and columns of the weight with its bias
FRAMES_OF = 8  # frames of a program between the products
LABELS_OF = 8  # labels that it takes at a time
COLUMNS = 64  # of the hidden layer that it takes
FIRST = tl.constexpr(dropout.FIRST)
SECOND = tl.constexpr(dropout.SECOND)
GOLDEN = tl.constexpr(dropout.GOLDEN)
VARIED = ["first_b", "first_t", "T", "U1", "seed", "least"]  # not worth a kernel for each value


class Chunk(NamedTuple):
    """Some frames of utterance b, then whole utterances, then some frames of the last one.

    `b` and `t` are the first utterance and its first frame. `nodes` has a row for each utterance in
    the chunk; its node numbers are those of the batch, its logits those of the chunk.
    """

    b: int
    t: int
    nodes: Nodes


def chunks(nodes: Nodes, most: int, row: int) -> Iterator[Chunk]:
    """Chunks of at most `most` nodes, or of one frame; a node's logits are `row` elements apart."""
    pieces: list[list[int]] = []
    b = t = first = 0
    for utterance, (T, U, node, *_) in enumerate(nodes.table.tolist()):
        done = 0
        while done < T:
            taken = min(T - done, (most - first) // (U + 1))
            if taken <= 0 and pieces:
                yield Chunk(b, t, Nodes(torch.tensor(pieces, device="cpu")))
                pieces, first = [], 0
                continue
            taken = max(1, taken)
            if not pieces:
                b, t = utterance, done
            place = [node + done * (U + 1), first * row, (U + 1) * row, row]
            pieces.append([taken, U, *place, taken, U + 1])
            first += taken * (U + 1)
            done += taken
    yield Chunk(b, t, Nodes(torch.tensor(pieces, device="cpu")))


class Tiles(NodeTiles):
    """Chunks of nodes on a GPU, in float32 or half precision."""

    gpu_tile_bytes = 256 << 20  # keeps an H100 busy until the next launch is ready
    cpu_tile_bytes = gpu_tile_bytes  # in the interpreter

    def __init__(self, *call: Any) -> None:
        super().__init__(*call)
        self.outputs, self.D = self.weight.shape
        self.weight = with_bias(self.weight, self.bias)
        self.chunks = [*chunks(self.nodes, self.tile, len(self.weight))]
        upload([chunk.nodes for chunk in self.chunks], self.weight.device)
        self.room = max(chunk.nodes.count for chunk in self.chunks)
        self.common = {  # arguments of both kernels
            "T": self.T,
            "U1": self.U1,
            "D": self.D,
            "DEPTH": self.weight.shape[1],
            "seed": signed(self.seed),
            "least": signed(dropout.threshold(self.dropout)),
            "keep": 1 / (1 - self.dropout),
            "IS_TANH": self.is_tanh,
            "DROPS": self.dropout > 0,
            "FRAMES_OF": FRAMES_OF,
            "LABELS_OF": LABELS_OF,
            "COLUMNS": COLUMNS,
            **rows.FUSED,
        }

    def arc_log_probs(self, out: ArcLogProbs) -> None:
        """Write the arcs' log-probabilities of all nodes into `out`."""
        for chunk, targets, _, logits in self._filled():
            scores = logits[:, : self.outputs]
            rows.write_arc_log_probs(scores, targets, chunk.nodes, self.options, out)

    def gradients(self, saved: Saved, incoming: Tensor) -> Sequence[Tensor]:
        """Return the gradients of encoded (B T, D), predicted (B U1, D), weight (V, D), bias (V,).

        They are summed in float32.

        Args:
            saved: Of all nodes, from the first pass and the lattice.
            incoming: Gradient of the losses (B,), which scales those of each utterance.
        """
        buffer = self.weight.new_empty(self.room, self.weight.shape[1])
        by_weight = torch.zeros_like(self.weight, dtype=torch.float32)
        halves = (self.encoded, self.predicted)
        by_halves = [torch.zeros_like(half, dtype=torch.float32) for half in halves]
        for chunk, targets, hidden, logits in self._filled():
            scores = logits[:, : self.outputs]
            scale = incoming[chunk.b : chunk.b + len(targets)]
            rows.gradient(scores, scores, targets, chunk.nodes, self.options, saved, scale)
            add_product(by_weight, logits, hidden)
            by_hidden = torch.mm(logits, self.weight, out=buffer[: len(logits)])
            self._launch(_halves, chunk, by_hidden, *by_halves)
        rows_of_outputs = by_weight[: self.outputs]
        return *by_halves, rows_of_outputs[:, : self.D], rows_of_outputs[:, self.D]

    def _filled(self) -> Iterator[tuple[Chunk, Tensor, Tensor, Tensor]]:
        """Every chunk with its targets, hidden layer (n, D padded) and logits (n, V padded).

        Both lie in buffers, which the next chunk overwrites.
        """
        V, D = self.weight.shape
        hidden = self.weight.new_empty(self.room, D)
        logits = self.weight.new_empty(self.room, V)
        for chunk in self.chunks:
            n = chunk.nodes.count
            self._launch(_hidden, chunk, hidden)
            torch.mm(hidden[:n], self.weight.T, out=logits[:n])
            targets = self.targets[chunk.b : chunk.b + len(chunk.nodes.table)]
            yield chunk, targets, hidden[:n], logits[:n]

    def _launch(self, kernel: Any, chunk: Chunk, *tensors: Tensor) -> None:
        """Queue a kernel on a chunk: a program for some frames of an utterance at some columns."""
        blocks = triton.cdiv(chunk.nodes.longest[0], FRAMES_OF)
        across = triton.cdiv(self.weight.shape[1], COLUMNS)
        kernel[blocks, len(chunk.nodes.table), across](
            self.encoded,
            self.predicted,
            chunk.nodes.on(self.weight.device),
            *tensors,
            len(self.weight),
            chunk.b,
            chunk.t,
            **self.common,
        )


def signed(number: int) -> int:
    """The int32 with the bits of a uint32, so that large ones take no other kernel."""
    if number >= 2**31:
        return number - 2**32
    return number


def with_bias(weight: Tensor, bias: Tensor) -> Tensor:
    """The weight (V, D), its bias as one more column, and zeros up to multiples of MULTIPLE."""
    V, D = weight.shape
    both = torch.cat([weight, bias.to(weight.dtype)[:, None]], 1)
    return torch.nn.functional.pad(both, (0, -(D + 1) % MULTIPLE, 0, -V % MULTIPLE))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left^T @ right to `total`; on CUDA no part of the sum is rounded to half precision.

    Args:
        total: The sum (n, m), float32, changed in place.
        left: (k, n).
        right: (k, m).
    """
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.T.to(total.dtype), right.to(total.dtype))


@triton.jit
def _hash32(x):
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 15)) * SECOND
    return x ^ (x >> 16)


@triton.jit
def _kept(b, t, u, d, seed, least):
    """Whether dropout keeps the elements at frames t (f,), labels u (l,), columns d (c,)."""
    key = _hash32(seed.to(tl.uint32) + b.to(tl.uint32))
    key = _hash32(key + t.to(tl.uint32))
    key = _hash32(key[:, None] + u.to(tl.uint32)[None, :])
    columns = d.to(tl.uint32) * GOLDEN
    bits = _hash32(key[:, :, None] ^ columns[None, None, :])
    return bits >= least.to(tl.uint32)


@triton.jit
def _layer(x, y, b, t, u, d, seed, least, keep, IS_TANH: tl.constexpr, DROPS: tl.constexpr):
    """Hidden layer of frames x (f, c) and labels y (l, c), and its slope: float32 (f, l, c)."""
    total = x[:, None, :] + y[None, :, :]
    if IS_TANH:
        hidden = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * total))
        slope = 1.0 - hidden * hidden
    else:
        hidden = tl.where(total < 0, 0.0, total)  # NaN passes
        slope = tl.where(total > 0, 1.0, 0.0)
    if DROPS:
        scale = tl.where(_kept(b, t, u, d, seed, least), keep, 0.0)
        hidden *= scale
        slope *= scale
    return hidden, slope


@triton.jit
def _half(half, first, row, here, d, D):
    """Rows of a half (rows, D) from row `first` on, at columns `d`: float32, 0 elsewhere."""
    place = (first + row).to(tl.int64) * D
    mask = here[:, None] & (d < D)[None, :]
    return tl.load(half + place[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _piece(table, wide, first_b, first_t):
    """Of the program's piece of an utterance: utterance, first frame, frames, rows of the lattice,
    and the place of its first node in the chunk.
    """
    p = tl.program_id(1)
    frames = column(table, p, FRAMES_).to(tl.int32)
    labels = column(table, p, LABELS_).to(tl.int32) + 1
    first = column(table, p, FIRST_LOGIT_) // wide
    return first_b + p, tl.where(p == 0, first_t, 0), frames, labels, first


@triton.jit(do_not_specialize=VARIED)
def _hidden(
    encoded,
    predicted,
    table,
    hidden,
    wide,
    first_b,
    first_t,
    T,
    U1,
    D,
    DEPTH,
    seed,
    least,
    keep,
    IS_TANH: tl.constexpr,
    DROPS: tl.constexpr,
    FRAMES_OF: tl.constexpr,
    LABELS_OF: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the hidden layer of a chunk's nodes into `hidden` (n, DEPTH): a 1 in column D, zeros
    behind it.

    Logits of a node are `wide` elements apart; the others are those of `Chunk` and `_layer`.
    """
    b, before, frames, labels, first = _piece(table, wide, first_b, first_t)
    t = tl.program_id(0) * FRAMES_OF + tl.arange(0, FRAMES_OF)
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    x = _half(encoded, b * T + before, t, t < frames, d, D)
    u0 = 0
    while (u0 < labels) & (tl.program_id(0) * FRAMES_OF < frames):
        u = u0 + tl.arange(0, LABELS_OF)
        y = _half(predicted, b * U1, u, u < labels, d, D)
        made, _ = _layer(x, y, b, before + t, u, d, seed, least, keep, IS_TANH, DROPS)
        made = tl.where((d < D)[None, None, :], made, tl.where(d == D, 1.0, 0.0)[None, None, :])
        here = (t < frames)[:, None] & (u < labels)[None, :]
        node = first + t[:, None] * labels + u[None, :]
        to = hidden + node[:, :, None] * DEPTH + d[None, None, :]
        mask = here[:, :, None] & (d < DEPTH)[None, None, :]
        tl.store(to, made.to(hidden.dtype.element_ty), mask=mask)
        u0 += LABELS_OF


@triton.jit(do_not_specialize=VARIED)
def _halves(
    encoded,
    predicted,
    table,
    by_hidden,
    by_encoded,
    by_predicted,
    wide,
    first_b,
    first_t,
    T,
    U1,
    D,
    DEPTH,
    seed,
    least,
    keep,
    IS_TANH: tl.constexpr,
    DROPS: tl.constexpr,
    FRAMES_OF: tl.constexpr,
    LABELS_OF: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum the gradient `by_hidden` (n, DEPTH), times the slope, to both halves' gradients.

    A program has all labels of its frames, whose sums it writes; what it adds to the labels' rows,
    others add to as well.
    """
    b, before, frames, labels, first = _piece(table, wide, first_b, first_t)
    t = tl.program_id(0) * FRAMES_OF + tl.arange(0, FRAMES_OF)
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    x = _half(encoded, b * T + before, t, t < frames, d, D)
    total = tl.zeros((FRAMES_OF, COLUMNS), tl.float32)
    u0 = 0
    while (u0 < labels) & (tl.program_id(0) * FRAMES_OF < frames):
        u = u0 + tl.arange(0, LABELS_OF)
        y = _half(predicted, b * U1, u, u < labels, d, D)
        _, slope = _layer(x, y, b, before + t, u, d, seed, least, keep, IS_TANH, DROPS)
        here = (t < frames)[:, None] & (u < labels)[None, :]
        node = first + t[:, None] * labels + u[None, :]
        from_ = by_hidden + node[:, :, None] * DEPTH + d[None, None, :]
        mask = here[:, :, None] & (d < D)[None, None, :]
        grad = tl.load(from_, mask=mask, other=0.0).to(tl.float32) * slope
        total += tl.sum(grad, axis=1)
        row = (b * U1 + u).to(tl.int64) * D
        tl.atomic_add(
            by_predicted + row[:, None] + d[None, :],
            tl.sum(grad, axis=0),
            mask=(u < labels)[:, None] & (d < D)[None, :],
            sem="relaxed",
        )
        u0 += LABELS_OF
    row = (b * T + before + t).to(tl.int64) * D
    here = (t < frames)[:, None] & (d < D)[None, :]
    tl.store(by_encoded + row[:, None] + d[None, :], total, mask=here)
