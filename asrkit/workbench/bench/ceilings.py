"""What a machine does at most: the rates that all other rates are compared with, measured in the
same run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional as F

from asrkit.models.execution import tf32
from asrkit.models.packed import multiplies
from asrkit.workbench.measure import Timing, measure
from asrkit.workbench.measure.ops import dtype_name
from asrkit.workbench.records import Measurement

WHAT = "machine-ceiling"
TYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
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


def ceilings(device: str = "cpu", quick: bool = False) -> Ceilings:
    """The machine's, with the threads torch uses now; measured once a process, in some seconds.
    `quick`: at smaller sizes only.
    """
    return _ceilings(device, quick, torch.get_num_threads())


@cache
@torch.inference_mode()
def _ceilings(device: str, quick: bool, threads: int) -> Ceilings:
    measurements = [
        *_products(device, quick, threads),
        *_streams(device, quick, threads),
    ]
    flops: dict[str, float] = {}
    bytes_per_s = 0.0
    for measurement in measurements:
        rate = max(measurement.samples)
        if measurement.metric == "matrix_product":
            impl = measurement.impl
            flops[impl] = max(rate, flops.get(impl, 0.0))
        else:
            bytes_per_s = max(rate, bytes_per_s)
    return Ceilings(flops=flops, bytes_per_s=bytes_per_s, measurements=tuple(measurements))


def _time(name: str, call: Callable[[], object], device: str, quick: bool) -> Timing:
    repeats = 7
    if quick:
        repeats = 3
    return measure({name: call}, repeats=repeats, warmup=1, enough_s=1.0, device=device)[name]


def _products(device: str, quick: bool, threads: int) -> Iterator[Measurement]:
    """FLOP/s of square matrix products by arithmetic."""
    kind = device.partition(":")[0]
    sizes: Sequence[int] = ROWS[kind]
    if quick:
        sizes = sizes[:1]
    for name, dtype in TYPES.items():
        if name == "tf32" and kind != "cuda":
            continue
        for N in sizes:
            a, b = torch.randn(2, N, N, device=device, dtype=dtype)
            product = partial(F.linear, a, b)
            if kind == "cpu" and multiplies(dtype):
                # the weight is laid out before, as in asrkit.models.packed
                packed = torch.ops.mkldnn._reorder_linear_weight(b, N)
                linear = torch.ops.mkldnn._linear_pointwise
                product = partial(linear, a, packed, None, "none", [], "")
            with tf32(name == "tf32"):
                timing = _time(name, product, device, quick)
            params = {"device": device, "threads": threads, "shape": [N, N, N]}
            yield _rate("matrix_product", "FLOP/s", name, 2 * N**3, timing, params)


def _streams(device: str, quick: bool, threads: int) -> Iterator[Measurement]:
    """Bytes a second of a copy, and of weights of each dtype that are read once."""
    size = 2**20 * MIB[device.partition(":")[0]]
    if quick:
        size //= 8
    where = {"device": device, "threads": threads}
    source = torch.ones(size // 8, device=device)  # half of the bytes are read, half are written
    target = torch.empty_like(source)
    timing = _time("copy", partial(target.copy_, source), device, quick)
    yield _rate("copy", "B/s", "float32", size, timing, where | {"shape": [size // 8]})
    for name, dtype in TYPES.items():
        if name == "tf32":
            continue
        both = torch.cat([source, target]).view(dtype).view(-1, 1024)  # no new memory but this
        timing = _time(name, partial(F.linear, both[:1], both), device, quick)
        yield _rate("weight_stream", "B/s", name, size, timing, where | {"shape": [*both.shape]})


def _rate(
    metric: str, unit: str, name: str, work: int, timing: Timing, params: dict[str, Any]
) -> Measurement:
    """The rate of so much work in the time it took."""
    return Measurement(
        WHAT,
        metric,
        unit,
        work / timing.median_ms * 1e3,
        tuple(work / ms * 1e3 for ms in timing.samples_ms),
        timing.warmup,
        impl=name,
        params={**params, "dtype": dtype_name(TYPES[name])},
        timer=timing.timer,
    )
