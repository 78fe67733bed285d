"""What models cost: operations and bytes counted (`counts`), a GPU's time predicted (`lean`,
`encoders`), and the money that transcription takes (`prices`, `speeds`, `transcription`).
"""

from asrkit.workbench.cost.counts import (
    CARDS,
    GPU_TILE_BYTES,
    VARIANTS,
    Card,
    Peak,
    encoder_flops,
    encoder_parameters,
    joint_bytes,
    joint_flops,
    largest_batch,
)
from asrkit.workbench.cost.encoders import predicted_ms
from asrkit.workbench.cost.lean import (
    Phase,
    card_called,
    lean_floor_ms,
    lean_ms,
    lean_peak,
    lean_phases,
)
from asrkit.workbench.cost.prices import Instance, load_prices
from asrkit.workbench.cost.ranges import Range
from asrkit.workbench.cost.speeds import (
    DEFAULT_MODEL,
    SAME_KIND,
    Speed,
    power,
    published_speeds,
    recorded_speeds,
    speeds_for,
)
from asrkit.workbench.cost.transcription import (
    Terms,
    TranscriptionCost,
    break_even_rtfx,
    cheapest_pair,
    compare,
    sensitivity,
    stated_inputs,
    transcription_cost,
    unequal,
)

__all__ = [
    "CARDS",
    "DEFAULT_MODEL",
    "GPU_TILE_BYTES",
    "SAME_KIND",
    "VARIANTS",
    "Card",
    "Instance",
    "Peak",
    "Phase",
    "Range",
    "Speed",
    "Terms",
    "TranscriptionCost",
    "break_even_rtfx",
    "card_called",
    "cheapest_pair",
    "compare",
    "encoder_flops",
    "encoder_parameters",
    "joint_bytes",
    "joint_flops",
    "largest_batch",
    "lean_floor_ms",
    "lean_ms",
    "lean_peak",
    "lean_phases",
    "load_prices",
    "power",
    "predicted_ms",
    "published_speeds",
    "recorded_speeds",
    "sensitivity",
    "speeds_for",
    "stated_inputs",
    "transcription_cost",
    "unequal",
]
