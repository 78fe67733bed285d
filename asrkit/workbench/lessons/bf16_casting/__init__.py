"""What notebook 04_bf16_casting measures and draws beyond its cells."""

from asrkit.workbench.lessons.bf16_casting.casts import (
    CAST,
    PRODUCT,
    casts_by_operand,
    encoder_cast_bytes,
    frames_for_product,
    layer_us,
    rounded_stages,
    what_rounds_badly,
)
from asrkit.workbench.lessons.bf16_casting.figures import (
    cast_against_product,
    cast_bytes,
    errors_of_bins,
    time_bars,
)
from asrkit.workbench.lessons.bf16_casting.formats import format_steps, magnitudes
from asrkit.workbench.lessons.bf16_casting.magnitudes import of_recogniser, spans

__all__ = [
    "CAST",
    "PRODUCT",
    "cast_against_product",
    "cast_bytes",
    "casts_by_operand",
    "encoder_cast_bytes",
    "errors_of_bins",
    "format_steps",
    "frames_for_product",
    "layer_us",
    "magnitudes",
    "of_recogniser",
    "rounded_stages",
    "spans",
    "time_bars",
    "what_rounds_badly",
]
