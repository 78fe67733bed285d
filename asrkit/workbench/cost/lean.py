"""The lean loss on a GPU, chunk by chunk as asrkit.losses.lean.triton goes: its least time and its
memory, from operations and bytes.
"""

from asrkit.workbench.cost.cards import Card
from asrkit.workbench.cost.counts import NODE_BYTES, Peak, joint_flops

CHUNK_BYTES = 1 << 27  # of a chunk's logits by default


def lean_floor_ms(
    card: Card, *, B: int, T: int, U1: int, D: int, V: int, itemsize: int = 2
) -> dict[str, float]:
    """Least milliseconds of the loss and its gradient: of the four products of 2 N D V, and of the
    passes over memory beside them.

    The passes write the hidden layer twice and read its gradient once; they read the logits for the
    scores, read them and write their gradient, and read that for the bias. Full rates of the data
    sheet; what the products themselves read and write is left out, as is all that a node costs.

    Args:
        card: a card whose rates are known.
        B: utterances.
        T: encoder frames.
        U1: labels and one.
        D: width of the hidden layer.
        V: tokens, blank included.
        itemsize: bytes of a number, 2 for half precision, 4 for float32.
    """
    N = B * T * U1
    rate = card.half_TFLOP_per_s if itemsize == 2 else card.float32_TFLOP_per_s
    assert rate
    assert card.memory_GB_per_s
    return {
        "products": joint_flops(N=N, D=D, V=V, products=4) / (rate * 1e9),
        "passes": N * (3 * D + 4 * V) * itemsize / (card.memory_GB_per_s * 1e6),
    }


def lean_peak(
    *,
    B: int,
    T: int,
    U1: int,
    D: int,
    V: int,
    itemsize: int = 2,
    chunk_bytes: int = CHUNK_BYTES,
) -> Peak:
    """Bytes at the peak of the second pass, beyond the inputs, without padding of utterances.

    Args:
        B: utterances.
        T: encoder frames.
        U1: labels and one.
        D: width of the hidden layer.
        V: tokens, blank included.
        itemsize: bytes of a number, 2 for half precision, 4 for float32.
        chunk_bytes: of a chunk's logits; the loss takes it as `tile`, in nodes.
    """
    N = B * T * U1
    nodes = min(N, chunk_bytes // (max(V, D) * itemsize))
    return Peak(
        parts={
            "tile": nodes * (V + 2 * D) * itemsize,
            "lattice": NODE_BYTES * N,
            "gradients": 4 * (B * (T + U1) * D + V * D),
        }
    )
