"""Recording the turns of a decoding loop into a CUDA graph."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asrkit.decoders.repeated_turns import RepeatedTurns
from asrkit.decoders.transducer.conditional import WhileGraph
from asrkit.runtime import CAPTURING, waits

TURNS = 4  # of the loop in one replay of "step"; turns after the end change nothing
WARM_UP = 2  # turns before a capture: libraries set themselves up and kernels are compiled


class CaptureGuard(TorchDispatchMode):
    """Raises RuntimeError at an op that a graph cannot hold, before a capture is begun.

    Such an op takes a value or a size from the device to Python. A capture that fails there may
    leave torch in a bad state.

    Attributes:
        storages_read: Addresses of the memory of all tensors that ops were called with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages_read = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.storages_read.add(leaf.untyped_storage().data_ptr())
        if waits(func, args, kwargs):
            raise RuntimeError(f"{func} waits for the GPU")
        with self:  # inference mode passes composite ops undecomposed
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            return func(*args, **kwargs)
        return result


class CapturedLoop(NamedTuple):
    """A loop, of any kind, and how to run it on the current stream once a batch is loaded."""

    loop: Any
    run: Callable[[], None]

    def holds(self, T: int) -> bool:
        """Whether there is room for T frames."""
        return self.loop.encoded.shape[1] >= T


def capture(loop: RepeatedTurns, model: Any, mode: str) -> Callable[[], None]:
    """Record turns of a loaded loop, and return a function that runs it to its end.

    Args:
        loop: A loop with a batch in it; sets its `storages_read`.
        model: What the loop's turn takes.
        mode: "step" records `TURNS` turns in a graph that the host replays; "full" records one turn
            in a graph that repeats itself.

    Raises:
        RuntimeError: The turn contains an op that waits for the GPU, or the capture failed.
    """
    device_type = loop.active.device.type
    stream = torch.cuda.Stream()  # its own, since matrix products keep a workspace per stream
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph(keep_graph=mode == "full")
    # Casts that autocast has cached belong to whoever entered it, and may be gone at a replay.
    cast = torch.autocast(
        device_type,
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_enabled(device_type),
        cache_enabled=False,
    )
    with CAPTURING, cast, torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            with CaptureGuard() as guard:
                loop.turn(model)
        loop.storages_read = guard.storages_read
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(1 if mode == "full" else TURNS):
                loop.turn(model)
    torch.cuda.current_stream().wait_stream(stream)
    if mode == "full":
        return WhileGraph(graph, loop.active).launch

    def replay_until_done() -> None:
        loop.repeat(graph.replay)

    return replay_until_done
