"""The CUDA kernels against the float64 reference: in Numba's simulator anywhere, on a device where there is one.

The simulator runs a kernel's Python, block after block, with real threads and barriers: it shows wrong indices, missing arcs
and barriers that not all threads reach. It does not show races between blocks, occupancy, float32 rounding inside sums (its
exp is float64), the device's own half types, or streams. So the kernels are compiled to PTX as well, for the types of real
calls: the simulator also takes Python that has no types.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from itertools import product

import pytest
import torch

from asrkit.losses import rnnt_loss
from asrkit.losses.nodes import LatticeOptions, Nodes
from asrkit.losses.tdt import tdt_loss

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
needs_numba_cuda = pytest.mark.skipif(
    not importlib.util.find_spec("numba_cuda"), reason="needs the package numba-cuda"
)


def batch(
    seed,
    B,
    T,
    U,
    V,
    *,
    n=0,
    dtype=torch.float32,
    blank=-1,
    fused=True,
    layout="plain",
    device="cpu",
):
    """Random ragged (logits, targets, logit_lengths, target_lengths), with NaN for padding."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(B, T, U + 1, V + n, generator=g)
    logits = (logits if fused else logits.log_softmax(-1)).to(dtype)
    targets = torch.randint(0, V - 1, (B, U), generator=g)
    targets += (targets >= blank % V).long()
    frames, labels = torch.full((B,), T), torch.full((B,), U)
    frames[1:], labels[:-1] = (
        torch.randint(1, T + 1, (B - 1,), generator=g),
        torch.randint(0, U + 1, (B - 1,), generator=g),
    )
    for b in range(B):
        logits[b, frames[b] :] = logits[b, :, labels[b] + 1 :] = math.nan
        targets[b, labels[b] :] = -100
    logits = logits.to(device)
    if layout == "rows apart":  # tokens side by side, but in longer rows, and the batch inside
        logits = (
            torch.nn.functional.pad(logits, (0, 3))
            .transpose(0, 1)
            .contiguous()
            .transpose(0, 1)[..., : V + n]
        )
    elif layout == "tokens apart":
        logits = logits.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    return logits, targets.to(device), frames.to(device), labels.to(device)


