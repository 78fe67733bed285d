"""What casts between precisions cost: the ops of a module's call by kind, place, bytes and time."""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from asrkit.shapes import expect, expect_choice
from asrkit.workbench.measure.ops import KINDS, PROFILED, RANGE, Op, listening

MODES = ("float32", "autocast", "half")


@dataclass(frozen=True, kw_only=True)
class CastProfile:
    """The ops of some calls of a module that start work, in the order in which they ran.

    Each has the median of its times; on CUDA of its kernels.
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
        """What ran in one submodule, such as "blocks.0"."""
        ops = tuple(op for op in self.ops if f"{op.module}.".startswith(f"{path}."))
        remedy = "See table('module')."
        expect(bool(ops), "path", "a submodule in which ops ran", repr(path), remedy)
        return CastProfile(ops=ops)

    def share(self, kind: str) -> float:
        """Time of one kind of op over that of all ops, 0 to 1."""
        return sum(row["share"] for row in self.table(kind=kind))

    def table(self, *by: str, kind: str | None = None) -> list[dict[str, Any]]:
        """Ops grouped by some fields of `Op`, longest first.

        `profile.table()` has a row for each kind, `profile.table("kind", "name")` one for each op,
        and `profile.table("module", "site", "source", "target", "operand", kind="cast")` says where
        casts come from.

        Args:
            by: Names of the fields; "kind" where none is named.
            kind: Only ops of this kind.

        Returns:
            Rows with those fields, the number of ops, ms, share of all ops' time, and bytes.
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
            row: dict[str, Any] = dict(zip(by, key, strict=True))
            row["ops"] = len(ops)
            row["ms"] = sum(op.ms for op in ops)
            row["share"] = row["ms"] / self.op_ms
            row["bytes"] = sum(op.bytes for op in ops)
            rows.append(row)
        return sorted(rows, key=lambda row: -row["ms"])


def profiles_in_turns(
    module: nn.Module, inputs: Sequence[Any], *, repeats: int
) -> list[dict[str, CastProfile]]:
    """Profiles of a module in all three modes, taken in alternation: one dict for each repeat.

    Other load on the machine then falls on all modes alike.

    Args:
        module: In float32.
        inputs: Its positional arguments.
        repeats: How often each mode is profiled.
    """
    profile = partial(cast_profile, module, inputs, repeats=1, warmup=1)
    return [{mode: profile(mode) for mode in MODES} for _ in range(repeats)]


def median_profile(profiles: Sequence[CastProfile]) -> CastProfile:
    """The ops of the first profile, with the median time of each over all of them.

    Args:
        profiles: Of the same calls in the same mode.
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
    dtype: torch.dtype = torch.bfloat16,
    calls: int = 1,
    repeats: int = 10,
    warmup: int = 2,
) -> CastProfile:
    """Profile the ops of a float32 module's calls in one of three precisions.

    Ops are those of torch's dispatcher, below autograd and autocast; views and allocations are left
    out. Conversions within a kernel, as where bfloat16 meets float32 in a sum, are no ops of their
    own. CPU: the time around each op, which holds a few microseconds of dispatch. CUDA:
    torch.profiler's time of the kernels that an op started.

    Training mode, requires_grad and grad mode are the caller's, and matter. Autocast keeps the cast
    copies of float32 leaves that require grad (weights) until the outermost region ends or
    torch.clear_autocast_cache() is called, under no_grad too. What is frozen, a view, or used in
    inference mode is cast at every use, and so is every activation. (Tried on torch 2.11; the code
    is `cached_cast` in its aten/src/ATen/autocast_mode.cpp and `__exit__` in
    torch/amp/autocast_mode.py.) For inference use torch.no_grad(): while grad is on, attention with
    a bias takes plain kernels with casts of their own.

    Args:
        module: The module, in float32.
        inputs: Its arguments, a tuple.
        mode: "float32" runs it as it is. "autocast" makes all calls within one region of
            torch.autocast to `dtype`. "half" runs a copy of the module in `dtype`, with float32
            inputs cast beforehand and uncounted.
        device: Where module and inputs are, "cpu" or "cuda".
        dtype: torch.bfloat16 or torch.float16.
        calls: Calls in one region. One is a program that opens a region for each batch; two show
            what a longer region saves.
        repeats: Passes that list and time the ops.
        warmup: Passes before those.

    Raises:
        ValueError: An argument does not fit, or calls differ in their ops.
    """
    expect_choice("mode", mode, MODES)
    expect_choice("device", device, ("cpu", "cuda"))
    dtypes = {weight.dtype for weight in module.parameters() if weight.is_floating_point()}
    remedy = "Modes start from module.float()."
    expect(dtypes <= {torch.float32}, "module", "float32 weights", dtypes, remedy)
    if mode == "half":
        module = copy.deepcopy(module).to(dtype)
        inputs = tree_map_only(
            Tensor, lambda x: x.to(dtype) if x.dtype == torch.float32 else x, tuple(inputs)
        )

    def run() -> None:
        torch.clear_autocast_cache()  # a region around this one would keep it
        with torch.autocast(device, dtype, enabled=mode == "autocast"):
            for _ in range(calls):
                module(*inputs)

    def listed() -> list[Op]:
        with listening(device, module) as listener:
            run()
        return listener.ops

    for _ in range(1 + warmup):  # what a first call makes and keeps is no op of those after it
        run()
    passes = [_on_cuda(listed) if device == "cuda" else listed() for _ in range(repeats)]
    works = [[op for op in ops if op.launches] for ops in passes]
    numbers = sorted(set(map(len, works)))
    expect(len(numbers) == 1, "module", "the same ops in every call", numbers, "Try module.eval().")
    return CastProfile(ops=_medians(works))


def _on_cuda(listed: Callable[[], list[Op]]) -> list[Op]:
    """The ops of a pass on CUDA, with the time of their kernels."""
    with torch.profiler.profile(activities=PROFILED, acc_events=True) as profile:
        ops = listed()
        torch.cuda.synchronize()
    ms = defaultdict[str, float](float)
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CPU:  # the GPU's has no kernels
            ms[event.name] += event.device_time_total / 1e3
    return [replace(op, ms=ms[f"{RANGE}{number}"]) for number, op in enumerate(ops)]
