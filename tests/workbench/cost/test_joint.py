"""Counted costs of joint and loss against torch's allocator."""

import pytest
import torch
from torch.nn.functional import linear

from asrkit.losses import (
    pack_joint,
    rnnt_loss,
    rnnt_loss_lean,
    rnnt_loss_packed,
    split_batches,
)
from asrkit.workbench.cost import VARIANTS, joint_bytes, largest_batch
from asrkit.workbench.measure import peak_memory

SHAPE = {"B": 2, "T": 66, "U1": 31, "V": 256, "D": 160}
NARROW = SHAPE | {"D": 16}  # logits outweigh the workspace of products
FEW_TOKENS = SHAPE | {"V": 8}  # the peak is in the hidden layer
SHORT = {
    "B": 2,
    "T": 16,
    "U1": 9,
    "V": 64,
    "D": 16,
}  # an utterance is smaller than a tile
PEAKS = [
    *((variant, torch.float32, SHAPE, 0.02) for variant in VARIANTS),
    *((one, torch.float16, NARROW, 0.05) for one in ("torchaudio", "wavefront", "numba", "split", "packed")),
    *((variant, torch.float32, FEW_TOKENS, 0.05) for variant in ("numba", "split", "packed")),
    *((variant, torch.float32, SHORT, 0.05) for variant in ("wavefront", "packed")),
]  # fmt: skip


def lengths_of(T, U1):
    """Frames and labels of two utterances, of which the second is about two thirds as long."""
    return torch.tensor([T, 7 * T // 11]), torch.tensor([U1 - 1, 3 * (U1 - 1) // 5])


def step(variant, dtype, B, T, U1, V, D):
    """Loss and gradients from the halves of a joint, by one variant, as a function to call."""
    draw = torch.Generator().manual_seed(0)
    sizes = (B, T, D), (B, U1, D), (V, D), (V,)
    leaves = [torch.randn(size, generator=draw).mul(0.3).to(dtype) for size in sizes]
    halves = leaves[:2]
    weights = leaves[2:]
    given = torch.randint(V - 1, (B, U1 - 1), generator=draw), *lengths_of(T, U1)

    def join(encoded, predicted):
        hidden = encoded[:, :, None] + predicted[:, None]
        return linear(hidden.relu(), *weights)

    def packed():
        hidden = pack_joint(*halves, *given[1:], activation="relu")
        return rnnt_loss_packed(linear(hidden, *weights), *given)

    def whole(impl, overwrite=False):
        logits = join(*halves)
        return rnnt_loss(logits, *given, impl=impl, overwrite_logits=overwrite)

    losses = {
        "split": lambda: split_batches(join, *halves, *given, size=1),
        "packed": packed,
        "lean": lambda: rnnt_loss_lean(
            *leaves, *given, activation="relu", impl="numba_cpu"
        ),
        "numba": lambda: whole("numba_cpu"),
        "overwrite": lambda: whole("numba_cpu", overwrite=True),
    }
    for leaf in leaves:
        leaf.requires_grad_()
    loss = losses.get(variant, lambda: whole(variant))
    return lambda: loss().backward()


@pytest.mark.parametrize("variant, dtype, shape, share", PEAKS)
def test_the_predicted_peak_is_near_the_allocators(variant, dtype, shape, share):
    lengths, labels = lengths_of(shape["T"], shape["U1"])
    nodes = int((lengths * (labels + 1)).sum())
    predicted = joint_bytes(
        variant, **shape, itemsize=dtype.itemsize, nodes=nodes
    ).total
    run = step(variant, dtype, **shape)
    run()  # a first call compiles and allocates buffers
    assert peak_memory(run) == pytest.approx(predicted, rel=share)


@pytest.mark.parametrize("padding", [0.0, 0.5])
@pytest.mark.parametrize("variant", ["torchaudio", "wavefront", "packed", "lean"])
def test_the_largest_batch_fits_and_one_more_does_not(variant, padding):
    shape = {"T": 200, "U1": 101, "V": 1024, "D": 640}
    most = largest_batch(16 << 30, variant, padding=padding, **shape)

    def needed(B):
        nodes = int(B * 200 * 101 * (1 - padding))
        return joint_bytes(variant, B=B, nodes=nodes, **shape).total

    assert needed(most) <= 16 << 30 < needed(most + 1)
    assert largest_batch(1, variant, **shape) == 0
