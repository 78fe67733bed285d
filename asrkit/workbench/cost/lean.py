"""The time that asrkit.losses.lean.triton will take on a GPU: operations, bytes and launches of
each phase, and the milliseconds predicted from them.

A prediction, not a measurement: no GPU has run these kernels. A phase takes as long as the slowest
of its operations, its bytes from memory and its bytes from the L2 cache, each at ATTAINED of the
card's rate, and LAUNCH_US a launch. Left out: exponentials and other work beside the products, the
tail of the last wave of blocks, and the clock that falls under load.

In half precision the predicted limit is L2: each tile reads the whole weight, and its own hidden
layer once for every chunk of outputs. At B = 32, T = 200, U1 = 101, D = 640, V = 1025 `scores` asks
L2 for 16.4 GB, 2.28 ms on an H100 against 1.29 ms of products; `by_logits` asks as much, and
`by_halves` nearly. So the sum lies far above the products' own time. The rate of L2 is itself
assumed (asrkit.workbench.cost.cards.Card).
"""

from dataclasses import dataclass

from asrkit.shapes import expect
from asrkit.workbench.cost.cards import Card
from asrkit.workbench.cost.counts import NODE_BYTES, Peak, joint_flops

# as in asrkit.losses.lean.triton: frames and labels of a tile; V and D in memory are multiples
FRAMES_OF = 16
LABELS_OF = 8
MULTIPLE = 64
COLUMNS = {2: 128, 4: 64}  # of a product that a program computes at once, by bytes of a number
ROWS = FRAMES_OF * LABELS_OF
TILE_BYTES = 1 << 28  # of logits' gradient at once
# assumptions: the share of a card's rate that good kernels reach, and microseconds
ATTAINED = 0.8
LAUNCH_US = 5.0  # from one small kernel to the next
STEP_US = 1.0  # of a diagonal of the lattice: a barrier and one float64 log-add


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
        """Predicted milliseconds on a card whose rates are known; itemsize 2 is half precision."""
        assert card.memory_GB_per_s
        assert card.cache_GB_per_s
        slowest = max(
            self.flops / (_tflop_per_s(card, itemsize) * 1e9),
            self.memory_B / (card.memory_GB_per_s * 1e6),
            self.cache_B / (card.cache_GB_per_s * 1e6),
        )
        working = max(slowest / ATTAINED, self.steps * STEP_US / 1e3)
        return working + self.launches * LAUNCH_US / 1e3


def _tflop_per_s(card: Card, itemsize: int) -> float:
    rate = card.half_TFLOP_per_s if itemsize == 2 else card.float32_TFLOP_per_s
    assert rate is not None
    return rate


@dataclass(frozen=True)
class _Tiling:
    """How the kernels divide a batch: tiles of ROWS nodes, and runs of tiles."""

    tiles: int
    runs: int
    wide: int  # V, padded
    deep: int  # D, padded

    @property
    def rows(self) -> int:
        """Nodes of all tiles."""
        return self.tiles * ROWS


