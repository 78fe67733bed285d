"""The lean losses on a GPU, chunk by chunk: products by cuBLAS, and a Triton kernel between them.

A chunk has whole frames of consecutive utterances. The first pass has three steps:

    _hidden_layer   writes the hidden layer H of the chunk's nodes, with dropout, and a column of 1;
    mm              computes the logits; the bias is one more column of the weight;
    triton_rows     computes the arcs' log-probabilities from them.

After the lattice, the second pass computes H and the logits again, and then

    triton_rows     turns the logits into their gradient G, in place;
    addmm           adds G^T H to the gradient of weight and bias, summed in float32;
    mm              computes the hidden layer's gradient G W;
    _hidden_layer   multiplies it by the slope. It sums it over labels for the encoder's half, and
                    over frames for the predictor's half.

Memory: a chunk of n nodes needs n (V + 2 D) numbers in the weight's dtype. By default n V (or n D,
if larger) fills 256 MiB; the smallest chunk is one frame. V and D + 1 are rounded up to multiples
of 16 (in a copy of the weight), so that every row is aligned. Logits are rounded to the weight's
dtype, as in a joint that is kept. The order of sums over frames is not fixed.

On an H100 the losses agree with a joint that is kept, and in bfloat16 they are faster. On a CPU
they run in Triton's interpreter.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asrkit.losses import dropout
from asrkit.losses import triton_rows as rows
from asrkit.losses.lattice import ArcLogProbs, Nodes, Saved, upload
from asrkit.losses.lean import driver
from asrkit.losses.lean.driver import NodeTiles
from asrkit.losses.triton_rows import FIRST_LOGIT_, column, lattice_size

MULTIPLE = 16  # rows and columns of the weight with its bias are multiples of this
FRAME_BLOCK = 8  # frames of a program of `_hidden_layer`
LABEL_BLOCK = 8  # labels that it processes at a time
COLUMN_BLOCK = 64  # columns of the hidden layer of a program
FIRST = tl.constexpr(dropout.FIRST)
SECOND = tl.constexpr(dropout.SECOND)
GOLDEN = tl.constexpr(dropout.GOLDEN)
RELU = tl.constexpr(driver.RELU)
TANH = tl.constexpr(driver.TANH)
VARIED = ["first_b", "first_t", "T", "U1", "seed", "least"]  # no kernel for each value


class Chunk(NamedTuple):
    """A few frames of utterance b, then whole utterances, then a few frames of the last one.

    `b` and `t` are the first utterance and its first frame. `nodes` has a row for each utterance in
    the chunk. Its node indices count the batch's nodes, its logit indices those of the chunk.
    """

    b: int
    t: int
    nodes: Nodes


def chunks(nodes: Nodes, max_nodes: int, row: int) -> Iterator[Chunk]:
    """Yield chunks of at most `max_nodes` nodes, or of one frame.

    The logits of consecutive nodes start `row` elements apart.
    """
    pieces: list[list[int]] = []
    b = t = first = 0
    for utterance, (T, U, node, *_) in enumerate(nodes.table.tolist()):
        done = 0
        while done < T:
            frames = min(T - done, (max_nodes - first) // (U + 1))
            if frames <= 0 and pieces:
                yield Chunk(b, t, Nodes(torch.tensor(pieces, device="cpu")))
                pieces, first = [], 0
                continue
            frames = max(1, frames)
            if not pieces:
                b, t = utterance, done
            place = [node + done * (U + 1), first * row, (U + 1) * row, row]
            pieces.append([frames, U, *place, frames, U + 1])
            first += frames * (U + 1)
            done += frames
    yield Chunk(b, t, Nodes(torch.tensor(pieces, device="cpu")))


class Tiles(NodeTiles):
    """Chunks of nodes on a GPU, in float32 or half precision."""

    gpu_tile_bytes = 256 << 20  # keeps an H100 busy until the next launch is ready
    cpu_tile_bytes = gpu_tile_bytes  # in the interpreter

    def __init__(self, *call: Any) -> None:
        super().__init__(*call)
        self.outputs, self.D = self.weight.shape
        self.weight = with_bias(self.weight, self.bias)
        # without outputs, positions are those of the hidden layer
        self.wide = len(self.weight) or self.D
        self.common = {  # arguments of every launch
            "T": self.T,
            "U1": self.U1,
            "D": self.D,
            "seed": signed(self.seed),
            "least": signed(dropout.threshold(self.dropout)),
            "keep": 1 / (1 - self.dropout),
            "ACTIVATION": self.activation,
            "DROPS": self.dropout > 0,
            "FRAME_BLOCK": FRAME_BLOCK,
            "LABEL_BLOCK": LABEL_BLOCK,
            "COLUMN_BLOCK": COLUMN_BLOCK,
            **rows.FUSED,
        }

    @cached_property
    def chunks(self) -> list[Chunk]:
        """All chunks, their tables on the device."""
        found = [*chunks(self.nodes, self.tile, self.wide)]
        upload([chunk.nodes for chunk in found], self.weight.device)
        return found

    @cached_property
    def room(self) -> int:
        """Nodes of the largest chunk."""
        return max(chunk.nodes.count for chunk in self.chunks)

    def hidden_layer(self, out: Tensor) -> None:
        """Write the hidden layer of all nodes into `out` (N, D), in one launch."""
        self._launch(False, Chunk(0, 0, self.nodes), out, out, out)

    def halves_gradients(self, hidden: Tensor, by_hidden: Tensor) -> Sequence[Tensor]:
        """Return the gradients of encoded (B T, D) and predicted (B U1, D), float32.

        `hidden` is not read: the kernel computes it again, with its slope.
        """
        by_halves = self.zeros_like(self.encoded, self.predicted)
        self._launch(True, Chunk(0, 0, self.nodes), by_hidden, *by_halves)
        return by_halves

    def arc_log_probs(self, out: ArcLogProbs) -> None:
        """Write the arcs' log-probabilities of all nodes into `out`."""
        for chunk, targets, _, logits in self._chunk_logits():
            scores = logits[:, : self.outputs]
            rows.write_arc_log_probs(scores, targets, chunk.nodes, self.options, out)

    def gradients(self, saved: Saved, incoming: Tensor) -> Sequence[Tensor]:
        """Return the gradients of encoded (B T, D), predicted (B U1, D), weight (V, D), bias (V,).

        They are summed in float32.

        Args:
            saved: What the first pass and the lattice saved, for all nodes.
            incoming: Gradient over the losses (B,); it scales the gradients of each utterance.
        """
        buffer = self.weight.new_empty(self.room, self.weight.shape[1])
        *by_halves, by_weight = self.zeros_like(self.encoded, self.predicted, self.weight)
        for chunk, targets, hidden, logits in self._chunk_logits():
            scores = logits[:, : self.outputs]
            scale = incoming[chunk.b : chunk.b + len(targets)]
            rows.gradient(scores, scores, targets, chunk.nodes, self.options, saved, scale)
            add_product(by_weight, logits, hidden)
            by_hidden = torch.mm(logits, self.weight, out=buffer[: len(logits)])
            self._launch(True, chunk, by_hidden, *by_halves)
        rows_of_outputs = by_weight[: self.outputs]
        return *by_halves, rows_of_outputs[:, : self.D], rows_of_outputs[:, self.D]

    def _chunk_logits(self) -> Iterator[tuple[Chunk, Tensor, Tensor, Tensor]]:
        """Yield every chunk, its targets, hidden layer (n, D padded) and logits (n, V padded).

        The last two are buffers that the next chunk overwrites.
        """
        V, D = self.weight.shape
        hidden = self.weight.new_empty(self.room, D)
        logits = self.weight.new_empty(self.room, V)
        for chunk in self.chunks:
            n = chunk.nodes.count
            self._launch(False, chunk, hidden, hidden, hidden)
            torch.mm(hidden[:n], self.weight.T, out=logits[:n])
            targets = self.targets[chunk.b : chunk.b + len(chunk.nodes.table)]
            yield chunk, targets, hidden[:n], logits[:n]

    def _launch(self, backward: bool, chunk: Chunk, *tensors: Tensor) -> None:
        """Queue `_hidden_layer` on a chunk: a program for each block of frames and of columns.

        The first of the tensors (n, DEPTH) is the hidden layer or its gradient.
        """
        depth = tensors[0].shape[1]
        frame_blocks = triton.cdiv(chunk.nodes.longest[0], FRAME_BLOCK)
        column_blocks = triton.cdiv(depth, COLUMN_BLOCK)
        _hidden_layer[frame_blocks, len(chunk.nodes.table), column_blocks](
            self.encoded,
            self.predicted,
            chunk.nodes.on(self.weight.device),
            *tensors,
            self.wide,
            chunk.b,
            chunk.t,
            DEPTH=depth,
            BACKWARD=backward,
            **self.common,
        )


