"""GPUs and the rates of their data sheets."""

from typing import NamedTuple


class Card(NamedTuple):
    """A GPU as it is sold.

    `gib` is what its memory is called, of which driver and context keep about half a GiB. The rates
    are those of its data sheet, of the SXM form where there is one; None was not looked up.
    """

    name: str
    gib: int
    year: int
    source: str
    memory_GB_per_s: float | None = None
    float32_TFLOP_per_s: float | None = None  # without tensor cores
    half_TFLOP_per_s: float | None = None  # of tensor cores, float16 or bfloat16, without sparsity


GEFORCE = "https://www.nvidia.com/en-us/geforce/graphics-cards"
DATA_CENTER = "https://www.nvidia.com/en-us/data-center"
# fmt: off
CARDS = (  # memory GB/s, float32 TFLOP/s, half TFLOP/s
    Card("GeForce RTX 3060", 12, 2021, f"{GEFORCE}/30-series/rtx-3060-3060ti/"),
    Card("Tesla T4", 16, 2018, f"{DATA_CENTER}/tesla-t4/", float32_TFLOP_per_s=8.1),
    Card("Tesla V100 (16 GB)", 16, 2017, f"{DATA_CENTER}/v100/", float32_TFLOP_per_s=15.7),
    Card("Tesla V100 (32 GB)", 32, 2018, f"{DATA_CENTER}/v100/", float32_TFLOP_per_s=15.7),
    Card("A10", 24, 2021, f"{DATA_CENTER}/products/a10-gpu/"),
    Card("L4", 24, 2023, f"{DATA_CENTER}/l4/", 300, 30.3),
    Card("GeForce RTX 4090", 24, 2022, f"{GEFORCE}/40-series/rtx-4090/"),
    Card("GeForce RTX 5090", 32, 2025, f"{GEFORCE}/50-series/rtx-5090/"),
    Card("A100 (40 GB)", 40, 2020, f"{DATA_CENTER}/a100/"),
    Card("A100 (80 GB)", 80, 2020, f"{DATA_CENTER}/a100/", 2039, 19.5, 312),
    Card("H100", 80, 2022, f"{DATA_CENTER}/h100/", 3350, 67, 989.5),
    Card("H200", 141, 2024, f"{DATA_CENTER}/h200/", 4800, 67, 989.5),
)
# fmt: on
