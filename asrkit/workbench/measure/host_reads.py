"""Where a step reads from the device, and how much memory it takes, without such a device.

A read makes the CPU wait for everything that was queued, so a step that shall be queued ahead, or
captured in a graph, must have none. Tensors of device "meta" and fake tensors have shapes and no
numbers: with them a step of any size is traced in seconds, and what it reads is made up.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from asrkit.runtime import op_name, waits
from asrkit.shapes import expect, whole
from asrkit.workbench.measure.launches import READS, CountOps, CountReads, crosses
from asrkit.workbench.measure.ops import caller, tensors

DEVICES = ("cpu", "cuda", "meta")


def host_reads(step: Callable[[], object], *, device: str = "cpu") -> Counter[str]:
    """How often each line of a step makes the CPU wait for the device: empty where none does.

    Counted are `.item()`, `bool()`, `.tolist()`, `nonzero()`, boolean masks as an index, and copies
    between host and device that block; see `launch_profile`. A read of a tensor without numbers
    gives ones, so that the step goes on.

    Args:
        step: The call. Its tensors may be real, fake (call this inside a FakeTensorMode) or of
            device "meta".
        device: Whose tensors count. With "meta" those of the CPU are real and lie on the host; with
            "cpu" every tensor counts; "cuda" needs a GPU.

    Returns:
        Reads by "file:line" of the nearest caller outside torch. A read in the backward pass of
        torch's own functions has the line that called `backward`.

    Raises:
        ValueError: `device` is none of these, or "cuda" where there is no GPU.
        RuntimeError: A shape depends on numbers that its tensor does not have; the line is named.
    """
    expect(device in DEVICES, "device", "'cpu', 'cuda' or 'meta'", repr(device))
    present = device != "cuda" or torch.cuda.is_available()
    expect(present, "device", "'cpu' or 'meta' where there is no GPU", repr(device))
    count = _CountWithoutNumbers(device)
    with count, CountReads(count), _ReadOnes(count):
        step()
    return +count.sites


def fake_peak(
    step: Callable[[Any], object],
    batch: Any,
    *,
    held: Iterable[Any] = (),
    device: str = "meta",
    steps: int = 2,
) -> int:
    """Peak memory of a step in bytes, its arguments included, on tensors without numbers.

    The step runs twice, since the first makes the optimizer's state. Sizes are those of the
    tensors; an allocator rounds them up, and cuDNN's and cuBLAS's workspaces are not in them. An
    LSTM keeps for its backward pass what the CPU's implementation does.

    Args:
        step: step(batch), forward, backward and update.
        batch: Its argument: tensors, nested in tuples, lists or dicts.
        held: Modules, optimizers and tensors that exist before the step.
        device: The device whose bytes count: "meta", or "cpu" inside a FakeTensorMode.
        steps: How often the step runs; once is enough where `held` has all that stays.

    Raises:
        ValueError: `device` is neither, or there is no step.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    expect(device in ("cpu", "meta"), "device", "'meta' or 'cpu'", repr(device))
    expect(whole(steps, 1), "steps", "at least 1", steps)
    tracker: Any = MemTracker()
    tracker._update_peak_stats = partial(_note_peak, tracker)
    tracker.track_external(*held, *tensors(tree_leaves(batch)))
    with tracker:
        for number in range(steps):
            if number > 0:
                tracker.reset_mod_stats()
            step(batch)
    peaks = tracker.get_tracker_snapshot("peak")
    return int(peaks[torch.device(device)]["Total"])


def _note_peak(tracker: Any, _: object) -> None:
    """Note the peak of all; MemTracker's own method notes each module's too, and takes longer."""
    for device, sizes in tracker._curr_mem_snap.items():
        if sizes["Total"] > tracker._peak_mem.get(device, 0):
            tracker._peak_mem[device] = sizes["Total"]
            tracker._peak_mem_snap[device] = dict(sizes)


def has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers: fakes and those of device "meta" do not."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


class _CountWithoutNumbers(CountOps):
    """Counts ops, and answers the reads of tensors that have no numbers."""

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func` with `args` and `kwargs`, and count it."""
        inputs = tensors((args, kwargs))
        unknown = [tensor for tensor in inputs if not has_numbers(tensor)]
        if not unknown:
            return super().op(func, args, kwargs)
        name = op_name(func)
        if name in ("_local_scalar_dense", "equal"):
            self.add(name, False, True)
            return _one(unknown[0].dtype, name)
        if name == "_to_copy" and _leaves_meta(unknown[0], kwargs):
            dtype = kwargs.get("dtype") or unknown[0].dtype
            copied = torch.ones(unknown[0].shape, dtype=dtype)
            self.add(name, True, crosses(name, args, kwargs, [copied, *inputs]))
            return copied
        if name == "copy_" and has_numbers(args[0]):
            self.add(name, True, crosses(name, args, kwargs, inputs))
            return args[0].fill_(1)
        sized_by_numbers = torch.Tag.dynamic_output_shape in func.tags
        if sized_by_numbers and waits(func, args, kwargs):
            raise RuntimeError(
                f"step: expected shapes that follow from shapes, got {name} at {caller()}, whose "
                "size depends on numbers. Write it otherwise, or count on real tensors."
            )
        return super().op(func, args, kwargs)


def _one(dtype: torch.dtype, name: str) -> float | int | bool:
    """What the op `name` reads from a tensor without numbers."""
    if dtype == torch.bool or name == "equal":
        return True
    if dtype.is_floating_point:
        return 1.0
    return 1


def _leaves_meta(source: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether a copy is one from device "meta" to another."""
    target = kwargs.get("device")
    if target is None or source.device.type != "meta":
        return False
    return torch.device(target).type != "meta"


class _ReadOnes(TorchFunctionMode):
    """Answers `tolist`, `numpy` and `cpu` of tensors that have no numbers, and counts them."""

    def __init__(self, count: CountOps) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in READS or has_numbers(args[0]):
            return func(*args, **kwargs)
        tensor = args[0]
        if tensor.device.type == self.count.kind:
            self.count.add(func.__name__, False, True)
        if func is Tensor.cpu and isinstance(tensor, FakeTensor):
            return tensor
        with unset_fake_temporarily():
            ones = torch.ones(tensor.shape, dtype=tensor.dtype)
        if func is Tensor.cpu:
            return ones
        return func(ones)
