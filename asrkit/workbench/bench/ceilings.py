"""What a machine does at most: the rates that all other rates are compared with, measured in the
same run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from asrkit.models.execution import tf32
from asrkit.models.packed import multiplies
from asrkit.workbench.measure import measure
from asrkit.workbench.measure.ops import dtype_name
from asrkit.workbench.records import Measurement

WHAT = "machine-ceiling"
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROWS = {"cpu": (512, 2048), "cuda": (4096, 8192)}  # square products; the better rate counts
MIB = {"cpu": 1024, "cuda": 4096}  # of a stream: beyond the caches, some hundreds of MiB on servers


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The best rates that torch reached in any repeat: of matrix products by arithmetic, and of
    bytes that stream by.

    `measurements` are what they were taken from, whose values are medians.
    """

    flops: dict[str, float]  # FLOP/s of float32, bfloat16, float16, and on CUDA tf32
    bytes_per_s: float  # of a copy (read and written) or of weights in any type, whichever is more
    measurements: tuple[Measurement, ...]

    def floor_ms(self, FLOP: int, B: int, arithmetic: str) -> float:
        """Milliseconds that work takes at least: those of its operations or of its bytes.

        Args:
            FLOP: operations.
            B: bytes that are read and written.
            arithmetic: dtype of the operations, or "tf32".
        """
        return 1e3 * max(FLOP / self.flops[arithmetic], B / self.bytes_per_s)


class Work(NamedTuple):
    """A call whose work is known."""

    metric: str
    unit: str
    impl: str
    shape: list[int]
    amount: int  # of the unit, in one call
    call: Callable[[], object]


def ceilings(device: str = "cpu", quick: bool = False) -> Ceilings:
    """The machine's, with the threads torch uses now; measured once a process, in some seconds.
    `quick`: at smaller sizes only.
    """
    return _ceilings(device, quick, torch.get_num_threads())


@cache
@torch.inference_mode()
def _ceilings(device: str, quick: bool, threads: int) -> Ceilings:
    measurements: list[Measurement] = []
    flops: dict[str, float] = {}
    bytes_per_s = 0.0
    for generate in (_products, _streams):
        for work in generate(device, quick):
            measurement = _rate(work, device, quick, threads)
            measurements.append(measurement)
            best = max(measurement.samples)
            if work.unit == "FLOP/s":
                flops[work.impl] = max(best, flops.get(work.impl, 0.0))
            else:
                bytes_per_s = max(best, bytes_per_s)
    return Ceilings(flops=flops, bytes_per_s=bytes_per_s, measurements=tuple(measurements))


def _rate(work: Work, device: str, quick: bool, threads: int) -> Measurement:
    arms = {work.impl: work.call}
    repeats = 3 if quick else 7
    with tf32(work.impl == "tf32"):
        times = measure(arms, repeats=repeats, warmup=1, enough_s=1.0, device=device)
    timing = times[work.impl]
    dtype = dtype_name(TYPES.get(work.impl, torch.float32))
    return Measurement(
        WHAT,
        work.metric,
        work.unit,
        work.amount / timing.median_ms * 1e3,
        tuple(work.amount / ms * 1e3 for ms in timing.samples_ms),
        timing.warmup,
        impl=work.impl,
        params={"device": device, "threads": threads, "shape": work.shape, "dtype": dtype},
        timer=timing.timer,
    )


def _products(device: str, quick: bool) -> Iterator[Work]:
    """Square matrix products by arithmetic."""
    kind = device.partition(":")[0]
    types = dict(TYPES)
    if kind == "cuda":
        types["tf32"] = torch.float32
    for name, dtype in types.items():
        for N in ROWS[kind][: 1 if quick else None]:
            a, b = torch.randn(2, N, N, device=device, dtype=dtype)
            product = partial(F.linear, a, b)
            if kind == "cpu" and multiplies(dtype):
                # the weight is laid out before, as in asrkit.models.packed
                packed = torch.ops.mkldnn._reorder_linear_weight(b, N)
                linear = torch.ops.mkldnn._linear_pointwise
                product = partial(linear, a, packed, None, "none", [], "")
            yield Work("matrix_product", "FLOP/s", name, [N, N, N], 2 * N**3, product)


def _streams(device: str, quick: bool) -> Iterator[Work]:
    """A copy, and weights of each dtype that are read once."""
    size = 2**20 * MIB[device.partition(":")[0]]
    if quick:
        size //= 8
    source = torch.ones(size // 8, device=device)  # half of the bytes are read, half are written
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    yield Work("copy", "B/s", "float32", [size // 8], size, copy)
    for name, dtype in TYPES.items():
        both = torch.cat([source, target]).view(dtype).view(-1, 1024)  # no new memory but this
        read = partial(F.linear, both[:1], both)
        yield Work("weight_stream", "B/s", name, [*both.shape], size, read)
