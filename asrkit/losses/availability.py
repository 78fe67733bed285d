"""Which implementation of a loss can run on which tensors, and why one cannot."""

import functools
import warnings
from importlib import import_module
from math import isclose, log

import torch
from torch import Tensor

from asrkit.losses.nodes import LatticeOptions, Nodes
from asrkit.runtime import INTERPRETED, JIT_OFF, SIMULATED, lacks
from asrkit.shapes import expect

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of Numba's and Triton's kernels
AUTO = "Pass impl='auto'."


def fastest(scores: Tensor) -> str:
    """Name of the implementation that impl="auto" runs on `scores`.

    numba_cpu on a CPU, triton on a GPU where it works; wavefront elsewhere, for float64 and with
    NUMBA_DISABLE_JIT=1.
    """
    if scores.dtype in KERNEL_DTYPES:
        if not JIT_OFF and scores.device.type == "cpu":
            return "numba_cpu"
        if scores.device.type == "cuda" and triton_works(scores.device):
            return "triton"
    return "wavefront"


@functools.cache
def triton_works(device: torch.device) -> bool:
    """Whether Triton finds the loss of a lattice of one node on `device`.

    Tried once in a process; a RuntimeWarning says why it does not.
    """
    why = lacks("triton")
    if not why:
        try:
            _solve_one_node(device)
        except Exception as error:
            why = repr(error)
    if why:
        warnings.warn(
            f"Triton's losses do not work on {device}: {why}. "
            "They run in plain torch, some launches a diagonal.",
            RuntimeWarning,
            stacklevel=2,
        )
    return not why


def _solve_one_node(device: torch.device) -> None:
    losses = import_module("asrkit.losses.rnnt.triton").losses
    logits = torch.zeros(1, 1, 1, 2, device=device)
    targets = torch.zeros(1, 0, dtype=torch.int64, device=device)
    nodes = Nodes.padded(logits, torch.tensor([[1, 0]], device="cpu"))
    # tolist() waits for the kernels, whose errors are known only then
    (loss,) = losses(logits, targets, nodes, LatticeOptions(blank=0)).tolist()
    if not isclose(loss, log(2), rel_tol=1e-5):
        raise RuntimeError(f"a node of two equal tokens costs {loss} nats")


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
