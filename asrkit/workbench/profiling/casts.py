"""What casts between precisions cost: the ops of a module's call by kind, place, bytes and time,
every cast among them.
"""

import copy
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_map_only

from asrkit.runtime import op_name
from asrkit.shapes import expect, whole
from asrkit.workbench.profiling.ops import EachOp, caller, tensors, works
from asrkit.workbench.profiling.timing import Timing, measure

MODES = ("float32", "autocast", "half")
KINDS = {  # by the first pattern found in the name of an op; casts are known by their dtypes
    "attention": "scaled_dot_product|multi_head_attention",
    "convolution": "conv",
    "normalisation": "(layer|batch|group|instance|rms)_norm",
    "matrix product": "mm$|_addmm|mv$|dot$|linear$|rnn|lstm|gru",
    "layout": "^(_to_copy|copy_|clone|cat|stack|embedding|gather|index.*|.*pad.*|slice_scatter|select_scatter|flip|roll)$",
    "elementwise": "",  # and what else there is: reductions, softmax, tensors that are filled
}
ONLY_WRITTEN = re.compile(
    "^(copy_|fill_|zero_|new_.*|.*_like)$"
)  # their first argument is not read
RANGE = "asrkit op "


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op that a device ran. A cast turns one floating dtype into another: `_to_copy`, or
    `copy_` between two.
    """

    kind: str  # "cast", or one of KINDS
    name: str
    # path of the innermost module, "blocks.0.attention.qkv"; of the profiled module itself the
    # class
    module: str
    site: str  # "file:line" of the nearest caller outside torch
    source: (
        str  # dtype of the first tensor read; of a cast, what it casts from; "" where none is read
    )
    target: str  # dtype of the first result
    operand: str  # casts: "weight" (parameters, buffers, views of them) or "activation"; else ""
    bytes: int  # of the tensors that go in and come out, each once
    ms: float  # median of the repeats; CUDA: of its kernels


@dataclass(frozen=True, kw_only=True)
class CastProfile:
    """The ops of some calls of a module, in the order they ran."""

    mode: str
    dtype: str
    device: str
    threads: int
    calls: int
    ops: tuple[Op, ...] = field(repr=False)
    total: Timing  # of all calls of the whole module, with nobody watching

    casts = property(lambda self: tuple(op for op in self.ops if op.kind == "cast"))
    op_ms = property(lambda self: sum(op.ms for op in self.ops))
    # Below 1 by Python, dispatch, autograd and waiting; on a busy machine too, for medians op by op
    # leave interruptions out.
    covered = property(lambda self: self.op_ms / self.total.median_ms)

    def within(self, path: str) -> "CastProfile":
        """What ran in one submodule, such as "blocks.0", and in those below it; `total` stays that
        of all.
        """
        ops = tuple(op for op in self.ops if f"{op.module}.".startswith(f"{path}."))
        expect(
            bool(ops), "path", "a submodule in which ops ran", repr(path), "See table('module')."
        )
        return replace(self, ops=ops)

    def share(self, kind: str) -> float:
        """Time of one kind of op over that of all ops, 0 to 1."""
        _known(kind)
        return sum(op.ms for op in self.ops if op.kind == kind) / self.op_ms if self.ops else 0.0

    def table(self, *by: str, kind: str | None = None) -> list[dict[str, Any]]:
        """A row for each value of some fields of Op, longest first: those fields, ops, ms, share of
        all ops' time, bytes.

        `profile.table()` has a row a kind, `profile.table("kind", "name")` a row an op, and
        `profile.table("module", "site", "source", "target", "operand", kind="cast")` says where
        casts come from.
        """
        _known(kind)
        by = by or ("kind",)
        groups: dict[tuple[str, ...], list[Op]] = {}
        for op in self.ops:
            if kind in (None, op.kind):
                groups.setdefault(tuple(getattr(op, field) for field in by), []).append(op)
        rows = [
            {
                **dict(zip(by, key, strict=True)),
                "ops": len(ops),
                "ms": (ms := sum(op.ms for op in ops)),
                "share": ms / self.op_ms,
                "bytes": sum(op.bytes for op in ops),
            }
            for key, ops in groups.items()
        ]
        return sorted(rows, key=lambda row: -row["ms"])


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
    """Profile of `calls` calls `module(*inputs)` of a float32 module on `device`, in one of three
    modes.

    "float32": as it is. "autocast": all calls within one region of torch.autocast to `dtype`.
    "half": a copy of the module moved to `dtype`, with float32 inputs cast beforehand, uncounted:
    what is half already at a model's door needs no cast there. Training mode, requires_grad and
    grad mode are the caller's, and matter: autocast keeps the cast copies of float32 leaves that
    require grad (weights) until the outermost region ends or torch.clear_autocast_cache(), under
    no_grad too; what is frozen, a view, or used in inference mode is cast at every use, and so is
    every activation. calls=1 is a program that opens a region for each batch; calls=2 shows what a
    longer one saves. (Tried on torch 2.11; the code is `cached_cast` in its
    aten/src/ATen/autocast_mode.cpp and `__exit__` in torch/amp/autocast_mode.py.) For inference use
    torch.no_grad(): while grad is on, attention with a bias takes plain kernels with casts of their
    own.

    Ops are those of torch's dispatcher, below autograd and autocast; views and allocations are left
    out. Conversions within a kernel, as where bfloat16 meets float32 in a sum, are no ops of their
    own. One pass looks at the ops, `repeats` others time them, and as many time the calls alone
    (`total`), in turn with those on a CPU. CPU: the time around each op, which holds a few
    microseconds of dispatch. CUDA: torch.profiler's time of the kernels that an op started.
    """
    kind = str(device).partition(":")[0]
    _check(module, inputs, mode, kind, dtype, calls, repeats)
    if mode == "half":
        module = copy.deepcopy(module).to(dtype)
        inputs = tree_map_only(
            Tensor, lambda x: x.to(dtype) if x.dtype == torch.float32 else x, tuple(inputs)
        )

    def run() -> None:
        torch.clear_autocast_cache()  # a region around this one would keep it
        with torch.autocast(kind, dtype, enabled=mode == "autocast"):
            for _ in range(calls):
                module(*inputs)

    run()  # what a first call makes and keeps is no op of those after it
    with _tracked(module) as stack, _Look(module, stack) as look:
        run()
    passes, total = (_cuda_passes if kind == "cuda" else _cpu_passes)(run, repeats, warmup, device)
    expect(
        all(len(times) == len(look.ops) for times in passes),
        "module",
        "the same ops in every call",
        sorted({len(look.ops), *map(len, passes)}),
        "Try module.eval().",
    )
    ops = tuple(
        replace(op, ms=median(times)) for op, *times in zip(look.ops, *passes, strict=True) if op
    )
    return CastProfile(
        mode=mode,
        dtype=_name(dtype),
        device=str(device),
        threads=torch.get_num_threads(),
        calls=calls,
        ops=ops,
        total=total,
    )


def _check(
    module: Any, inputs: Any, mode: str, kind: str, dtype: torch.dtype, calls: Any, repeats: Any
) -> None:
    expect(mode in MODES, "mode", f"one of {', '.join(MODES)}", repr(mode))
    expect(
        dtype in (torch.bfloat16, torch.float16), "dtype", "torch.bfloat16 or torch.float16", dtype
    )
    expect(kind in ("cpu", "cuda"), "device", "'cpu' or 'cuda'", repr(kind))
    expect(
        whole(calls, 1) and whole(repeats, 1),
        "calls, repeats",
        "whole numbers of at least 1",
        (calls, repeats),
    )
    expect(
        isinstance(inputs, tuple | list),
        "inputs",
        "a tuple of arguments",
        type(inputs).__name__,
        "Write (x,) for one.",
    )
    weights = [weight for weight in module.parameters() if weight.is_floating_point()]
    strays = {
        str(tensor.device) for tensor in [*weights, *tensors(inputs)] if tensor.device.type != kind
    }
    expect(
        not strays,
        "device",
        f"module and inputs on {kind!r}",
        ", ".join(sorted(strays)),
        "Move them there with .to.",
    )
    others = {_name(weight.dtype) for weight in weights} - {"float32"}
    expect(
        not others,
        "module",
        "float32 weights",
        ", ".join(sorted(others)),
        "Modes start from module.float().",
    )


def _known(kind: str | None) -> None:
    expect(
        kind in (None, "cast", *KINDS), "kind", f"one of {', '.join(['cast', *KINDS])}", repr(kind)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> int:
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * prod(
        size for size, stride in sides if stride
    )  # what is expanded lies in memory once


@contextmanager
def _tracked(module: nn.Module) -> Iterator[list[str]]:
    """Paths of the modules that are running, outermost first."""
    root = type(module).__name__
    names, stack = {id(part): path or root for path, part in module.named_modules()}, [root]

    def leave(*_: Any) -> None:
        stack.pop()

    before = register_module_forward_pre_hook(
        lambda part, _: stack.append(names.get(id(part), stack[-1]))
    )
    after = register_module_forward_hook(leave)
    try:
        yield stack
    finally:
        before.remove()
        after.remove()


class _Look(EachOp):
    """What each op is; None for those that do no work."""

    def __init__(self, module: nn.Module, stack: list[str]) -> None:
        super().__init__()
        held = [*module.parameters(), *module.buffers()]
        self.weights, self.stack = (
            {tensor.untyped_storage().data_ptr() for tensor in held if tensor.numel()},
            stack,
        )
        self.ops: list[Op | None] = []

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        given, made, name = tensors((args, kwargs)), tensors(result), op_name(func)
        self.ops.append(self.describe(name, given, made) if works(func, given, made) else None)
        return result

    def describe(self, name: str, given: list[Tensor], made: list[Tensor]) -> Op:
        read = given[1:] if ONLY_WRITTEN.match(name) else given
        source, target = (
            [*dict.fromkeys(tensor.dtype for tensor in side)][:1] for side in (read, made)
        )
        floats = all(tensor.is_floating_point() for tensor in read + made)
        cast = name in ("_to_copy", "copy_") and floats and source != target
        weight = cast and read[0].untyped_storage().data_ptr() in self.weights
        return Op(
            kind="cast"
            if cast
            else next(kind for kind, names in KINDS.items() if re.search(names, name)),
            name=name,
            module=self.stack[-1],
            site=caller(),
            ms=0.0,
            source="".join(map(_name, source)),
            target="".join(map(_name, target)),
            operand=("weight" if weight else "activation") if cast else "",
            bytes=sum(map(_bytes, read + made)),
        )


class _Clock(EachOp):
    """Milliseconds that each op takes of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.ms: list[float] = []

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        start = time.perf_counter_ns()
        result = func(*args, **kwargs)
        self.ms.append((time.perf_counter_ns() - start) / 1e6)
        return result


