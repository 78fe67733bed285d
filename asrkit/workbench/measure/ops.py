"""A listener that lists each op with its kind, its caller, its bytes, and whether the CPU waits.

Launches, waits and casts, with their bytes and times, are counted from this list. Tensors of device
"meta" and fake tensors have a shape and no data. With them a step of any size is traced in seconds,
and the values that it reads are made up.
"""

import functools
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from asrkit.gpu_waits import op_name, waits
from asrkit.shapes import expect_choice

ROOT = Path(__file__).resolve().parents[3]
BELOW_CALLERS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
META = torch.device("meta")
RANGE = "asrkit op "  # with its number, the name of an op's range in torch.profiler's trace
KINDS = {  # the first pattern found in an op's name decides; casts are recognised by their dtypes
    "attention": "scaled_dot_product|multi_head_attention",
    "convolution": "conv",
    "normalisation": "(layer|batch|group|instance|rms)_norm",
    "matrix product": "mm$|_addmm|mv$|dot$|linear$|rnn|lstm|gru",
    "layout": "^(_to_copy|copy_|clone|cat|stack|embedding|gather|index.*|.*pad.*|slice_scatter|"
    "select_scatter|flip|roll)$",
    "elementwise": "",  # and all other ops: reductions, softmax, fills
}
COPIES = ("_to_copy", "copy_")
# Ops that write their first argument without reading it.
WRITE_FIRST = re.compile("^(copy_|fill_|zero_|new_.*|.*_like)$")
# Ops that start no work: allocations, views, queries.
WORKLESS = re.compile(
    "^(empty|empty_like|empty_strided|empty_permuted|new_empty|new_empty_strided|resize_|set_|"
    "_unsafe_view|_reshape_alias|lift_fresh|detach_|is_pinned|record_stream|_local_scalar_dense)$"
)
READS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}  # no ops if the device is the CPU itself
PROFILED = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op that reached a device.

    A cast converts one floating dtype into another: `_to_copy`, or `copy_` between two.

    Attributes:
        kind: "cast", or one of KINDS.
        name: Name of the op.
        site: "file:line" of the nearest caller outside torch.
        launches: Whether it starts a kernel or a copy on a GPU; views and metadata do not.
        waits: Whether the CPU waits for it.
        module: Path of the innermost module, "blocks.0.attention.qkv"; the class name for the
            profiled module itself.
        source: dtype of the first tensor that is read, "" if there is none.
        target: dtype of the first result.
        operand: For a cast, "weight" (parameters, buffers, views of them) or "activation"; else "".
        bytes: Bytes of all inputs and outputs, each tensor once.
        ms: Milliseconds on the CPU.
    """

    kind: str
    name: str
    site: str
    launches: bool = True
    waits: bool = False
    module: str = ""
    source: str = ""
    target: str = ""
    operand: str = ""
    bytes: int = 0
    ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Launches and waits of one call.

    One op may launch several kernels, and other ops may run on a CPU than on a GPU (LSTM); `driver`
    has the true numbers.

    Attributes:
        launches: Number of ops that start at least one kernel or copy on a GPU; views and metadata
            do not.
        syncs: Number of ops after which the CPU waits for the GPU: .item(), bool(), nonzero,
            boolean masks, copies between the two.
        ops: The launches and syncs by name.
        sync_sites: The syncs by "file:line" of the first caller outside torch.
        driver: On CUDA with `runtime`, calls to CUDA's runtime and driver by name, such as
            "cudaLaunchKernel", "cudaGraphLaunch" and "cudaStreamSynchronize".
    """

    launches: int
    syncs: int
    ops: Counter[str]
    sync_sites: Counter[str]
    driver: Counter[str]


def launch_profile(
    fn: Callable[[], object], *, device: str = "cpu", runtime: bool = True
) -> Launches:
    """Count the launches and waits of one call.

    On a CPU, the call is counted as if its tensors were on a GPU. A copy between devices is then
    seen as .cpu(), .numpy(), .tolist(), or torch.tensor(values, device=...).

    Args:
        fn: The call.
        device: The device of its work: "cpu", "cuda" or, without data, "meta".
        runtime: On CUDA, also count calls to the driver (`driver`) by torch.profiler. This is slow,
            as it keeps an event for each op.

    Raises:
        ValueError: `device` is none of these.
    """
    expect_choice("device", device, ("cpu", "cuda", "meta"))
    driver = Counter[str]()
    if device == "cuda" and runtime:
        with torch.profiler.profile(activities=PROFILED, acc_events=True) as profile:
            with listening(device) as listener:
                fn()
        names = [event.name for event in profile.events() or ()]
        driver.update(name for name in names if name.startswith("cu"))
    else:
        with listening(device) as listener:
            fn()
    return count_launches(listener.ops, driver)


def count_launches(ops: Sequence[Op], driver: Mapping[str, int] = Counter()) -> Launches:
    """The launches and waits among ops, with the calls to the driver."""
    sites = Counter(op.site for op in ops if op.waits)
    return Launches(
        launches=sum(op.launches for op in ops),
        syncs=sites.total(),
        ops=Counter(op.name for op in ops if op.launches or op.waits),
        sync_sites=sites,
        driver=Counter(driver),
    )


