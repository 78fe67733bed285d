"""The losses in Numba's CUDA kernels against the float64 reference, in Numba's simulator, and on a GPU if there is one.

The simulator runs a kernel's Python, block after block, with real threads and barriers: it shows wrong indices, missing arcs
and barriers that not all threads reach. It does not show races between blocks or streams, and it takes Python without types, so
the kernels are compiled as well.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from compiled import ARCHITECTURES, needs_nvvm, numba_spilled_B
from gpu_kernels import check_all, check_large, run_on_cpu
from ragged import DTYPES, batch

from asrkit.losses import rnnt_loss
from asrkit.memory import peak_memory

needs_numba_cuda = pytest.mark.skipif(
    not find_spec("numba_cuda"), reason="needs the package numba-cuda"
)


def check_memory(dtype, device):
    """Besides the gradient there are only lattices: no second tensor has the size of the logits."""
    logits, *rest = batch(5, 1, 2, 1, 4096, dtype=dtype, device=device)
    leaf = logits.requires_grad_()

    def step():
        loss = rnnt_loss(leaf, *rest, impl="numba_cuda")
        return torch.autograd.grad(loss, leaf)

    step()
    assert peak_memory(step, device=device) < 1.1 * logits.nbytes + 4096


def check_rounding():
    """bfloat16 is stored as torch rounds: ties to even, NaN stays NaN."""
    from asrkit.losses import numba_cuda as kernels

    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1.004, -torch.inf, torch.nan])
    stored = torch.zeros(5, dtype=torch.bfloat16)
    for i, value in enumerate(values.numpy()):
        kernels._store(kernels._array(stored), i, value)
    torch.testing.assert_close(
        stored, values.bfloat16(), equal_nan=True, rtol=0, atol=0
    )


def simulated():
    """All cases, with blocks so small that every loop repeats."""
    from asrkit.losses import numba_cuda as kernels

    sys.setswitchinterval(1e-5)  # the simulator polls its threads
    check_rounding()
    kernels.LANES = kernels.THREADS = 4
    kernels.ROWS = kernels.EACH = 2
    check_memory(torch.float16, "cpu")
    check_all("numba_cuda", "cpu", [rnnt_loss])


@needs_numba_cuda
def test_kernels_agree_with_the_reference_in_the_simulator():
    run_on_cpu(Path(__file__), NUMBA_ENABLE_CUDASIM="1")


@needs_numba_cuda
@pytest.mark.gpu
def test_kernels_agree_with_the_reference_on_a_gpu():
    check_all("numba_cuda", "cuda", [rnnt_loss])
    check_large("numba_cuda", [rnnt_loss])
    for dtype in DTYPES:
        check_memory(dtype, "cuda")


@needs_numba_cuda
@pytest.mark.gpu
def test_kernels_run_after_earlier_work_of_the_current_stream():
    logits, *rest = batch(10, 4, 200, 50, 128, device="cuda")
    expected = rnnt_loss(logits, *rest, impl="numba_cuda")
    stream = torch.cuda.Stream()
    late = torch.zeros_like(logits)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        late.copy_(logits, non_blocking=True)
        cost = rnnt_loss(late, *rest, impl="numba_cuda")
    stream.synchronize()
    torch.testing.assert_close(cost, expected, rtol=0, atol=0)


@needs_nvvm
@pytest.mark.live
@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_kernels_compile_without_spills(cc, tmp_path):
    from numba import types

    from asrkit.losses import numba_cuda as kernels

    floats = types.Array(types.float32, 1, "C")
    sums = types.Array(types.float64, 2, "C")
    table = types.Array(types.int64, 2, "C")
    lattice = (table, floats, floats, sums)
    kernel_types = [
        (kernels._sweep, lattice),
        (kernels._posteriors, (*lattice, types.float64, floats, floats)),
    ]
    options = (
        table,
        types.int64,
        types.int64,
        types.boolean,
    )  # targets, V, blank, fused
    for dtype in (types.float32, types.float16, types.uint16):  # uint16 for bfloat16
        logits = types.Array(dtype, 1, "C")
        outputs = (floats, floats, floats)
        kernel_types += [
            (kernels._scores, (table, logits, *options, *outputs)),
            (kernels._gradient, (table, logits, logits, *options, *outputs, floats)),
        ]
    for kernel, arguments in kernel_types:
        assert numba_spilled_B(kernel, arguments, cc, tmp_path) == 0
