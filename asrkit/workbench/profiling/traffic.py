"""What an encoder reads and writes on a GPU, step by step, counted without one: on tensors of that
device that have no memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from asrkit.models import FastConformer, FastConformerConfig
from asrkit.models.fused import fuse
from asrkit.runtime import op_name
from asrkit.shapes import expect, whole
from asrkit.workbench.profiling.casts import _bytes, _tracked
from asrkit.workbench.profiling.ops import EachOp, tensors, works

PRODUCTS = {"addmm", "mm", "bmm", "baddbmm"}
ATTENTION = "scaled_dot_product_attention"
KINDS = ("products", "attention", "rest")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One launch at least: an op of torch or one of our kernels. Bytes of what goes in and comes
    out, each once.
    """

    name: str
    stage: Literal["subsampling", "blocks", "around"]
    kind: Literal["products", "attention", "rest"]
    bytes: int


def encoder_steps(
    config: FastConformerConfig, *, B: int, T: int, fused: bool, dtype: torch.dtype = torch.bfloat16
) -> tuple[Step, ...]:
    """Steps of one call on features (B, T, F) in inference mode, eager or fused, on a CUDA device.

    All layers are alike: two are looked at, and the second counts for those between. Attention
    counts as one kernel that reads q, k, v and the bias. What a kernel reads twice because a cache
    is too small is not seen, and no time is.
    """
    expect(whole(B, 1) and whole(T, 1), "B, T", "at least 1", (B, T))
    expect(config.layers >= 2, "config", "two layers at least", config.layers)
    one, two = (_steps(replace(config, layers=layers), B, T, fused, dtype) for layers in (1, 2))
    more = _without(two, one)  # those of one layer
    return two + more * (config.layers - 2)


def stage_table(before: Sequence[Step], after: Sequence[Step]) -> list[dict[str, Any]]:
    """A row a stage and kind: launches and bytes before and after, most bytes first."""
    keys = dict.fromkeys((step.stage, step.kind) for step in (*before, *after))
    rows = []
    for stage, kind in keys:
        row: dict[str, Any] = {"stage": stage, "kind": kind}
        for name, steps in (("before", before), ("after", after)):
            these = [step for step in steps if (step.stage, step.kind) == (stage, kind)]
            row |= {
                f"launches {name}": len(these),
                f"bytes {name}": sum(step.bytes for step in these),
            }
        rows.append(row)
    return sorted(rows, key=lambda row: -row["bytes before"])


def _steps(
    config: FastConformerConfig, B: int, T: int, fused: bool, dtype: torch.dtype = torch.bfloat16
) -> tuple[Step, ...]:
    with FakeTensorMode(), torch.device("cuda"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # fake weights cannot be cast afterwards
        try:
            encoder: Any = FastConformer(config).eval()
        finally:
            torch.set_default_dtype(before)
        with torch.inference_mode():
            encoder = fuse(encoder) if fused else encoder
            features, lengths = torch.zeros(B, T, config.bins), torch.full((B,), T)
            return traffic(encoder, lambda: encoder(features, lengths))


def traffic(encoder: torch.nn.Module, call: Callable[[], object]) -> tuple[Step, ...]:
    """The steps that `call` takes, in which `encoder` runs."""
    with _tracked(encoder) as stack, _Look(stack) as look:
        call()
    return tuple(look.steps)


class _Look(EachOp):
    """Notes every op that works."""

    def __init__(self, stack: list[str]) -> None:
        super().__init__()
        self.stack, self.steps = stack, list[Step]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op_name(func)
        if (
            name == "dropout" and not args[2]
        ):  # of tensors without memory a copy is made; of others none
            return args[0]
        if (
            name == ATTENTION
        ):  # would be taken apart into the plain kernels, for no device says what it has
            q = args[0]
            out = torch.empty_like(
                q.transpose(1, 2), memory_format=torch.contiguous_format
            ).transpose(1, 2)
            self.note(name, tensors((args, kwargs)), [out])
            return out
        return super().__torch_dispatch__(func, types, args, kwargs)

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        given, made = tensors((args, kwargs)), tensors(result)
        if works(func, given, made):
            self.note(op_name(func), given, made)
        return result

    def note(self, name: str, given: list[Tensor], made: list[Tensor]) -> None:
        path = self.stack[-1].partition(".")[0]
        self.steps.append(
            Step(
                name=name,
                stage=path if path in ("subsampling", "blocks") else "around",  # type: ignore[arg-type]
                kind="products"
                if name in PRODUCTS
                else "attention"
                if name == ATTENTION
                else "rest",
                bytes=sum(map(_bytes, given + made)),
            )
        )


def _without(steps: Sequence[Step], others: Sequence[Step]) -> tuple[Step, ...]:
    """`steps` but for one of each in `others`."""
    left = list(steps)
    for one in others:
        left.remove(one)
    return tuple(left)
