"""What models cost, counted: floating-point operations, bytes of a joint at the peak of a training
step, weights of an encoder.

Integers only; no tensor is made. The formulas of memory follow the docstrings of asrkit.losses. The
tests compare them with what torch's allocator counts: within 2 % in float32, and in half precision,
overwrite and lean left out, within 5 %. N is the number of lattice nodes held at once.
"""

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


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes by what they are for, at the moment that takes most."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of them, in bytes."""
        return sum(self.parts.values())


def joint_flops(*, N: int, D: int, V: int, products: int = 3) -> int:
    """Operations of the joint's matrix products: 2 N D V each.

    Args:
        N: lattice nodes.
        D: width of the hidden layer.
        V: tokens, blank included.
        products: three with the gradient; four where the logits are computed twice.

    >>> joint_flops(N=1, D=640, V=1024)
    3932160
    """
    return products * 2 * N * D * V


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
    expect(itemsize in (2, 4), "itemsize", "2 or 4 bytes", itemsize)
    sizes = {"B": B, "T": T, "U1": U1, "V": V, "size": size}
    if nodes is not None:
        sizes["nodes"] = nodes
    for name, value in sizes.items():
        expect(value >= 1, name, "at least 1", value)
    N = B * T * U1
    if variant == "split":
        N = min(size, B) * T * U1
    elif variant in ("packed", "lean") and nodes is not None:
        N = nodes
    joint = _Joint(
        N=N,
        T=T,
        U1=U1,
        V=V,
        D=D,
        itemsize=itemsize,
        halves=B * (T + U1) * D,
        tile_bytes=tile_bytes or TILE_BYTES.get(variant, 0),
    )
    if variant == "lean":
        return Peak(parts=joint.lean())
    moments = [
        joint.in_loss(overwrite=variant == "overwrite", tiled=variant == "wavefront"),
        joint.in_weight_gradient(),
        joint.in_hidden_gradient(packed=variant == "packed"),
    ]
    if kept:
        moments.append(joint.behind_loss())
    if variant == "split" and size < B:  # the gradients of earlier sub-batches are kept
        earlier = {"gradient of earlier sub-batches": (joint.weight + joint.halves) * itemsize}
        moments = [moment | earlier for moment in moments]
    return Peak(parts=max(moments, key=lambda parts: sum(parts.values())))


