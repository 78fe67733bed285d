"""What notebook 12_cost measures and draws beyond its cells.

Parakeet RNN-T 1.1B on one core of a CPU, in every way in which asrkit computes it there. Its
encoder has 42 blocks of one size, which take long to make and much memory. So two recognisers are
timed that have all of its width and a few of its blocks; a line through both gives the rest:

    seconds of all = seconds of few + (42 - few) (seconds of more - seconds of few) / (more - few)

What is no block is in both times: features, subsampling, and the decoding of planted labels.
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

from asrkit.cpu import has_int8
from asrkit.models import TransducerConfig
from asrkit.models.packed import multiplies
from asrkit.shapes import expect
from asrkit.transcribe.options import PipelineConfig
from asrkit.transcribe.recognizer import ModelVariants, Recognizer
from asrkit.workbench.bench.suites.encoders import one_utterance
from asrkit.workbench.cost.money import UNITS, TranscriptionCost, compare
from asrkit.workbench.cost.ranges import Range, range_text
from asrkit.workbench.cost.rtfx import Speed
from asrkit.workbench.machine import this_machine
from asrkit.workbench.measure import measure
from asrkit.workbench.plots.palette import GREEN, colour

OPTIMIZED = PipelineConfig(encoder="optimized", graphs="off")
WAYS = {
    "float32": PipelineConfig(precision="float32", encoder="eager", graphs="off"),
    "optimized_float32": replace(OPTIMIZED, precision="float32"),
    "optimized_bfloat16": replace(OPTIMIZED, precision="bfloat16"),
    "optimized_int8": replace(OPTIMIZED, precision="int8"),
}


@dataclass(frozen=True, kw_only=True)
class WayOnCore:
    """What one way of computing takes on a core.

    Attributes:
        name: Of `WAYS`.
        rtfx: Seconds of speech in a second of the core, by the whole model: an estimate from each
            repeat.
        error: Distance of the encoded frames from those of float32, over the norm of these; of the
            larger recogniser that is timed.
    """

    name: str
    rtfx: tuple[float, ...]
    error: float

    @property
    def label(self) -> str:
        """The name as pictures and tables show it."""
        return "eager float32" if self.name == "float32" else self.name.replace("_", " ")

    @property
    def middle(self) -> float:
        """Median of the RTFx."""
        return median(self.rtfx)

    def speed(self, model: str) -> Speed:
        """The RTFx of a core of this machine with its quartiles, to compute costs with."""
        return Speed(
            rtfx=Range(*np.quantile(self.rtfx, (0.25, 0.5, 0.75)).tolist()),
            per="core",
            origin="estimated here",
            device=this_machine()["cpu_model"],
            model=model,
            batch=1,
            note=f"{self.label}, weights random, from a few of the encoder's blocks",
        )


def ways_here() -> list[str]:
    """Those of `WAYS` that this CPU computes: bfloat16 where its oneDNN multiplies that, int8 where
    it has instructions for it.
    """
    computed = {
        "optimized_bfloat16": multiplies(torch.bfloat16),
        "optimized_int8": has_int8(),
    }
    return [name for name in WAYS if computed.get(name, True)]


def time_ways(
    config: TransducerConfig, *, seconds: float, few: int, more: int, repeats: int
) -> list[WayOnCore]:
    """One utterance on one core in each of `ways_here`, in alternation; random weights, CPU time.

    Args:
        config: A model with a FastConformer and an LSTM predictor.
        seconds: Of the utterance.
        few: Blocks of the smaller recogniser that is timed.
        more: Blocks of the larger one, at most as many as `config` has: then nothing is estimated.
        repeats: Of each timing.
    """
    encoder: Any = config.encoder
    blocks = encoder.layers
    expect(0 < few < more <= blocks, "few, more", f"1 <= few < more <= {blocks}", (few, more))
    arms: dict[str, Callable[[], Any]] = {}
    frames = {}
    for layers in (few, more):
        sized = replace(config, encoder=replace(encoder, layers=layers))
        utterance = one_utterance(sized, seconds)
        variants = ModelVariants(utterance.model)
        for name in ways_here():
            arm = partial(utterance.recognise, Recognizer(variants, WAYS[name]))
            frames[name], _ = arm()  # warms up; those of the larger one are kept
            arms[f"{name}, {layers}"] = arm
    timings = measure(arms, repeats=repeats, warmup=0)
    found = []
    for name, encoded in frames.items():
        times_ms = np.array([timings[f"{name}, {layers}"].cpu_ms for layers in (few, more)])
        all_ms = of_all_blocks(*times_ms, few=few, more=more, blocks=blocks)
        error = (encoded - frames["float32"]).norm() / frames["float32"].norm()
        rtfx = tuple((1e3 * seconds / all_ms).tolist())
        found.append(WayOnCore(name=name, rtfx=rtfx, error=float(error)))
    return found


def of_all_blocks(
    time_of_few: np.ndarray, time_of_more: np.ndarray, *, few: int, more: int, blocks: int
) -> np.ndarray:
    """The time of a model with `blocks` alike, from those of models with `few` and with `more`;
    never less than with `more`, whatever noise says.

    >>> of_all_blocks(np.array([3.0]), np.array([5.0]), few=1, more=3, blocks=42)
    array([44.])
    """
    of_a_block = (time_of_more - time_of_few) / (more - few)
    return np.maximum(time_of_few + (blocks - few) * of_a_block, time_of_more)


def usable_cores(most: int) -> list[int]:
    """Numbers of the cores that this process may use, at most `most` of them."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))[:most]
    return [0]


