"""What a machine does at most: the rates that all other rates are compared with, measured in the
same run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional as F

from asrkit.models.cpu.prepacked import onednn_supports
from asrkit.models.inference import tf32
from asrkit.workbench.bench.publishing import of_samples
from asrkit.workbench.measure import measure
from asrkit.workbench.records import Measurement

WHAT = "machine-ceiling"
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TF32 = {"tf32": torch.float32}
ROWS = {"cpu": (512, 2048), "cuda": (4096, 8192)}  # square products; the better rate counts
MIB = {"cpu": 1024, "cuda": 4096}  # of a stream: beyond the caches, some hundreds of MiB on servers
Call = Callable[[], object]
Measured = tuple[str, str, list[int], int, Call]  # metric, impl, shape, operations or bytes, call


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
    rate = partial(_rate, device=device, repeats=3 if quick else 7)
    products = [rate("FLOP/s", *work) for work in _products(device, quick)]
    streams = [rate("B/s", *work) for work in _streams(device, quick)]
    flops: dict[str, float] = {}
    for one in products:
        flops[one.impl] = max(flops.get(one.impl, 0.0), *one.samples)
    bytes_per_s = max(max(one.samples) for one in streams)
    return Ceilings(flops=flops, bytes_per_s=bytes_per_s, measurements=(*products, *streams))


def _rate(
    unit: str, metric: str, name: str, shape: list[int], work: int, call: Call, **run: Any
) -> Measurement:
    """Measure how much work a call does in a second, which is so much at once."""
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
                # the weight is laid out before, as in asrkit.models.cpu.prepacked
                packed = torch.ops.mkldnn._reorder_linear_weight(b, N)
                linear = torch.ops.mkldnn._linear_pointwise
                product = partial(linear, a, packed, None, "none", [], "")
            yield "matrix_product", name, [N, N, N], 2 * N**3, product


def _streams(device: str, quick: bool) -> Iterator[Measured]:
    """A copy, and weights of each dtype that are read once."""
    size = 2**20 * MIB[device]
    if quick:
        size //= 8
    source = torch.ones(size // 8, device=device)  # half of the bytes are read, half are written
    target = torch.empty_like(source)
    yield "copy", "float32", [size // 8], size, partial(target.copy_, source)
    for name, dtype in TYPES.items():
        both = torch.cat([source, target]).view(dtype).view(-1, 1024)  # no new memory but this
        yield "weight_stream", name, [*both.shape], size, partial(F.linear, both[:1], both)
