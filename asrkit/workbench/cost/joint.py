"""The joint and its loss, counted: bytes at the peak of a training step.

No tensor is made. The formulas of memory follow the docstrings of asrkit.losses. The tests compare
them with what torch's allocator counts: within 2 % in float32, and in half precision, overwrite and
lean left out, within 5 %. N is the number of lattice nodes held at once.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asrkit.shapes import expect

VARIANTS = ("torchaudio", "wavefront", "numba", "overwrite", "split", "packed", "lean")
# of a node in float32, what backward still holds: log-normaliser, two arcs and their posteriors
NODE_BYTES = 20
TILE_BYTES = {"wavefront": 1 << 20, "packed": 1 << 20, "lean": 4 << 20}  # on a CPU
# on a GPU in plain torch
GPU_TILE_BYTES = {"wavefront": 1 << 28, "packed": 1 << 26, "lean": 1 << 24}
MOST_UTTERANCES = 2**31  # some shapes cost nothing an utterance


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes by what they are for, at the moment that takes most."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of them, in bytes."""
        return sum(self.parts.values())


def joint_bytes(  # noqa: PLR0913  sizes of the legend, one a letter
    variant: str,
    *,
    B: int,
    T: int,
    U1: int,
    V: int,
    D: int = 640,
    itemsize: int = 4,
    nodes: int | None = None,
    size: int = 1,
    tile_bytes: int | None = None,
    kept: bool = False,
) -> Peak:
    """Peak memory of the joint and its loss, forward and backward, beyond their inputs.

    Inputs are the halves (B, T, D) and (B, U1, D), weight and bias. V N for the logits and again
    for their gradient is document 003's formula (with U1 for its U); D N is the hidden layer, which
    it leaves out at first.

    Args:
        variant: one of VARIANTS, how joint and loss are computed.
        B: utterances.
        T: encoder frames.
        U1: labels and one.
        V: tokens, blank included.
        D: width of the hidden layer; 0 is the loss on given logits.
        itemsize: bytes of a number, 4 for float32, 2 for half precision.
        nodes: sum of T (U + 1) over the batch, which packed and lean variants hold or walk through;
            None: no padding.
        size: utterances of a sub-batch, for `split`.
        tile_bytes: size of a tile of those variants that have tiles; by default a CPU's.
        kept: whether the memory of the gradient of the logits is kept for the next call, as on a
            CPU that of one above 32 MiB is (asrkit.losses.gradient_memory).

    >>> joint_bytes("numba", B=1, T=2000, U1=100, V=1024, D=0).parts["logits"] * 2
    1638400000
    """
    expect(variant in VARIANTS, "variant", "one of " + ", ".join(VARIANTS), repr(variant))
    at_once = min(size, B) if variant == "split" else B
    N = at_once * T * U1
    if variant in ("packed", "lean") and nodes is not None:
        N = nodes
    tile_bytes = tile_bytes or TILE_BYTES.get(variant, 0)
    halves = B * (T + U1) * D
    if variant == "lean":
        tile_B = _lean_tile_bytes(N, max(V, D) * itemsize, (2 * D + V) * itemsize, tile_bytes)
        gradients_B = 4 * (halves + V * D)
        return Peak(parts={"tile": tile_B, "lattice": 2 * NODE_BYTES * N, "gradients": gradients_B})
    logits_B = N * V * itemsize
    hidden_B = N * D * itemsize
    weight_B = V * D * itemsize
    in_loss = {
        "logits": logits_B,
        "gradient of logits": 0 if variant == "overwrite" else logits_B,
        "hidden layer": hidden_B,
        "lattice": NODE_BYTES * N,
    }
    in_weight_gradient = {
        "gradient of weights": weight_B,
        "gradient of logits": logits_B,
        "hidden layer": hidden_B,
        "gradient of hidden layer": hidden_B,
    }
    in_hidden_gradient = {
        "gradient of weights": weight_B,
        "hidden layer": hidden_B,
        "gradient of hidden layer": 2 * hidden_B,
    }
    behind_loss = in_hidden_gradient | {"gradient of logits": logits_B, "gradient of weights": 0}
    if variant == "wavefront":
        row_B = 4 * U1 * V
        frames = min(T, max(1, tile_bytes // row_B))  # of one utterance
        in_loss["tiles"] = (2 if itemsize == 4 else 3) * frames * row_B  # one more, in float32
    elif variant == "packed":
        in_hidden_gradient["gradient of hidden layer"] = hidden_B
        in_hidden_gradient["gradient of halves"] = 4 * halves
        utterance_B = 8 * T * U1 * D  # in float64
        in_hidden_gradient["tiles"] = min(tile_bytes, utterance_B) * 9 // 8
    moments = [in_loss, in_weight_gradient, in_hidden_gradient] + [behind_loss] * kept
    most = max(moments, key=lambda parts: sum(parts.values()))
    if at_once < B:  # the gradients of earlier sub-batches are kept
        most["gradient of earlier sub-batches"] = weight_B + halves * itemsize
    return Peak(parts=most)


def largest_batch(memory_bytes: int, variant: str, *, padding: float = 0.0, **shape: Any) -> int:
    """The most utterances whose joint and loss fit into memory.

    Args:
        memory_bytes: bytes of memory.
        variant: as in `joint_bytes`.
        padding: share of nodes that packing leaves out.
        shape: T, U1, V and what else `joint_bytes` takes.

    >>> largest_batch(16 * 2**30, "numba", T=2000, U1=101, V=1024, D=0)
    10
    """

    def needed(B: int) -> int:
        nodes = int(B * shape["T"] * shape["U1"] * (1 - padding))
        return joint_bytes(variant, B=B, nodes=max(1, nodes), **shape).total

    return bisect_right(range(1, MOST_UTTERANCES), memory_bytes, key=needed)


def _lean_tile_bytes(nodes: int, widest_B: int, row_B: int, tile_bytes: int) -> int:
    """The tile of the plain lean loss: hidden layer, its gradient, logits and indices of a row."""
    rows = min(nodes, max(64, tile_bytes // widest_B))
    return rows * (row_B + 32)
