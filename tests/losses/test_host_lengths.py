"""Targets and lengths on the host with scores on a device: they are checked without waiting."""

import pytest
import torch

from asrkit.losses import (
    ctc_loss,
    pack_joint,
    rnnt_loss,
    rnnt_loss_lean,
    rnnt_loss_packed,
    tdt_loss,
    tdt_loss_lean,
)
from asrkit.workbench.measure import host_reads

B, T, U1, D, V = 3, 7, 5, 8, 6
SIZES = {"rnnt": (B, T, U1, V), "tdt": (B, T, U1, V + 5)}


def integers(device):
    targets = torch.arange(B * (U1 - 1)).view(B, -1) % (V - 1)
    frames = torch.tensor([T, 5, 1])
    labels = torch.tensor([U1 - 1, 2, 0])
    lengths = (targets, frames, labels)
    return [tensor.to(device) for tensor in lengths]


def scores(*shape, device="meta"):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return values.to(device, non_blocking=True).requires_grad_()


def halves(outputs, device):
    shapes = ((B, T, D), (B, U1, D), (outputs, D), (outputs,))
    return [scores(*shape, device=device) for shape in shapes]


def packed_rows(device):
    """N = 7 * 5 + 5 * 3 + 1 rows."""
    return scores(51, V, device=device)


LOSSES = {
    "rnnt": lambda device, ints: rnnt_loss(
        scores(*SIZES["rnnt"], device=device), *ints
    ),
    "tdt": lambda device, ints: tdt_loss(scores(*SIZES["tdt"], device=device), *ints),
    "packed": lambda device, ints: rnnt_loss_packed(packed_rows(device), *ints),
    "pack_joint": lambda device, ints: pack_joint(
        *halves(V, device)[:2], *ints[1:]
    ).sum(),
    "lean rnnt": lambda device, ints: rnnt_loss_lean(
        *halves(V, device), *ints, activation="relu"
    ),
    "lean tdt": lambda device, ints: tdt_loss_lean(
        *halves(V + 5, device), *ints, activation="relu"
    ),
    "ctc": lambda device, ints: ctc_loss(scores(B, T, V, device=device), *ints).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_waits_for_lengths_on_the_host(name):
    ints = integers("cpu")
    assert (
        host_reads(lambda: LOSSES[name]("meta", ints).backward(), device="meta") == {}
    )


def test_lengths_on_the_device_are_read_for_their_checks():
    ints = integers("cpu")
    with pytest.raises(RuntimeError, match="nonzero"):
        host_reads(
            lambda: LOSSES["rnnt"]("meta", [ints[0], ints[1].to("meta"), ints[2]]),
            device="meta",
        )


def test_a_wrong_label_on_the_host_is_named_even_for_meta_scores():
    targets, frames, labels = integers("cpu")
    targets[1, 0] = V
    with pytest.raises(
        ValueError, match=r"^targets: expected labels 0..5 but blank=5, got 6 in"
    ):
        LOSSES["rnnt"]("meta", (targets, frames, labels))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOSSES)
def test_on_a_gpu_lengths_on_host_and_device_give_the_same_loss(name):
    on_host = LOSSES[name]("cuda", integers("cpu"))
    assert torch.equal(on_host, LOSSES[name]("cuda", integers("cuda")))
    ints = integers("cpu")
    LOSSES[name]("cuda", ints).backward()  # compiles kernels, and tries Triton
    assert (
        host_reads(lambda: LOSSES[name]("cuda", ints).backward(), device="cuda") == {}
    )