def core_rates(
    work: Callable[[], object], amount: float, *, cores: list[int], repeats: int
) -> list[tuple[float, float]]:
    """Do the same work on one core and on all cores at once, in turns; after a warm-up.

    CPU time of each thread is counted, so that it does not matter what else the machine does.

    Args:
        work: What a core does; torch has one thread within it.
        amount: What one call of `work` is worth, as seconds of speech.
        cores: Numbers of the cores; a thread is pinned to each, where the system can.
        repeats: Repeats that count.

    Returns:
        For each repeat, work a CPU second of a core: alone, and the mean of all cores at once.
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
    found = []
    with ThreadPoolExecutor(len(cores), initializer=pin) as pool:
        for _ in range(1 + repeats):  # the first warms up
            alone = fmean(pool.map(rate, range(1)))
            found.append((alone, fmean(pool.map(rate, range(len(cores))))))
    torch.set_num_threads(threads)
    return found[1:]


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


def cost_bars(costs: Sequence[TranscriptionCost], ax: Axes) -> None:
    """What the same speech costs on several machines; the first is yours, in green."""
    names = [f"{cost.name} {cost.speed.origin}" for cost in costs]
    shades = [GREEN, *(colour(UNITS[cost.speed.per]) for cost in costs[1:])]
    ax.barh(names, [cost.usd.middle for cost in costs], color=shades)
    ax.invert_yaxis()
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel("USD")


def break_even(costs: Sequence[TranscriptionCost], ax: Axes) -> None:
    """USD of a million hours of speech over the RTFx of one core or GPU, a line a machine.

    Lines of cores have one colour and those of GPUs another, and a second machine of a kind is
    dashed. They are pale from the lowest to the highest price. A marker is an RTFx that somebody
    has seen, with its origin; it is filled where this project measured.

    Args:
        costs: Of machines at the speeds that somebody has seen, without startup.
        ax: Axes to draw on.
    """
    speeds = [end for cost in costs for end in cost.speed.rtfx.ends]
    rtfx = np.geomspace(min(speeds) / 3, max(speeds) * 3, 100)
    dashes = {per: cycle(("-", "--")) for per in UNITS}
    for cost in {cost.instance.name: cost for cost in costs}.values():
        per = cost.speed.per
        units = cost.instance.units(per)
        unit_usd = cost.instance.usd_per_hour / units / cost.utilisation
        low, middle, high = (1e6 * usd / rtfx for usd in unit_usd.ends)
        shade = colour(UNITS[per])
        label = f"{cost.instance.name}, {units} {UNITS[per]}"
        ax.plot(rtfx, middle, next(dashes[per]), color=shade, label=label)
        ax.fill_between(rtfx, low, high, color=shade, alpha=0.2, lw=0)
    by_speed = sorted(costs, key=lambda cost: cost.speed.rtfx.middle)
    for place, cost in enumerate(by_speed):
        x = cost.speed.rtfx.middle
        y = cost.usd_per_million_hours.middle
        shade = colour(UNITS[cost.speed.per])
        face = shade if cost.speed.origin == "recorded" else "white"
        ax.plot(x, y, "o", color=shade, mfc=face, zorder=3)
        # neighbours have their words on either side of the line
        offset, alignment = ((6, 4), "left") if place % 2 else ((-6, -11), "right")
        beside: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "ha": alignment}
        ax.annotate(f"{x:,.4g}, {cost.speed.origin}", (x, y), offset, **beside)
    usd = [end for cost in costs for end in cost.usd_per_million_hours.ends]
    ax.set(xscale="log", yscale="log", ylim=(min(usd) / 3, max(usd) * 2))
    ax.set(xlabel="RTFx of one core or GPU", ylabel="USD for a million hours of speech")
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.xaxis.set_major_formatter("{x:,.4g}")
    ax.legend(frameon=False, fontsize=8)
