"""Ways to compute a model's forward pass, as arms of a case.

The name of an arm says how it computes: what is done to the model, then the arithmetic of its
products, as in "optimized_graphed_bfloat16".

    float32 bfloat16 float16    weights of that dtype, products too
    tf32                        products of float32 on a GPU
    int8                        linear layers on a CPU, the rest in its fast dtype
    autocast                    weights stay float32, products take them cast to bfloat16
    optimized                   by `asrkit.models.optimize`
    graphed                     replayed as a CUDA graph
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asrkit.cpu import fast_dtype, has_int8
from asrkit.cuda_graphs import capture
from asrkit.models.inference import LinearLayers, cast_copy, optimize, tf32
from asrkit.workbench.bench.ceilings import ceilings
from asrkit.workbench.machine import this_machine

TOLERANCE = {  # distance from eager float32 over its norm
    "float32": 1e-4,
    "tf32": 0.02,
    "bfloat16": 0.05,
    "float16": 0.01,
    "int8": 0.1,
}
Inputs = tuple[Tensor, Tensor]
Encode = Callable[[], tuple[Tensor, Tensor]]


class Work(NamedTuple):
    """What no way can do without: operations, and numbers that are read."""

    FLOP: int
    weights: int


def arithmetic(way: str) -> str:
    """The arithmetic of the products."""
    return way.rpartition("_")[2]


def weights_dtype(way: str) -> torch.dtype:
    """The dtype of the weights."""
    name = arithmetic(way)
    if name == "int8":  # those that do not become int8
        name = fast_dtype()
    elif name == "tf32" or way.startswith("autocast"):
        name = "float32"
    return getattr(torch, name)


def runs(way: str) -> bool:
    """Whether this machine computes so."""
    return arithmetic(way) != "int8" or has_int8()


def arm(
    model: nn.Module,
    inputs: Inputs,
    way: str,
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Encode:
    """A call that computes the model's outputs.

    Args:
        model: with weights of `weights_dtype(way)`.
        inputs: features (B, T, F) and lengths (B,).
        way: how to compute.
        scope: makes a context that each call runs in, such as one core.
    """
    features, lengths = inputs
    if "optimized" in way:
        layers: LinearLayers = "int8" if arithmetic(way) == "int8" else "as_it_is"
        model = optimize(cast_copy(model, weights_dtype(way)), linear_layers=layers)

    def encode() -> tuple[Tensor, Tensor]:
        autocast = torch.autocast(features.device.type, torch.bfloat16, enabled="autocast" in way)
        with scope(), torch.inference_mode(), tf32(way == "tf32"), autocast:
            return model(features, lengths)

    if "graphed" not in way:
        return encode
    graph, results = capture(encode)

    def replay() -> tuple[Tensor, Tensor]:
        graph.replay()
        return results

    return replay


def arm_params(way: str, work: Work, device: str, quick: bool) -> dict[str, Any]:
    """Params of an arm: its arithmetic, its least work, and the time that this takes at the
    ceilings of that arithmetic, but for int8, whose rate is not measured.

    Args:
        way: how the arm computes.
        work: of a call.
        device: "cpu" or "cuda".
        quick: take the ceilings at smaller sizes.
    """
    name = arithmetic(way)
    params = {"dtype": name, "tolerance": TOLERANCE[name], "floor_FLOP": work.FLOP}
    if name == "int8":
        return params
    read_B = work.weights * weights_dtype(way).itemsize
    top = ceilings(device, quick)
    return params | {
        "floor_B": read_B,
        "least_ms": top.floor_ms(work.FLOP, read_B, name),
        "peak_FLOP": top.flops[name],
        "peak_B": top.bytes_per_s,
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread on one core inside the block; afterwards all is as before.

    Where the system pins no thread, as macOS does not, the thread moves between cores.
    """
    this_machine()  # whose records, those of the block too, name all of its cores
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


def speech(B: int, seconds: float, bins: int, device: str) -> Inputs:
    """Noise as features (B, T, F), zeros in the padding, and lengths (B,) from T down to T / 2.

    Args:
        B: utterances.
        seconds: of the longest.
        bins: F.
        device: of the tensors.
    """
    T = round(100 * seconds)
    lengths = torch.linspace(T, T // 2, B).long()
    features = torch.randn(B, T, bins, generator=torch.Generator().manual_seed(1))
    features *= (torch.arange(T) < lengths[:, None])[..., None]
    return features.to(device), lengths.to(device)
