"""Peak memory of tensors, from the allocators of torch itself: exact to the byte, and blind to what others allocate."""

from collections.abc import Callable
from itertools import accumulate

import torch

from asrkit.shapes import expect


def peak_memory(fn: Callable[[], object], *, device: str = "cpu") -> int:
    """Bytes of tensor memory at the peak of one call of `fn`, beyond what was allocated when it began.

    CPU: the allocation events of torch's own (c10) allocator, which torchaudio's compiled code uses too. Arrays of NumPy
    and Numba, and workspaces that a library keeps for itself (BLAS), are not seen; memory from before that `fn` frees is
    not subtracted. CUDA: torch.cuda.max_memory_allocated.
    """
    kind = torch.device(device).type
    expect(kind in ("cpu", "cuda"), "device", "'cpu' or 'cuda'", repr(device))
    if kind == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn()
        return torch.cuda.max_memory_allocated(device) - before
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        fn()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(0, *accumulate((event.nbytes() for event in events), initial=0))
