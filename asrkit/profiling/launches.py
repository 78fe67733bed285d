"""What a GPU is asked to do, one small thing at a time, and where it has to wait for Python: counted, on any device."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asrkit.shapes import expect
from asrkit.waits import op_name, waits

ROOT, TORCH = Path(__file__).resolve().parents[2], Path(torch.__file__).parent
MEMORY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "set_"}
VIEWS = {"_unsafe_view", "_reshape_alias", "lift_fresh", "detach_", "is_pinned", "record_stream", "_local_scalar_dense"}
READS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}  # which no dispatcher sees where the device is the CPU itself
RUNTIME = {
    "kernels": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaLaunchCooperativeKernel"),
    "graph_launches": ("cudaGraphLaunch", "cuGraphLaunch"),
    "stream_syncs": ("cudaStreamSynchronize", "cudaEventSynchronize", "cuStreamSynchronize"),
}


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Counts of one call. An op may take several kernels, and on the CPU another one than on a GPU (LSTM): see `kernels`."""

    launches: int  # dispatched ops that start at least one kernel or copy on a GPU; views and metadata are left out
    syncs: int  # ops after which the CPU waits for the GPU: .item(), bool(), nonzero, boolean masks, copies between the two
    ops: Counter[str]  # the launches and the syncs by name
    sync_sites: Counter[str]  # the syncs by "file:line" of the first caller outside torch
    kernels: int | None = None  # CUDA only: launches that the driver saw, from Python; those within a graph are not among them
    graph_launches: int | None = None  # CUDA only; a graph started by cuda-python may be missing
    stream_syncs: int | None = None  # CUDA only: cudaStreamSynchronize and cudaEventSynchronize


def launch_profile(fn: Callable[[], object], *, device: str = "cpu") -> Launches:
    """Launches and waits of one call of `fn`, whose work is on `device`.

    On a CPU the tensors stand in for those of a GPU: what is counted is what a GPU would get to do, and would be waited for. A
    copy between devices shows there as .cpu(), .numpy(), .tolist(), or torch.tensor(values, device=...).
    """
    kind = str(device).partition(":")[0]
    expect(kind in ("cpu", "cuda"), "device", "'cpu' or 'cuda'", repr(device))
    expect(kind == "cpu" or torch.cuda.is_available(), "device", "'cpu' where there is no GPU", repr(device))
    count = _Count(kind)
    if kind == "cpu":
        with count, _Reads(count):
            fn()
        return count.result()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        with count, _Reads(count):
            fn()
    seen = Counter(event.name for event in profile.events() or ())
    return count.result(**{field: sum(seen[name] for name in names) for field, names in RUNTIME.items()})


class _Count(TorchDispatchMode):
    """Sees every op that reaches a device."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.launches, self.ops, self.sites = kind, 0, Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about metadata
            return func(*args, **kwargs)
        with self:  # in inference mode ops arrive whole that are made of others
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        result = func(*args, **kwargs)
        name, given = op_name(func), [leaf for leaf in tree_leaves((args, kwargs)) if _is(leaf)]
        made = [leaf for leaf in tree_leaves(result) if _is(leaf)]
        if not any(tensor.device.type == self.kind for tensor in given + made):
            return result
        launches = name not in MEMORY | VIEWS and not func.is_view and any(tensor.numel() for tensor in made or given)
        self.add(name, launches, waits(func, args, kwargs) or _crosses(name, args, kwargs, given + made))
        return result

    def add(self, name: str, launches: bool, waited: bool) -> None:
        self.launches += launches
        self.ops[name] += launches or waited
        if waited:
            self.sites[_caller()] += 1

    def result(self, **seen: int) -> Launches:
        syncs = self.sites.total()
        return Launches(launches=self.launches, syncs=syncs, ops=+self.ops, sync_sites=self.sites, **seen)


class _Reads(TorchFunctionMode):
    """Sees what only Python sees on a CPU: tensors that are read, or made of Python's values."""

    def __init__(self, count: _Count) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.count.kind == "cpu" and func in READS:
            self.count.add(func.__name__, False, True)
        if func is torch.tensor and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == self.count.kind:
            self.count.add("tensor", True, True)
        return func(*args, **kwargs)


def _is(leaf: object) -> bool:
    return isinstance(leaf, Tensor)


def _crosses(name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
    if name not in ("_to_copy", "copy_"):
        return False
    patient = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
    return patient and len({tensor.device.type for tensor in tensors}) > 1


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename == __file__ or Path(frame.f_code.co_filename).is_relative_to(TORCH)):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name}:{frame.f_lineno}"
