"""Numba's CUDA kernels of the lattice against the float64 reference, in Numba's simulator; on a device where there is one.

The simulator runs a kernel's Python, block after block, with real threads and barriers: it shows wrong indices, missing arcs
and barriers that not all threads reach. It does not show races between blocks, occupancy, or streams. So the kernels are compiled
as well: the simulator also takes Python that has no types.
"""

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "losses"))
from compiled import needs_nvvm, numba_spilled_B
from ragged import DTYPES, batch

from asrkit.losses import rnnt_loss

needs_numba_cuda = pytest.mark.skipif(
    not importlib.util.find_spec("numba_cuda"), reason="needs the package numba-cuda"
)


def check(loss, logits, *rest):
    """Values and gradients of `loss` within rounding of the float64 reference's."""
    found = []
    reference = partial(rnnt_loss, impl="reference")
    for function, leaf in ((reference, logits.double()), (loss, logits)):
        leaf = leaf.detach().requires_grad_()
        costs = function(leaf, *rest, reduction="none")
        weight = torch.linspace(-1, 2, len(costs), device=costs.device).to(costs)
        (gradient,) = torch.autograd.grad(costs, leaf, weight)
        found.append((costs.detach().double(), gradient.double()))
    (wanted, wanted_gradient), (costs, gradient) = found
    torch.testing.assert_close(costs, wanted, rtol=1e-6, atol=2e-6)
    half_unit = torch.finfo(logits.dtype).eps / 2  # rounded once
    torch.testing.assert_close(gradient, wanted_gradient, rtol=half_unit, atol=2e-6)


def check_all(device):
    """A ragged batch in each dtype."""
    from asrkit.workbench.lessons.shared.numba_cuda_loss import rnnt_loss_numba_cuda

    for dtype in DTYPES:
        inputs = batch(3, 3, 4, 3, 21, dtype=dtype, device=device)
        check(rnnt_loss_numba_cuda, *inputs)


def simulate():
    """All of it with blocks so small that every loop goes round."""
    from asrkit.workbench.lessons.shared import numba_cuda_loss as kernels

    sys.setswitchinterval(1e-5)  # the simulator polls its threads
    kernels.WARP = kernels.THREADS = 4
    kernels.BLOCKS = 2
    check_all("cpu")


@needs_numba_cuda
def test_kernels_agree_with_the_reference_in_the_simulator():
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "OMP_NUM_THREADS": "1"}
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_numba_cuda_loss as t; t.simulate()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.live
@needs_nvvm
@pytest.mark.parametrize("cc", [80, 90, 100])
def test_kernels_compile_without_spills(cc, tmp_path):
    from numba import types

    from asrkit.workbench.lessons.shared import numba_cuda_loss as kernels

    floats = types.Array(types.float32, 1, "C")
    table = types.Array(types.int64, 2, "C")
    sums = types.Array(types.float64, 2, "C")
    costs = types.Array(types.float64, 1, "C")
    for kernel, arguments in (
        (kernels._sweep, (floats, floats, table, sums, costs)),
        (kernels._posteriors, (floats, floats, table, sums, floats, floats)),
    ):
        assert numba_spilled_B(kernel, arguments, cc, tmp_path) == 0


@pytest.mark.gpu
@needs_numba_cuda
def test_kernels_agree_with_the_reference_on_a_device():
    from asrkit.workbench.lessons.shared.numba_cuda_loss import rnnt_loss_numba_cuda

    check_all("cuda")
    for dtype in DTYPES:
        inputs = batch(8, 2, 40, 300, 65, dtype=dtype, device="cuda")
        check(rnnt_loss_numba_cuda, *inputs)


@pytest.mark.gpu
@needs_numba_cuda
def test_kernels_run_behind_what_the_current_stream_holds():
    from asrkit.workbench.lessons.shared.numba_cuda_loss import rnnt_loss_numba_cuda

    logits, *rest = batch(10, 4, 200, 50, 128, device="cuda")
    wanted = rnnt_loss_numba_cuda(logits, *rest)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(logits)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        late.copy_(logits, non_blocking=True)
        cost = rnnt_loss_numba_cuda(late, *rest)
    stream.synchronize()
    torch.testing.assert_close(cost, wanted, rtol=0, atol=0)
