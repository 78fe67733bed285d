"""Ways to compute a model's forward pass, as arms of a case: the arithmetic of its products, how it
is executed, and beside each the least work, and the time of that at the machine's ceilings.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from asrkit.cpu import fast_dtype
from asrkit.models.execution import EncoderForm, capture, cast_copy, prepare, tf32
from asrkit.workbench.bench.cases import Case
from asrkit.workbench.bench.ceilings import ceilings
from asrkit.workbench.machine import this_machine

M = TypeVar("M", bound=nn.Module)
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


@dataclass(frozen=True, kw_only=True)
class Way:
    """How an arm computes: the arithmetic of its products, and how the model is executed."""

    arithmetic: str = "float32"
    autocast: bool = False  # weights stay float32, products take them cast
    form: EncoderForm = "eager"  # of `asrkit.models.execution.prepare`
    graphed: bool = False  # replayed as a CUDA graph
    # attention by cuDNN where torch prefers that, as on Hopper: it makes a plan for each new (B, T)
    cudnn: bool = True

    @property
    def weights(self) -> torch.dtype:
        """The dtype of the weights."""
        if self.autocast or self.arithmetic == "tf32":
            return torch.float32
        if self.arithmetic == "int8":  # those that do not become int8
            return getattr(torch, fast_dtype())
        return getattr(torch, self.arithmetic)


def case(
    what: str,
    ways: Mapping[str, Way],
    model: nn.Module,
    inputs: Inputs,
    work: Work,
    quick: bool,
    **params: Any,
) -> Case:
    """An arm for each way, and beside it its least work; on a CPU `cores=1` keeps all on one core.

    Args:
        what: the name of the case.
        ways: by name of the arm; the first is what the others are compared with.
        model: float32, returns frames or log-probabilities, and lengths.
        inputs: features (B, T, F) and lengths (B,), where the model is.
        work: of a call.
        quick: take the ceilings at smaller sizes.
        params: more params of all records.
    """
    features, lengths = inputs
    device = features.device.type
    scope = scope_of(params.get("cores"))
    models = {dtype: twin(model, dtype) for dtype in {way.weights for way in ways.values()}}
    with scope():
        params_of_arms = {name: arm_params(way, work, device, quick) for name, way in ways.items()}
    first, *others = ways
    return Case(
        what=what,
        arms={name: arm(models[way.weights], inputs, way, scope) for name, way in ways.items()},
        params={
            "shape": [*features.shape[:2]],
            "audio_s": lengths.sum().item() / 100,
            "weights": "random",
            **params,
        },
        arm_params=params_of_arms,
        ratios=[(first, name) for name in others],
        warmup=1,
    )


def scope_of(cores: int | None) -> Callable[[], AbstractContextManager[Any]]:
    """What makes the context of each call: one core, or nothing."""
    return one_thread if cores == 1 else nullcontext


def arm_params(way: Way, work: Work, device: str, quick: bool) -> dict[str, Any]:
    """Params of an arm: its arithmetic, its least work, and the time that this takes at the
    ceilings of that arithmetic, but for int8, whose rate is not measured.

    Args:
        way: how the arm computes.
        work: of a call.
        device: "cpu" or "cuda".
        quick: take the ceilings at smaller sizes.
    """
    params = {
        "dtype": way.arithmetic,
        "tolerance": TOLERANCE[way.arithmetic],
        "floor_FLOP": work.FLOP,
    }
    if way.arithmetic == "int8":
        return params
    read_B = work.weights * way.weights.itemsize
    top = ceilings(device, quick)
    return params | {
        "floor_B": read_B,
        "least_ms": top.floor_ms(work.FLOP, read_B, way.arithmetic),
        "peak_FLOP": top.flops[way.arithmetic],
        "peak_B": top.bytes_per_s,
    }


def twin(model: M, dtype: torch.dtype) -> M:
    """Another model with these weights in `dtype`: not copies of them where that is theirs."""
    return cast_copy(model, dtype).eval().requires_grad_(False)


def arm(
    model: nn.Module,
    inputs: Inputs,
    way: Way,
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Encode:
    """A call that computes the model's outputs.

    Args:
        model: with the weights of `way`.
        inputs: features (B, T, F) and lengths (B,).
        way: how to compute.
        scope: makes a context that each call runs in, such as one core.
    """
    features, lengths = inputs
    if way.form != "eager":
        model = prepare(twin(model, way.weights), way.form)

    def encode() -> tuple[Tensor, Tensor]:
        autocast: AbstractContextManager[Any] = nullcontext()
        if way.autocast:
            autocast = torch.autocast(features.device.type, getattr(torch, way.arithmetic))
        exact = tf32(way.arithmetic == "tf32")
        attention = cudnn_attention(way.cudnn)
        with scope(), torch.inference_mode(), exact, autocast, attention:
            return model(features, lengths)

    return capture(encode) if way.graphed else encode


@contextmanager
def cudnn_attention(allowed: bool) -> Iterator[None]:
    """Whether cuDNN may compute attention inside the block; afterwards it is as before."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed and before)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread on one core inside the block; afterwards all is as before.

    Where the system pins no thread, as macOS does not, the thread moves between cores.
    """
    this_machine()  # whose records, those of the block too, name all of its cores
    threads = torch.get_num_threads()
    cores: set[int] = set()
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