def signed(number: int) -> int:
    """Return the int32 with the bits of a uint32, so that all values share one kernel."""
    if number >= 2**31:
        return number - 2**32
    return number


def with_bias(weight: Tensor, bias: Tensor) -> Tensor:
    """Return the weight (V, D) and its bias as one more column, padded to multiples of MULTIPLE."""
    V, D = weight.shape
    both = torch.cat([weight, bias.to(weight.dtype)[:, None]], 1)
    return torch.nn.functional.pad(both, (0, -(D + 1) % MULTIPLE, 0, -V % MULTIPLE))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left^T @ right to `total`; on CUDA, no partial sum is rounded to half precision.

    Args:
        total: The sum (n, m), float32, which is updated in place.
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
def _layer(x, y, b, t, u, d, seed, least, keep, ACTIVATION: tl.constexpr, DROPS: tl.constexpr):
    """Return the hidden layer of frames x (f, c) and labels y (l, c), and its slope, (f, l, c)."""
    total = x[:, None, :] + y[None, :, :]
    if ACTIVATION == TANH:
        hidden = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * total))
        slope = 1.0 - hidden * hidden
    elif ACTIVATION == RELU:
        hidden = tl.where(total < 0, 0.0, total)  # NaN passes
        slope = tl.where(total > 0, 1.0, 0.0)
    else:
        hidden = total
        slope = tl.full(total.shape, 1.0, tl.float32)
    if DROPS:
        scale = tl.where(_kept(b, t, u, d, seed, least), keep, 0.0)
        hidden *= scale
        slope *= scale
    return hidden, slope


