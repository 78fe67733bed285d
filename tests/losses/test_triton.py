"""The losses in Triton, rows and lattices, against the float64 reference, in Triton's interpreter; on a device where there is one.

The interpreter runs a kernel's Python with NumPy, program after program: it shows wrong places and wrong sums, and neither races
between lanes nor the rounding of exp2. It cuts bfloat16 off where a GPU rounds, so there a whole unit is let pass.
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

from asrkit.losses import rnnt_loss, rnnt_loss_packed, tdt_loss
from asrkit.losses.lattice import ArcLogProbs, LatticeOptions, Nodes
from asrkit.shapes import valid_mask

sys.path.insert(0, str(Path(__file__).parent))
from compiled import ARCHITECTURES, triton_spilled_B
from ragged import DTYPES, batch

needs_triton = pytest.mark.skipif(
    not find_spec("triton"), reason="needs the package triton"
)


def graded(loss, logits, rest, overwrite=False, **options):
    """Costs, and the gradient of their weighted sum."""
    leaf = logits.detach().requires_grad_()
    costs = loss(leaf, *rest, reduction="none", overwrite_logits=overwrite, **options)
    weight = (
        torch.linspace(-1, 2, len(costs), device=logits.device).to(costs)
        * costs.isfinite()
    )
    (grad,) = torch.autograd.grad(costs, leaf, weight)
    assert (
        grad.dtype == logits.dtype
        and (grad.data_ptr() == logits.data_ptr()) == overwrite
    )
    return costs.detach().double(), grad.double()


def check(loss, logits, *rest, overwrite=False, **options):
    """Values and gradients within rounding of the reference, and off by at most twice what plain torch is in the same dtype."""
    exact = graded(loss, logits.double(), rest, impl="reference", **options)
    plain = graded(loss, logits, rest, impl="wavefront", **options)
    found = graded(
        loss,
        logits.clone(memory_format=torch.preserve_format),
        rest,
        overwrite,
        impl="triton",
        **options,
    )
    units = 1.0 if logits.dtype == torch.bfloat16 and not logits.is_cuda else 0.5
    torch.testing.assert_close(found[0], exact[0], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(
        found[1], exact[1], rtol=units * torch.finfo(logits.dtype).eps, atol=2e-6
    )
    for ours, theirs, truth in zip(found, plain, exact, strict=True):
        off, plain_off, size = (
            torch.where(truth.isfinite(), part, 0).abs().max()
            for part in (ours - truth, theirs - truth, truth)
        )
        cut = torch.finfo(logits.dtype).eps * size * (units == 1)
        assert off <= 2 * plain_off + size * torch.finfo(torch.float32).eps + cut


def cases(device):
    """Calls of `check`, one after another: options and shapes at random, then what is special."""
    choices = product(range(3), (-1.0, 0.05), (True, False))
    for seed, (_, clamp, fused) in enumerate(choices):
        B, T, U, V = 1 + seed % 3, 1 + seed * 7 % 4, seed * 5 % 3, 29 + seed
        dtype, blank = DTYPES[seed % 3], (-1, 0, 1)[seed // 3 % 3]
        given = batch(
            seed,
            B,
            T,
            U,
            V,
            dtype=dtype,
            blank=blank,
            fused=fused,
            device=device,
        )
        options = {
            "blank": blank,
            "clamp": clamp,
            "fused_log_softmax": fused,
            "fastemit_lambda": 0.3 * (seed % 2),
        }
        yield lambda given=given, options=options: check(rnnt_loss, *given, **options)
    for seed, listed in enumerate(((0, 1, 2), (2,), (0, 1, 2, 3, 4))):
        options = {
            "durations": listed,
            "clamp": (-1.0, 0.05)[seed % 2],
            "sigma": 0.05,
            "fastemit_lambda": 0.2 * (seed % 2),
        }
        given = batch(
            seed, 2, 3, 1, 30, n=len(listed), dtype=DTYPES[seed], device=device
        )
        yield lambda given=given, options=options: check(tdt_loss, *given, **options)
    for dtype, V in zip(
        DTYPES, (1024, 1025, 8193), strict=True
    ):  # whole blocks; and the vocabularies of checkpoints
        yield lambda dtype=dtype, V=V: check(
            rnnt_loss, *batch(1, 1, 1, 1, V, dtype=dtype, device=device), overwrite=True
        )
    yield lambda: check(
        tdt_loss,
        *batch(1, 1, 2, 0, 8193, n=5, device=device),
        durations=(0, 1, 2, 3, 4),
        overwrite=True,
    )
    yield lambda: check_packed(*batch(3, 3, 3, 2, 31, device=device))
    yield lambda: check_impossible(rnnt_loss, *batch(4, 2, 3, 2, 33, device=device))
    yield lambda: check_impossible(
        tdt_loss, *batch(7, 2, 3, 2, 31, n=2, device=device), durations=(0, 1)
    )


def check_packed(logits, targets, frames, labels):
    """Packed logits give what padded ones give."""
    _, T, U1, _ = logits.shape
    valid = valid_mask(frames, T)[:, :, None] & valid_mask(labels + 1, U1)[:, None]
    padded = graded(rnnt_loss, logits, (targets, frames, labels), impl="triton")
    packed = graded(
        rnnt_loss_packed, logits[valid], (targets, frames, labels), impl="triton"
    )
    torch.testing.assert_close(packed[0], padded[0], rtol=0, atol=0)
    torch.testing.assert_close(packed[1], padded[1][valid], rtol=0, atol=0)


def check_impossible(loss, logits, targets, frames, labels, **options):
    """A label that cannot be costs infinity and has no gradient; NaN and infinite logits that are no padding are not hidden."""
    given = logits.clone()
    given[1, :, :, targets[1, 0]] = -inf
    check(loss, given, targets, frames, labels, **options)
    for row in (nan, inf, -inf):
        given = logits.clone()
        given[0, 0, 0] = row
        cost = loss(
            given, targets, frames, labels, reduction="none", impl="triton", **options
        )
        assert cost.isnan().tolist() == [True, False]


def check_lattice(T, U, durations=(), device="cpu"):
    """Log-likelihoods and posteriors of a ragged batch are those of the wavefront in plain torch."""
    from asrkit.losses import triton as ours
    from asrkit.losses import wavefront as plain

    torch.manual_seed(T)
    lengths = torch.tensor([[T, U // 2], [(T + 1) // 2, U], [1, 0]])
    nodes = Nodes.packed(lengths, 2)
    blank, label = torch.randn(2, nodes.count, device=device).sub(1).unbind()
    for b in range(len(lengths)):
        T_b, U1, where = nodes.slices(b)
        label[where].view(T_b, U1)[:, -1] = -inf
    by_duration = torch.randn(nodes.count, len(durations), device=device).log_softmax(
        -1
    )
    arcs = ArcLogProbs(torch.zeros_like(blank), blank, label, by_duration)
    options = LatticeOptions(blank=0, fastemit_lambda=0.1, durations=durations)
    for name, wanted in vars(plain.lattice(arcs, nodes, options, True)).items():
        found = getattr(ours.lattice(arcs, nodes, options, True), name)
        if wanted is None:
            assert found is None
        else:
            torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-7)
    alone = ours.lattice(arcs, nodes, options, False)
    torch.testing.assert_close(
        alone.log_likelihood, plain.lattice(arcs, nodes, options, False).log_likelihood
    )


def check_lattices(device):
    """More rows than frames and the reverse, U = 0, T = 1, durations that lead beyond the end."""
    for sizes in ((7, 4), (3, 21), (1, 0), (1, 9), (12, 1)):
        check_lattice(*sizes, device=device)
    for durations in ((0, 1, 2, 3, 4), (2,), (4, 1, 0), (0, 2**40, 1)):
        check_lattice(5, 9, durations, device)


def run_all(device):
    """Number of cases of whole losses that passed, after the lattices."""
    from asrkit.losses import triton

    check_lattices(device)
    block, triton.BLOCK = triton.BLOCK, 8  # most diagonals are longer than a block
    check_lattices(device)
    triton.BLOCK = block
    return sum(case() is None for case in cases(device))


@needs_triton
def test_kernels_agree_with_the_reference_in_the_interpreter():
    here = Path(__file__)
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r}); from {here.stem} import *; assert run_all('cpu') >= 20"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
@pytest.mark.gpu
def test_kernels_agree_with_the_reference_on_a_gpu():
    assert run_all("cuda") >= 20
    for dtype, shape in product(DTYPES, ((2, 40, 30, 65), (2, 30, 20, 1030))):
        check(rnnt_loss, *batch(8, *shape, dtype=dtype, device="cuda"))
        check(tdt_loss, *batch(9, *shape, n=5, dtype=dtype, device="cuda"))


@needs_triton
@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_the_lattice_compiles_without_spills(cc, tmp_path):
    from asrkit.losses import triton as lattice

    doubles, ints = ("sums", "log_likelihood"), ("table", "durations")
    known = dict.fromkeys(doubles, "*fp64") | dict.fromkeys(ints, "*i64")
    known |= {"count": "i32", "label_factor": "fp32", "BLOCK": 128}
    for N, ROOM in ((0, 1), (5, 8)):
        for kernel in (lattice._sweep, lattice._posteriors):
            sizes = known | {"N": N, "ROOM": ROOM}
            types = {name: sizes.get(name, "*fp32") for name in kernel.arg_names}
            options = {"num_warps": lattice.WARPS, "num_stages": 1}
            assert triton_spilled_B(kernel, types, cc, tmp_path, **options) == 0


def test_a_cpu_tensor_is_refused_and_the_remedy_named():
    with pytest.raises(
        ValueError, match="logits: expected a cuda tensor with impl='triton', got cpu"
    ):
        rnnt_loss(*batch(0, 1, 2, 1, 5), impl="triton")
