"""What an inference engine does that eager PyTorch does not, one step after the other, each timed.

Every step is one more change to the same FastConformer with the same weights, by the functions of
which `asrkit.models.optimize` is made.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from asrkit.cpu import fast_dtype, has_int8
from asrkit.models import FastConformer, optimize
from asrkit.models.attention import RelativeAttention
from asrkit.models.folded import fold
from asrkit.models.packed import PackedLinear, multiplies, pack
from asrkit.models.packed_conformer import pack_conformer
from asrkit.models.weight_cache import WeightCache
from asrkit.shapes import dims, expect
from asrkit.workbench.profiling import Timing, measure

Build = Callable[[FastConformer], nn.Module]
EAGER = "eager, float32"


@dataclass(frozen=True, kw_only=True)
class Step:
    """An encoder after one more change.

    Attributes:
        name: Of the change.
        ms: Median milliseconds of a batch, by all threads together.
        error: Distance of the encoded frames from those of the eager encoder in float32, over the
            norm of these.
    """

    name: str
    ms: float
    error: float


def _eager(encoder: FastConformer) -> nn.Module:
    return encoder


def _norms_folded(encoder: FastConformer) -> nn.Module:
    return fold(encoder)


def _weights_laid_out(encoder: FastConformer) -> nn.Module:
    return pack(fold(encoder))


def _activations_in_products(encoder: FastConformer) -> nn.Module:
    """SiLU is computed by the product before it, as its result leaves the registers."""
    for block in encoder.blocks:
        halves: Any = block.feed
        for half in halves:
            half[1] = PackedLinear(half[1], "swish").eval()
            half[2] = nn.Identity()
    return _weights_laid_out(encoder)


def _positions_kept(encoder: FastConformer) -> nn.Module:
    encoder = _activations_in_products(encoder)  # type: ignore[assignment]
    for part in encoder.modules():
        if isinstance(part, RelativeAttention):
            part.position_cache = WeightCache()
    return encoder


def _residuals_in_products(encoder: FastConformer) -> nn.Module:
    return pack_conformer(encoder)


def _bfloat16(encoder: FastConformer) -> nn.Module:
    return optimize(encoder.to(torch.bfloat16))


def _int8(encoder: FastConformer) -> nn.Module:
    """Linear layers of the blocks in int8, all else in the dtype that is fast on this CPU."""
    encoder = encoder.to(getattr(torch, fast_dtype()))
    return optimize(encoder, linear_layers="int8")


STEPS: Mapping[str, Build] = {  # each has all that those before it have
    EAGER: _eager,
    "batch norms folded": _norms_folded,
    "weights laid out once": _weights_laid_out,
    "SiLU in the products": _activations_in_products,
    "positions kept": _positions_kept,
    "residuals and ReLU in the products": _residuals_in_products,
    "bfloat16": _bfloat16,
    "int8": _int8,
}
OF_FEWER_BITS = ("bfloat16", "int8")  # steps that round more than float32


def engine_steps(
    encoder: FastConformer, features: Tensor, *, repeats: int, most_s: float = 2.0
) -> list[Step]:
    """The encoder after each of `STEPS`, all timed in alternation, eager first.

    bfloat16 is left out where this CPU's oneDNN does not multiply it, int8 where the CPU has no
    instructions for it.

    Args:
        encoder: float32, in eval mode, on a CPU. It stays as it is.
        features: (B, T, F) of utterances without padding.
        repeats: Calls of each step that count.
        most_s: Seconds after which a step is called no more.
    """
    B, T, _ = dims(features, "B T F", "features", F=encoder.config.bins)
    expect(not encoder.training, "encoder", "eval mode", "training mode", "Call .eval() first.")
    lengths = torch.full((B,), T)
    encoders = dict(_built(encoder))
    with torch.inference_mode():
        frames = {name: one(features, lengths)[0].float() for name, one in encoders.items()}
        calls = {name: _call(one, features, lengths) for name, one in encoders.items()}
        timings = measure(calls, repeats=repeats, warmup=1, most_s=most_s)
    exact = frames[EAGER]
    return [
        Step(
            name=name,
            ms=_cpu_ms(timings[name]),
            error=float((frames[name] - exact).norm() / exact.norm()),
        )
        for name in encoders
    ]


def _built(encoder: FastConformer) -> Iterator[tuple[str, nn.Module]]:
    """Name and encoder of each step that this CPU computes."""
    for name, build in STEPS.items():
        if is_computed(name):
            yield name, build(copy.deepcopy(encoder))


def is_computed(name: str) -> bool:
    """Whether this CPU computes a step.

    Args:
        name: Of `STEPS`.
    """
    if name == "bfloat16":
        return multiplies(torch.bfloat16)
    if name == "int8":
        return has_int8()
    return True


def _call(encoder: nn.Module, features: Tensor, lengths: Tensor) -> Callable[[], object]:
    def call() -> object:
        return encoder(features, lengths)

    return call


def _cpu_ms(timing: Timing) -> float:
    assert timing.cpu_ms is not None  # steps run on a CPU
    return median(timing.cpu_ms)
