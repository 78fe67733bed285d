"""The lean losses in chunks with no GPU: run in Triton's interpreter, their kernels compiled for three GPUs.

What this cannot show: speed, the rounding of real half-precision hardware (the interpreter cuts bfloat16 off where a GPU
rounds), races between programs (there are none to share memory with). A test marked `gpu` runs the same cases for real.
"""

import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from asrkit.losses import rnnt_loss_lean, tdt_loss_lean
from asrkit.losses.lattice import FIRST_NODE, Nodes

sys.path.insert(0, str(Path(__file__).parent))
from compiled import ARCHITECTURES, triton_spilled_B


class Case(NamedTuple):
    """Sizes, and what else a loss is asked for."""

    B: int = 3
    T: int = 5
    U: int = 3
    D: int = 20
    V: int = 9
    dtype: torch.dtype = torch.float32
    activation: str = "relu"
    dropout: float = 0.0
    durations: tuple[int, ...] = ()
    tile: int = 7
    halves: torch.dtype | None = None  # under autocast these are wider than the weight


CASES = [
    Case(activation=activation, dtype=dtype, dropout=dropout, durations=durations)
    for activation, dtypes in (("relu", (torch.float32, torch.float16)), ("tanh", (torch.float32, torch.bfloat16)))
    for dtype in dtypes
    for dropout, durations in ((0.0, (0, 2)), (0.3, ()))
] + [
    Case(B=1, T=1, U=0, D=8, V=29),
    Case(B=1, T=17, U=8, D=8, V=1025, activation="tanh", tile=50),
    Case(B=1, T=3, U=2, D=640, V=29, dropout=0.3, activation="tanh"),
    Case(B=1, T=2, U=1, D=8, V=8198, durations=(0, 1, 2, 3, 4)),
    Case(B=5, T=20, U=0, D=72, V=64, dtype=torch.float16),  # no labels at all, and nothing to round up but D
    Case(B=2, T=20, U=6, V=8, tile=200),
    Case(dtype=torch.float16, halves=torch.float32, activation="tanh"),
]  # fmt: skip


def disagreements(device):
    """Cases in which Triton errs by more than twice what plain torch errs in the same dtype, both against float64."""
    return [(case, wrong) for case in CASES if (wrong := errors(case, device))]


def errors(case, device):
    """(what, error, allowed) of the loss and of the four gradients, where the error is larger."""
    torch.manual_seed(case.V)
    given, rest = tensors(case)
    truth = graded(case, [tensor.double() for tensor in given], rest, "plain")
    plain = graded(case, given, rest, "plain")
    ours = graded(case, given, rest, "triton", device)
    assert torch.equal(ours[0].isinf().cpu(), truth[0].isinf())
    cut_off = (
        2 if case.dtype == torch.bfloat16 and device == "cpu" else 1
    )  # not rounded: twice the error
    found = []
    for what, *results in zip(
        ["loss", "encoded", "predicted", "weight", "bias"],
        truth,
        plain,
        ours,
        strict=True,
    ):
        wanted, theirs, got = (
            result.double().cpu().nan_to_num(posinf=0) for result in results
        )
        error, tiny = (
            float((got - wanted).abs().max()),
            4 * torch.finfo(case.dtype).eps * max(1.0, float(wanted.abs().max())),
        )
        allowed = cut_off * (2 * float((theirs - wanted).abs().max()) + tiny)
        if not error <= allowed:
            found.append((what, error, allowed))
    return found