@dataclass(frozen=True, kw_only=True)
class _Joint:
    """Sizes of a joint, and the bytes by purpose at the moments that may take most."""

    N: int
    T: int
    U1: int
    V: int
    D: int
    itemsize: int
    halves: int  # numbers of both encoder's and predictor's projections
    tile_bytes: int

    @property
    def weight(self) -> int:
        """Numbers of the output layer's weight."""
        return self.V * self.D

    @property
    def logits_B(self) -> int:
        """Bytes of the logits of all nodes."""
        return self.N * self.V * self.itemsize

    @property
    def hidden_B(self) -> int:
        """Bytes of the hidden layer of all nodes."""
        return self.N * self.D * self.itemsize

    def lean(self) -> dict[str, int]:
        """The lean loss, which holds a tile of nodes at a time."""
        widest_B = max(self.V, self.D) * self.itemsize
        rows = min(self.N, max(64, self.tile_bytes // widest_B))
        # hidden layer, its gradient and logits; indices
        row_B = (2 * self.D + self.V) * self.itemsize + 32
        return {
            "tile": rows * row_B,
            "lattice": 2 * NODE_BYTES * self.N,
            "gradients": 4 * (self.halves + self.weight),
        }

    def behind_loss(self) -> dict[str, int]:
        """In the backward pass of the hidden layer, while the logits' gradient is kept."""
        return {
            "gradient of logits": self.logits_B,
            "hidden layer": self.hidden_B,
            "gradient of hidden layer": 2 * self.hidden_B,
        }

    def in_loss(self, *, overwrite: bool, tiled: bool) -> dict[str, int]:
        """Inside the loss: logits and their gradient."""
        tiles = 0
        if tiled:
            row_B = 4 * self.U1 * self.V
            frames = min(self.T, max(1, self.tile_bytes // row_B))  # of one utterance
            tiles = 2 * frames * row_B
        if self.itemsize == 2:
            tiles = tiles * 3 // 2  # one more, in float32
        return {
            "logits": self.logits_B,
            "gradient of logits": 0 if overwrite else self.logits_B,
            "hidden layer": self.hidden_B,
            "lattice": NODE_BYTES * self.N,
            "tiles": tiles,
        }

    def in_weight_gradient(self) -> dict[str, int]:
        """Inside the backward pass of the output layer."""
        return {
            "gradient of weights": self.weight * self.itemsize,
            "gradient of logits": self.logits_B,
            "hidden layer": self.hidden_B,
            "gradient of hidden layer": self.hidden_B,
        }

    def in_hidden_gradient(self, *, packed: bool) -> dict[str, int]:
        """Inside the backward pass of the hidden layer."""
        parts = {
            "gradient of weights": self.weight * self.itemsize,
            "hidden layer": self.hidden_B,
            "gradient of hidden layer": self.hidden_B if packed else 2 * self.hidden_B,
        }
        if packed:
            parts["gradient of halves"] = 4 * self.halves
            utterance_B = 8 * self.T * self.U1 * self.D  # in float64
            parts["tiles"] = min(self.tile_bytes, utterance_B) * 9 // 8
        return parts


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

    def fits(B: int) -> bool:
        nodes = int(B * shape["T"] * shape["U1"] * (1 - padding))
        return joint_bytes(variant, B=B, nodes=max(1, nodes), **shape).total <= memory_bytes

    expect(0 <= padding < 1, "padding", "a share below 1", padding)
    fitting = 0
    too_many = 1
    while fits(too_many) and too_many < 2**31:  # some shapes cost nothing an utterance
        fitting = too_many
        too_many *= 2
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if fits(middle):
            fitting = middle
        else:
            too_many = middle
    return fitting


def encoder_flops(  # noqa: PLR0913  sizes of a FastConformerConfig, and of a batch
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
    """Operations of a FastConformer's products and convolutions (arXiv 2305.05084), forward.

    A multiplication and its addition are two. Norms, activations and softmax are left out: below 1
    %. Limited attention is computed block by block, as asrkit.models.FastConformer does.

    Args:
        B: utterances.
        T: feature frames of each, padding included.
        bins: feature bins.
        width: width of the layers.
        layers: number of layers.
        subsampling: 2, 4 or 8 frames to one.
        channels: channels of the subsampling convolutions.
        kernel: width of the layers' depthwise convolutions.
        expansion: width of the feed-forward layers, in widths.
        context: encoder frames attended to on the left and right, -1 for all.

    >>> flops = encoder_flops(B=1, T=1000, bins=80, width=1024, layers=42)
    >>> flops // 10**9  # Parakeet 1.1B on ten seconds
    282
    """
    _check_sizes(
        subsampling,
        B=B,
        T=T,
        bins=bins,
        width=width,
        channels=channels,
        kernel=kernel,
        expansion=expansion,
    )
    D = width
    C = channels
    F = bins
    multiplications = 0
    for stage in range(_halvings(subsampling)):
        T = _half(T)
        F = _half(F)
        depthwise = 9 * C  # 3 x 3; the first stage is an ordinary convolution of one channel
        pointwise = 0
        if stage > 0:
            pointwise = C * C
        multiplications += B * T * F * (depthwise + pointwise)
    multiplications += B * T * C * F * D
    distances, scores = _attention_sizes(T, context)
    # two feed-forwards; query, key, value, output; gate and pointwise convolution; depthwise
    linear = (4 * expansion + 7) * D * D + kernel * D
    attention = distances * D * D + B * T * distances * D + 2 * B * scores * D
    multiplications += layers * (B * T * linear + attention)
    return 2 * multiplications


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
    """Trained numbers of a FastConformer.

    Each is read at least once a batch, which is the least memory traffic there is.

    Args:
        bins: feature bins.
        width: width of the layers.
        layers: number of layers.
        subsampling: 2, 4 or 8 frames to one.
        channels: channels of the subsampling convolutions.
        kernel: width of the layers' depthwise convolutions.
        expansion: width of the feed-forward layers, in widths.
        bias: whether linear layers and convolutions of the layers have biases.

    >>> encoder_parameters(bins=80, width=1024, layers=42)  # Parakeet 1.1B
    1061489664
    """
    _check_sizes(
        subsampling, bins=bins, width=width, channels=channels, kernel=kernel, expansion=expansion
    )
    D = width
    C = channels
    F = bins
    halvings = _halvings(subsampling)
    for _ in range(halvings):
        F = _half(F)
    front = 10 * C + (halvings - 1) * (C * C + 11 * C) + (C * F + 1) * D
    products = (4 * expansion + 8) * D * D + kernel * D  # those of `encoder_flops`, and positions
    vectors = (10 + 2 + 2) * D  # five layer norms, a batch norm, two biases of attention
    if bias:
        vectors += (2 * expansion + 10) * D
    return front + layers * (products + vectors)


def lstm_encoder_flops(
    *,
    B: int,
    T: int,
    bins: int,
    width: int,
    before: int,
    after: int,
    stack_input: int = 3,
    stack: int = 2,
) -> int:
    """Operations of an LSTM encoder's products, forward; a multiplication and its addition are two.

    Gates' activations are left out: below 1 %.

    Args:
        B: utterances.
        T: feature frames of each, with all padding that is computed.
        bins: feature bins.
        width: width of the LSTMs.
        before: LSTM layers before the second stacking.
        after: LSTM layers behind it.
        stack_input: feature frames that are stacked before the first LSTM.
        stack: frames that are stacked between the LSTMs.

    >>> sizes = {"bins": 80, "width": 1024, "before": 2, "after": 3}
    >>> lstm_encoder_flops(B=1, T=1230, **sizes) // 10**9  # MLPerf's on 12.3 seconds
    23
    """
    _expect_sizes(B=B, T=T, bins=bins, width=width, before=before, after=after)
    _expect_sizes(stack_input=stack_input, stack=stack)
    frames = -(-T // stack_input)
    stacked = -(-frames // stack)
    gates = 4 * width  # input, forget, cell and output
    inputs_before = bins * stack_input + width * (before - 1)
    inputs_after = width * stack + width * (after - 1)
    multiplications = B * frames * gates * (inputs_before + width * before)
    multiplications += B * stacked * gates * (inputs_after + width * after)
    return 2 * multiplications


def lstm_encoder_parameters(
    *,
    bins: int,
    width: int,
    before: int,
    after: int,
    stack_input: int = 3,
    stack: int = 2,
) -> int:
    """Trained numbers of an LSTM encoder. Every step of the recurrence reads most of them.

    Args:
        bins: feature bins.
        width: width of the LSTMs.
        before: LSTM layers before the second stacking.
        after: LSTM layers behind it.
        stack_input: feature frames that are stacked before the first LSTM.
        stack: frames that are stacked between the LSTMs.

    >>> lstm_encoder_parameters(bins=80, width=1024, before=2, after=3)  # MLPerf's
    42967040
    """
    _expect_sizes(bins=bins, width=width, before=before, after=after)
    _expect_sizes(stack_input=stack_input, stack=stack)
    layers = before + after
    inputs = bins * stack_input + width * stack + width * (layers - 2)
    biases = 2 * layers  # torch has two vectors of them a layer
    return 4 * width * (inputs + width * layers + biases)


def _halvings(subsampling: int) -> int:
    """The convolutions of stride 2 that subsample so much."""
    return subsampling.bit_length() - 1


def _half(size: int) -> int:
    """Frames or bins after a convolution of stride 2."""
    return (size + 1) // 2


def _attention_sizes(T: int, context: tuple[int, int]) -> tuple[int, int]:
    """(relative positions, scores of queries by keys) of an utterance of T encoder frames."""
    attended = sum(context)
    if min(context) < 0 or 2 * attended >= T:
        return 2 * T, T * T
    block = max(attended, 1)
    blocks = -(-T // block)
    return attended + 1, blocks * block * (block + attended)


def _check_sizes(subsampling: int, **sizes: int) -> None:
    expect(subsampling in (2, 4, 8), "subsampling", "2, 4 or 8", subsampling)
    _expect_sizes(**sizes)


def _expect_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        expect(size >= 1, name, "at least 1", size)
