"""What measures and counts, against what is known of small calls."""

from collections.abc import Iterator
from functools import partial

import torch

from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.profiling import cast_profile, launch_profile, measure, peak_memory


def profiling_checks(device: str, cuda: bool) -> Iterator[Check]:
    """Checks of the tools of asrkit.workbench.profiling, and of the search for batch sizes."""
    calls = {
        "cast_profile": _cast_profile,
        "launch_profile": _launch_profile,
        "peak_memory": _peak_memory,
        "oom_search": _oom_search,
        "timing": _timing,
    }
    for name, call in calls.items():
        yield Check("profiling", name, "", partial(call, device))


def _cast_profile(device: str) -> None:
    linear = torch.nn.Linear(64, 256)
    norm = torch.nn.LayerNorm(256)
    model = torch.nn.Sequential(linear, norm).to(device)
    expected = {"float32": 0, "autocast": 3, "half": 0}
    if torch.device(device).type == "cuda":
        expected["autocast"] = 4
    with torch.no_grad():
        inputs = (torch.randn(100, 64, device=device),)
        for mode, casts in expected.items():
            profile = cast_profile(model, inputs, mode, device=device, repeats=2)
            assert len(profile.casts) == casts, f"{len(profile.casts)} casts in {mode}"
            assert all(op.ms > 0 for op in profile.ops), "an op without time"


def _launch_profile(device: str) -> None:
    x = torch.ones(4, device=device)
    seen = launch_profile(lambda: (x + 1).sum().item(), device=device)
    assert seen.launches == 2, seen
    assert seen.syncs == 1, seen
    if seen.kernels is not None:
        assert seen.kernels >= 2, seen
        assert seen.stream_syncs, seen
        assert not seen.graph_launches, seen


def _peak_memory(device: str) -> None:
    def overlap() -> object:
        freed = torch.zeros(1_000_000, device=device)
        kept = torch.zeros(2_000_000, device=device)
        del freed
        return kept, torch.zeros(500_000, device=device)

    tolerance = 0
    if torch.device(device).type == "cuda":
        tolerance = 4096
    peak = peak_memory(overlap, device=device)
    assert abs(peak - 12e6) <= tolerance, peak


def _oom_search(device: str) -> None:
    """Where tqdm is installed, which this search shows its progress with."""
    from asrkit.data import Buckets, oom_search

    budget_B = 2**24
    second_B = 2**16  # of each second of an utterance

    def step(n: int, seconds: float, tokens: int) -> None:
        """Allocate for `n` utterances of so many seconds, whatever their tokens."""
        size = int(n * seconds * second_B)
        torch.empty(size, dtype=torch.uint8, device=device)

    buckets = Buckets([1.0, 4.0], [0, 0], [1, 1])  # type: ignore[arg-type]
    result = oom_search(
        step,
        buckets,
        device=device,
        budget_bytes=budget_B,
        progress=False,
    )
    first_size = result.table.sizes[0]
    filled = first_size * second_B / budget_B
    assert 0.9 < filled <= 1, result.table.sizes


def _timing(device: str) -> None:
    x = torch.ones(256, 256, device=device)
    timings = measure({"product": lambda: x @ x}, repeats=3, device=device)
    timing = timings["product"]
    on_gpu = torch.device(device).type == "cuda"
    assert min(timing.samples_ms) > 0, timing
    assert ("Event" in timing.timer) == on_gpu, timing