def tensors(case):
    """Halves with NaN in the padding, weight and bias, none contiguous; targets with wild values there, and ragged lengths."""
    B, T, U, D, V = case[:5]
    frames, labels = torch.linspace(T, 1, B).long(), torch.linspace(U // 2, U, B).long()
    outputs = V + len(case.durations)
    sizes = (B, T, D), (B, U + 1, D), (outputs, D), (outputs,)
    given = [torch.randn(*size, 2)[..., 0] for size in sizes]
    targets = torch.randint(0, V - 1, (B, U))
    for b in range(B):
        given[0][b, frames[b] :] = math.nan
        given[1][b, labels[b] + 1 :] = math.nan
        targets[b, labels[b] :] = 10**6
    given[2] /= D**0.5
    dtypes = [case.halves or case.dtype] * 2 + [case.dtype] * 2
    return [tensor.to(dtype) for tensor, dtype in zip(given, dtypes, strict=True)], [
        targets,
        frames,
        labels,
    ]


def graded(case, given, rest, impl, device="cpu"):
    """Loss (B,) and its gradients by the four tensors, weighted; 0 where a loss is infinite."""
    leaves = [tensor.to(device).detach().requires_grad_() for tensor in given]
    loss = (
        partial(tdt_loss_lean, durations=case.durations)
        if case.durations
        else partial(rnnt_loss_lean, fastemit_lambda=0.1)
    )
    how = {
        "activation": case.activation,
        "dropout": case.dropout,
        "seed": 2**32 - 5,
        "tile": case.tile,
    }
    costs = loss(
        *leaves, *[part.to(device) for part in rest], reduction="none", impl=impl, **how
    )
    weight = torch.linspace(-1, 2, case.B).to(costs) * costs.isfinite()
    return [costs.detach(), *torch.autograd.grad(costs, leaves, weight)]


def test_kernels_err_no_more_than_plain_torch_in_the_interpreter():
    pytest.importorskip("triton")
    here = Path(__file__)
    test = f"from {here.stem} import disagreements; assert not (found := disagreements('cpu')), found"
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r}); {test}"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
def test_kernels_err_no_more_than_plain_torch_on_a_gpu():
    assert not disagreements("cuda")


def test_chunks_hold_every_node_once_and_no_more_than_asked_for():
    pytest.importorskip("triton")
    from asrkit.losses.lean.triton import chunks

    lengths = torch.tensor([[5, 3], [1, 0], [9, 20], [2, 1], [4, 0]])
    nodes = Nodes.packed(lengths, 7)
    for most in (1, 4, 9, 30, 50, 1000):
        places, found = [], [*chunks(nodes, most, 7)]
        for chunk in found:
            assert chunk.nodes.count <= max(most, 21)  # the longest frame has 21 nodes
            end = 0
            for p, (T, U, node, logit, *_) in enumerate(chunk.nodes.table.tolist()):
                frame = chunk.t if p == 0 else 0
                start = int(nodes.table[chunk.b + p, FIRST_NODE])
                assert node == start + frame * (U + 1)
                assert logit == 7 * end
                places += range(node, node + T * (U + 1))
                end += T * (U + 1)
        assert places == [*range(nodes.count)]
        assert most < 1000 or len(found) == 1


@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_kernels_compile_with_one_spilled_number_at_most(cc, tmp_path):
    """For halves in bfloat16, and in float32 as autocast leaves them; the products are cuBLAS's."""
    pytest.importorskip("triton")
    from asrkit.losses.lean import triton as lean

    tensors = dict.fromkeys(("hidden", "by_hidden"), "*bf16") | {"table": "*i64"}
    tensors |= dict.fromkeys(("by_encoded", "by_predicted", "keep"), "*fp32") | {
        "keep": "fp32"
    }
    constants = {
        "FRAMES_OF": lean.FRAMES_OF,
        "LABELS_OF": lean.LABELS_OF,
    }
    constants |= {"COLUMNS": lean.COLUMNS, "IS_TANH": True, "DROPS": True}
    for halves in ("*bf16", "*fp32"):
        known = tensors | constants | {"encoded": halves, "predicted": halves}
        for kernel in (lean._hidden, lean._halves):
            types = {name: known.get(name, "i32") for name in kernel.arg_names}
            assert triton_spilled_B(kernel, types, cc, tmp_path) <= 8, kernel


def test_a_cpu_tensor_is_refused():
    with pytest.raises(ValueError) as error:
        rnnt_loss_lean(
            torch.zeros(1, 2, 2), torch.zeros(1, 1, 2), torch.zeros(3, 2), torch.zeros(3), torch.zeros(1, 0).long(),
            torch.tensor([2]), torch.tensor([0]), impl="triton",
        )  # fmt: skip
    assert (
        str(error.value)
        == "encoded: expected a cuda tensor with impl='triton', got cpu."
    )
