"""Which implementation of a loss runs: what impl="auto" takes, or the named one if it can."""

import functools
import warnings
from importlib import import_module
from math import isclose, log

import torch
from torch import Tensor

from asrkit.compilers import INTERPRETED, JIT_OFF, triton_fails
from asrkit.losses.lattice import LatticeOptions, Nodes
from asrkit.shapes import expect, expect_choice

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DEVICES = {  # of the kernels' tensors
    "numba_cpu": "cpu",
    "triton": "cpu" if INTERPRETED else "cuda",
}
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

    Raises:
        RuntimeError: inside a capture of a CUDA graph, where nothing can be tried.
    """
    why = triton_fails()
    if not why:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a loss's first call cannot be captured: whether Triton works is not known yet. "
                "Call the loss once before capturing."
            )
        logits = torch.zeros(1, 1, 1, 2, dtype=torch.float32, device=device)
        targets = torch.zeros(1, 0, dtype=torch.int64, device=device)
        nodes = Nodes.padded(logits, torch.tensor([[1, 0]], device="cpu"))
        options = LatticeOptions(blank=0)
        try:
            kernels = import_module("asrkit.losses.triton")
            arcs = kernels.arc_log_probs(logits, targets, nodes, options)
            # tolist() waits for the kernels, whose errors are known only then
            (found,) = kernels.lattice(arcs, nodes, options, False).log_likelihood.tolist()
            if not isclose(found, -log(2), rel_tol=1e-5):
                why = f"a node of two equal tokens costs {-found} nats"
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
    expect_choice("impl", impl, ("auto", *impls))
    picked = fastest(logits) if impl == "auto" else impl
    expect_runs(picked, logits)
    if overwrite_logits:
        able = picked not in ("torchaudio", "reference")
        expect(able, "overwrite_logits", f"False with impl={picked!r}", True, AUTO)
        wanted = "contiguous with overwrite_logits=True"
        expect(logits.is_contiguous(), "logits", wanted, logits.stride())
    return picked


def expect_runs(impl: str, scores: Tensor, name: str = "logits") -> None:
    """Check that `impl` runs on `scores`, an argument called `name`.

    Raises:
        ValueError: it does not; the message says why, and what does.
    """
    if impl not in DEVICES:
        return
    if impl == "numba_cpu":
        why = "NUMBA_DISABLE_JIT is set" if JIT_OFF else ""
    else:
        why = triton_fails()
    expect(not why, "impl", "another implementation", f"{impl!r}, which fails here: {why}", AUTO)
    wanted = f"float32, float16 or bfloat16 with impl={impl!r}"
    expect(scores.dtype in KERNEL_DTYPES, name, wanted, scores.dtype, AUTO)
    wanted = f"a {DEVICES[impl]} tensor with impl={impl!r}"
    expect(scores.device.type == DEVICES[impl], name, wanted, scores.device)