def host_reads(step: Callable[[], object], *, device: str = "cpu") -> Counter[str]:
    """Number of times that each line of a step makes the CPU wait for the device.

    A step that is queued ahead, or captured in a graph, must have none. Counted are `.item()`,
    `bool()`, `.tolist()`, `nonzero()`, boolean masks as an index, and blocking copies between host
    and device; see `launch_profile`. Reading a tensor without data gives ones, so that the step
    continues.

    Args:
        step: The call. Its tensors may be real, fake (call this inside a FakeTensorMode) or of
            device "meta".
        device: The device whose tensors count. With "meta", CPU tensors are real and belong to the
            host. With "cpu", every tensor counts. "cuda" needs a GPU.

    Returns:
        Reads by "file:line" of the nearest caller outside torch. A read in the backward pass of
        torch's own functions has the line that called `backward`.

    Raises:
        ValueError: `device` is none of these.
        RuntimeError: A shape depends on the values of a tensor without data; raised by torch.
    """
    return launch_profile(step, device=device, runtime=False).sync_sites


@contextmanager
def listening(device: str, module: nn.Module | None = None) -> Iterator["Listener"]:
    """A listener that lists the ops of a block on tensors of one device.

    Args:
        device: "cpu", "cuda" or "meta".
        module: The module that runs; it gives ops their paths, and identifies casts of weights.
    """
    listener = Listener(device, module)
    with listener, _Reads(listener), listener.running:
        yield listener


class Listener(TorchDispatchMode):
    """Lists the ops on tensors of one kind of device; see `listening`.

    Composite ops are decomposed first.
    """

    def __init__(self, device: str, module: nn.Module | None) -> None:
        super().__init__()
        self.device = device
        self.running = ModuleTracker()
        self.weights = set[int]()
        if module is not None:
            weights = [*module.parameters(), *module.buffers()]
            self.weights = {weight.untyped_storage()._cdata for weight in weights}
        self.ops: list[Op] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a query of metadata
            return func(*args, **kwargs)
        with self:  # in inference mode, composite ops arrive without being decomposed
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op in its own range of the profiler, and list it."""
        with torch.profiler.record_function(f"{RANGE}{len(self.ops)}"):
            start = time.perf_counter_ns()
            result = _result(func, args, kwargs)
            ms = (time.perf_counter_ns() - start) / 1e6
        inputs = tensors((args, kwargs))
        outputs = tensors(result)
        if any(tensor.device.type == self.device for tensor in inputs + outputs):
            waited = waits(func, args, kwargs) or _blocks(func, args, kwargs, inputs + outputs)
            self.ops.append(self._describe(func, inputs, outputs, waited, ms))
        return result

    def _describe(
        self, func: Any, inputs: list[Tensor], outputs: list[Tensor], waited: bool, ms: float
    ) -> Op:
        name = op_name(func)
        is_workless = func.is_view or WORKLESS.match(name)
        read = inputs[1:] if WRITE_FIRST.match(name) else inputs
        source = _first_dtype(read)
        target = _first_dtype(outputs)
        kind = _kind(name)
        operand = ""
        floats = all(tensor.is_floating_point() for tensor in read + outputs)
        if name in COPIES and floats and source != target:
            kind = "cast"
            is_weight = read[0].untyped_storage()._cdata in self.weights
            operand = "weight" if is_weight else "activation"
        innermost = max(self.running.parents - {"Global"}, key=len, default="")
        return Op(
            kind=kind,
            name=name,
            site=caller(),
            launches=not is_workless and any(tensor.numel() for tensor in outputs or inputs),
            waits=waited,
            module=innermost.partition(".")[2] or innermost,
            source=source,
            target=target,
            operand=operand,
            bytes=sum(map(_bytes_in_memory, read + outputs)),
            ms=ms,
        )


class _Reads(TorchFunctionMode):
    """Lists what no op shows: tensors created from Python values and, on a CPU, reads."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self.listener = listener

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") is not None:
            self._list(torch.device(kwargs["device"]), "tensor", launches=True)
        if func in READS and self.listener.device == "cpu":
            self._list(args[0].device, func.__name__, launches=False)
        return func(*args, **kwargs)

    def _list(self, device: torch.device, name: str, *, launches: bool) -> None:
        if device.type == self.listener.device:
            op = Op(kind="layout", name=name, site=caller(), launches=launches, waits=True)
            self.listener.ops.append(op)


def _result(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an op; ones if it reads tensors without data."""
    unknown = [tensor for tensor in tensors((args, kwargs)) if not _has_data(tensor)]
    if not unknown:
        return func(*args, **kwargs)
    name = op_name(func)
    if name == "_local_scalar_dense":
        return 1
    if name == "equal":
        return True
    if name == "_to_copy" and unknown[0].is_meta and kwargs.get("device") not in (None, META):
        return torch.ones(unknown[0].shape, dtype=kwargs.get("dtype") or unknown[0].dtype)
    if name == "copy_" and _has_data(args[0]):
        return args[0].fill_(1)
    return func(*args, **kwargs)


def _has_data(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def _blocks(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
    """Whether an op is a copy between devices that the CPU waits for."""
    name = op_name(func)
    is_queued = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
    devices = {tensor.device.type for tensor in tensors}
    return name in COPIES and not is_queued and len(devices) > 1


@functools.cache
def _kind(name: str) -> str:
    return next(kind for kind, names in KINDS.items() if re.search(names, name))


def _bytes_in_memory(tensor: Tensor) -> int:
    """Bytes of a tensor in memory, where an expanded dimension exists once."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * prod(size for size, stride in sides if stride)


def _first_dtype(tensors: list[Tensor]) -> str:
    """The dtype of the first tensor; "" if there is none."""
    return dtype_name(tensors[0].dtype) if tensors else ""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without "torch.", such as "float32"."""
    return str(dtype).removeprefix("torch.")


def tensors(tree: Any) -> list[Tensor]:
    """The tensors among arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def caller() -> str:
    """ "file:line" of the nearest frame that is neither in torch nor in this package."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(BELOW_CALLERS):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    name = path.name
    if path.is_relative_to(ROOT):
        name = path.relative_to(ROOT).as_posix()
    return f"{name}:{frame.f_lineno}"
