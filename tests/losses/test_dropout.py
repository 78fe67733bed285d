"""The counter-based dropout mask: properties of its hash, and the same bits in compiled code."""

import numpy as np
import pytest
import torch
from numba import njit

from asrkit.losses.dropout import hash32, kept, mask, node_key, node_keys, threshold


def by_hand(x):
    """The finaliser on Python's own integers, which cannot overflow."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


@njit
def compiled(seed, nodes, D, least):
    keys = np.empty(len(nodes), np.uint32)
    actual = np.empty((len(nodes), D), np.bool_)
    for i in range(len(nodes)):
        b = nodes[i, 0]
        t = nodes[i, 1]
        u = nodes[i, 2]
        keys[i] = node_key(seed, b, t, u)
        for k in range(D):
            actual[i, k] = kept(keys[i], k, least)
    return keys, actual


def masks(seed, p=0.5, D=512, T=40, U1=10, b=0):
    """The masks (T, U1, D) of one utterance."""
    utterance = torch.tensor(b)
    frames = torch.arange(T)[:, None]
    labels = torch.arange(U1)
    nodes = utterance, frames, labels
    keys = node_keys(*nodes, seed).flatten()
    return mask(keys, D, p).view(T, U1, D)


def test_the_hash_is_the_published_one_also_for_high_bits():
    drawn = np.random.default_rng(0).integers(0, 2**32, 500)
    numbers = [0, 1, 2**31, 2**32 - 1, *drawn.tolist()]
    actual = hash32(torch.tensor(numbers)).tolist()
    assert actual == [by_hand(x) for x in numbers]
    b, t, u = torch.tensor([[3], [5], [7]])
    keys = node_keys(b, t, u, seed=11)
    of_utterance = by_hand(11 + 3)
    of_frame = by_hand(of_utterance + 5)
    assert keys.item() == by_hand(of_frame + 7)
    element = by_hand(keys.item() ^ 9 * 0x9E3779B9 % 2**32)
    for least in (element, element + 1):
        kept = mask(keys, 10, least / 2**32)
        assert kept[0, 9] == (element >= least)


SEEDS = [
    0,
    7,
    2**31 + 5,
    2**32 - 2,
    2**32 + 7,
    2**63 - 4,
]


@pytest.mark.parametrize("seed", SEEDS)
def test_torch_and_compiled_masks_agree_bit_for_bit(seed):
    nodes = np.random.default_rng(1).integers(0, 2000, (100, 3))
    least = np.uint32(threshold(0.3))
    keys, actual = compiled(np.uint32(seed % 2**32), nodes, 33, least)
    ours = node_keys(*torch.from_numpy(nodes).unbind(1), seed)
    assert ours.tolist() == keys.tolist()
    assert (mask(ours, 33, 0.3).numpy() == actual).all()


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_the_rate_is_right_overall_in_each_column_and_in_each_node(p):
    actual = masks(12345, p).flatten(0, 1).double()
    deviation = (p * (1 - p)) ** 0.5
    for rate in (actual.mean(), actual.mean(0), actual.mean(1)):
        count = actual.numel() / rate.numel()
        error = (rate - (1 - p)).abs().max()
        assert error < 5 * deviation / count**0.5


def test_seeds_utterances_frames_rows_and_columns_are_not_correlated():
    plain = masks(99)
    pairs = [
        (plain, masks(100)),
        (plain, masks(99, b=1)),
        (plain[1:], plain[:-1]),
        (plain[:, 1:], plain[:, :-1]),
        (plain[..., 1:], plain[..., :-1]),
        (plain[..., 256:], plain[..., :256]),
        (plain[1:, :-1], plain[:-1, 1:]),
    ]
    for one, other in pairs:
        five_deviations = 2.5 / one.numel() ** 0.5
        assert abs((one == other).double().mean() - 0.5) < five_deviations


def test_nothing_is_dropped_at_zero():
    assert masks(1, 0.0).all()
    assert threshold(1 - 1e-12) == 2**32 - 1
