"""What notebook 09_encoder_decoder measures and draws beyond its cells."""

from asrkit.workbench.lessons.encoder_decoder.counts import aed_bytes, aed_flops
from asrkit.workbench.lessons.encoder_decoder.figures import (
    decoder_work,
    decoding_steps,
    deep_over_shallow,
    step_cells,
    step_floor,
)
from asrkit.workbench.lessons.encoder_decoder.studies import (
    LAYERS,
    WAYS,
    gigaflops,
    kept_MB,
    noise,
    noise_frames,
    random_model,
    step_products,
    texts_agree,
    time_drafts,
    time_ways,
)

__all__ = [
    "LAYERS",
    "WAYS",
    "aed_bytes",
    "aed_flops",
    "decoder_work",
    "decoding_steps",
    "deep_over_shallow",
    "gigaflops",
    "kept_MB",
    "noise",
    "noise_frames",
    "random_model",
    "step_cells",
    "step_floor",
    "step_products",
    "texts_agree",
    "time_drafts",
    "time_ways",
]
