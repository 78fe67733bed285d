"""Notebook 12: Parakeet RNN-T 1.1B on one core of a CPU, in each precision, and pictures of costs.

The encoder has 42 blocks of one size, which need much time and memory to create. So two recognisers
of full width with few blocks are timed, and the time of all blocks is extrapolated linearly:

    seconds of all = seconds of few + (42 - few) (seconds of more - seconds of few) / (more - few)

Both times include the rest: features, subsampling, and the decoding of planted labels.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from statistics import fmean, median
from time import thread_time
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes

from asrkit.cpu import fast_dtype, has_int8
from asrkit.models import TransducerConfig
from asrkit.rtfx import rtfx
from asrkit.shapes import expect
from asrkit.transcribe.options import PipelineConfig
from asrkit.transcribe.recognizer import ModelVariants, Recognizer
from asrkit.workbench.cost.money import UNITS, TranscriptionCost, compare
from asrkit.workbench.cost.ranges import Range, range_text
from asrkit.workbench.cost.rtfx import Speed
from asrkit.workbench.lessons.shared.one_utterance import one_utterance
from asrkit.workbench.machine import this_machine
from asrkit.workbench.measure import measure
from asrkit.workbench.plots.palette import colour

OPTIMIZED = PipelineConfig(encoder="optimized", graphs="off")
VARIANTS = {
    "float32": PipelineConfig(precision="float32", encoder="eager", graphs="off"),
    "optimized_float32": replace(OPTIMIZED, precision="float32"),
    "optimized_bfloat16": replace(OPTIMIZED, precision="bfloat16"),
    "optimized_int8": replace(OPTIMIZED, precision="int8"),
}


@dataclass(frozen=True, kw_only=True)
class VariantOnCore:
    """The speed of one variant on a core.

    Attributes:
        name: A key of `VARIANTS`.
        rtfx: RTFx of the whole model on a core, estimated from each repeat.
        error: Relative error of the encoded frames, compared with float32, for the larger of the
            timed recognisers.
    """

    name: str
    rtfx: tuple[float, ...]
    error: float

    @property
    def label(self) -> str:
        """The name in pictures and tables."""
        return "eager float32" if self.name == "float32" else self.name.replace("_", " ")

    @property
    def middle(self) -> float:
        """Median of the RTFx."""
        return median(self.rtfx)

    def speed(self, model: str) -> Speed:
        """The RTFx of a core of this machine with its quartiles, for the computation of costs."""
        return Speed(
            rtfx=Range(*np.quantile(self.rtfx, (0.25, 0.5, 0.75)).tolist()),
            per="core",
            origin="estimated here",
            device=this_machine()["cpu_model"],
            model=model,
            batch=1,
            note=f"{self.label}, weights random, from a few of the encoder's blocks",
        )


def supported_variants() -> list[str]:
    """The variants that this CPU has instructions for."""
    supported = {
        "optimized_bfloat16": fast_dtype() == "bfloat16",
        "optimized_int8": has_int8(),
    }
    return [name for name in VARIANTS if supported.get(name, True)]


def time_variants(
    config: TransducerConfig, *, seconds: float, few: int, more: int, repeats: int
) -> list[VariantOnCore]:
    """Time one utterance on one core in all supported variants, interleaved.

    Weights are random, and CPU time is counted.

    Args:
        config: A model with a FastConformer and an LSTM predictor.
        seconds: Length of the utterance.
        few: Blocks of the smaller recogniser.
        more: Blocks of the larger recogniser. With all blocks of `config`, nothing is estimated.
        repeats: Number of timings of each variant.
    """
    encoder: Any = config.encoder
    blocks = encoder.layers
    expect(0 < few < more <= blocks, "few, more", f"1 <= few < more <= {blocks}", (few, more))
    arms: dict[str, Callable[[], Any]] = {}
    frames = {}
    for layers in (few, more):
        sized = replace(config, encoder=replace(encoder, layers=layers))
        utterance = one_utterance(sized, seconds)
        models = ModelVariants(utterance.model)
        for name in supported_variants():
            arm = partial(utterance.recognise, Recognizer(models, VARIANTS[name]))
            frames[name], _ = arm()  # also warms up; the frames of the larger model are kept
            arms[f"{name}, {layers}"] = arm
    timings = measure(arms, repeats=repeats, warmup=0)
    timed = []
    for name, encoded in frames.items():
        times_ms = np.array([timings[f"{name}, {layers}"].cpu_ms for layers in (few, more)])
        all_ms = time_of_all_blocks(*times_ms, few=few, more=more, blocks=blocks)
        error = (encoded - frames["float32"]).norm() / frames["float32"].norm()
        speeds = tuple(rtfx(seconds, ms / 1e3) for ms in all_ms.tolist())
        timed.append(VariantOnCore(name=name, rtfx=speeds, error=float(error)))
    return timed


def time_of_all_blocks(
    time_of_few: np.ndarray, time_of_more: np.ndarray, *, few: int, more: int, blocks: int
) -> np.ndarray:
    """The time of a model with `blocks` equal blocks, from models with `few` and with `more`.

    Noise never makes it less than the time with `more` blocks.

    >>> time_of_all_blocks(np.array([3.0]), np.array([5.0]), few=1, more=3, blocks=42)
    array([44.])
    """
    block_time = (time_of_more - time_of_few) / (more - few)
    return np.maximum(time_of_few + (blocks - few) * block_time, time_of_more)


def usable_cores(most: int) -> list[int]:
    """Numbers of at most `most` cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))[:most]
    return [0]


