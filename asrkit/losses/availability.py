"""Which implementation can run where, and why not."""

import functools
import warnings
from importlib import import_module

import torch
from torch import Tensor

from asrkit.losses.nodes import ArcLogProbs, LatticeOptions, Nodes
from asrkit.runtime import INTERPRETED, SIMULATED, lacks
from asrkit.shapes import expect

HALVES = (torch.float16, torch.bfloat16)


def fastest(scores: Tensor) -> str:
    """What `impl="auto"` stands for: the compiled kernels on a CPU, plain torch elsewhere and for
    float64.

    On CUDA the numba_cuda and triton kernels wait for a measurement before one of them becomes the
    default.
    """
    return (
        "numba_cpu"
        if scores.device.type == "cpu" and scores.dtype in (torch.float32, *HALVES)
        else "wavefront"
    )


def lattice_beside(scores: Tensor) -> str:
    """Which lattice follows Triton's kernels: Numba's on a GPU where numba-cuda is found to work,
    else that in plain torch.
    """
    try:
        expect_runs("numba_cuda", scores)
    except ValueError:
        return "wavefront"
    return "numba_cuda" if numba_cuda_works(scores.device) else "wavefront"


@functools.cache
def numba_cuda_works(device: torch.device) -> bool:
    """Whether a numba-cuda that compiles also solves a lattice of one node; if not, a
    RuntimeWarning says why. Asked once.
    """
    try:
        lattice = import_module("asrkit.losses.rnnt.numba_cuda").lattice
        node = torch.zeros(1, device=device)
        found = lattice(
            ArcLogProbs(node, node, node),
            Nodes.packed(torch.tensor([[1, 0]]), 1),
            LatticeOptions(blank=0),
            False,
        )
        (total,) = (
            found.log_likelihood.tolist()
        )  # waits, for only then is an error of the kernel known
        if total != 0:
            raise RuntimeError(f"a node that is certain has log-likelihood {total}")
    except Exception as error:
        remedy = "The lattice runs in plain torch, three launches a diagonal. Reinstall with pip install 'asrkit[cuda]'."
        warnings.warn(
            f"numba-cuda is installed and does not work: {error!r}. {remedy}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def pick(impl: str, impls: tuple[str, ...], logits: Tensor, overwrite_logits: bool) -> str:
    """Name of the implementation that `impl` stands for; ValueError where it is not one of `impls`
    or cannot run.
    """
    expect(
        impl in ("auto", *impls),
        "impl",
        "one of 'auto', " + ", ".join(map(repr, impls)),
        repr(impl),
    )
    picked = fastest(logits) if impl == "auto" else impl
    expect_runs(picked, logits)
    if overwrite_logits:
        able = picked not in ("torchaudio", "reference")
        expect(able, "overwrite_logits", f"False with impl={picked!r}", True, "Pass impl='auto'.")
        expect(
            logits.is_contiguous(),
            "logits",
            "contiguous with overwrite_logits=True",
            tuple(logits.stride()),
        )
    return picked


def expect_runs(impl: str, scores: Tensor, name: str = "logits") -> None:
    """ValueError that says why `impl` cannot run on these scores, and what can."""
    if impl in ("numba_cpu", "numba_cuda"):
        ok = scores.dtype in (torch.float32, *HALVES)
        expect(
            ok,
            name,
            f"float32, float16 or bfloat16 with impl={impl!r}",
            scores.dtype,
            "Pass impl='auto'.",
        )
    if impl == "numba_cpu":
        expect(
            scores.device.type == "cpu",
            name,
            "a CPU tensor with impl='numba_cpu'",
            scores.device,
            "Pass impl='auto'.",
        )
    if impl == "numba_cuda":
        why = lacks("numba_cuda")
        expect(
            not why,
            "impl",
            "'wavefront'",
            f"'numba_cuda', which fails here: {why}",
            "pip install 'asrkit[cuda]'.",
        )
    if impl == "triton":
        why = lacks("triton")
        expect(
            not why,
            "impl",
            "another implementation",
            f"'triton', which fails here: {why}",
            "Pass impl='auto'.",
        )
        expect(
            scores.dtype in (torch.float32, *HALVES),
            name,
            "float32, float16 or bfloat16 with impl='triton'",
            scores.dtype,
        )
    if impl in ("numba_cuda", "triton"):
        wanted = "cpu" if {"numba_cuda": SIMULATED, "triton": INTERPRETED}[impl] else "cuda"
        expect(
            scores.device.type == wanted,
            name,
            f"a {wanted} tensor with impl={impl!r}",
            scores.device,
        )
