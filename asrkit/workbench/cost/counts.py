"""What models cost, counted: a joint's bytes at the peak of a training step, an encoder's weights,
floating-point operations.

Pure integers: no tensor is made. Formulas of memory follow the docstrings of asrkit.losses;
tests/workbench/cost/test_counts.py holds them to what torch's allocator counts, within 2 % in
float32, and in half precision within 5 %, overwrite and lean left out. N is the number of lattice
nodes held at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from asrkit.shapes import expect

VARIANTS = ("torchaudio", "wavefront", "numba", "overwrite", "split", "packed", "lean")
NODE_BYTES = (
    20  # log-normaliser, two arcs and two shares of a node, float32: what backward still holds
)
TILE_BYTES = {"wavefront": 1 << 20, "packed": 1 << 20, "lean": 4 << 20}  # on a CPU
GPU_TILE_BYTES = {
    "wavefront": 1 << 28,
    "packed": 1 << 26,
    "lean": 1 << 24,
}  # in plain torch; in Triton: asrkit.workbench.cost.lean


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes by what they are for, at the moment that takes most."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of them, bytes."""
        return sum(self.parts.values())


def joint_flops(*, N: int, D: int, V: int, products: int = 3) -> int:
    """Operations of the joint's matrix products: 2 N D V each. Three with gradient; four where the
    logits are made twice.

    >>> joint_flops(N=1, D=640, V=1024)
    3932160
    """
    return products * 2 * N * D * V


