"""What casts between precisions cost.

The ops of a module's call by kind, place, bytes and time, with every cast among them.
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
from asrkit.workbench.measure.ops import EachOp, caller, dtype_name, tensors, works
from asrkit.workbench.measure.timing import Timing, measure

MODES = ("float32", "autocast", "half")
KINDS = {  # by the first pattern found in the name of an op; casts are known by their dtypes
    "attention": "scaled_dot_product|multi_head_attention",
    "convolution": "conv",
    "normalisation": "(layer|batch|group|instance|rms)_norm",
    "matrix product": "mm$|_addmm|mv$|dot$|linear$|rnn|lstm|gru",
    "layout": "^(_to_copy|copy_|clone|cat|stack|embedding|gather|index.*|.*pad.*|slice_scatter|"
    "select_scatter|flip|roll)$",
    "elementwise": "",  # and what else there is: reductions, softmax, tensors that are filled
}
# Ops that do not read their first argument.
ONLY_WRITTEN = re.compile("^(copy_|fill_|zero_|new_.*|.*_like)$")
RANGE = "asrkit op "


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op that a device ran.

    A cast turns one floating dtype into another: `_to_copy`, or `copy_` between two.

    Attributes:
        kind: "cast", or one of KINDS.
        name: The op.
        module: Path of the innermost module, "blocks.0.attention.qkv"; for the profiled module
            itself its class.
        site: "file:line" of the nearest caller outside torch.
        source: dtype of the first tensor that is read, "" where none is.
        target: dtype of the first result.
        operand: Of a cast, "weight" (parameters, buffers, views of them) or "activation"; else "".
        bytes: Of the tensors that go in and come out, each once.
        ms: Milliseconds, median of the repeats; on CUDA of its kernels.
    """

    kind: str
    name: str
    module: str
    site: str
    source: str
    target: str
    operand: str
    bytes: int
    ms: float


@dataclass(frozen=True, kw_only=True)
class CastProfile:
    """The ops of some calls of a module, in the order in which they ran.

    Attributes:
        mode: "float32", "autocast" or "half".
        dtype: dtype of autocast or of the half module.
        device: Where it ran.
        threads: torch's CPU threads.
        calls: Calls of the module.
        ops: The ops.
        total: Time of all calls of the whole module, while nothing else looked at it.
    """

    mode: str
    dtype: str
    device: str
    threads: int
    calls: int
    ops: tuple[Op, ...] = field(repr=False)
    total: Timing

    @property
    def casts(self) -> tuple[Op, ...]:
        """The casts among the ops."""
        return tuple(op for op in self.ops if op.kind == "cast")

    @property
    def op_ms(self) -> float:
        """Milliseconds of all ops together."""
        return sum(op.ms for op in self.ops)

    def within(self, path: str) -> "CastProfile":
        """What ran in one submodule, such as "blocks.0"; `total` stays that of all."""
        ops = tuple(op for op in self.ops if f"{op.module}.".startswith(f"{path}."))
        remedy = "See table('module')."
        expect(bool(ops), "path", "a submodule in which ops ran", repr(path), remedy)
        return replace(self, ops=ops)

    def share(self, kind: str) -> float:
        """Time of one kind of op over that of all ops, 0 to 1."""
        _expect_known(kind)
        if not self.ops:
            return 0.0
        return sum(op.ms for op in self.ops if op.kind == kind) / self.op_ms

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
        _expect_known(kind)
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
) -> list[dict[str, "CastProfile"]]:
    """Profiles of a module in all three modes, taken in alternation: one dict for each repeat.

    Other load on the machine then falls on all modes alike.

    Args:
        module: In float32.
        inputs: Its positional arguments.
        repeats: How often each mode is profiled.
    """
    turns = []
    for _ in range(repeats):
        turn = {}
        for mode in MODES:
            turn[mode] = cast_profile(module, inputs, mode, repeats=1, warmup=1)
        turns.append(turn)
    return turns


