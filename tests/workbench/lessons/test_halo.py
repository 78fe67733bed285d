"""A convolution whose frames are shared out is the whole one, values and gradients."""

import pytest
import torch
from torch.nn import functional as F

from asrkit.workbench.lessons.mlperf_rnnt.halo import split_convolution


def draw(T, K):
    random = torch.Generator().manual_seed(T + K)
    x = torch.randn(2, 3, T, dtype=torch.float64, generator=random, requires_grad=True)
    weight = torch.randn(
        4, 3, K, dtype=torch.float64, generator=random, requires_grad=True
    )
    return x, weight


@pytest.mark.parametrize(
    ("T", "K", "parts"),
    [(1, 1, 1), (7, 1, 7), (12, 3, 4), (29, 11, 3), (29, 11, 5), (64, 13, 8)],
)
def test_parts_with_their_halo_give_the_whole_convolution_and_its_gradients(
    T, K, parts
):
    x, weight = draw(T, K)
    whole = F.conv1d(x, weight, padding=K // 2)
    split = split_convolution(x, weight, parts)
    upstream = torch.randn(whole.shape, dtype=whole.dtype, generator=torch.Generator())
    wanted = torch.autograd.grad(whole, (x, weight), upstream)
    found = torch.autograd.grad(split, (x, weight), upstream)
    for ours, theirs in zip((split, *found), (whole, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_without_the_halo_only_outputs_at_the_edges_between_parts_are_off():
    x, weight = draw(40, 5)
    off = split_convolution(x, weight, 4, halo=False) - F.conv1d(x, weight, padding=2)
    frames = off.abs().amax((0, 1)) > 1e-9
    assert frames.nonzero()[:, 0].tolist() == [
        8,
        9,
        10,
        11,
        18,
        19,
        20,
        21,
        28,
        29,
        30,
        31,
    ]


@pytest.mark.parametrize(
    ("K", "parts", "message"),
    [
        (4, 2, "weight: expected an odd kernel, got 4."),
        (11, 5, "parts: expected 1 to 4, of 5 frames at least, got 5."),
        (3, 0, "parts: expected 1 to 20, of 1 frames at least, got 0."),
    ],
)
def test_bad_input_is_one_line(K, parts, message):
    with pytest.raises(ValueError) as caught:
        split_convolution(*draw(20, K), parts)
    assert str(caught.value) == message
