"""What measures and counts, against what is known of small calls."""

from collections.abc import Iterator
from functools import partial

import torch

from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.profiling import cast_profile, launch_profile, measure, peak_memory


def profiling_checks(device: str, cuda: bool) -> Iterator[Check]:
    """Checks of the tools of asrkit.workbench.profiling, and of the search for batch sizes."""
    for call in (_cast_profile, _launch_profile, _peak_memory, _oom_search, _timing):
        yield Check("profiling", call.__name__[1:], "", partial(call, device))


def _cast_profile(device: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.LayerNorm(256)).to(device)
    with torch.no_grad():
        inputs = (torch.randn(100, 64, device=device),)
        modes = ("float32", "autocast", "half")
        profiles = {
            mode: cast_profile(model, inputs, mode, device=device, repeats=2) for mode in modes
        }
    counts = {mode: len(profile.casts) for mode, profile in profiles.items()}
    expected = {"float32": 0, "autocast": 3, "half": 0}
    if torch.device(device).type == "cuda":
        expected["autocast"] = 4
    assert counts == expected, counts
    for profile in profiles.values():
        assert all(op.ms > 0 for op in profile.ops), "an op without time"


def _launch_profile(device: str) -> None:
    x = torch.ones(4, device=device)
    seen = launch_profile(lambda: (x + 1).sum().item(), device=device)
    assert (seen.launches, seen.syncs) == (2, 1), seen
    if seen.kernels is not None:
        assert seen.kernels >= 2 and seen.stream_syncs and not seen.graph_launches, seen


def _peak_memory(device: str) -> None:
    def overlap() -> object:
        a, b = (torch.zeros(size * 250_000, device=device) for size in (4, 8))
        del a
        return b, torch.zeros(500_000, device=device)

    tolerance = 0
    if torch.device(device).type == "cuda":
        tolerance = 4096
    peak = peak_memory(overlap, device=device)
    assert abs(peak - 12e6) <= tolerance, peak


def _oom_search(device: str) -> None:
    """Where tqdm is installed, which this search shows its progress with."""
    from asrkit.data import Buckets, oom_search

    def step(n: int, seconds: float, tokens: int) -> None:
        torch.empty(int(n * seconds * 2**16), dtype=torch.uint8, device=device)

    buckets = Buckets([1.0, 4.0], [0, 0], [1, 1])  # type: ignore[arg-type]
    result = oom_search(step, buckets, device=device, budget_bytes=2**24, progress=False)
    sizes = result.table.sizes
    assert 0.9 < sizes[0] * 2**16 / 2**24 <= 1, sizes


def _timing(device: str) -> None:
    x = torch.ones(256, 256, device=device)
    timing = measure({"product": lambda: x @ x}, repeats=3, device=device)["product"]
    on_gpu = torch.device(device).type == "cuda"
    assert min(timing.samples_ms) > 0, timing
    assert ("Event" in timing.timer) == on_gpu, timing
