"""Which implementation of a loss can run on which tensors, and why one cannot."""

import functools
import warnings
from importlib import import_module

import torch
from torch import Tensor

from asrkit.losses.nodes import ArcLogProbs, LatticeOptions, Nodes
from asrkit.runtime import INTERPRETED, JIT_OFF, SIMULATED, lacks
from asrkit.shapes import expect

HALVES = (torch.float16, torch.bfloat16)
KERNEL_DTYPES = (torch.float32, *HALVES)  # of Numba's and Triton's kernels
AUTO = "Pass impl='auto'."


def fastest(scores: Tensor) -> str:
    """Name of the implementation that impl="auto" runs on `scores`.

    numba_cpu on a CPU, wavefront elsewhere, for float64 and with NUMBA_DISABLE_JIT=1. On CUDA the
    numba_cuda and triton kernels wait for a measurement before one of them becomes the default.
    """
    if not JIT_OFF and scores.device.type == "cpu" and scores.dtype in KERNEL_DTYPES:
        return "numba_cpu"
    return "wavefront"


def lattice_beside(scores: Tensor) -> str:
    """Name of the lattice to run between Triton's passes over `scores`.

    numba_cuda on a GPU where numba-cuda works, else wavefront.
    """
    try:
        expect_runs("numba_cuda", scores)
    except ValueError:
        return "wavefront"
    if numba_cuda_works(scores.device):
        return "numba_cuda"
    return "wavefront"


@functools.cache
def numba_cuda_works(device: torch.device) -> bool:
    """Whether numba-cuda, which compiles here, also solves a lattice of one node on `device`.

    Tried once in a process; a RuntimeWarning says why it does not.
    """
    try:
        _solve_one_node(device)
    except Exception as error:
        remedy = (
            "The lattice runs in plain torch, three launches a diagonal. "
            "Reinstall with pip install 'asrkit[cuda]'."
        )
        warnings.warn(
            f"numba-cuda is installed and does not work: {error!r}. {remedy}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _solve_one_node(device: torch.device) -> None:
    lattice = import_module("asrkit.losses.rnnt.numba_cuda").lattice
    certain = torch.zeros(1, device=device)
    arcs = ArcLogProbs(certain, certain, certain)
    nodes = Nodes.packed(torch.tensor([[1, 0]]), 1)
    solved = lattice(arcs, nodes, LatticeOptions(blank=0), False)
    # tolist() waits for the kernel, whose errors are known only then
    (log_likelihood,) = solved.log_likelihood.tolist()
    if log_likelihood != 0:
        raise RuntimeError(f"a node that is certain has log-likelihood {log_likelihood}")


def pick(impl: str, impls: tuple[str, ...], logits: Tensor, overwrite_logits: bool) -> str:
    """Name of the implementation that `impl` stands for.

    Args:
        impl: the caller's choice, "auto" or one of `impls`.
        impls: the implementations of this loss.
        logits: what it shall run on.
        overwrite_logits: whether the gradient shall be written over the logits.

    Raises:
        ValueError: `impl` is none of `impls`, or cannot run on these logits.
    """
    choices = ", ".join(map(repr, impls))
    expect(impl in ("auto", *impls), "impl", f"one of 'auto', {choices}", repr(impl))
    picked = impl
    if impl == "auto":
        picked = fastest(logits)
    expect_runs(picked, logits)
    if overwrite_logits:
        able = picked not in ("torchaudio", "reference")
        expect(able, "overwrite_logits", f"False with impl={picked!r}", True, AUTO)
        contiguous = logits.is_contiguous()
        stride = tuple(logits.stride())
        expect(contiguous, "logits", "contiguous with overwrite_logits=True", stride)
    return picked


def expect_runs(impl: str, scores: Tensor, name: str = "logits") -> None:
    """Check that `impl` runs on `scores`, an argument called `name`.

    Raises:
        ValueError: it does not; the message says why, and what does.
    """
    if impl == "numba_cpu":
        got = "'numba_cpu' with NUMBA_DISABLE_JIT=1"
        expect(not JIT_OFF, "impl", "another implementation", got, AUTO)
        _expect_dtype(impl, scores, name, AUTO)
        on_cpu = scores.device.type == "cpu"
        expect(on_cpu, name, "a CPU tensor with impl='numba_cpu'", scores.device, AUTO)
    elif impl == "numba_cuda":
        _expect_dtype(impl, scores, name, AUTO)
        why = lacks("numba_cuda")
        got = f"'numba_cuda', which fails here: {why}"
        expect(not why, "impl", "'wavefront'", got, "pip install 'asrkit[cuda]'.")
        _expect_device(_gpu_or_cpu(simulated=SIMULATED), impl, scores, name)
    elif impl == "triton":
        why = lacks("triton")
        got = f"'triton', which fails here: {why}"
        expect(not why, "impl", "another implementation", got, AUTO)
        _expect_dtype(impl, scores, name)
        _expect_device(_gpu_or_cpu(simulated=INTERPRETED), impl, scores, name)


def _gpu_or_cpu(*, simulated: bool) -> str:
    """The type of device that a kernel's tensors lie on, on a GPU or simulated on a CPU."""
    if simulated:
        return "cpu"
    return "cuda"


def _expect_dtype(impl: str, scores: Tensor, name: str, remedy: str = "") -> None:
    wanted = f"float32, float16 or bfloat16 with impl={impl!r}"
    expect(scores.dtype in KERNEL_DTYPES, name, wanted, scores.dtype, remedy)


def _expect_device(wanted: str, impl: str, scores: Tensor, name: str) -> None:
    runs = scores.device.type == wanted
    expect(runs, name, f"a {wanted} tensor with impl={impl!r}", scores.device)
