"""What models cost: operations and bytes counted (`counts`), a GPU's time predicted (`lean`,
`encoders`), and the money that transcription takes (`prices`, `speeds`, `transcription`).
"""

from asrkit.workbench.cost.cards import CARDS, Card, card_called
from asrkit.workbench.cost.comparison import MACHINES, priced_pair, published_pair, swings
from asrkit.workbench.cost.counts import (
    GPU_TILE_BYTES,
    VARIANTS,
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
    "MACHINES",
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
    "priced_pair",
    "published_pair",
    "published_speeds",
    "recorded_speeds",
    "sensitivity",
    "speeds_for",
    "stated_inputs",
    "swings",
    "transcription_cost",
    "unequal",
]