class _Ranges(EachOp):
    """Gives each op a numbered range in torch.profiler's trace, to which its kernels belong."""

    count = 0

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        with torch.profiler.record_function(f"{RANGE}{self.count}"):
            self.count += 1
            return func(*args, **kwargs)


def _cpu_passes(
    run: Any, repeats: int, warmup: int, device: str
) -> tuple[list[list[float]], Timing]:
    passes: list[list[float]] = []

    def timed() -> None:
        with _Clock() as clock:
            run()
        passes.append(clock.ms)

    total = measure({"clean": run, "timed": timed}, repeats=repeats, warmup=warmup)["clean"]
    return passes[warmup:], total


def _cuda_passes(
    run: Any, repeats: int, warmup: int, device: str
) -> tuple[list[list[float]], Timing]:
    total = measure({"clean": run}, repeats=repeats, warmup=warmup, device=device)["clean"]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    passes = []
    for _ in range(repeats):
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            with _Ranges() as ranges:
                run()
            torch.cuda.synchronize(device)
        ms = [0.0] * ranges.count
        for event in profile.events() or ():
            if (
                event.name.startswith(RANGE) and event.device_type == torch.autograd.DeviceType.CPU
            ):  # the GPU's copy has no kernels
                ms[int(event.name.removeprefix(RANGE))] = event.device_time_total / 1e3
        passes.append(ms)
    return passes, total
