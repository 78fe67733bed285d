"""What asrkit.losses.lean.triton will take on a GPU: operations, bytes and launches by phase, and
milliseconds predicted of them.

A prediction, not a measurement: no GPU has run these kernels. A phase takes as long as the slowest
of its operations, its bytes from memory and its bytes from the L2 cache, each at ATTAINED of the
card's rate, and LAUNCH_US a launch. Left out: exponentials and other work beside the products, the
tail of the last wave of blocks, the clock that falls under load.

In half precision the predicted limit is L2: each tile reads the whole weight, and its own hidden
layer once for every chunk of outputs. At B = 32, T = 200, U1 = 101, D = 640, V = 1025 `scores` asks
L2 for 16.4 GB, 2.28 ms on an H100 against 1.29 ms of products; `by_logits` asks as much, and
`by_halves` nearly. So the sum lies far above the products' own time. The rate of L2 is itself
assumed (asrkit.workbench.cost.counts.Card).
"""

from dataclasses import dataclass

from asrkit.shapes import expect
from asrkit.workbench.cost.counts import CARDS, NODE_BYTES, Card, Peak, joint_flops

FRAMES_OF, LABELS_OF, MULTIPLE = (
    16,
    8,
    64,
)  # of a tile; of V and D in memory: as in asrkit.losses.lean.triton
COLUMNS = {2: 128, 4: 64}  # of a product that a program computes at once, by bytes of a number
ROWS = FRAMES_OF * LABELS_OF
TILE_BYTES = 1 << 28  # of logits' gradient at once
# of a card's rate: taken to be what good kernels reach, and the assumption behind every prediction
# here
ATTAINED = 0.8
LAUNCH_US = 5.0  # an assumption too: from one small kernel to the next
STEP_US = 1.0  # and so is a diagonal of the lattice: a barrier and one float64 log-add


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One kernel of the loss, all its launches together."""

    name: str
    launches: int
    flops: int = 0
    memory_B: int = 0  # read from or written to the GPU's memory
    cache_B: int = 0  # read from the L2 cache
    steps: int = 0  # one after another, whatever their size

    def ms(self, card: Card, itemsize: int) -> float:
        """Predicted milliseconds."""
        tflop_per_s = card.half_TFLOP_per_s if itemsize == 2 else card.float32_TFLOP_per_s
        assert tflop_per_s and card.memory_GB_per_s and card.cache_GB_per_s
        multiplying, memory = (
            self.flops / (tflop_per_s * 1e9),
            self.memory_B / (card.memory_GB_per_s * 1e6),
        )
        slowest = max(multiplying, memory, self.cache_B / (card.cache_GB_per_s * 1e6))
        return max(slowest / ATTAINED, self.steps * STEP_US / 1e3) + self.launches * LAUNCH_US / 1e3


def lean_phases(
    *, B: int, T: int, U1: int, D: int, V: int, itemsize: int = 2, tile_bytes: int = TILE_BYTES
) -> tuple[Phase, ...]:
    """Phases of rnnt_loss_lean(impl='triton') and its gradient, without padding of utterances;
    itemsize 2 is half precision.

    `tile_bytes` is the size of a run's logits' gradient, which the loss takes as `tile`, in nodes.
    The lattice is Numba's. "the rest" are torch's zeros, casts and copies; of its bytes only the
    gradients' are counted.

    >>> sum(phase.launches for phase in lean_phases(B=32, T=200, U1=101, D=640, V=1025))
    35
    """
    expect(itemsize in (2, 4), "itemsize", "2 or 4 bytes", itemsize)
    N, tiles = B * T * U1, B * up(T, FRAMES_OF) * up(U1, LABELS_OF)
    rows, columns = tiles * ROWS, COLUMNS[itemsize]
    wide, depth = up(V, MULTIPLE) * MULTIPLE, up(D, MULTIPLE) * MULTIPLE
    runs = min(tiles, up(rows, max(64, tile_bytes // (max(V, D) * itemsize))))
    hidden, gradient, weight = (
        rows * depth * itemsize,
        rows * wide * itemsize,
        tiles * wide * depth * itemsize,
    )
    chunks, across = up(V, columns), up(depth, columns)  # of V, and of D
    logits = {
        "flops": 2 * rows * depth * chunks * columns,
        "cache_B": (chunks + 1) * hidden + weight,
    }
    halves = B * (T + U1) * D * itemsize
    rest = 4  # zeros of the gradients, sign and cast of the likelihoods, the nodes' table
    rest += 6 if itemsize == 2 else 0  # casts of the bias, twice, and of four gradients
    rest += (
        4 if (wide, depth) != (V, D) else 0
    )  # the padded weight's zeros and copy, in both passes
    return (
        Phase(name="scores", launches=1, memory_B=halves + 12 * N, **logits),
        Phase(name="lattice", launches=2, memory_B=(2 * 8 + 3 * 16 + 8) * N, steps=T + U1 - 1),
        Phase(
            name="by_logits", launches=runs, memory_B=halves + 12 * N + hidden + gradient, **logits
        ),
        Phase(
            name="by_weight",
            launches=runs,
            flops=2 * rows * wide * depth,
            memory_B=hidden + gradient,
        ),
        Phase(
            name="by_halves",
            launches=runs,
            flops=2 * rows * wide * across * columns,
            memory_B=gradient,
            cache_B=across * gradient + weight,
        ),
        Phase(name="the rest", launches=rest, memory_B=6 * B * (T + U1) * D + 6 * V * D),
    )


def lean_ms(card: Card, *, itemsize: int = 2, **shape: int) -> dict[str, float]:
    """Predicted milliseconds by phase on a card whose rates are known; shape: as in lean_phases."""
    expect(card.cache_GB_per_s is not None, "card", "one whose L2 cache's rate is known", card.name)
    return {
        phase.name: phase.ms(card, itemsize) for phase in lean_phases(itemsize=itemsize, **shape)
    }


def lean_peak(
    *, B: int, T: int, U1: int, D: int, V: int, itemsize: int = 2, tile_bytes: int = TILE_BYTES
) -> Peak:
    """Bytes at the peak of the second pass, beyond the inputs, without padding of utterances;
    arguments: as in lean_phases.
    """
    tiles = B * up(T, FRAMES_OF) * up(U1, LABELS_OF)
    phases = lean_phases(B=B, T=T, U1=U1, D=D, V=V, itemsize=itemsize, tile_bytes=tile_bytes)
    (runs,) = (phase.launches for phase in phases if phase.name == "by_logits")
    rows, wide, depth = (
        up(tiles, runs) * ROWS,
        up(V, MULTIPLE) * MULTIPLE,
        up(D, MULTIPLE) * MULTIPLE,
    )
    sums = 4 * (B * (T + U1) * D + wide * depth)
    tile = rows * (wide + depth) * itemsize + wide * depth * itemsize  # with the padded weight
    return Peak(parts={"tile": tile, "lattice": NODE_BYTES * B * T * U1, "gradients": sums})


def lean_floor_ms(
    card: Card, *, B: int, T: int, U1: int, D: int, V: int, itemsize: int = 2
) -> float:
    """Milliseconds that four products of 2 N D V take at ATTAINED of the card's rate: nothing
    padded, all else free.
    """
    tflop_per_s = card.half_TFLOP_per_s if itemsize == 2 else card.float32_TFLOP_per_s
    assert tflop_per_s is not None
    return joint_flops(N=B * T * U1, D=D, V=V, products=4) / (ATTAINED * tflop_per_s * 1e9)


def card_called(device: str) -> Card | None:
    """The card with all rates whose name is a word of a device's name, such as "NVIDIA H100 80GB
    HBM3"; None if there is none.
    """
    words = device.replace("-", " ").split()
    return next(
        (card for card in CARDS if card.cache_GB_per_s and card.name.split()[0] in words), None
    )


def up(size: int, multiple: int) -> int:
    """How many times `multiple` covers `size`."""
    return -(-size // multiple)
