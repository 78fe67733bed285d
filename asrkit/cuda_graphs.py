"""One capture of CUDA graphs, for decoders, encoders and passes of training.

A graph records what a call launches on a GPU, and a replay launches all of it at once. Shapes and
addresses in it are fixed: copy new inputs into the tensors that the call read, then replay.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

R = TypeVar("R")
WARM_UP = 3  # calls before a capture, in which libraries allocate workspaces and choose algorithms
CAPTURING = threading.Lock()  # held during a capture, since torch captures one graph at a time


def capture(
    call: Callable[[], R],
    *,
    warm_up: Callable[[], object] | None = None,
    stream: torch.cuda.Stream | None = None,
    pool: Any = None,
    keep_graph: bool = False,
) -> tuple[torch.cuda.CUDAGraph, R]:
    """Record the GPU work of one call as a CUDA graph.

    Args:
        call: Reads tensors whose addresses do not change, and returns tensors.
        warm_up: Called `WARM_UP` times before the capture; None is `call` itself.
        stream: The stream to record on; None is a new one. Matrix products keep a workspace for
            each stream, so graphs that may run at the same time are recorded on different ones.
        pool: Memory shared by several graphs. A replay of one overwrites the results of the others.
        keep_graph: Whether the graph can become part of another one.

    Returns:
        The graph, and the tensors that `call` returned, which each replay overwrites.
    """
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    with CAPTURING, torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            (warm_up or call)()
        # thread_local: another thread may load audio meanwhile
        options: dict[str, Any] = {"stream": stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graph, pool=pool, **options):
            results = call()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, results


def capture_training(
    module: nn.Module, arguments: tuple[Tensor, ...], pool: Any
) -> Callable[..., Any]:
    """A callable that replays the forward and backward pass of `module` on such `arguments`."""
    with CAPTURING:
        return torch.cuda.make_graphed_callables(module, arguments, pool=pool)
