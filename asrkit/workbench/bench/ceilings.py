"""What a machine does at most: the rates that everything else is set beside, measured in the same
run.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from asrkit.models.execution import tf32
from asrkit.models.packed import multiplies
from asrkit.workbench.profiling import Timing, measure
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
        """Milliseconds that work of so many operations and bytes takes at least: as long as the
        slower of the two.
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
    kind, made = device.partition(":")[0], list[Measurement]()
    how: dict[str, Any] = {
        "repeats": 3 if quick else 7,
        "warmup": 1,
        "enough_s": 1.0,
        "device": device,
    }
    where = {"device": device, "threads": threads}
    for name in TYPES if kind == "cuda" else [name for name in TYPES if name != "tf32"]:
        for N in ROWS[kind][:1] if quick else ROWS[kind]:
            a, b = torch.randn(2, N, N, device=device, dtype=TYPES[name])
            product = partial(torch.nn.functional.linear, a, b)
            if kind == "cpu" and multiplies(
                TYPES[name]
            ):  # the weight laid out before, as in asrkit.models.packed
                packed = torch.ops.mkldnn._reorder_linear_weight(b, N)
                product = partial(
                    torch.ops.mkldnn._linear_pointwise, a, packed, None, "none", [], ""
                )
            with tf32(name == "tf32"):
                timing = measure({name: product}, **how)[name]
            made.append(
                _rate(
                    "matrix_product", "FLOP/s", name, 2 * N**3, timing, where | {"shape": [N, N, N]}
                )
            )
    size = 2**20 * MIB[kind] // (8 if quick else 1)
    source = torch.ones(size // 8, device=device)  # half of the bytes are read, half are written
    target = torch.empty_like(source)
    timing = measure({"copy": partial(target.copy_, source)}, **how)["copy"]
    made.append(_rate("copy", "B/s", "float32", size, timing, where | {"shape": [size // 8]}))
    for name, dtype in [(name, dtype) for name, dtype in TYPES.items() if name != "tf32"]:
        both = torch.cat([source, target]).view(dtype).view(-1, 1024)  # no new memory but this
        timing = measure({name: partial(torch.nn.functional.linear, both[:1], both)}, **how)[name]
        made.append(
            _rate("weight_stream", "B/s", name, size, timing, where | {"shape": [*both.shape]})
        )
    best = {
        (one.metric, one.impl): max(one.samples)
        for one in sorted(made, key=lambda one: max(one.samples))
    }
    flops = {name: rate for (metric, name), rate in best.items() if metric == "matrix_product"}
    streams = [rate for (metric, _), rate in best.items() if metric != "matrix_product"]
    return Ceilings(flops=flops, bytes_per_s=max(streams), measurements=tuple(made))


def _rate(
    metric: str, unit: str, name: str, work: int, timing: Timing, params: dict[str, Any]
) -> Measurement:
    samples = tuple(work / ms * 1e3 for ms in timing.samples_ms)
    told: dict[str, Any] = {
        "impl": name,
        "params": params | {"dtype": str(TYPES[name])[6:]},
        "timer": timing.timer,
    }
    return Measurement(
        WHAT, metric, unit, work / timing.median_ms * 1e3, samples, timing.warmup, **told
    )
