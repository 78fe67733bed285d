"""The losses in Triton against the float64 reference, in Triton's interpreter, and on a GPU if there is one.

The interpreter runs a kernel's Python with NumPy, program after program. It shows wrong indices and wrong sums, but neither
races between lanes nor the rounding of exp2. It truncates bfloat16 where a GPU rounds, so an error of a whole unit is allowed.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from math import inf, nan
from pathlib import Path

import pytest
import torch

from asrkit.losses import rnnt_loss, tdt_loss
from asrkit.losses.lattice import ArcLogProbs, LatticeOptions, Nodes

sys.path.insert(0, str(Path(__file__).parent))
from compiled import ARCHITECTURES, triton_spilled_B
from ragged import DTYPES, batch, expect_no_worse_than, graded

needs_triton = pytest.mark.skipif(
    not find_spec("triton"), reason="needs the package triton"
)
FP32, FP16, BF16 = DTYPES
PLAIN = {"fused_log_softmax": False}
OVER = {"overwrite_logits": True}
FIVE = {"durations": (0, 1, 2, 3, 4)}
CASES = [  # loss, sizes, dtype, options; whole blocks of V, and vocabularies of checkpoints
    (rnnt_loss, (3, 4, 2, 30), FP32, {"blank": 0, "clamp": 0.05}),
    (rnnt_loss, (3, 3, 2, 29), FP16, PLAIN | {"fastemit_lambda": 0.3, "clamp": 0.05}),
    (rnnt_loss, (2, 4, 1, 31), BF16, {"blank": 1, "fastemit_lambda": 0.3}),
    (rnnt_loss, (2, 1, 2, 33), FP32, PLAIN),
    (rnnt_loss, (1, 1, 1, 1024), FP32, OVER),
    (rnnt_loss, (1, 1, 1, 1025), FP16, OVER),
    (rnnt_loss, (1, 1, 1, 8193), BF16, OVER),
    (tdt_loss, (2, 3, 1, 30), FP32, {"durations": (0, 1, 2), "sigma": 0.05}),
    (tdt_loss, (2, 3, 1, 30), FP16, {"durations": (2,), "clamp": 0.05}),
    (tdt_loss, (2, 3, 1, 30), BF16, FIVE | {"fastemit_lambda": 0.2}),
    (tdt_loss, (1, 2, 0, 8193), FP32, FIVE | OVER),
]


def check(loss, sizes, dtype, options, device):
    """Values and gradients are within rounding of the reference; errors are at most twice those of plain torch in the dtype."""
    options = options.copy()
    over = options.pop("overwrite_logits", False)
    durations = options.get("durations", ())
    shape = {"blank": options.get("blank", -1), "n": len(durations)}
    fused = options.get("fused_log_softmax", True)
    logits, *rest = batch(1, *sizes, dtype=dtype, fused=fused, device=device, **shape)
    exact = graded(loss, logits.double(), *rest, impl="reference", **options)
    plain = graded(loss, logits, *rest, impl="wavefront", **options)
    inputs = logits.clone()
    options |= {"impl": "triton", "overwrite_logits": over}
    actual = graded(loss, inputs, *rest, **options)
    assert actual[1].dtype == dtype
    assert (actual[1].data_ptr() == inputs.data_ptr()) == over
    cuts = dtype == BF16 and device == "cpu"
    eps = torch.finfo(dtype).eps
    for got, expected, rtol in zip(
        actual, exact, (1e-6, eps if cuts else eps / 2), strict=True
    ):
        torch.testing.assert_close(
            got.double(), expected.double(), rtol=rtol, atol=2e-6
        )
    tiny = torch.finfo(FP32).eps + cuts * eps
    expect_no_worse_than(plain, actual, exact, tiny)


def check_impossible(loss, n, device, **options):
    """An impossible label costs infinity and has no gradient; NaN and infinite logits outside the padding give NaN."""
    logits, targets, *lengths = batch(4, 2, 3, 2, 33, n=n, device=device)
    options |= {"impl": "triton"}
    broken = logits.clone()
    broken[1, :, :, targets[1, 0]] = -inf
    cost, grad = graded(loss, broken, targets, *lengths, **options)
    assert cost.isinf().tolist() == [False, True]
    assert grad[0].isfinite().all()
    assert (grad[1] == 0).all()
    for row in (nan, inf, -inf):
        broken = logits.clone()
        broken[0, 0, 0] = row
        cost = loss(broken, targets, *lengths, reduction="none", **options)
        assert cost.isnan().tolist() == [True, False]


def check_lattice(T, U, durations, device):
    """Log-likelihoods and posteriors of a ragged batch equal those of the wavefront in plain torch."""
    from asrkit.losses import triton as ours
    from asrkit.losses import wavefront as plain

    torch.manual_seed(T)
    lengths = torch.tensor([[T, U // 2], [(T + 1) // 2, U], [1, 0]])
    nodes = Nodes.packed(lengths, 2)
    blank, label = torch.randn(2, nodes.count, device=device).sub(1)
    for b in range(len(lengths)):
        T_b, U1, where = nodes.slices(b)
        label[where].view(T_b, U1)[:, -1] = -inf
    logits = torch.randn(nodes.count, len(durations), device=device)
    arcs = ArcLogProbs(torch.zeros_like(blank), blank, label, logits.log_softmax(-1))
    options = LatticeOptions(blank=0, fastemit_lambda=0.1, durations=durations)
    for gradient in (True, False):
        actual, expected = (
            vars(kernels.lattice(arcs, nodes, options, gradient))
            for kernels in (ours, plain)
        )
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=1e-7)


LATTICES = [  # more rows than frames and the reverse, U = 0, T = 1; durations beyond the end
    (7, 4, ()),
    (3, 21, ()),
    (1, 0, ()),
    (1, 9, ()),
    (12, 1, ()),
    (5, 9, (0, 1, 2, 3, 4)),
    (5, 9, (2,)),
    (5, 9, (0, 2**40, 1)),
]


def run_all(device):
    from asrkit.losses import triton

    usual = triton.BLOCK
    triton.BLOCK = 8  # most diagonals are longer
    for sizes in LATTICES:
        check_lattice(*sizes, device)
    triton.BLOCK = usual
    for sizes in LATTICES[4:6]:  # without durations, and with
        check_lattice(*sizes, device)
    for case in CASES:
        check(*case, device)
    check_impossible(rnnt_loss, 0, device)
    check_impossible(tdt_loss, 2, device, durations=(0, 1))


@needs_triton
def test_kernels_agree_with_the_reference_in_the_interpreter():
    here = Path(__file__)
    paths = f"import sys; sys.path.insert(0, {str(here.parent)!r})"
    done = subprocess.run(
        [sys.executable, "-c", f"{paths}; from {here.stem} import *; run_all('cpu')"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
@pytest.mark.gpu
def test_kernels_agree_with_the_reference_on_a_gpu():
    run_all("cuda")
    for dtype, shape in product(DTYPES, ((2, 40, 30, 65), (2, 30, 20, 1030))):
        check(rnnt_loss, shape, dtype, {}, "cuda")
        check(tdt_loss, shape, dtype, FIVE, "cuda")


@needs_triton
@pytest.mark.live
@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_the_lattice_compiles_without_spills(cc, tmp_path):
    from asrkit.losses import triton as lattice

    known = dict.fromkeys(("sums", "log_likelihood"), "*fp64")
    known |= dict.fromkeys(("table", "durations"), "*i64")
    known |= {"count": "i32", "label_factor": "fp32", "BLOCK": 128}
    options = {"num_warps": lattice.MAX_WARPS, "num_stages": 1}
    for N, ROOM in ((0, 1), (5, 8)):
        sizes = known | {"N": N, "ROOM": ROOM}
        for kernel in (lattice._sweep, lattice._posteriors):
            types = {name: sizes.get(name, "*fp32") for name in kernel.arg_names}
            assert triton_spilled_B(kernel, types, cc, tmp_path, **options) == 0
