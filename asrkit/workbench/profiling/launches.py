"""What a GPU is asked to do, one small thing at a time, and where it has to wait for Python:
counted, on any device.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from asrkit.runtime import op_name, waits
from asrkit.shapes import expect
from asrkit.workbench.profiling.ops import EachOp, caller, tensors, works

READS = {
    Tensor.tolist,
    Tensor.numpy,
    Tensor.cpu,
}  # which no dispatcher sees where the device is the CPU itself
RUNTIME = {
    "kernels": (
        "cudaLaunchKernel",
        "cudaLaunchKernelExC",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "cudaLaunchCooperativeKernel",
    ),
    "graph_launches": ("cudaGraphLaunch", "cuGraphLaunch"),
    "stream_syncs": ("cudaStreamSynchronize", "cudaEventSynchronize", "cuStreamSynchronize"),
}


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Counts of one call. An op may take several kernels, and on the CPU another one than on a GPU
    (LSTM): see `kernels`.
    """

    # dispatched ops that start at least one kernel or copy on a GPU; views and metadata are left
    # out
    launches: int
    # ops after which the CPU waits for the GPU: .item(), bool(), nonzero, boolean masks, copies
    # between the two
    syncs: int
    ops: Counter[str]  # the launches and the syncs by name
    sync_sites: Counter[str]  # the syncs by "file:line" of the first caller outside torch
    # By the driver, on CUDA and with `runtime` only.
    kernels: int | None = None  # launches from Python; those within a graph are not among them
    graph_launches: int | None = None  # a graph started by cuda-python may be missing
    stream_syncs: int | None = None  # cudaStreamSynchronize and cudaEventSynchronize


def launch_profile(
    fn: Callable[[], object], *, device: str = "cpu", runtime: bool = True
) -> Launches:
    """Launches and waits of one call of `fn`, whose work is on `device`.

    On a CPU the tensors stand in for those of a GPU: what is counted is what a GPU would get to do,
    and would be waited for. A copy between devices shows there as .cpu(), .numpy(), .tolist(), or
    torch.tensor(values, device=...).

    runtime: on CUDA also what the driver saw (`kernels`, `graph_launches`, `stream_syncs`), by
    torch.profiler, which is slow: it keeps an event for each of many thousand ops.
    """
    kind = str(device).partition(":")[0]
    expect(kind in ("cpu", "cuda"), "device", "'cpu' or 'cuda'", repr(device))
    expect(
        kind == "cpu" or torch.cuda.is_available(),
        "device",
        "'cpu' where there is no GPU",
        repr(device),
    )
    count = _Count(kind)
    if kind == "cpu" or not runtime:
        with count, _Reads(count):
            fn()
        return count.result()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        with count, _Reads(count):
            fn()
    seen = Counter(event.name for event in profile.events() or ())
    return count.result(
        **{field: sum(seen[name] for name in names) for field, names in RUNTIME.items()}
    )


class _Count(EachOp):
    """Counts every op that reaches a device."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.launches, self.ops, self.sites = kind, 0, Counter[str](), Counter[str]()

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        name, given, made = op_name(func), tensors((args, kwargs)), tensors(result)
        if any(tensor.device.type == self.kind for tensor in given + made):
            waited = waits(func, args, kwargs) or _crosses(name, args, kwargs, given + made)
            self.add(name, works(func, given, made), waited)
        return result

    def add(self, name: str, launches: bool, waited: bool) -> None:
        self.launches += launches
        self.ops[name] += launches or waited
        if waited:
            self.sites[caller()] += 1

    def result(self, **seen: int) -> Launches:
        syncs = self.sites.total()
        return Launches(
            launches=self.launches, syncs=syncs, ops=+self.ops, sync_sites=self.sites, **seen
        )


class _Reads(TorchFunctionMode):
    """Sees what only Python sees on a CPU: tensors that are read, or made of Python's values."""

    def __init__(self, count: _Count) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.count.kind == "cpu" and func in READS:
            self.count.add(func.__name__, False, True)
        if (
            func is torch.tensor
            and kwargs.get("device") is not None
            and torch.device(kwargs["device"]).type == self.count.kind
        ):
            self.count.add("tensor", True, True)
        return func(*args, **kwargs)


def _crosses(name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
    if name not in ("_to_copy", "copy_"):
        return False
    patient = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
    return patient and len({tensor.device.type for tensor in tensors}) > 1