def check(loss, logits, *rest, **options):
    """Values and gradients of numba_cuda within rounding of the float64 reference's."""
    weight = torch.linspace(-1, 2, len(logits), device=logits.device)
    overwrite = options.pop("overwrite_logits", False)
    exact = logits.double().requires_grad_()
    truth = loss(exact, *rest, reduction="none", impl="reference", **options)
    (wanted,) = torch.autograd.grad(truth, exact, weight.double())
    given = logits.detach().requires_grad_()
    cost = loss(
        given, *rest, reduction="none", impl="numba_cuda", overwrite_logits=overwrite, **options
    )
    (grad,) = torch.autograd.grad(cost, given, weight)
    assert (cost.dtype, grad.dtype) == (torch.float32, logits.dtype)
    assert (grad.data_ptr() == logits.data_ptr()) == overwrite
    torch.testing.assert_close(cost.detach().double(), truth.detach(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(
        grad.double(), wanted, rtol=torch.finfo(logits.dtype).eps / 2, atol=2e-6
    )  # rounded once


def check_alone(loss, *given, **options):
    """The loss is the same where no gradient is asked for."""
    costs = (
        loss(*given, impl="numba_cuda", **options),
        loss(given[0].requires_grad_(), *given[1:], impl="numba_cuda", **options),
    )
    torch.testing.assert_close(costs[0], costs[1].detach(), rtol=0, atol=0)


def check_packed(loss, logits, targets, frames, labels, **options):
    """Packed logits give what padded ones give."""
    from asrkit.losses.rnnt.numba_cuda import losses

    lengths, V = torch.stack((frames, labels), 1).cpu(), logits.shape[-1]
    flat = torch.cat(
        [
            one[:T, : U + 1].reshape(-1, V)
            for one, (T, U) in zip(logits, lengths.tolist(), strict=True)
        ]
    )
    flat, padded = flat.requires_grad_(), logits.detach().requires_grad_()
    costs = losses(flat, targets, Nodes.packed(lengths, V), LatticeOptions(blank=V - 1))
    wanted = loss(padded, targets, frames, labels, reduction="none", impl="numba_cuda")
    torch.testing.assert_close(costs, wanted, rtol=0, atol=0)
    (grad,), (whole,) = (
        torch.autograd.grad(costs.sum(), flat),
        torch.autograd.grad(wanted.sum(), padded),
    )
    cut = [
        one[:T, : U + 1].reshape(-1, V) for one, (T, U) in zip(whole, lengths.tolist(), strict=True)
    ]
    torch.testing.assert_close(grad, torch.cat(cut), rtol=0, atol=0)


def rnnt_cases(device):
    """Calls of `check`, one after another: options and shapes at random, then what is special."""
    choices = list(
        product(("plain", "rows apart", "tokens apart"), (-1.0, 0.05), (True, False), (0.0, 0.3))
    )
    for seed, (layout, clamp, fused, fastemit_lambda) in enumerate(choices):
        B, T, U, V = 1 + seed % 3, 1 + seed * 7 % 5, seed * 5 % 4, 2 + seed * 3 % 8
        dtype, blank = DTYPES[seed % 3], (-1, 0, 1)[seed // 3 % 3]
        given = batch(
            seed, B, T, U, V, dtype=dtype, blank=blank, fused=fused, layout=layout, device=device
        )
        options = {
            "blank": blank,
            "clamp": clamp,
            "fused_log_softmax": fused,
            "fastemit_lambda": fastemit_lambda,
        }
        yield lambda given=given, options=options: check(rnnt_loss, *given, **options)
    for seed, dtype in enumerate(DTYPES):
        for shape in (
            (1, 1, 0, 5),
            (2, 2, 9, 3),
            (2, 3, 2, 150),
        ):  # one node; more rows than frames and lanes; many tokens
            yield lambda seed=seed, shape=shape, dtype=dtype: check(
                rnnt_loss, *batch(seed, *shape, dtype=dtype, device=device)
            )
        given = batch(seed, 2, 4, 2, 5, dtype=dtype, device=device)
        yield lambda given=given: check(rnnt_loss, *given, overwrite_logits=True)
    yield lambda: check_alone(rnnt_loss, *batch(3, 2, 3, 2, 5, device=device))
    yield lambda: check_packed(rnnt_loss, *batch(3, 3, 4, 3, 6, device=device))
    yield lambda: check_impossible(rnnt_loss, *batch(4, 2, 3, 2, 5, device=device))


def tdt_cases(device):
    """The same for TDT."""
    durations = ((0, 1, 2), (1,), (2,), (0, 1, 2, 3, 4), (4, 1, 0), (0, 7, 1))
    for seed, (listed, (clamp, sigma)) in enumerate(
        product(durations, ((-1.0, 0.05), (0.05, 0.0)))
    ):
        B, T, U, V = 1 + seed % 3, 1 + seed * 7 % 6, seed * 5 % 4, 2 + seed * 3 % 6
        layout, dtype = ("plain", "rows apart", "tokens apart")[seed // 2 % 3], DTYPES[seed % 3]
        given = batch(seed, B, T, U, V, n=len(listed), dtype=dtype, layout=layout, device=device)
        options = {
            "durations": listed,
            "clamp": clamp,
            "sigma": sigma,
            "fastemit_lambda": 0.2 * (seed % 2),
        }
        yield lambda given=given, options=options: check(tdt_loss, *given, **options)
    given = batch(5, 2, 2, 9, 3, n=3, device=device)
    yield lambda: check(tdt_loss, *given, durations=(0, 1, 2), overwrite_logits=True)
    yield lambda: check(
        tdt_loss, *batch(6, 2, 3, 2, 4, n=2, device=device), durations=(0, 1), omega=1.0
    )
    yield lambda: check_alone(tdt_loss, *batch(6, 2, 3, 2, 4, n=2, device=device), durations=(0, 1))
    yield lambda: check_impossible(
        tdt_loss, *batch(7, 2, 3, 2, 5, n=3, device=device), durations=(0, 1, 2)
    )


def check_impossible(loss, logits, targets, frames, labels, **options):
    """A label that cannot be costs infinity and has no gradient; NaN and infinity that are no padding are not hidden."""
    given = logits.clone()
    given[1, :, :, targets[1, 0]] = -math.inf
    check(loss, given, targets, frames, labels, **options)
    for wrong in (math.nan, math.inf):
        logits[0, 0, 0, 0] = wrong
        cost = loss(logits, targets, frames, labels, reduction="none", impl="numba_cuda", **options)
        assert cost.isnan().tolist() == [True, False]


def run_all(device):
    """Number of cases that passed."""
    return sum(case() is None for case in (*rnnt_cases(device), *tdt_cases(device)))


@needs_numba_cuda
def test_kernels_agree_with_the_reference_in_the_simulator():
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "OMP_NUM_THREADS": "1"}
    warnings = [
        "-W",
        "error",
        "-W",
        "ignore:invalid value encountered:RuntimeWarning",
    ]  # infinity minus infinity, as it should be
    done = subprocess.run(
        [sys.executable, *warnings, __file__], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["cases"] >= 50


@needs_numba_cuda
@pytest.mark.skipif(
    not importlib.util.find_spec("nvidia.cu13.nvvm"), reason="needs NVVM: numba-cuda[cu13]"
)
def test_kernels_compile_for_the_types_of_real_calls(monkeypatch):
    from numba import typeof

    from asrkit.losses.logit_rows import numba_cuda as rows
    from asrkit.losses.rnnt import numba_cuda as rnnt
    from asrkit.losses.tdt import numba_cuda as tdt
    from asrkit.workbench.bench.row_kernels import numba_types
    from asrkit.workbench.profiling.cubin import compile_numba

    launched = {}

    def noted(kernel, blocks, threads, *arguments, shared=0):
        signature = tuple(
            typeof(a.numpy() if isinstance(a, torch.Tensor) else a) for a in rows.as_bits(arguments)
        )
        launched[kernel.py_func.__module__.split(".")[2] + kernel.py_func.__name__, signature] = (
            kernel
        )

    for loss, n, dtype in (
        (rnnt, 0, torch.float32),
        (rnnt, 0, torch.float16),
        (tdt, 3, torch.bfloat16),
    ):
        for module in (loss, rows):
            monkeypatch.setattr(module, "launch", noted)
        logits, targets, *lengths = batch(0, 2, 3, 2, 5, n=n, dtype=dtype)
        nodes = Nodes.padded(logits, torch.stack(lengths, 1))
        options = LatticeOptions(blank=4, clamp=0.1, fastemit_lambda=0.1, durations=tuple(range(n)))
        loss.losses(logits.requires_grad_(), targets, nodes, options).sum().backward()
        for name, types in numba_types(
            dtype
        ).items():  # these are compiled, and counted, in test_rows.py
            assert launched.pop((f"logit_rows_{name}", types)) is getattr(rows, f"_{name}")
    assert sorted(name for name, _ in launched) == [
        "rnnt_posteriors",
        "rnnt_sweep",
        "tdt_posteriors",
        "tdt_sweep",
    ]
    for (_, types), kernel in launched.items():
        made = compile_numba(kernel, types, cc=90, threads=rnnt.LANES)
        assert (made.spills, made.stack_B) == (0, 0)


@pytest.mark.gpu
@needs_numba_cuda
def test_kernels_agree_with_the_reference_on_a_device():
    assert run_all("cuda") >= 50
    for dtype, shape in product(DTYPES, ((2, 40, 300, 65), (2, 300, 20, 1030))):
        check(rnnt_loss, *batch(8, *shape, dtype=dtype, device="cuda"))
        check(tdt_loss, *batch(9, *shape, n=5, dtype=dtype, device="cuda"))


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


def main():
    """The worker: all cases in the simulator, with blocks so small that every loop goes round."""
    start = time.perf_counter()
    assert "numba.cuda" not in sys.modules  # importing the losses has not brought it in
    from asrkit.losses.logit_rows import numba_cuda as rows
    from asrkit.losses.rnnt import numba_cuda as rnnt
    from asrkit.losses.tdt import numba_cuda as tdt

    sys.setswitchinterval(1e-5)  # the simulator polls its threads
    rows.LANES = rnnt.LANES = tdt.LANES = 4
    rows.ROWS = rows.EACH = rows.BLOCKS = 2
    print(json.dumps({"cases": run_all("cpu"), "seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
