"""Whether a training step builds the joint: the rule of `TrainConfig(joint="auto")`.

The full joint holds logits (B, T, U1, V) and their gradient. The lean losses of
`asrkit.losses.lean` compute both tile by tile and keep neither, for one matrix product more.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asrkit.models import TransducerModel
from asrkit.shapes import expect
from asrkit.training.config import TrainConfig

MEMORY_SHARE = 0.5  # of the device that the joint may fill; weights and encoder need the rest
PRODUCT_WIDTH = 224  # D V / (D + V) up to which lean was as fast on a CPU; see chooses_lean
PAGED_BYTES = 1 << 27  # joint from which lean was faster on a CPU whatever D and V are
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of the compiled kernels


def joint_peak_bytes(*, B: int, T: int, U1: int, V: int, D: int, dtype: torch.dtype) -> int:
    """Bytes that the full joint takes at the peak of a training step, padding included.

    Three moments can be the peak: the logits, their gradient and the hidden layer; the gradient of
    the logits, the hidden layer and its gradient; or the hidden layer, its gradient and that of
    the sum before it.

    Args:
        B: Utterances.
        T: Encoder frames.
        U1: Lattice rows, labels + 1.
        V: Outputs of the joint: tokens with blank, and durations.
        D: Width of the joint.
        dtype: Type of the logits.

    >>> joint_peak_bytes(B=1, T=2000, U1=101, V=1024, D=640, dtype=torch.float32)
    2172992000
    """
    nodes = B * T * U1
    return nodes * dtype.itemsize * max(2 * V + D, V + 2 * D, 3 * D)


def chooses_lean(
    *,
    B: int,
    T: int,
    U1: int,
    V: int,
    D: int,
    dtype: torch.dtype,
    device_type: str,
    memory_bytes: int | None,
) -> bool:
    """Whether joint="auto" takes the lean loss for a batch of this shape.

    It does where the full joint would fill more than half of the device's memory. It also does on a
    CPU in float32 or half precision where the lean loss is faster. That costs a product of D V
    operations a node, and saves memory traffic of about D + V numbers a node, so it pays while
    D V / (D + V) is small. It also pays where the joint is so large (128 MiB) that the system hands
    out fresh pages for it at each step.

    Time of joint and loss, full / lean, forward and backward, medians of 4 to 5 interleaved rounds
    on one core of an AMD EPYC with AVX-512 BF16, tanh (the suite "training" of `asrkit bench`
    measures whole steps):

        D V / (D + V)   D, V        nodes    float32   bfloat16
         24             128, 29      4,200      1.61       1.14
         64             128, 128     4,200      0.91       1.00
        114             128, 1025    4,200      1.35       1.30
        124             128, 4097    4,200      1.05       1.15
        205             256, 1025    4,200      1.05       1.03
        205             256, 1025   48,000      1.48       1.28
        256             512, 512     8,000      0.98       0.98
        256             512, 512    60,000      1.12       1.19
        394             640, 1025    8,000      1.03       0.95
        394             640, 1025   16,000      1.05       0.95
        394             640, 1025   60,000      1.13       1.23
        512             1024, 1025   8,000      0.91       0.90
        512             1024, 1025  60,000      1.57       1.19

    On a GPU the two have not been measured, so that only memory decides there.

    Args:
        B: Utterances.
        T: Encoder frames.
        U1: Lattice rows, labels + 1.
        V: Outputs of the joint: tokens with blank, and durations.
        D: Width of the joint.
        dtype: Type of the logits.
        device_type: "cpu" or "cuda".
        memory_bytes: Memory of the device in bytes; None where it is unknown.
    """
    size = joint_peak_bytes(B=B, T=T, U1=U1, V=V, D=D, dtype=dtype)
    if memory_bytes is not None and size > MEMORY_SHARE * memory_bytes:
        return True
    if device_type != "cpu" or dtype not in KERNEL_DTYPES:
        return False
    return D * V <= PRODUCT_WIDTH * (D + V) or size >= PAGED_BYTES


def lean_obstacle(model: TransducerModel) -> str:
    """Why the lean losses cannot stand for this model's joint; "" where they can.

    They compute output(dropout(activation(encoded + predicted))) with tanh or relu and one linear
    layer, and never call the modules themselves.
    """
    if type(model).join is not TransducerModel.join or "join" in vars(model):
        return "its join is its own"
    if model.activation not in (torch.tanh, torch.relu):
        return "its activation is neither tanh nor relu"
    if type(model.output) is not nn.Linear:
        return f"its output layer is {type(model.output).__name__}"
    if type(model.dropout) is not nn.Dropout:
        return f"its dropout is {type(model.dropout).__name__}"
    for module in (model.output, model.dropout):
        if _has_hooks(module):
            return "hooks wait on its joint"
    return ""


def takes_lean(
    model: TransducerModel,
    config: TrainConfig,
    *,
    B: int,
    T: int,
    U1: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether a step on a batch of this shape takes the lean loss.

    Args:
        model: Whose joint it is.
        config: Its `joint` is "auto", "full" or "lean".
        B: Utterances.
        T: Encoder frames.
        U1: Lattice rows, labels + 1.
        dtype: Type of the logits.
        device: Where the model computes.

    Raises:
        ValueError: joint="lean" with a joint that the lean losses cannot express.
    """
    if config.joint == "full":
        return False
    obstacle = lean_obstacle(model)
    if config.joint == "lean":
        remedy = "Pass joint='full' or joint='auto'."
        wanted = "a model whose joint the lean losses can express"
        expect(not obstacle, "joint", f"{wanted} with 'lean'", f"one of which {obstacle}", remedy)
        return True
    if obstacle:
        return False
    V, D = model.output.weight.shape
    return chooses_lean(
        B=B,
        T=T,
        U1=U1,
        V=V,
        D=D,
        dtype=dtype,
        device_type=device.type,
        memory_bytes=device_memory(device),
    )


def device_memory(device: torch.device) -> int | None:
    """Bytes of memory that the device has in all, None where that is unknown.

    What is free at the moment would make the choice, and so a resumed run, a matter of chance.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    quota = Path("/sys/fs/cgroup/memory.max")
    if not quota.exists():
        return installed
    allowed = quota.read_text().strip()
    if not allowed.isdigit():  # "max": no quota
        return installed
    return min(installed, int(allowed))


def _has_hooks(module: Any) -> bool:
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks)
