"""Times of CUDA graphs, which only a GPU has: of empty kernels, of a decoder, of an encoder."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from asrkit.models import FastConformer, FastConformerConfig, execution
from asrkit.runtime import CAPTURING
from asrkit.workbench.bench.turn_costs import LaunchCosts
from asrkit.workbench.profiling import Timing, measure

SINGLE_CALLS = 200
MIB = 2**20


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of what `call` launches.

    Args:
        call: It runs once before, so that libraries make their workspaces outside the graph.
    """
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with CAPTURING, torch.cuda.graph(graph):
        call()
    return graph


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds until `call` returns on the host.

    Args:
        call: What is timed, once.
    """
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def launch_costs(repeats: int) -> tuple[LaunchCosts, dict[str, Timing]]:
    """What this GPU and its host need for launches, short kernels, flags and graphs.

    The timings are of a thousand short kernels, "launched" one by one and "replayed" as a graph.

    Args:
        repeats: Of the measurement.
    """
    number = torch.zeros(1, device="cuda")

    def thousand() -> None:
        for _ in range(1000):
            number.add_(1)

    graph = captured(thousand)
    times = measure(
        {"launched": thousand, "replayed": graph.replay}, repeats=repeats, device="cuda"
    )
    single = captured(partial(number.add_, 1))
    replays_us = [host_us(single.replay) for _ in range(SINGLE_CALLS)]
    torch.cuda.synchronize()
    flags_us = [host_us(number.item) for _ in range(SINGLE_CALLS)]
    costs = LaunchCosts(
        host_us=times["launched"].median_ms,  # ms of a thousand are µs of each
        kernel_us=times["replayed"].median_ms,
        flag_us=median(flags_us),
        replay_us=median(replays_us),
    )
    return costs, times


def first_call(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of the first call, capture included, and MiB that it reserved.

    Args:
        call: What is called, once.
    """
    start = time.perf_counter()
    before_B = torch.cuda.memory_reserved()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, (torch.cuda.memory_reserved() - before_B) / MIB


def kernel_spans(call: Callable[[], Any]) -> list[tuple[float, float]]:
    """Start and length in µs of each kernel that torch's profiler sees, from the first one on.

    Args:
        call: What is profiled, once. Kernels within WHILE nodes may be missing.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    gpu = torch.autograd.DeviceType.CUDA
    ranges = [event.time_range for event in profile.events() or () if event.device_type == gpu]
    first = min((kernel.start for kernel in ranges), default=0)
    return [(kernel.start - first, kernel.elapsed_us()) for kernel in ranges]


@torch.inference_mode()
def encoder_times(
    frame_counts: Sequence[int], repeats: int
) -> dict[int, tuple[float, dict[str, Timing]]]:
    """An encoder of four layers on one utterance: eager, as a graph, and compiled.

    Args:
        frame_counts: Lengths to measure.
        repeats: Of the measurement.

    Returns:
        Frames -> seconds that compiling took, and the timings.
    """
    encoder = FastConformer(FastConformerConfig(layers=4)).eval().cuda()
    compiled = torch.compile(encoder, mode="reduce-overhead", dynamic=False)
    found = {}
    for frames in frame_counts:
        features = torch.randn(1, frames, 80, device="cuda")
        ends = torch.tensor([frames], device="cuda")
        inside = torch.empty_like(features)
        replay = execution.capture(partial(encoder, inside, ends))
        copied_in = partial(_replayed, replay, inside, features)
        expected = encoder(features, ends)[0]
        assert torch.allclose(copied_in()[0], expected, atol=1e-3)
        compile_s = host_us(partial(compiled, features, ends)) / 1e6
        arms = {
            "eager": partial(encoder, features, ends),
            "graph": copied_in,
            "compiled": partial(compiled, features, ends),
        }
        found[frames] = compile_s, measure(arms, repeats=repeats, warmup=5, device="cuda")
    return found


def _replayed(replay: Callable[[], Any], inside: torch.Tensor, features: torch.Tensor) -> Any:
    inside.copy_(features)
    return replay()
