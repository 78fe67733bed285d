"""The Triton kernels of the lean losses with no GPU: run in Triton's interpreter, and compiled for one without a launch.

What this cannot show: speed, the rounding of real half-precision hardware (the interpreter cuts bfloat16 off where a GPU
rounds), races between programs (there are none to share memory with). A test marked `gpu` runs the same cases for real.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asrkit.losses import rnnt_loss_lean, tdt_loss_lean

CASES = [
    (activation, dtype, dropout, durations)
    for activation in ("relu", "tanh")
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for dropout, durations in ((0.0, (0, 2)), (0.3, ()))
]  # fmt: skip
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 0.15}  # of gradients, to the largest of each


def disagreements(device):
    """Cases in which Triton and plain torch differ by more than the format explains."""
    found = []
    for activation, dtype, dropout, durations in CASES:
        torch.manual_seed(0)
        B, T, U, D, V = 3, 5, 3, 20, 9
        sizes = (B, T, D), (B, U + 1, D), (V + len(durations), D), (V + len(durations),)
        given = [torch.randn(*size, 2).to(device, dtype)[..., 0].requires_grad_() for size in sizes]  # not contiguous
        rest = [torch.randint(0, V - 1, (B, U)), torch.tensor([5, 2, 1]), torch.tensor([2, 3, 0])]
        results = []
        for impl in ("plain", "triton"):
            loss, more = (tdt_loss_lean, {"durations": durations}) if durations else (rnnt_loss_lean, {"fastemit_lambda": 0.1})
            options = {"activation": activation, "dropout": dropout, "seed": 3, "tile": 8, "reduction": "none", "impl": impl}
            costs = loss(*given, *[part.to(device) for part in rest], **options, **more)
            weight = torch.tensor([1.0, -2, 3]).to(costs) * costs.isfinite()
            results.append([costs.detach().nan_to_num(posinf=0), *torch.autograd.grad(costs, given, weight)])
        for one, other in zip(*results, strict=True):
            if (one - other).abs().max() > TOLERANCE[dtype] * max(1.0, float(one.abs().max())):
                found.append((activation, dtype, dropout, durations, one.tolist(), other.tolist()))
    return found


def test_kernels_agree_with_plain_torch_in_the_interpreter():
    pytest.importorskip("triton")
    here = Path(__file__)
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r}); from {here.stem} import *; assert not disagreements('cpu')"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
def test_kernels_agree_with_plain_torch_on_a_gpu():
    assert not disagreements("cuda")


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_kernels_compile_for_a_gpu(dtype):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from asrkit.losses.lean import triton as kernels

    hidden = {"keep": "fp32", "least": "i64", "is_tanh": True, "drops": True, "D": 640, "BLOCK": 1024}
    rows = {"blank": "i32", "stride": "i32", "V": 1025, "BLOCK": 2048}
    pointers = {"encoded_row": "*i64", "predicted_row": "*i64", "keys": "*i64", "labels": "*i64"}
    pointers |= dict.fromkeys(("z", "stay", "emit", "by_blank", "by_label", "bias", "out"), "*fp32")
    for name, more in {"_join": hidden, "_slope": hidden, "_scores": rows, "_gradient": rows}.items():
        kernel = getattr(kernels, name)
        types = {argument: more.get(argument, pointers.get(argument, f"*{dtype}")) for argument in kernel.arg_names}
        signature = {argument: kind if isinstance(kind, str) else "constexpr" for argument, kind in types.items()}
        constants = {(kernel.arg_names.index(a),): kind for a, kind in types.items() if not isinstance(kind, str)}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        assert "sm_90" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


def test_a_cpu_tensor_is_refused():
    with pytest.raises(ValueError) as error:
        rnnt_loss_lean(
            torch.zeros(1, 2, 2), torch.zeros(1, 1, 2), torch.zeros(3, 2), torch.zeros(3), torch.zeros(1, 0).long(),
            torch.tensor([2]), torch.tensor([0]), impl="triton",
        )  # fmt: skip
    assert str(error.value) == "encoded: expected a cuda tensor with impl='triton', got cpu."
