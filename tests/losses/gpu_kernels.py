"""Cases that every file of GPU kernels must pass: the float64 reference, edges of lattices, packed logits.

They need torch and asrkit only, so that they run on a bare machine.
"""

import os
import subprocess
import sys
from importlib import import_module
from itertools import product
from math import inf, nan

import torch
from ragged import DTYPES, batch, expect_no_worse_than, graded

from asrkit.losses import rnnt_loss, rnnt_loss_packed, tdt_loss
from asrkit.losses.lattice import ArcLogProbs, LatticeOptions, Nodes

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


def check(impl, loss, sizes, dtype, options, device):
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
    options |= {"impl": impl, "overwrite_logits": over}
    actual = graded(loss, inputs, *rest, **options)
    assert actual[1].dtype == dtype
    assert (actual[1].data_ptr() == inputs.data_ptr()) == over
    cuts = impl == "triton" and dtype == BF16 and device == "cpu"
    eps = torch.finfo(dtype).eps
    for got, expected, rtol in zip(
        actual, exact, (1e-6, eps if cuts else eps / 2), strict=True
    ):
        torch.testing.assert_close(
            got.double(), expected.double(), rtol=rtol, atol=2e-6
        )
    tiny = torch.finfo(FP32).eps + cuts * eps
    expect_no_worse_than(plain, actual, exact, tiny)


def check_impossible(impl, loss, n, device, **options):
    """An impossible label costs infinity and has no gradient; NaN and infinite logits outside the padding give NaN."""
    logits, targets, *lengths = batch(4, 2, 3, 2, 33, n=n, device=device)
    options |= {"impl": impl}
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


def check_lattice(impl, T, U, durations, device):
    """Log-likelihoods and posteriors of a ragged batch equal those of the wavefront in plain torch."""
    ours, plain = (
        import_module(f"asrkit.losses.{name}") for name in (impl, "wavefront")
    )
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


def check_packed(impl, dtype, device):
    """A packed batch has the losses of the padded one, and the gradient of its valid nodes."""
    logits, targets, frames, labels = batch(6, 3, 4, 2, 21, dtype=dtype, device=device)
    rest = targets, frames, labels
    valid_frames = torch.arange(4, device=device) < frames[:, None]
    valid_rows = torch.arange(3, device=device) <= labels[:, None]
    valid = valid_frames[:, :, None] & valid_rows[:, None]  # (B, T, U1)
    cost, grad = graded(rnnt_loss, logits, *rest, impl=impl)
    actual = graded(rnnt_loss_packed, logits[valid], *rest, impl=impl)
    torch.testing.assert_close(actual, (cost, grad[valid]), rtol=0, atol=0)


def check_all(impl, device, losses=(rnnt_loss, tdt_loss)):
    """The cases of these losses that need no large blocks."""
    for T, U, durations in LATTICES:
        if not durations or tdt_loss in losses:
            check_lattice(impl, T, U, durations, device)
    for case in CASES:
        if case[0] in losses:
            check(impl, *case, device)
    check_impossible(impl, rnnt_loss, 0, device)
    if tdt_loss in losses:
        check_impossible(impl, tdt_loss, 2, device, durations=(0, 1))
    check_packed(impl, BF16, device)


def check_large(impl, losses=(rnnt_loss, tdt_loss)):
    """Lattices and vocabularies of several blocks, on a GPU."""
    for dtype, shape in product(DTYPES, ((2, 40, 30, 65), (2, 30, 20, 1030))):
        for loss in losses:
            check(impl, loss, shape, dtype, FIVE if loss is tdt_loss else {}, "cuda")
    check_lattice(impl, 40, 300, (), "cuda")


def run_on_cpu(file, **environment):
    """Run `simulated()` of a test file in a process with these environment variables."""
    paths = f"import sys; sys.path.insert(0, {str(file.parent)!r})"
    done = subprocess.run(
        [sys.executable, "-c", f"{paths}; from {file.stem} import *; simulated()"],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
