"""The cost of casts between precisions: the ops of a call by kind, place, bytes and time."""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from asrkit.shapes import expect, expect_choice
from asrkit.workbench.measure.ops import KINDS, PROFILED, RANGE, Op, listening

MODES = ("float32", "autocast", "half")
HALF = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class CastProfile:
    """The ops of some calls of a module that start work, in execution order.

    The time of each op is the median over passes; on CUDA it is that of its kernels.
    """

    ops: tuple[Op, ...] = field(repr=False)

    @property
    def casts(self) -> tuple[Op, ...]:
        """The casts among the ops."""
        return tuple(op for op in self.ops if op.kind == "cast")

    @property
    def op_ms(self) -> float:
        """Milliseconds of all ops together."""
        return sum(op.ms for op in self.ops)

    def within(self, path: str) -> "CastProfile":
        """The ops of one submodule, such as "blocks.0"."""
        ops = tuple(op for op in self.ops if f"{op.module}.".startswith(f"{path}."))
        remedy = "table('module') lists them."
        expect(bool(ops), "path", "a submodule in which ops ran", repr(path), remedy)
        return CastProfile(ops=ops)

    def share(self, kind: str) -> float:
        """Share of one kind of op in the time of all ops, 0 to 1."""
        return sum(row["share"] for row in self.table(kind=kind))

    def table(self, *by: str, kind: str | None = None) -> list[dict[str, Any]]:
        """Ops grouped by fields of `Op`, longest first.

        `profile.table()` has a row for each kind and `profile.table("kind", "name")` one for each
        op. `profile.table("module", "site", "source", "target", "operand", kind="cast")` lists the
        places of the casts.

        Args:
            by: Names of the fields; by default "kind".
            kind: Keep only ops of this kind.

        Returns:
            Rows with the fields, the number of ops, their ms, share of all ops' time, and bytes.
        """
        if kind is not None:
            expect_choice("kind", kind, ("cast", *KINDS))
        by = by or ("kind",)
        groups: dict[tuple[str, ...], list[Op]] = {}
        for op in self.ops:
            if kind in (None, op.kind):
                groups.setdefault(tuple(getattr(op, field) for field in by), []).append(op)
        rows = []
        for key, ops in groups.items():
            ms = sum(op.ms for op in ops)
            fields = dict(zip(by, key, strict=True))
            sums = {"ops": len(ops), "ms": ms, "share": ms / self.op_ms}
            rows.append({**fields, **sums, "bytes": sum(op.bytes for op in ops)})
        return sorted(rows, key=lambda row: -row["ms"])


def median_profile(profiles: Sequence[CastProfile]) -> CastProfile:
    """The ops of the first profile, each with its median time over all profiles.

    Args:
        profiles: Profiles of the same calls in the same mode.
    """
    return CastProfile(ops=_medians([profile.ops for profile in profiles]))


def _medians(passes: Sequence[Sequence[Op]]) -> tuple[Op, ...]:
    """The ops of the first pass, each with the median of its times."""
    same_ops = zip(*passes, strict=True)
    return tuple(replace(ops[0], ms=median(op.ms for op in ops)) for ops in same_ops)


def cast_profile(
    module: nn.Module,
    inputs: Sequence[Any],
    mode: str,
    *,
    device: str = "cpu",
    calls: int = 1,
    repeats: int = 10,
    warmup: int = 2,
) -> CastProfile:
    """Profile the ops of a float32 module's calls in one of three precisions.

    Ops are those of torch's dispatcher, below autograd and autocast, without views and allocations.
    A conversion inside a kernel, as in a sum of bfloat16 and float32, is not an op. On a CPU, the
    time is that around each op and includes a few microseconds of dispatch. On CUDA, it is
    torch.profiler's time of the kernels that the op started.

    The caller's training mode, requires_grad and grad mode matter. Autocast keeps the cast copies
    of float32 leaves that require grad (weights) until the outermost region ends or
    torch.clear_autocast_cache() is called, even under no_grad. Frozen tensors, views, tensors in
    inference mode and all activations are cast at every use. (Tried on torch 2.11; the code is
    `cached_cast` in its aten/src/ATen/autocast_mode.cpp and `__exit__` in
    torch/amp/autocast_mode.py.) For inference use torch.no_grad(): with grad on, attention with a
    bias takes plain kernels with casts of their own.

    Args:
        module: The module, in float32.
        inputs: Its arguments, a tuple.
        mode: "float32" runs the module as it is. "autocast" makes all calls within one region of
            torch.autocast to bfloat16. "half" runs a copy of the module in bfloat16; its float32
            inputs are cast first, and those casts are not counted.
        device: The device of module and inputs, "cpu" or "cuda".
        calls: Number of calls in one region. A program that opens a region for each batch makes
            one call; two show what a longer region saves.
        repeats: Number of passes that list and time the ops.
        warmup: Number of passes before them.

    Raises:
        ValueError: An argument is wrong, or calls differ in their ops.
    """
    expect_choice("mode", mode, MODES)
    expect_choice("device", device, ("cpu", "cuda"))
    dtypes = {weight.dtype for weight in module.parameters() if weight.is_floating_point()}
    remedy = "Modes start from module.float()."
    expect(dtypes <= {torch.float32}, "module", "float32 weights", dtypes, remedy)
    if mode == "half":
        module = copy.deepcopy(module).to(HALF)
        inputs = tree_map_only(
            Tensor, lambda x: x.to(HALF) if x.dtype == torch.float32 else x, tuple(inputs)
        )

    def run() -> None:
        torch.clear_autocast_cache()  # in case the caller has opened a region
        with torch.autocast(device, HALF, enabled=mode == "autocast"):
            for _ in range(calls):
                module(*inputs)

    def list_ops() -> list[Op]:
        with listening(device, module) as listener:
            run()
        return listener.ops

    for _ in range(1 + warmup):  # a first call may create tensors that later calls reuse
        run()
    passes = [_on_cuda(list_ops) if device == "cuda" else list_ops() for _ in range(repeats)]
    launched = [[op for op in ops if op.launches] for ops in passes]
    counts = sorted(set(map(len, launched)))
    expect(len(counts) == 1, "module", "the same ops in every call", counts, "Try module.eval().")
    return CastProfile(ops=_medians(launched))


def _on_cuda(list_ops: Callable[[], list[Op]]) -> list[Op]:
    """The ops of a pass on CUDA, with the time of their kernels."""
    with torch.profiler.profile(activities=PROFILED, acc_events=True) as profile:
        ops = list_ops()
        torch.cuda.synchronize()
    ms = defaultdict[str, float](float)
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CPU:  # events of the GPU have no kernels
            ms[event.name] += event.device_time_total / 1e3
    return [replace(op, ms=ms[f"{RANGE}{number}"]) for number, op in enumerate(ops)]