def joint_bytes(
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
) -> Peak:
    """Peak of the joint and its loss, forward and backward, beyond their inputs: the halves (B, T,
    D), (B, U1, D), weight, bias.

    V N for the logits and again for their gradient is document 003's formula (with U1 for its U); D
    N is the hidden layer that it first left out. D = 0 is the loss on given logits. `itemsize` 4 is
    float32, 2 half precision. `nodes`, the sum of T (U + 1) over the batch, is what packed and lean
    variants hold or walk through; None: no padding. `size` utterances share a sub-batch in `split`.
    `tile_bytes` is the size of a tile of those variants that have some, by default a CPU's.

    >>> joint_bytes("numba", B=1, T=2000, U1=100, V=1024, D=0).parts["logits"] * 2
    1638400000
    """
    expect(variant in VARIANTS, "variant", "one of " + ", ".join(VARIANTS), repr(variant))
    expect(itemsize in (2, 4), "itemsize", "2 or 4 bytes", itemsize)
    sizes = {"B": B, "T": T, "U1": U1, "V": V, "size": size, "nodes": 1 if nodes is None else nodes}
    for name, value in sizes.items():
        expect(value >= 1, name, "at least 1", value)
    real = B * T * U1 if nodes is None else nodes
    N = (
        min(size, B) * T * U1
        if variant == "split"
        else real
        if variant in ("packed", "lean")
        else B * T * U1
    )
    halves, weight = B * (T + U1) * D, V * D
    tile_bytes = tile_bytes or TILE_BYTES.get(variant, 0)
    if variant == "lean":
        rows = min(N, max(64, tile_bytes // (max(V, D) * itemsize)))
        tile = rows * ((2 * D + V) * itemsize + 32)  # hidden layer, its gradient, logits; indices
        return Peak(
            parts={"tile": tile, "lattice": 2 * NODE_BYTES * N, "gradients": 4 * (halves + weight)}
        )
    logits, hidden = N * V * itemsize, N * D * itemsize
    tiles = 2 * max(1, tile_bytes // (4 * U1 * V)) * U1 * V * 4 if variant == "wavefront" else 0
    if itemsize == 2:
        tiles = tiles * 3 // 2  # one more, in float32
    out = {"gradient of weights": weight * itemsize}
    whole = {
        "logits": logits,
        "gradient of logits": 0 if variant == "overwrite" else logits,
        "hidden layer": hidden,
    }
    moments = [
        whole | {"lattice": NODE_BYTES * N, "tiles": tiles},
        out
        | {
            "gradient of logits": logits,
            "hidden layer": hidden,
            "gradient of hidden layer": hidden,
        },
        out
        | {
            "hidden layer": hidden,
            "gradient of hidden layer": hidden * (1 if variant == "packed" else 2),
        },
    ]
    if variant == "packed":
        moments[2] |= {"gradient of halves": 4 * halves, "tiles": tile_bytes * 9 // 8}
    if variant == "split" and size < B:  # what earlier sub-batches gave is kept
        kept = {"gradient of earlier sub-batches": (weight + halves) * itemsize}
        moments = [moment | kept for moment in moments]
    return Peak(parts=max(moments, key=lambda parts: sum(parts.values())))


def encoder_flops(
    *,
    B: int,
    T: int,
    bins: int,
    width: int,
    layers: int,
    subsampling: int = 8,
    channels: int = 256,
    kernel: int = 9,
    expansion: int = 4,
    context: tuple[int, int] = (-1, -1),
) -> int:
    """Operations of a FastConformer's products and convolutions (arXiv 2305.05084), forward, on B x
    T frames with their padding.

    A multiplication and its addition are two. Norms, activations and softmax are left out: below
    one in a hundred. `context` is (left, right) in encoder frames, -1 for all; a short one is
    attended to block by block, as asrkit.models.FastConformer does.

    >>> encoder_flops(B=1, T=1000, bins=80, width=1024, layers=42) // 10**9  # Parakeet 1.1B on ten
    seconds 282
    """
    _sizes(
        subsampling,
        B=B,
        T=T,
        bins=bins,
        width=width,
        channels=channels,
        kernel=kernel,
        expansion=expansion,
    )
    D, C, T0, F, work = width, channels, T, bins, 0  # work: multiplications
    for stage in range(subsampling.bit_length() - 1):
        T0, F = (T0 + 1) // 2, (F + 1) // 2
        work += B * T0 * F * C * (9 + (C if stage else 0))  # 3 x 3 depthwise, then pointwise
    work += B * T0 * C * F * D
    around = sum(context)
    if min(context) >= 0 and 2 * around < T0:
        block = max(around, 1)
        distances, products = (
            around + 1,
            -(-T0 // block) * block * (block + around),
        )  # queries by keys
    else:
        distances, products = 2 * T0, T0 * T0
    linear = (
        4 * expansion + 7
    ) * D * D + kernel * D  # two feed-forwards; q, k, v, out; gate, pointwise; depthwise
    attention = distances * D * D + B * T0 * distances * D + 2 * B * products * D
    return 2 * (work + layers * (B * T0 * linear + attention))


def encoder_parameters(
    *,
    bins: int,
    width: int,
    layers: int,
    subsampling: int = 8,
    channels: int = 256,
    kernel: int = 9,
    expansion: int = 4,
    bias: bool = True,
) -> int:
    """Trained numbers of a FastConformer; each is read at least once a batch, which is the least
    memory traffic there is.

    >>> encoder_parameters(bins=80, width=1024, layers=42)  # Parakeet 1.1B
    1061489664
    """
    _sizes(
        subsampling, bins=bins, width=width, channels=channels, kernel=kernel, expansion=expansion
    )
    D, C, F, halvings = width, channels, bins, subsampling.bit_length() - 1
    for _ in range(halvings):
        F = (F + 1) // 2
    front = 10 * C + (halvings - 1) * (C * C + 11 * C) + (C * F + 1) * D
    products = (4 * expansion + 8) * D * D + kernel * D  # those of `encoder_flops`, and positions
    vectors = (10 + 2 + 2) * D + (
        2 * expansion + 10
    ) * D * bias  # five layer norms, a batch norm, two biases of attention
    return front + layers * (products + vectors)


def _sizes(subsampling: int, **sizes: int) -> None:
    expect(subsampling in (2, 4, 8), "subsampling", "2, 4 or 8", subsampling)
    for name, size in sizes.items():
        expect(size >= 1, name, "at least 1", size)


class Card(NamedTuple):
    """A GPU as it is sold; `gib` is what its memory is called, of which driver and context keep
    about half a GiB.

    The rates are those of its data sheet, of the SXM form where there is one; None was not looked
    up. No data sheet rates an L2 cache: `cache_GB_per_s` is a third party's product of width and
    clock for the full die (doi 10.1016/j.ultsonch.2023.106546, table 3), of A100 and H100; the H200
    is taken to be as the H100.
    """

    name: str
    gib: int
    year: int
    source: str
    memory_GB_per_s: float | None = None
    float32_TFLOP_per_s: float | None = None  # without tensor cores
    half_TFLOP_per_s: float | None = None  # of tensor cores, float16 or bfloat16, without sparsity
    cache_GB_per_s: float | None = None  # of L2: assumed from width and clock of the full die


NVIDIA = "https://www.nvidia.com/en-us"
CARDS = (
    Card(
        "GeForce RTX 3060", 12, 2021, f"{NVIDIA}/geforce/graphics-cards/30-series/rtx-3060-3060ti/"
    ),
    Card("Tesla T4", 16, 2018, f"{NVIDIA}/data-center/tesla-t4/"),
    Card("Tesla V100 (16 GB)", 16, 2017, f"{NVIDIA}/data-center/v100/"),
    Card("Tesla V100 (32 GB)", 32, 2018, f"{NVIDIA}/data-center/v100/"),
    Card("A10", 24, 2021, f"{NVIDIA}/data-center/products/a10-gpu/"),
    Card("L4", 24, 2023, f"{NVIDIA}/data-center/l4/", 300, 30.3),
    Card("GeForce RTX 4090", 24, 2022, f"{NVIDIA}/geforce/graphics-cards/40-series/rtx-4090/"),
    Card("GeForce RTX 5090", 32, 2025, f"{NVIDIA}/geforce/graphics-cards/50-series/rtx-5090/"),
    Card("A100 (40 GB)", 40, 2020, f"{NVIDIA}/data-center/a100/"),
    Card("A100 (80 GB)", 80, 2020, f"{NVIDIA}/data-center/a100/", 2039, 19.5, 312, 7219),
    Card("H100", 80, 2022, f"{NVIDIA}/data-center/h100/", 3350, 67, 989.5, 8986),
    Card("H200", 141, 2024, f"{NVIDIA}/data-center/h200/", 4800, 67, 989.5, 8986),
)


def largest_batch(memory_bytes: int, variant: str, *, padding: float = 0.0, **shape: int) -> int:
    """Most utterances of (T, U1) whose joint fits into memory_bytes; `padding` is the share of
    nodes that packing leaves out.

    >>> largest_batch(16 * 2**30, "numba", T=2000, U1=101, V=1024, D=0)
    10
    """

    def fits(B: int) -> bool:
        nodes = int(B * shape["T"] * shape["U1"] * (1 - padding))
        return joint_bytes(variant, B=B, nodes=max(1, nodes), **shape).total <= memory_bytes

    expect(0 <= padding < 1, "padding", "a share below 1", padding)
    low, high = 0, 1
    while fits(high) and high < 2**31:  # some shapes cost nothing per utterance
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