def median_profile(profiles: Sequence["CastProfile"]) -> "CastProfile":
    """The first profile, with the median time of each op over all of them.

    Args:
        profiles: Of the same calls in the same mode.
    """
    ops = []
    for same in zip(*(profile.ops for profile in profiles), strict=True):
        ops.append(replace(same[0], ms=median(op.ms for op in same)))
    return replace(profiles[0], ops=tuple(ops))


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
    own. One pass lists the ops, `repeats` others time them, and as many time the calls alone
    (`total`), in turn with those on a CPU. CPU: the time around each op, which holds a few
    microseconds of dispatch. CUDA: torch.profiler's time of the kernels that an op started.

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
        repeats: Passes that time the ops.
        warmup: Passes before those.

    Raises:
        ValueError: An argument does not fit, or calls differ in their ops.
    """
    kind = str(device).partition(":")[0]
    _check(module, inputs, mode, kind, dtype, calls, repeats)
    if mode == "half":
        module = copy.deepcopy(module).to(dtype)
        inputs = tree_map_only(Tensor, lambda x: _half(x, dtype), tuple(inputs))

    def run() -> None:
        torch.clear_autocast_cache()  # a region around this one would keep it
        with torch.autocast(kind, dtype, enabled=mode == "autocast"):
            for _ in range(calls):
                module(*inputs)

    run()  # what a first call makes and keeps is no op of those after it
    with running_modules(module) as stack, _ListOps(module, stack) as listing:
        run()
    if kind == "cuda":
        passes, total = _cuda_passes(run, repeats, warmup, device)
    else:
        passes, total = _cpu_passes(run, repeats, warmup)
    numbers = sorted({len(listing.ops), *map(len, passes)})
    same = len(numbers) == 1
    expect(same, "module", "the same ops in every call", numbers, "Try module.eval().")
    ops = []
    for op, *times in zip(listing.ops, *passes, strict=True):
        if op is not None:
            ops.append(replace(op, ms=median(times)))
    return CastProfile(
        mode=mode,
        dtype=dtype_name(dtype),
        device=str(device),
        threads=torch.get_num_threads(),
        calls=calls,
        ops=tuple(ops),
        total=total,
    )


def _half(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype != torch.float32:
        return x
    return x.to(dtype)


def _check(
    module: Any, inputs: Any, mode: str, kind: str, dtype: torch.dtype, calls: Any, repeats: Any
) -> None:
    expect(mode in MODES, "mode", f"one of {', '.join(MODES)}", repr(mode))
    halves = (torch.bfloat16, torch.float16)
    expect(dtype in halves, "dtype", "torch.bfloat16 or torch.float16", dtype)
    expect(kind in ("cpu", "cuda"), "device", "'cpu' or 'cuda'", repr(kind))
    numbers = whole(calls, 1) and whole(repeats, 1)
    expect(numbers, "calls, repeats", "whole numbers of at least 1", (calls, repeats))
    listed = isinstance(inputs, tuple | list)
    got = type(inputs).__name__
    expect(listed, "inputs", "a tuple of arguments", got, "Write (x,) for one.")
    weights = [weight for weight in module.parameters() if weight.is_floating_point()]
    devices = {tensor.device for tensor in [*weights, *tensors(inputs)]}
    others = sorted(str(device) for device in devices if device.type != kind)
    wanted = f"module and inputs on {kind!r}"
    expect(not others, "device", wanted, ", ".join(others), "Move them there with .to.")
    dtypes = sorted({dtype_name(weight.dtype) for weight in weights} - {"float32"})
    remedy = "Modes start from module.float()."
    expect(not dtypes, "module", "float32 weights", ", ".join(dtypes), remedy)


def _expect_known(kind: str | None) -> None:
    wanted = f"one of {', '.join(['cast', *KINDS])}"
    expect(kind in (None, "cast", *KINDS), "kind", wanted, repr(kind))


def bytes_in_memory(tensor: Tensor) -> int:
    """Bytes that a tensor's elements take; what is expanded lies in memory once."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * prod(size for size, stride in sides if stride)


@contextmanager
def running_modules(module: nn.Module) -> Iterator[list[str]]:
    """Paths of the parts of `module` that are running, outermost first."""
    root = type(module).__name__
    names = {id(part): path or root for path, part in module.named_modules()}
    stack = [root]

    def enter(part: nn.Module, _: Any) -> None:
        stack.append(names.get(id(part), stack[-1]))

    def leave(*_: Any) -> None:
        stack.pop()

    before = register_module_forward_pre_hook(enter)
    after = register_module_forward_hook(leave)
    try:
        yield stack
    finally:
        before.remove()
        after.remove()


class _ListOps(EachOp):
    """Lists what each op is; None for those that do no work."""

    def __init__(self, module: nn.Module, stack: list[str]) -> None:
        super().__init__()
        weights = [tensor for tensor in [*module.parameters(), *module.buffers()] if tensor.numel()]
        self.weights = {tensor.untyped_storage().data_ptr() for tensor in weights}
        self.stack = stack
        self.ops: list[Op | None] = []

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func` with `args` and `kwargs`, and list what it is."""
        result = func(*args, **kwargs)
        inputs = tensors((args, kwargs))
        outputs = tensors(result)
        if works(func, inputs, outputs):
            self.ops.append(self.describe(op_name(func), inputs, outputs))
        else:
            self.ops.append(None)
        return result

    def describe(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> Op:
        """What an op is that works.

        Args:
            name: Of the op.
            inputs: Tensors among its arguments.
            outputs: Tensors among its results.
        """
        read = inputs
        if ONLY_WRITTEN.match(name):
            read = inputs[1:]
        source = _first_dtype(read)
        target = _first_dtype(outputs)
        floats = all(tensor.is_floating_point() for tensor in read + outputs)
        operand = ""
        if name in ("_to_copy", "copy_") and floats and source != target:
            kind = "cast"
            operand = "activation"
            if read[0].untyped_storage().data_ptr() in self.weights:
                operand = "weight"
        else:
            kind = next(kind for kind, names in KINDS.items() if re.search(names, name))
        return Op(
            kind=kind,
            name=name,
            module=self.stack[-1],
            site=caller(),
            ms=0.0,
            source=source,
            target=target,
            operand=operand,
            bytes=sum(map(bytes_in_memory, read + outputs)),
        )


def _first_dtype(tensors: list[Tensor]) -> str:
    """The dtype of the first tensor, "" where there is none."""
    if not tensors:
        return ""
    return dtype_name(tensors[0].dtype)


class _Clock(EachOp):
    """Milliseconds that each op takes of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.ms: list[float] = []

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func` with `args` and `kwargs`, and note how long it took."""
        start = time.perf_counter_ns()
        result = func(*args, **kwargs)
        self.ms.append((time.perf_counter_ns() - start) / 1e6)
        return result


class _Ranges(EachOp):
    """Gives each op a numbered range in torch.profiler's trace, to which its kernels belong."""

    count = 0

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func` with `args` and `kwargs` in a range of its own."""
        with torch.profiler.record_function(f"{RANGE}{self.count}"):
            self.count += 1
            return func(*args, **kwargs)


def _cpu_passes(run: Any, repeats: int, warmup: int) -> tuple[list[list[float]], Timing]:
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
            on_cpu = event.device_type == torch.autograd.DeviceType.CPU  # the GPU's has no kernels
            if on_cpu and event.name.startswith(RANGE):
                ms[int(event.name.removeprefix(RANGE))] = event.device_time_total / 1e3
        passes.append(ms)
    return passes, total
