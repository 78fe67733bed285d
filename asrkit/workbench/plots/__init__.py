"""Pictures: data in, matplotlib Axes out.

No global style, and nothing is saved; `show` puts a picture on a page with its alt text.
"""

from asrkit.workbench.plots.aed import (
    decoder_work,
    decoding_steps,
    deep_over_shallow,
    step_cells,
    step_floor,
)
from asrkit.workbench.plots.bars import padded_batches, stacked, timeline, tornado, waterfall
from asrkit.workbench.plots.batching import (
    epochs_over_batch,
    lengths_and_shares,
    loss_over_padded_speech,
    padding_over_spread,
    shuffling,
    utilisation_lines,
)
from asrkit.workbench.plots.canvas import as_html, canvas, show
from asrkit.workbench.plots.casts import (
    cast_against_product,
    cast_bytes,
    errors_of_bins,
    time_bars,
)
from asrkit.workbench.plots.costs import (
    break_even,
    cost_bars,
    ways_on_core,
)
from asrkit.workbench.plots.decoding import (
    pointer_jumping,
    waiting,
    waiting_legend,
    waits_matrix,
)
from asrkit.workbench.plots.dots import dots
from asrkit.workbench.plots.formats import format_steps, magnitudes
from asrkit.workbench.plots.frames import frames
from asrkit.workbench.plots.frontend import (
    amdahl,
    ctc_runs,
    gain_over_speed,
    launches_and_waits,
    ms_per_utterance,
)
from asrkit.workbench.plots.intervals import intervals
from asrkit.workbench.plots.jasper import (
    dense_branches,
    latency_over_work,
    rate_over_batch,
    seed_dots,
    training_memory_bars,
)
from asrkit.workbench.plots.lattices import arcs, diagonal, nodes_at_once, tdt_arcs
from asrkit.workbench.plots.live import live_training_curve
from asrkit.workbench.plots.losses import (
    emissions,
    rounding_errors,
    time_over_memory,
    tokens_over_penalty,
)
from asrkit.workbench.plots.memory import memory_over_batch, padded_lattices
from asrkit.workbench.plots.palette import COLOURS, colour
from asrkit.workbench.plots.phases import phased_batch, rank_work
from asrkit.workbench.plots.scaling import (
    epochs_and_critical_batch,
    minutes_over_gpus,
)
from asrkit.workbench.plots.speech import (
    lattice,
    lengths,
    spectrogram,
    training_curve,
    waveform,
)

__all__ = [
    "COLOURS",
    "amdahl",
    "arcs",
    "as_html",
    "break_even",
    "canvas",
    "cast_against_product",
    "cast_bytes",
    "colour",
    "cost_bars",
    "ctc_runs",
    "decoder_work",
    "decoding_steps",
    "deep_over_shallow",
    "dense_branches",
    "diagonal",
    "dots",
    "emissions",
    "epochs_and_critical_batch",
    "epochs_over_batch",
    "errors_of_bins",
    "format_steps",
    "frames",
    "gain_over_speed",
    "intervals",
    "latency_over_work",
    "lattice",
    "launches_and_waits",
    "lengths",
    "lengths_and_shares",
    "live_training_curve",
    "loss_over_padded_speech",
    "magnitudes",
    "memory_over_batch",
    "minutes_over_gpus",
    "ms_per_utterance",
    "nodes_at_once",
    "padded_batches",
    "padded_lattices",
    "padding_over_spread",
    "phased_batch",
    "pointer_jumping",
    "rank_work",
    "rate_over_batch",
    "rounding_errors",
    "seed_dots",
    "show",
    "shuffling",
    "spectrogram",
    "stacked",
    "step_cells",
    "step_floor",
    "tdt_arcs",
    "time_bars",
    "time_over_memory",
    "timeline",
    "tokens_over_penalty",
    "tornado",
    "training_curve",
    "training_memory_bars",
    "utilisation_lines",
    "waiting",
    "waiting_legend",
    "waits_matrix",
    "waterfall",
    "waveform",
    "ways_on_core",
]
