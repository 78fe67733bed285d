"""Triton's passes over the logits: their compiled code, and the width of their loads."""

import sys
from pathlib import Path

import pytest
import torch

from asrkit.losses.lattice import Nodes

sys.path.insert(0, str(Path(__file__).parent))
from compiled import triton_spilled_B

pytest.importorskip("triton")
FP32 = torch.float32
FP16 = torch.float16
BF16 = torch.bfloat16
OF_TRITON = {FP32: "*fp32", FP16: "*fp16", BF16: "*bf16"}


def triton_kernels(dtype, V, n, **constants):
    """Triton's two passes, each with the types of its arguments and the values of its constants."""
    from asrkit.losses import triton_rows as rows

    known = dict.fromkeys(("table", "targets"), "*i64") | {
        "U": "i32",
        "blank": "i32",
    }
    known |= {"logits": OF_TRITON[dtype], "out": OF_TRITON[dtype], "V": V, "N": n}
    known |= {"FUSED": True, "TOGETHER": 1} | rows.blocks(V, n) | constants
    for kernel in (rows._scores, rows._gradient):
        yield kernel, {name: known.get(name, "*fp32") for name in kernel.arg_names}


# At a launch, integer arguments of 1 become constants.
OPTIONS = {"FUSED": False, "U": 1, "blank": 1}


@pytest.mark.parametrize(
    "dtype, V, n, cc, constants",
    [
        (BF16, 1025, 0, 80, {}),
        (FP32, 8193, 5, 90, {}),
        (FP16, 29, 0, 90, {}),
        (BF16, 1025, 0, 100, {}),
        (BF16, 1024, 0, 80, {"TOGETHER": 8}),
        (BF16, 29, 0, 90, OPTIONS),
        (BF16, 29, 2, 90, OPTIONS | {"FUSED": True}),
    ],
)
@pytest.mark.live
def test_passes_of_triton_compile_without_spills(dtype, V, n, cc, constants, tmp_path):
    """The interpreter accepts code that the compiler rejects: a name that changes its type, or is undefined in a branch."""
    for kernel, types in triton_kernels(dtype, V, n, **constants):
        assert triton_spilled_B(kernel, types, cc, tmp_path, num_warps=1) == 0


@pytest.mark.parametrize("dtype, size", [(FP32, 4), (BF16, 8)], ids=str)
def test_lanes_read_16_bytes_only_if_every_row_is_aligned(dtype, size):
    """An unaligned wide access is an error on a GPU, which the interpreter would not detect."""
    from asrkit.losses.triton_rows import together

    def width(logits, row):
        lengths = torch.tensor([[4, 2], [3, 1]])
        nodes = Nodes.packed(lengths, row)
        return together(logits, nodes)

    whole = torch.zeros(18 * 1028 + 1, dtype=dtype)
    assert width(whole, 1024) == size
    assert width(whole, 1025) == width(whole[1:], 1024) == 1
    assert width(whole, 1028) == (size if 1028 % size == 0 else 1)
