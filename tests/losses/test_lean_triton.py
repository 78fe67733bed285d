"""The lean losses in chunks without a GPU: run in Triton's interpreter, their kernels compiled for three GPUs.

This cannot show speed, the rounding of half-precision hardware (the interpreter truncates bfloat16, a GPU rounds it) or
races between programs (the interpreter runs one after another). A test marked `gpu` runs the same cases on a GPU.
"""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from asrkit.losses import pack_joint, rnnt_loss_lean, tdt_loss_lean
from asrkit.losses.lattice import Nodes

sys.path.insert(0, str(Path(__file__).parent))
from compiled import ARCHITECTURES, triton_spilled_B
from ragged import expect_no_worse_than, graded, halves, poisoned_halves

FP32 = torch.float32
FP16 = torch.float16
BF16 = torch.bfloat16


class Case(NamedTuple):
    """Sizes and arguments of a call."""

    B: int = 2
    T: int = 4
    U: int = 3
    D: int = 20
    V: int = 9
    dtype: torch.dtype = FP32
    activation: str = "relu"
    dropout: float = 0.0
    durations: tuple[int, ...] = ()
    tile: int = 7
    halves: torch.dtype | None = (
        None  # dtype of the halves; wider than the weight under autocast
    )


CASES = [
    Case(durations=(0, 2)),
    Case(dropout=0.3),
    Case(dtype=FP16, dropout=0.3),
    Case(dtype=BF16, activation="tanh", durations=(0, 2)),
    Case(B=1, T=1, U=0, D=8, V=29),
    Case(B=1, T=5, U=4, D=8, V=1025, activation="tanh", tile=15),
    Case(B=1, T=2, U=1, D=640, V=29, dropout=0.3, activation="tanh"),
    Case(B=1, T=2, U=1, D=8, V=8198, durations=(0, 1, 2, 3, 4)),
    # no labels, and only D has to be rounded up
    Case(B=3, T=5, U=0, D=72, V=64, dtype=FP16),
    Case(T=5, U=6, V=8, tile=50),
    Case(dtype=FP16, halves=FP32, activation="tanh"),
]


def check_all(device):
    """Triton's error is at most twice that of plain torch in the same dtype, both against float64."""
    for case in CASES:
        tensors, rest = drawn(case)
        loss = rnnt_loss_lean
        options = {"fastemit_lambda": 0.1}
        if case.durations:
            loss = tdt_loss_lean
            options = {"durations": case.durations}
        options |= {"activation": case.activation, "dropout": case.dropout}
        options |= {"seed": 2**32 - 5, "tile": case.tile}
        wide = [tensor.double() for tensor in tensors]
        truth = graded(loss, wide, *rest, impl="plain", **options)
        rival = graded(loss, tensors, *rest, impl="plain", **options)
        there = [tensor.to(device) for tensor in tensors]
        rest = [part.to(device) for part in rest]
        actual = graded(loss, there, *rest, impl="triton", **options)
        tiny = 4 * torch.finfo(case.dtype).eps
        if case.dtype == BF16 and device == "cpu":
            tiny *= 4  # the interpreter does not round it
        expect_no_worse_than(rival, actual, truth, tiny)
    for case, activation in product(CASES[:4], ("none", "relu", "tanh")):
        halves, rest = drawn(case)
        rest = [part.to(device) for part in rest]
        options = {"activation": activation, "dropout": case.dropout, "seed": 5}
        truth, rival, actual = (
            graded(squares, [half.to(device, dtype) for half in halves[:2]], *rest, impl=impl, **options)
            for dtype, impl in ((torch.float64, "plain"), (case.dtype, "plain"), (case.dtype, "triton"))
        )  # fmt: skip
        tiny = 32 * torch.finfo(case.dtype).eps
        expect_no_worse_than(rival, actual, truth, tiny)


def squares(encoded, predicted, _, *lengths, reduction, **options):
    """The sum of squares of each row of the packed joint, (N,)."""
    hidden = pack_joint(encoded, predicted, *lengths, **options)
    return hidden.float().square().sum(1)


def drawn(case):
    """Tensors that are not contiguous, with poisoned padding."""
    sizes = case[:5]
    tensors, rest = halves(0, *sizes, n=len(case.durations))
    tensors, rest = poisoned_halves(tensors, *rest)
    tensors[2] /= case.D**0.5
    of_halves = case.halves or case.dtype
    dtypes = [of_halves, of_halves, case.dtype, case.dtype]
    actual = []
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        twice = torch.stack((tensor, tensor), -1).to(dtype)
        actual.append(twice[..., 0])
    return actual, rest


def test_kernels_are_as_exact_as_plain_torch_in_the_interpreter():
    pytest.importorskip("triton")
    here = Path(__file__)
    paths = f"import sys; sys.path.insert(0, {str(here.parent)!r})"
    done = subprocess.run(
        [sys.executable, "-c", f"{paths}; from {here.stem} import *; check_all('cpu')"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
def test_kernels_are_as_exact_as_plain_torch_on_a_gpu():
    check_all("cuda")


@pytest.mark.parametrize("most", [1, 4, 9, 30, 50, 1000])
def test_chunks_have_all_nodes_and_at_most_the_given_number_each(most):
    pytest.importorskip("triton")
    from asrkit.losses.lean.triton import chunks

    lengths = torch.tensor([[5, 3], [1, 0], [9, 20], [2, 1], [4, 0]])
    nodes = Nodes.packed(lengths, 7)
    counts = [chunk.nodes.count for chunk in chunks(nodes, most, 7)]
    assert sum(counts) == nodes.count
    assert max(counts) <= max(most, 21)  # the longest frame has 21 nodes
    assert most < 1000 or len(counts) == 1


@pytest.mark.live
@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_kernels_compile_with_few_spills(cc, tmp_path):
    """For halves in bfloat16, and in float32 as under autocast; cuBLAS computes the products.

    Triton 3.6 spills at most 8 bytes of the backward kernel, 3.8 and 3.9 spill 16 and 24.
    """
    pytest.importorskip("triton")
    from asrkit.losses.lean import triton as lean

    kernel = lean._hidden_layer
    known = {"rows": "*bf16", "table": "*i64", "keep": "fp32"}
    known |= dict.fromkeys(("by_encoded", "by_predicted"), "*fp32")
    known |= {"FRAME_BLOCK": lean.FRAME_BLOCK, "LABEL_BLOCK": lean.LABEL_BLOCK}
    known |= {
        "COLUMN_BLOCK": lean.COLUMN_BLOCK,
        "ACTIVATION": lean.driver.TANH,
        "DROPS": True,
    }
    for dtype, backward in product(("*bf16", "*fp32"), (False, True)):
        known |= {"encoded": dtype, "predicted": dtype, "BACKWARD": backward}
        types = {name: known.get(name, "i32") for name in kernel.arg_names}
        assert triton_spilled_B(kernel, types, cc, tmp_path) <= 24, (dtype, backward)