def core_rates(
    work: Callable[[], object], amount: float, *, cores: list[int], repeats: int
) -> list[tuple[float, float]]:
    """Do the same work on one core and on all cores at once, in turns, after a warm-up.

    CPU time of each thread is counted, so that other work of the machine does not matter.

    Args:
        work: The work of a core; torch has one thread in it.
        amount: Amount of work in one call, such as seconds of speech.
        cores: Numbers of the cores. A thread is pinned to each if the system supports that.
        repeats: Number of repeats that count.

    Returns:
        For each repeat, the work in a CPU second of a core: of one core alone, and the mean of all
        cores at once.
    """
    free = list(cores)

    def pin() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {free.pop()})  # of this thread alone
        torch.set_num_threads(1)

    def rate(_: int) -> float:
        start = thread_time()
        work()
        return amount / (thread_time() - start)

    threads = torch.get_num_threads()
    rates = []
    with ThreadPoolExecutor(len(cores), initializer=pin) as pool:
        for _ in range(1 + repeats):  # the first is the warm-up
            alone = fmean(pool.map(rate, range(1)))
            rates.append((alone, fmean(pool.map(rate, range(len(cores))))))
    torch.set_num_threads(threads)
    return rates[1:]


def cost_table(costs: Sequence[TranscriptionCost]) -> Any:
    """A pandas Styler: a row for each cost, cheapest first, the models in its caption."""
    rows = [
        {
            "machine": row["instance"],
            "USD/h": range_text(row["usd_per_hour"]),
            "RTFx": f"{range_text(row['rtfx'])} a {UNITS[row['per']][:-1]}, batch {row['batch']}",
            "RTFx is": f"{row['origin']}, {row['device']}",
            "USD for a million hours": range_text(row["usd_per_million_hours"]),
            "break-even RTFx": range_text(row["break_even_rtfx"]),
        }
        for row in compare(costs)
    ]
    models = dict.fromkeys(cost.speed.model for cost in costs)
    return pd.DataFrame(rows).style.hide(axis="index").set_caption(" ".join(models))


def break_even(costs: Sequence[TranscriptionCost], ax: Axes) -> None:
    """Draw USD for a million hours of speech over the RTFx of one unit, a line for each machine.

    Lines of cores have one colour, those of GPUs another, and a second machine of a kind is dashed.
    A pale band goes from the lowest to the highest price. A marker is a known RTFx with its origin;
    it is filled if this project measured it.

    Args:
        costs: Costs of machines at known speeds, without startup.
        ax: Axes to draw on.
    """
    speeds = [end for cost in costs for end in cost.speed.rtfx.ends]
    grid = np.geomspace(min(speeds) / 3, max(speeds) * 3, 100)
    dashes = {per: cycle(("-", "--")) for per in UNITS}
    for cost in {cost.instance.name: cost for cost in costs}.values():
        per = cost.speed.per
        units = cost.instance.units(per)
        unit_usd = cost.instance.usd_per_hour / units / cost.utilisation
        low, middle, high = (1e6 * usd / grid for usd in unit_usd.ends)
        shade = colour(UNITS[per])
        label = f"{cost.instance.name}, {units} {UNITS[per]}"
        ax.plot(grid, middle, next(dashes[per]), color=shade, label=label)
        ax.fill_between(grid, low, high, color=shade, alpha=0.2, lw=0)
    by_speed = sorted(costs, key=lambda cost: cost.speed.rtfx.middle)
    for place, cost in enumerate(by_speed):
        x = cost.speed.rtfx.middle
        y = cost.usd_per_million_hours.middle
        shade = colour(UNITS[cost.speed.per])
        face = shade if cost.speed.origin == "recorded" else "white"
        ax.plot(x, y, "o", color=shade, mfc=face, zorder=3)
        # labels alternate between the two sides of the line
        offset, alignment = ((6, 4), "left") if place % 2 else ((-6, -11), "right")
        style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "ha": alignment}
        ax.annotate(f"{x:,.4g}, {cost.speed.origin}", (x, y), offset, **style)
    usd = [end for cost in costs for end in cost.usd_per_million_hours.ends]
    ax.set(xscale="log", yscale="log", ylim=(min(usd) / 3, max(usd) * 2))
    ax.set(xlabel="RTFx of one core or GPU", ylabel="USD for a million hours of speech")
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.xaxis.set_major_formatter("{x:,.4g}")
    ax.legend(frameon=False, fontsize=8)
