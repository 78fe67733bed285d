"""Dropout by counting: whether element k of node (b, t, u) is kept is a hash of (seed, b, t, u, k),
and of nothing else.

So every implementation, forward and backward, makes the same mask without storing it, however nodes
are padded, packed or tiled. With sums modulo 2^32:
    key = hash32(hash32(hash32(seed + b) + t) + u),    bits = hash32(key xor k 0x9E3779B9),    kept
    = bits >= p 2^32.
Draw seeds at random: seed s + 1 gives utterance b what seed s gives utterance b + 1. Source of
hash32: C. Wellons, "Prospecting for Hash Functions" (2018), `lowbias32`; counter-based generators:
J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). The odd multiplier of k,
2^32 over the golden ratio, is Knuth's.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from asrkit.shapes import dims, expect

LOW = 0xFFFFFFFF
FIRST, SECOND, GOLDEN = 0x7FEB352D, 0x846CA68B, 0x9E3779B9
A, B, C, S15, S16 = (
    np.uint32(number) for number in (FIRST, SECOND, GOLDEN, 15, 16)
)  # so that compiled sums stay 32 bits wide


def threshold(p: float) -> int:
    """The smallest hash that is kept at dropout `p`, 0 to 2^32 - 1."""
    expect(0 <= p < 1, "dropout", "a probability, at least 0 and below 1", p)
    return min(round(p * 2**32), LOW)


def hash32(x: Tensor) -> Tensor:
    """A bijection of uint32 held in int64, in which every bit depends on all: the shape of `x`."""
    x = (
        x ^ (x >> 16)
    ) * FIRST & LOW  # the product wraps at 64 bits, which leaves its lower 32 as they are
    x = (x ^ (x >> 15)) * SECOND & LOW
    return x ^ (x >> 16)


def node_keys(
    nodes_b: Tensor | int, nodes_t: Tensor | int, nodes_u: Tensor | int, seed: int
) -> Tensor:
    """Keys of nodes (b, t, u), uint32 held in int64; the three indices broadcast, as in (B, 1, 1),
    (T, 1), (U1,).
    """
    b, t, u = (torch.as_tensor(index).long() for index in (nodes_b, nodes_t, nodes_u))
    return hash32(hash32(hash32(b + seed & LOW) + t & LOW) + u & LOW)


def mask(keys: Tensor, D: int, p: float) -> Tensor:
    """True where an element is kept at dropout `p`: bool (N, D) from keys (N,). Memory on the way:
    24 N D bytes.

    >>> mask(node_keys(0, 0, torch.arange(2), seed=1), 4, 0.5).shape
    torch.Size([2, 4])
    """
    dims(keys, "N", "keys")
    columns = torch.arange(D, device=keys.device) * GOLDEN & LOW
    return hash32(keys[:, None] ^ columns) >= threshold(p)


@njit
def _hash32(x):
    x = np.uint32((x ^ (x >> S16)) * A)
    x = np.uint32((x ^ (x >> S15)) * B)
    return np.uint32(x ^ (x >> S16))


@njit
def node_key(seed, b, t, u):
    """Key of one node, uint32: the compiled twin of `node_keys`."""
    x = _hash32(np.uint32(np.uint32(seed) + np.uint32(b)))
    return _hash32(np.uint32(_hash32(np.uint32(x + np.uint32(t))) + np.uint32(u)))


@njit
def kept(key, k, least):
    """Whether element k of the node with this key is kept, `least` being threshold(p) as uint32:
    the twin of `mask`.
    """
    return _hash32(np.uint32(key ^ np.uint32(np.uint32(k) * C))) >= least
