"""Counter-based dropout: a hash of (seed, b, t, u, k) decides whether to keep element k of a node.

So every implementation computes the same mask in forward and backward without storing it, whether
nodes are padded, packed or tiled. With sums modulo 2^32:

    key = hash32(hash32(hash32(seed + b) + t) + u)
    bits = hash32(key xor k 0x9E3779B9)
    kept = bits >= p 2^32

Draw seeds at random: with seed s + 1, utterance b has the mask that utterance b + 1 has with seed
s.

Sources: hash32 is `lowbias32` of C. Wellons, "Prospecting for Hash Functions" (2018);
counter-based generators: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
The odd multiplier of k, 2^32 over the golden ratio, is Knuth's.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

LOW = 0xFFFFFFFF  # the lower 32 bits
FIRST = 0x7FEB352D
SECOND = 0x846CA68B
GOLDEN = 0x9E3779B9


def threshold(p: float) -> int:
    """Return the smallest hash that is kept at dropout probability `p` < 1: 0 to 2^32 - 1."""
    return min(round(p * 2**32), LOW)


def hash32(x: Tensor) -> Tensor:
    """Map uint32 to uint32 one to one, in int64; each bit of the result depends on all of `x`."""
    # products wrap at 64 bits, which does not change their lower 32 bits
    x = (x ^ (x >> 16)) * FIRST & LOW
    x = (x ^ (x >> 15)) * SECOND & LOW
    return x ^ (x >> 16)


def node_keys(nodes_b: Tensor, nodes_t: Tensor, nodes_u: Tensor, seed: int) -> Tensor:
    """Return the keys of nodes (b, t, u): uint32 in int64, with the broadcast shape of the indices.

    Args:
        nodes_b: Utterances, int64.
        nodes_t: Frames, int64.
        nodes_u: Lattice rows, int64.
        seed: Seed of the mask.
    """
    key = hash32(nodes_b + seed & LOW)
    key = hash32(key + nodes_t & LOW)
    return hash32(key + nodes_u & LOW)


def mask(keys: Tensor, D: int, p: float) -> Tensor:
    """Return the mask, bool (N, D): True for an element that is kept.

    It needs 24 N D bytes of temporary memory.

    Args:
        keys: Keys of the nodes, (N,), from `node_keys`.
        D: Elements of a node.
        p: Probability that an element is dropped.

    >>> mask(node_keys(torch.tensor(0), torch.tensor(0), torch.arange(2), seed=1), 4, 0.5).shape
    torch.Size([2, 4])
    """
    k = torch.arange(D, device=keys.device)
    columns = k * GOLDEN & LOW
    bits = hash32(keys[:, None] ^ columns)
    return bits >= threshold(p)


@njit
def _hash32(x):
    """`hash32` for compiled code, in uint32, so that products have 32 bits."""
    x ^= x >> np.uint32(16)
    x = np.uint32(x * np.uint32(FIRST))
    x ^= x >> np.uint32(15)
    x = np.uint32(x * np.uint32(SECOND))
    return np.uint32(x ^ (x >> np.uint32(16)))


@njit
def node_key(seed, b, t, u):
    """Return the key of node (b, t, u), uint32: `node_keys` for compiled code."""
    x = _hash32(np.uint32(np.uint32(seed) + np.uint32(b)))
    x = _hash32(np.uint32(x + np.uint32(t)))
    return _hash32(np.uint32(x + np.uint32(u)))


@njit
def kept(key, k, least):
    """Whether element `k` of the node with this `key` is kept: `mask` for compiled code.

    `least` is `threshold(p)` as uint32.
    """
    return _hash32(np.uint32(key ^ np.uint32(np.uint32(k) * np.uint32(GOLDEN)))) >= least
