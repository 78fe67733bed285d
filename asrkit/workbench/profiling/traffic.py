"""What an encoder reads and writes on a GPU, step by step, counted without one.

The tensors are fakes on a CUDA device: they have shapes and no memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from asrkit.models import FastConformer, FastConformerConfig
from asrkit.runtime import op_name
from asrkit.shapes import expect, whole
from asrkit.workbench.profiling.casts import bytes_in_memory, running_modules
from asrkit.workbench.profiling.ops import EachOp, tensors, works

PRODUCTS = {"addmm", "mm", "bmm", "baddbmm"}
ATTENTION = "scaled_dot_product_attention"
KINDS = ("products", "attention", "rest")


@dataclass(frozen=True, kw_only=True)
class TrafficStep:
    """An op of torch or one of our kernels, which is one launch at least.

    Attributes:
        name: The op.
        stage: Part of the encoder that it belongs to.
        kind: Whether it is a matrix product, attention or something else.
        bytes: Of the tensors that go in and come out, each once.
    """

    name: str
    stage: Literal["subsampling", "blocks", "around"]
    kind: Literal["products", "attention", "rest"]
    bytes: int


def encoder_steps(
    config: FastConformerConfig, *, B: int, T: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[TrafficStep, ...]:
    """Steps of one call of an encoder in inference mode on a CUDA device.

    All layers are alike: two are looked at, and the second counts for those between. Attention
    counts as one kernel that reads q, k, v and the bias. What a kernel reads twice because a cache
    is too small is not seen, and no time is.

    Args:
        config: The encoder.
        B: Utterances.
        T: Frames of features.
        dtype: dtype of weights and features.
    """
    expect(whole(B, 1) and whole(T, 1), "B, T", "at least 1", (B, T))
    expect(config.layers >= 2, "config", "two layers at least", config.layers)
    with_one = _steps(replace(config, layers=1), B, T, dtype)
    with_two = _steps(replace(config, layers=2), B, T, dtype)
    of_a_layer = _without(with_two, with_one)
    return with_two + of_a_layer * (config.layers - 2)


def stage_table(steps: Sequence[TrafficStep]) -> list[dict[str, Any]]:
    """A row a stage and kind: launches and bytes, most bytes first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for step in steps:
        empty = {"stage": step.stage, "kind": step.kind, "launches": 0, "bytes": 0}
        row = rows.setdefault((step.stage, step.kind), empty)
        row["launches"] += 1
        row["bytes"] += step.bytes
    return sorted(rows.values(), key=lambda row: row["bytes"], reverse=True)


def _steps(
    config: FastConformerConfig, B: int, T: int, dtype: torch.dtype
) -> tuple[TrafficStep, ...]:
    with FakeTensorMode(), torch.device("cuda"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # fake weights cannot be cast afterwards
        try:
            encoder: Any = FastConformer(config).eval()
        finally:
            torch.set_default_dtype(before)
        with torch.inference_mode():
            features = torch.zeros(B, T, config.bins)
            lengths = torch.full((B,), T)
            return traffic(encoder, lambda: encoder(features, lengths))


def traffic(encoder: torch.nn.Module, call: Callable[[], object]) -> tuple[TrafficStep, ...]:
    """The steps that a call takes.

    Args:
        encoder: The encoder that runs in it; a step's stage is named after its parts.
        call: The call.
    """
    with running_modules(encoder) as stack, _ListSteps(stack) as listing:
        call()
    return tuple(listing.steps)


class _ListSteps(EachOp):
    """Lists every op that works."""

    def __init__(self, stack: list[str]) -> None:
        super().__init__()
        self.stack = stack
        self.steps = list[TrafficStep]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op_name(func)
        if name == "dropout" and not args[2]:
            return args[0]  # of tensors without memory it would make a copy
        if name == ATTENTION:  # would be decomposed, for there is no device to say what it has
            q = args[0].transpose(1, 2)
            contiguous = torch.empty_like(q, memory_format=torch.contiguous_format)
            out = contiguous.transpose(1, 2)
            self.add(name, tensors((args, kwargs)), [out])
            return out
        return super().__torch_dispatch__(func, types, args, kwargs)

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func` with `args` and `kwargs`, and list it if it works."""
        result = func(*args, **kwargs)
        inputs = tensors((args, kwargs))
        outputs = tensors(result)
        if works(func, inputs, outputs):
            self.add(op_name(func), inputs, outputs)
        return result

    def add(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """List an op.

        Args:
            name: Of the op.
            inputs: Tensors that it reads.
            outputs: Tensors that it writes.
        """
        stage: Any = self.stack[-1].partition(".")[0]
        if stage not in ("subsampling", "blocks"):
            stage = "around"
        bytes_moved = sum(bytes_in_memory(tensor) for tensor in inputs + outputs)
        step = TrafficStep(
            name=name,
            stage=stage,
            kind=_kind_of(name),
            bytes=bytes_moved,
        )
        self.steps.append(step)


def _kind_of(name: str) -> Literal["products", "attention", "rest"]:
    if name in PRODUCTS:
        return "products"
    if name == ATTENTION:
        return "attention"
    return "rest"


def _without(
    steps: Sequence[TrafficStep], others: Sequence[TrafficStep]
) -> tuple[TrafficStep, ...]:
    """`steps` but for one of each in `others`."""
    left = list(steps)
    for one in others:
        left.remove(one)
    return tuple(left)