def _tiling(*, B: int, T: int, U1: int, D: int, V: int, itemsize: int, tile_bytes: int) -> _Tiling:
    tiles = B * up(T, FRAMES_OF) * up(U1, LABELS_OF)
    rows_of_run = max(64, tile_bytes // (max(V, D) * itemsize))
    return _Tiling(
        tiles=tiles,
        runs=min(tiles, up(tiles * ROWS, rows_of_run)),
        wide=up(V, MULTIPLE) * MULTIPLE,
        deep=up(D, MULTIPLE) * MULTIPLE,
    )


def lean_phases(
    *, B: int, T: int, U1: int, D: int, V: int, itemsize: int = 2, tile_bytes: int = TILE_BYTES
) -> tuple[Phase, ...]:
    """The phases of rnnt_loss_lean(impl='triton') and its gradient, without padding of utterances.

    The lattice is Numba's. "the rest" are torch's zeros, casts and copies; of its bytes only the
    gradients' are counted.

    Args:
        B: utterances.
        T: encoder frames.
        U1: labels and one.
        D: width of the hidden layer.
        V: tokens, blank included.
        itemsize: bytes of a number, 2 for half precision, 4 for float32.
        tile_bytes: size of the logits' gradient of a run; the loss takes it as `tile`, in nodes.

    >>> sum(phase.launches for phase in lean_phases(B=32, T=200, U1=101, D=640, V=1025))
    35
    """
    expect(itemsize in (2, 4), "itemsize", "2 or 4 bytes", itemsize)
    tiling = _tiling(B=B, T=T, U1=U1, D=D, V=V, itemsize=itemsize, tile_bytes=tile_bytes)
    N = B * T * U1
    rows = tiling.rows
    wide = tiling.wide
    deep = tiling.deep
    hidden_B = rows * deep * itemsize
    gradient_B = rows * wide * itemsize
    weight_B = tiling.tiles * wide * deep * itemsize  # read by every tile
    columns = COLUMNS[itemsize]
    chunks_of_V = up(V, columns)
    chunks_of_D = up(deep, columns)
    # what computing the logits takes, in the first pass and again in the second
    logits_flops = 2 * rows * deep * chunks_of_V * columns
    logits_cache_B = (chunks_of_V + 1) * hidden_B + weight_B
    inputs_B = B * (T + U1) * D * itemsize + 12 * N  # both halves; scores of the nodes
    return (
        Phase(
            name="scores",
            launches=1,
            memory_B=inputs_B,
            flops=logits_flops,
            cache_B=logits_cache_B,
        ),
        Phase(name="lattice", launches=2, memory_B=(2 * 8 + 3 * 16 + 8) * N, steps=T + U1 - 1),
        Phase(
            name="by_logits",
            launches=tiling.runs,
            memory_B=inputs_B + hidden_B + gradient_B,
            flops=logits_flops,
            cache_B=logits_cache_B,
        ),
        Phase(
            name="by_weight",
            launches=tiling.runs,
            flops=2 * rows * wide * deep,
            memory_B=hidden_B + gradient_B,
        ),
        Phase(
            name="by_halves",
            launches=tiling.runs,
            flops=2 * rows * wide * chunks_of_D * columns,
            memory_B=gradient_B,
            cache_B=chunks_of_D * gradient_B + weight_B,
        ),
        Phase(
            name="the rest",
            launches=_other_launches(itemsize, padded=(wide, deep) != (V, D)),
            memory_B=6 * B * (T + U1) * D + 6 * V * D,
        ),
    )


def _other_launches(itemsize: int, *, padded: bool) -> int:
    """Launches of torch's own kernels beside ours."""
    launches = 4  # zeros of the gradients, sign and cast of the likelihoods, the nodes' table
    if itemsize == 2:
        launches += 6  # casts of the bias, twice, and of four gradients
    if padded:
        launches += 4  # zeros and copy of the padded weight, in both passes
    return launches


def lean_ms(card: Card, *, itemsize: int = 2, **shape: int) -> dict[str, float]:
    """Predicted milliseconds by phase.

    Args:
        card: a card whose rates are known, L2's included.
        itemsize: bytes of a number, 2 for half precision, 4 for float32.
        shape: B, T, U1, D, V, and maybe tile_bytes, as in `lean_phases`.
    """
    expect(card.cache_GB_per_s is not None, "card", "one whose L2 cache's rate is known", card.name)
    phases = lean_phases(itemsize=itemsize, **shape)
    return {phase.name: phase.ms(card, itemsize) for phase in phases}


def lean_peak(
    *, B: int, T: int, U1: int, D: int, V: int, itemsize: int = 2, tile_bytes: int = TILE_BYTES
) -> Peak:
    """Bytes at the peak of the second pass, beyond the inputs, without padding of utterances.

    Args:
        B: utterances.
        T: encoder frames.
        U1: labels and one.
        D: width of the hidden layer.
        V: tokens, blank included.
        itemsize: bytes of a number, 2 for half precision, 4 for float32.
        tile_bytes: as in `lean_phases`.
    """
    expect(itemsize in (2, 4), "itemsize", "2 or 4 bytes", itemsize)
    tiling = _tiling(B=B, T=T, U1=U1, D=D, V=V, itemsize=itemsize, tile_bytes=tile_bytes)
    weight = tiling.wide * tiling.deep
    rows_of_run = up(tiling.tiles, tiling.runs) * ROWS
    return Peak(
        parts={
            # of a run, and the padded weight
            "tile": (rows_of_run * (tiling.wide + tiling.deep) + weight) * itemsize,
            "lattice": NODE_BYTES * B * T * U1,
            "gradients": 4 * (B * (T + U1) * D + weight),
        }
    )


def lean_floor_ms(
    card: Card, *, B: int, T: int, U1: int, D: int, V: int, itemsize: int = 2
) -> float:
    """Milliseconds of four products of 2 N D V at ATTAINED of the card's rate, with nothing padded
    and all else free.

    Args:
        card: a card whose rates are known.
        B: utterances.
        T: encoder frames.
        U1: labels and one.
        D: width of the hidden layer.
        V: tokens, blank included.
        itemsize: bytes of a number, 2 for half precision, 4 for float32.
    """
    flops = joint_flops(N=B * T * U1, D=D, V=V, products=4)
    return flops / (ATTAINED * _tflop_per_s(card, itemsize) * 1e9)


def up(size: int, multiple: int) -> int:
    """How many times `multiple` covers `size`, rounded up."""
    return -(-size // multiple)