@triton.jit
def _half(half, first, row, here, d, D):
    """Load rows of a half (rows, D) from row `first` on, at columns `d`: float32, 0 outside."""
    place = (first + row).to(tl.int64) * D
    mask = here[:, None] & (d < D)[None, :]
    return tl.load(half + place[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _piece(table, wide, first_b, first_t):
    """Return where the program's part of an utterance is.

    The values are: utterance, first frame, number of frames, lattice rows, and the position of its
    first node in the chunk.
    """
    p = tl.program_id(1)
    frames, labels, _ = lattice_size(table, p)
    first = column(table, p, FIRST_LOGIT_) // wide
    return first_b + p, tl.where(p == 0, first_t, 0), frames, labels, first


@triton.jit(do_not_specialize=VARIED)
def _hidden_layer(
    encoded,
    predicted,
    table,
    rows,
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
    ACTIVATION: tl.constexpr,
    DROPS: tl.constexpr,
    FRAME_BLOCK: tl.constexpr,
    LABEL_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Write the hidden layer of a chunk's nodes, or turn its gradient into those of both halves.

    Forward writes the hidden layer into `rows` (n, DEPTH), with a 1 in column D and zeros after it.
    Backward reads the hidden layer's gradient from `rows`, multiplies it by the slope and sums it.
    A program processes all labels of its frames, so it writes the frames' sums. Several programs
    share the labels' rows, so they add to those sums atomically.

    The logits of consecutive nodes start `wide` elements apart; see `Chunk` and `_layer` for the
    other arguments.
    """
    b, before, frames, labels, first = _piece(table, wide, first_b, first_t)
    t = tl.program_id(0) * FRAME_BLOCK + tl.arange(0, FRAME_BLOCK)
    d = tl.program_id(2) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    x = _half(encoded, b * T + before, t, t < frames, d, D)
    total = tl.zeros((FRAME_BLOCK, COLUMN_BLOCK), tl.float32)
    columns = D if BACKWARD else DEPTH
    u0 = 0
    while (u0 < labels) & (tl.program_id(0) * FRAME_BLOCK < frames):
        u = u0 + tl.arange(0, LABEL_BLOCK)
        y = _half(predicted, b * U1, u, u < labels, d, D)
        hidden, slope = _layer(x, y, b, before + t, u, d, seed, least, keep, ACTIVATION, DROPS)
        here = (t < frames)[:, None] & (u < labels)[None, :]
        node = first + t[:, None] * labels + u[None, :]
        place = rows + node[:, :, None] * DEPTH + d[None, None, :]
        mask = here[:, :, None] & (d < columns)[None, None, :]
        if BACKWARD:
            grad = tl.load(place, mask=mask, other=0.0).to(tl.float32) * slope
            total += tl.sum(grad, axis=1)
            row = (b * U1 + u).to(tl.int64) * D
            tl.atomic_add(
                by_predicted + row[:, None] + d[None, :],
                tl.sum(grad, axis=0),
                mask=(u < labels)[:, None] & (d < D)[None, :],
                sem="relaxed",
            )
        else:
            after = tl.where(d == D, 1.0, 0.0)[None, None, :]
            hidden = tl.where((d < D)[None, None, :], hidden, after)
            tl.store(place, hidden.to(rows.dtype.element_ty), mask=mask)
        u0 += LABEL_BLOCK
    if BACKWARD:
        row = (b * T + before + t).to(tl.int64) * D
        here = (t < frames)[:, None] & (d < D)[None, :]
        tl.store(by_encoded + row[:, None] + d[None, :], total, mask=here)
