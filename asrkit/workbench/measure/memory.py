"""Peak memory of a call: measured, or counted on "meta" tensors, which hold no data."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from asrkit.memory import peak_memory
from asrkit.workbench.measure.ops import tensors

__all__ = ["fake_peak", "peak_memory"]


def fake_peak(
    step: Callable[[Any], object],
    batch: Any,
    *,
    held: Iterable[Any] = (),
    steps: int = 2,
) -> int:
    """Peak memory of a step in bytes, including its arguments, on tensors of device "meta".

    The step runs twice, because the first run creates the optimizer's state. The sizes are those of
    the tensors: an allocator rounds them up, and workspaces of cuDNN and cuBLAS come on top. An
    LSTM keeps for its backward pass what the CPU's implementation keeps.

    Args:
        step: step(batch) does forward, backward and update.
        batch: The argument of `step`: tensors, nested in tuples, lists or dicts.
        held: Modules, optimizers and tensors that exist before the step.
        steps: Number of runs; one is enough if `held` has everything that outlives a step.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker: Any = MemTracker()
    tracker._update_peak_stats = partial(_note_peak, tracker)
    tracker.track_external(*held, *tensors(batch))
    with tracker:
        for number in range(steps):
            if number > 0:
                tracker.reset_mod_stats()
            step(batch)
    peaks = tracker.get_tracker_snapshot("peak")
    return int(peaks[torch.device("meta")]["Total"])


def _note_peak(tracker: Any, _: object) -> None:
    """Record the total peak. MemTracker's own method also records each module's, and is slower."""
    for device, sizes in tracker._curr_mem_snap.items():
        if sizes["Total"] > tracker._peak_mem.get(device, 0):
            tracker._peak_mem[device] = sizes["Total"]
            tracker._peak_mem_snap[device] = dict(sizes)
