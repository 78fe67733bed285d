"""Numba's CUDA kernels of the transducer loss against the float64 reference, in Numba's simulator; on a device where there is one.

The simulator runs a kernel's Python, block after block, with real threads and barriers: it shows wrong indices, missing arcs
and barriers that not all threads reach. It does not show races between blocks, occupancy, float32 rounding inside sums (its
exp is float64), the device's own half types, or streams. So the kernels are compiled as well: the simulator also takes Python
that has no types.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from compiled import ARCHITECTURES, needs_nvvm, numba_spilled_B
from ragged import DTYPES, batch

from asrkit.losses import rnnt_loss

needs_numba_cuda = pytest.mark.skipif(
    not importlib.util.find_spec("numba_cuda"), reason="needs the package numba-cuda"
)


def check(logits, *rest, **options):
    """Values and gradients of numba_cuda within rounding of the float64 reference's."""
    found = []
    for impl, leaf in (("reference", logits.double()), ("numba_cuda", logits)):
        leaf = leaf.detach().requires_grad_()
        costs = rnnt_loss(leaf, *rest, reduction="none", impl=impl, **options)
        weight = torch.linspace(-1, 2, len(costs), device=costs.device).to(costs)
        found.append(
            (
                costs.detach().double(),
                torch.autograd.grad(costs, leaf, weight)[0].double(),
            )
        )
    (cost, grad), (ours, our_grad) = found
    torch.testing.assert_close(ours, cost, rtol=1e-6, atol=2e-6)
    half_unit = torch.finfo(logits.dtype).eps / 2  # rounded once
    torch.testing.assert_close(our_grad, grad, rtol=half_unit, atol=2e-6)


def check_all(device):
    """A ragged batch in each dtype, with every option of the kernels in one of them."""
    for dtype, options in zip(
        DTYPES,
        (
            {},
            {"clamp": 0.05, "fastemit_lambda": 0.3},
            {"blank": 0, "fused_log_softmax": False},
        ),
        strict=True,
    ):
        fused = options.get("fused_log_softmax", True)
        given = batch(
            3, 3, 4, 3, 21, dtype=dtype, blank=options.get("blank", -1), fused=fused,
            device=device,
        )  # fmt: skip
        check(*given, **options)


def simulate():
    """All of it with blocks so small that every loop goes round."""
    from asrkit.losses import numba_cuda as kernels

    sys.setswitchinterval(1e-5)  # the simulator polls its threads
    kernels.LANES = kernels.THREADS = 4
    kernels.ROWS = kernels.EACH = kernels.BLOCKS = 2
    check_all("cpu")


@needs_numba_cuda
def test_kernels_agree_with_the_reference_in_the_simulator():
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "OMP_NUM_THREADS": "1"}
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_numba_cuda as t; t.simulate()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


@needs_nvvm
@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_the_lattice_compiles_without_spills(cc, tmp_path):
    """The passes over the logits are compiled in test_rows.py."""
    from numba import types

    from asrkit.losses import numba_cuda as rnnt

    floats = types.Array(types.float32, 1, "C")
    table, sums = types.Array(types.int64, 2, "C"), types.Array(types.float64, 2, "C")
    lattice = (floats, floats, table, sums)
    for kernel, rest in (
        (rnnt._sweep, (types.Array(types.float64, 1, "C"),)),
        (rnnt._posteriors, (types.float64, floats, floats)),
    ):
        assert numba_spilled_B(kernel, (*lattice, *rest), cc, tmp_path) == 0


@pytest.mark.gpu
@needs_numba_cuda
def test_kernels_agree_with_the_reference_on_a_device():
    check_all("cuda")
    for dtype in DTYPES:
        check(*batch(8, 2, 40, 300, 65, dtype=dtype, device="cuda"))


@pytest.mark.gpu
@needs_numba_cuda
def test_kernels_run_behind_what_the_current_stream_holds():
    logits, *rest = batch(10, 4, 200, 50, 128, device="cuda")
    wanted = rnnt_loss(logits, *rest, impl="numba_cuda")
    stream, late = torch.cuda.Stream(), torch.zeros_like(logits)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        late.copy_(logits, non_blocking=True)
        cost = rnnt_loss(late, *rest, impl="numba_cuda")
    stream.synchronize()
    torch.testing.assert_close(cost, wanted, rtol=0, atol=0)
