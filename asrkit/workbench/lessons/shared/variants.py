"""Variants of a model's forward pass, as arms of a case.

The name of a variant lists how the model is prepared, then the arithmetic of its products, as in
"optimized_graphed_bfloat16".

    float32 bfloat16 float16    weights and products in that dtype
    tf32                        float32 weights, products in TF32 on a GPU
    int8                        linear layers in int8 on a CPU, the rest in its fast dtype
    autocast                    float32 weights, cast to bfloat16 for products
    optimized                   prepared by `asrkit.models.optimize`
    graphed                     replayed as a CUDA graph
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asrkit.cpu import fast_dtype, has_int8
from asrkit.models.inference import LinearLayers, capture, cast_copy, optimize, tf32
from asrkit.workbench.machine import this_machine
from asrkit.workbench.measure.ceilings import ceilings

TOLERANCE = {  # relative distance from eager float32
    "float32": 1e-4,
    "tf32": 0.02,
    "bfloat16": 0.05,
    "float16": 0.01,
    "int8": 0.1,
}
Inputs = tuple[Tensor, Tensor]  # features (B, T, F) and lengths (B,)
Encode = Callable[[], tuple[Tensor, Tensor]]  # frames (B, T', D) and lengths (B,)


class Work(NamedTuple):
    """Work that no variant can avoid: operations, and weights that are read."""

    FLOP: int
    weights: int


def arithmetic(variant: str) -> str:
    """The arithmetic of the products."""
    return variant.rpartition("_")[2]


def weights_dtype(variant: str) -> torch.dtype:
    """The dtype of the weights."""
    name = arithmetic(variant)
    if name == "int8":  # dtype of the weights that stay floats
        name = fast_dtype()
    elif name == "tf32" or variant.startswith("autocast"):
        name = "float32"
    return getattr(torch, name)


def is_supported(variant: str) -> bool:
    """Whether this machine can run it."""
    return arithmetic(variant) != "int8" or has_int8()


def arm(
    model: nn.Module,
    inputs: Inputs,
    variant: str,
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Encode:
    """A call that computes the model's outputs.

    Args:
        model: its weights have `weights_dtype(variant)`.
        inputs: features (B, T, F) and lengths (B,).
        variant: name of the variant.
        scope: returns a context for each call, such as `one_thread`.
    """
    features, lengths = inputs
    device = features.device.type
    if "optimized" in variant:
        layers: LinearLayers = "int8" if arithmetic(variant) == "int8" else "as_it_is"
        model = optimize(cast_copy(model, weights_dtype(variant)), linear_layers=layers)

    def encode() -> tuple[Tensor, Tensor]:
        autocast = torch.autocast(device, torch.bfloat16, enabled="autocast" in variant)
        with scope(), torch.inference_mode(), tf32(variant == "tf32"), autocast:
            return model(features, lengths)

    if "graphed" not in variant:
        return encode
    graph, results = capture(encode)

    def replay() -> tuple[Tensor, Tensor]:
        graph.replay()
        return results

    return replay


def arm_params(variant: str, work: Work, device: str, quick: bool) -> dict[str, Any]:
    """Params of an arm: its arithmetic, its least work, and the time of that work at the machine's
    ceilings. For int8 no ceiling is measured.

    Args:
        variant: name of the variant.
        work: least work of a call.
        device: "cpu" or "cuda".
        quick: measure the ceilings at smaller sizes.
    """
    name = arithmetic(variant)
    params = {"dtype": name, "tolerance": TOLERANCE[name], "floor_FLOP": work.FLOP}
    if name == "int8":
        return params
    read_B = work.weights * weights_dtype(variant).itemsize
    top = ceilings(device, quick)
    return params | {
        "floor_B": read_B,
        "least_ms": top.floor_ms(work.FLOP, read_B, name),
        "peak_FLOP": top.flops[name],
        "peak_B": top.bytes_per_s,
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread on one core inside the block.

    macOS cannot pin a thread to a core, so there it may move.
    """
    this_machine()  # cached here, so that records of the block name all cores
    threads = torch.get_num_threads()
    cores = set()
    if hasattr(os, "sched_setaffinity"):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if cores:
            os.sched_setaffinity(0, cores)


def random_features(B: int, seconds: float, bins: int, device: str) -> Inputs:
    """Noise as features (B, T, F), with zeros in the padding, and lengths (B,) from T to T / 2.

    Args:
        B: number of utterances.
        seconds: length of the longest.
        bins: F.
        device: device of both tensors.
    """
    T = round(100 * seconds)
    lengths = torch.linspace(T, T // 2, B).long()
    features = torch.randn(B, T, bins, generator=torch.Generator().manual_seed(1))
    features *= (torch.arange(T) < lengths[:, None])[..., None]
    return features.to(device), lengths.to(device)
