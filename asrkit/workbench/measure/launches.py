"""What a GPU is asked to do and where the CPU waits for it, counted on any device."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from asrkit.runtime import op_name, waits
from asrkit.shapes import expect
from asrkit.workbench.measure.ops import EachOp, caller, tensors, works

# Which no dispatcher sees where the device is the CPU itself.
READS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}
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
    """Counts of one call.

    An op may take several kernels, and on the CPU others than on a GPU (LSTM): see `kernels`.

    Attributes:
        launches: Ops that start at least one kernel or copy on a GPU, without views and metadata.
        syncs: Ops after which the CPU waits for the GPU: .item(), bool(), nonzero, boolean masks,
            copies between the two.
        ops: The launches and the syncs by name.
        sync_sites: The syncs by "file:line" of the first caller outside torch.
        kernels: Kernel launches that the driver saw, without those within a graph. This and the
            next two are None but on CUDA with `runtime`.
        graph_launches: Graph launches that the driver saw; one by cuda-python may be missing.
        stream_syncs: cudaStreamSynchronize and cudaEventSynchronize.
    """

    launches: int
    syncs: int
    ops: Counter[str]
    sync_sites: Counter[str]
    kernels: int | None = None
    graph_launches: int | None = None
    stream_syncs: int | None = None


def launch_profile(
    fn: Callable[[], object], *, device: str = "cpu", runtime: bool = True
) -> Launches:
    """Count the launches and waits of one call.

    On a CPU the tensors stand in for those of a GPU: counted is what a GPU would get to do, and
    would be waited for. A copy between devices shows there as .cpu(), .numpy(), .tolist(), or
    torch.tensor(values, device=...).

    Args:
        fn: The call.
        device: Where its work is, "cpu" or "cuda".
        runtime: On CUDA, also count what the driver saw (`kernels`, `graph_launches`,
            `stream_syncs`), by torch.profiler. That is slow: it keeps an event for each op.

    Raises:
        ValueError: `device` is neither, or "cuda" where there is no GPU.
    """
    kind = str(device).partition(":")[0]
    expect(kind in ("cpu", "cuda"), "device", "'cpu' or 'cuda'", repr(device))
    present = kind == "cpu" or torch.cuda.is_available()
    expect(present, "device", "'cpu' where there is no GPU", repr(device))
    count = CountOps(kind)
    if kind == "cpu" or not runtime:
        with count, CountReads(count):
            fn()
        return count.result()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        with count, CountReads(count):
            fn()
    events = Counter(event.name for event in profile.events() or ())
    by_driver = {}
    for field, names in RUNTIME.items():
        by_driver[field] = sum(events[name] for name in names)
    return count.result(**by_driver)


class CountOps(EachOp):
    """Counts the ops on tensors of one kind of device, "cpu" or "cuda"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.launches = 0
        self.ops = Counter[str]()
        self.sites = Counter[str]()

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func` with `args` and `kwargs`, and count it."""
        result = func(*args, **kwargs)
        name = op_name(func)
        inputs = tensors((args, kwargs))
        outputs = tensors(result)
        if any(tensor.device.type == self.kind for tensor in inputs + outputs):
            waited = waits(func, args, kwargs) or crosses(name, args, kwargs, inputs + outputs)
            self.add(name, works(func, inputs, outputs), waited)
        return result

    def add(self, name: str, launches: bool, waited: bool) -> None:
        """Count one op.

        Args:
            name: Its name.
            launches: Whether it starts a kernel or a copy.
            waited: Whether the CPU waits for it.
        """
        self.launches += launches
        self.ops[name] += launches or waited
        if waited:
            self.sites[caller()] += 1

    def result(self, **by_driver: int) -> Launches:
        """The counts so far, and what the driver saw."""
        return Launches(
            launches=self.launches,
            syncs=self.sites.total(),
            ops=+self.ops,
            sync_sites=self.sites,
            **by_driver,
        )


class CountReads(TorchFunctionMode):
    """Counts what only Python sees on a CPU: tensors that are read, or made of Python's values."""

    def __init__(self, count: CountOps) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.count.kind == "cpu" and func in READS:
            self.count.add(func.__name__, False, True)
        if func is torch.tensor and self._is_there(kwargs.get("device")):
            self.count.add("tensor", True, True)
        return func(*args, **kwargs)

    def _is_there(self, device: Any) -> bool:
        return device is not None and torch.device(device).type == self.count.kind


def crosses(name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
    """Whether an op is a copy between devices that the CPU waits for.

    Args:
        name: Of the op.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        tensors: Its inputs and outputs.
    """
    if name not in ("_to_copy", "copy_"):
        return False
    if kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]):
        return False
    return len({tensor.device.type for tensor in tensors}) > 1
