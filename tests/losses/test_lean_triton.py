"""The Triton kernels of the lean losses with no GPU: run in Triton's interpreter, compiled for three GPUs, launches counted.

What this cannot show: speed, the rounding of real half-precision hardware (the interpreter cuts bfloat16 off where a GPU
rounds), races between programs (there are none to share memory with). A test marked `gpu` runs the same cases for real.
"""

import math
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from asrkit.losses import availability, rnnt_loss_lean, tdt_loss_lean
from asrkit.workbench.profiling.fakes import lean_launches


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
    skip: float = 0.0
    halves: torch.dtype | None = None  # under autocast these are wider than the weight


CASES = [
    Case(activation=activation, dtype=dtype, dropout=dropout, durations=durations)
    for activation, dtypes in (("relu", (torch.float32, torch.float16)), ("tanh", (torch.float32, torch.bfloat16)))
    for dtype in dtypes
    for dropout, durations in ((0.0, (0, 2)), (0.3, ()))
] + [
    Case(B=1, T=1, U=0, D=8, V=29),
    Case(B=1, T=17, U=8, D=8, V=1025, activation="tanh"),  # more than one tile each way
    Case(B=1, T=3, U=2, D=640, V=29, dropout=0.3, activation="tanh"),
    Case(B=1, T=2, U=1, D=8, V=8198, durations=(0, 1, 2, 3, 4)),
    Case(B=5, T=20, U=0, D=72, V=64, dtype=torch.float16),  # no labels at all, and nothing to round up but D
    Case(B=2, T=40, U=12, V=8, skip=1e-3),
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
        ["loss", "encoded", "predicted", "weight", "bias"], truth, plain, ours, strict=True
    ):
        wanted, theirs, got = (result.double().cpu().nan_to_num(posinf=0) for result in results)
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
        "skip": case.skip,
        "tile": 200,
    }
    costs = loss(*leaves, *[part.to(device) for part in rest], reduction="none", impl=impl, **how)
    weight = torch.linspace(-1, 2, case.B).to(costs) * costs.isfinite()
    return [costs.detach(), *torch.autograd.grad(costs, leaves, weight)]


def test_kernels_err_no_more_than_plain_torch_in_the_interpreter():
    pytest.importorskip("triton")
    here = Path(__file__)
    test = (
        f"from {here.stem} import disagreements; assert not (found := disagreements('cpu')), found"
    )
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r}); {test}"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
def test_kernels_err_no_more_than_plain_torch_on_a_gpu():
    assert not disagreements("cuda")


SHAPE = {"B": 32, "T": 200, "U1": 101, "D": 640, "V": 1025}


@pytest.mark.parametrize("loss, most", [(rnnt_loss_lean, 40), (tdt_loss_lean, 45)])
def test_a_call_takes_few_launches_and_nobody_waits(loss, most):
    pytest.importorskip("triton")
    pytest.importorskip("numba_cuda")
    count = lean_launches(loss, **SHAPE, impl="triton", activation="tanh", dropout=0.1, skip=1e-7)
    kernels, runs = Counter(count.kernels), 6  # of at most 256 MiB of logits' gradient
    tdt = {"by_durations": runs} if loss is tdt_loss_lean else {}
    assert kernels == {
        "scores": 1,
        "_sweep": 1,
        "_posteriors": 1,
        "by_logits": runs,
        "by_halves": runs,
        **tdt,
    }
    assert count.ops["addmm"] == runs
    assert count.launches <= most, (kernels, +count.ops)


COMPILED = [(cc, torch.bfloat16, torch.bfloat16) for cc in (80, 90, 100)]
COMPILED += [
    (90, torch.bfloat16, torch.float32),
    (90, torch.float32, torch.float32),
]  # under autocast, and without


@pytest.mark.parametrize("cc, dtype, halves", COMPILED, ids=str)
def test_what_a_call_launches_compiles_without_spills_and_fills_eight_warps(cc, dtype, halves):
    pytest.importorskip("triton")
    loss, half = (tdt_loss_lean, True) if dtype == torch.bfloat16 else (rnnt_loss_lean, False)
    options = {"impl": "triton", "activation": "tanh", "dropout": 0.1, "seed": 1}
    made = lean_launches(
        loss, **SHAPE | {"B": 1}, dtype=dtype, halves=halves, cc=cc, compiles=True, **options
    ).compiled
    unit = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}[cc] if half else "FFMA"
    for name in ("scores", "by_logits", "by_halves"):
        kernel = made[name]
        taken = name, kernel.registers, kernel.stack_B, kernel.shared_B, kernel.opcodes
        assert (kernel.spills, kernel.stack_B) == (0, 0), taken
        assert (
            kernel.shared_B + 1024 <= {80: 164, 90: 228, 100: 228}[cc] * 1024 and kernel.warps >= 8
        ), taken
        assert kernel.opcodes[unit] >= 2 and half == any(
            "MMA" in opcode.replace("FFMA", "") for opcode in kernel.opcodes
        ), taken
        copies = [
            one for one in kernel.instructions if one.opcode.startswith("LDGSTS")
        ]  # under way while others are multiplied
        assert copies and all(one.bytes >= 8 for one in copies), (
            taken
        )  # V = 1025 is aligned by the padded weight


def test_float32_is_multiplied_as_such_unless_tf32_is_asked_for():
    pytest.importorskip("triton")
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for tf32 in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            asked = lean_launches(
                rnnt_loss_lean, **SHAPE, dtype=torch.float32, impl="triton"
            ).arguments
            assert [asked[name]["TF32"] for name in ("scores", "by_logits", "by_halves")] == [
                tf32
            ] * 3
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_a_broken_numba_cuda_leaves_the_lattice_to_torch(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, "asrkit.losses.rnnt.numba_cuda", None)  # its import raises
    availability.numba_cuda_works.cache_clear()
    fake = torch.zeros(1, device="meta")
    monkeypatch.setattr(
        availability, "expect_runs", lambda *given: None
    )  # installed, and the scores are on a GPU
    with pytest.warns(
        RuntimeWarning, match="numba-cuda is installed and does not work: ModuleNotFoundError"
    ):
        assert availability.lattice_beside(fake) == "wavefront"
    assert availability.lattice_beside(fake) == "wavefront"  # and says so once
    availability.numba_cuda_works.cache_clear()


def test_a_cpu_tensor_is_refused():
    with pytest.raises(ValueError) as error:
        rnnt_loss_lean(
            torch.zeros(1, 2, 2), torch.zeros(1, 1, 2), torch.zeros(3, 2), torch.zeros(3), torch.zeros(1, 0).long(),
            torch.tensor([2]), torch.tensor([0]), impl="triton",
        )  # fmt: skip
    assert str(error.value) == "encoded: expected a cuda tensor with impl='triton', got cpu."
