"""Peak memory of a call: measured, or counted on tensors without numbers."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from asrkit.memory import peak_memory
from asrkit.shapes import expect_choice
from asrkit.workbench.measure.ops import tensors

__all__ = ["fake_peak", "peak_memory"]


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
        ValueError: `device` is neither.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    expect_choice("device", device, ("cpu", "meta"))
    tracker: Any = MemTracker()
    tracker._update_peak_stats = partial(_note_peak, tracker)
    tracker.track_external(*held, *tensors(batch))
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
