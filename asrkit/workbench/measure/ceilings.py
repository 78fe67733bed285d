"""The machine's ceilings: its highest measured rates, to compare other rates of a run with."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional as F

from asrkit.models.cpu.prepacked import onednn_supports
from asrkit.models.inference import tf32
from asrkit.workbench.measure import measure
from asrkit.workbench.measure.publishing import of_samples
from asrkit.workbench.records import Measurement

WHAT = "machine-ceiling"
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TF32 = {"tf32": torch.float32}
ROWS = {"cpu": (512, 2048), "cuda": (4096, 8192)}  # sizes of square products; the best rate counts
MIB = {"cpu": 1024, "cuda": 4096}  # size of a stream, larger than the caches of servers
Call = Callable[[], object]
Measured = tuple[str, str, list[int], int, Call]  # metric, impl, shape, operations or bytes, call


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The best rates of any repeat: of matrix products by arithmetic, and of memory.

    `measurements` are the underlying measurements; their values are medians.
    """

    flops: dict[str, float]  # FLOP/s in float32, bfloat16, float16, and on CUDA tf32
    bytes_per_s: float  # the higher rate of a copy (read and written) and of reading weights
    measurements: tuple[Measurement, ...]

    def floor_ms(self, FLOP: int, B: int, arithmetic: str) -> float:
        """Lower bound of the time of work in ms: that of its operations or of its bytes.

        Args:
            FLOP: number of operations.
            B: bytes read and written.
            arithmetic: dtype of the operations, or "tf32".
        """
        return 1e3 * max(FLOP / self.flops[arithmetic], B / self.bytes_per_s)


def ceilings(device: str = "cpu", quick: bool = False) -> Ceilings:
    """The machine's ceilings with torch's current number of threads.

    They are measured once per process, in a few seconds; with `quick` at smaller sizes.
    """
    return _ceilings(device, quick, torch.get_num_threads())


@cache
@torch.inference_mode()
def _ceilings(device: str, quick: bool, threads: int) -> Ceilings:
    rate = partial(_rate, device=device, repeats=3 if quick else 7)
    products = [rate("FLOP/s", *work) for work in _products(device, quick)]
    streams = [rate("B/s", *work) for work in _streams(device, quick)]
    flops: dict[str, float] = {}
    for product in products:
        flops[product.impl] = max(flops.get(product.impl, 0.0), *product.samples)
    bytes_per_s = max(max(stream.samples) for stream in streams)
    return Ceilings(flops=flops, bytes_per_s=bytes_per_s, measurements=(*products, *streams))


def _rate(
    unit: str, metric: str, name: str, shape: list[int], work: int, call: Call, **run: Any
) -> Measurement:
    """Measure the rate of a call that does this much work."""
    with tf32(name == "tf32"):
        times = measure({name: call}, warmup=1, enough_s=1.0, **run)
    rates = [1e3 * work / ms for ms in times[name].samples_ms]
    params = {"device": run["device"], "threads": torch.get_num_threads(), "shape": shape}
    return of_samples(WHAT, metric, unit, rates, times[name], impl=name, params=params)


def _products(device: str, quick: bool) -> Iterator[Measured]:
    """Square matrix products by arithmetic."""
    for name, dtype in (TYPES | TF32 if device == "cuda" else TYPES).items():
        for N in ROWS[device][: 1 if quick else None]:
            draw = torch.Generator(device).manual_seed(0)
            a, b = torch.randn(2, N, N, generator=draw, device=device, dtype=dtype)
            product = partial(F.linear, a, b)
            if device == "cpu" and onednn_supports(dtype):
                # the weight is packed before, as in asrkit.models.cpu.prepacked
                packed = torch.ops.mkldnn._reorder_linear_weight(b, N)
                linear = torch.ops.mkldnn._linear_pointwise
                product = partial(linear, a, packed, None, "none", [], "")
            yield "matrix_product", name, [N, N, N], 2 * N**3, product


def _streams(device: str, quick: bool) -> Iterator[Measured]:
    """A copy, and one read of weights of each dtype."""
    size = 2**20 * MIB[device]
    if quick:
        size //= 8
    source = torch.ones(size // 8, device=device)  # half of the bytes are read, half are written
    target = torch.empty_like(source)
    yield "copy", "float32", [size // 8], size, partial(target.copy_, source)
    for name, dtype in TYPES.items():
        weight = torch.cat([source, target]).view(dtype).view(-1, 1024)
        yield "weight_stream", name, [*weight.shape], size, partial(F.linear, weight[:1], weight)
