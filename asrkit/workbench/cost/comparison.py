"""The published comparison of cores and GPUs, and what each of its inputs changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asrkit.shapes import expect
from asrkit.workbench.cost.prices import Instance
from asrkit.workbench.cost.ranges import Range
from asrkit.workbench.cost.speeds import Speed, speeds_for
from asrkit.workbench.cost.transcription import (
    TranscriptionCost,
    sensitivity,
    transcription_cost,
)

CORES = "c7a.48xlarge"
GPUS = "p4de.24xlarge"
MACHINES = (CORES, "c7i.48xlarge", GPUS, "hf-h200")  # whose costs are compared
NAMES = {
    "core_usd": "price of the cores, USD/h",
    "gpu_usd": "price of the GPUs, USD/h",
    "gpu_rtfx": "RTFx of a GPU",
    "core_used": "utilisation of cores",
    "gpu_used": "utilisation of GPUs",
    "cores": "cores of C7a",
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The speeds that the comparison stands on; `alone` is a GPU with one utterance at a time."""

    core: Speed
    gpu: Speed
    alone: Speed


def published_pair(published: Sequence[Speed]) -> Pair:
    """The account's core, and the GPU of the leaderboard with the same model.

    Args:
        published: Of `published_speeds`.
    """
    core = next(speed for speed in published if speed.per == "core")
    gpus = [speed for speed in published if speed.per == "gpu" and speed.model == core.model]
    return Pair(
        core=core,
        gpu=next(speed for speed in gpus if speed.batch != 1),
        alone=next(speed for speed in gpus if speed.batch == 1),
    )


def priced_pair(
    pair: Pair, prices: Mapping[str, Instance], *, hours: float
) -> tuple[TranscriptionCost, TranscriptionCost]:
    """What the speech costs on the cores, and on the GPUs.

    Args:
        pair: The speeds.
        prices: Of `load_prices`, on one day.
        hours: Hours of speech.
    """
    cores = transcription_cost(prices[CORES], pair.core, hours=hours)
    return cores, transcription_cost(prices[GPUS], pair.gpu, hours=hours)


@dataclass(frozen=True, kw_only=True)
class Swings:
    """How far the ratio of costs, cores over GPUs, moves with each input alone.

    `middle` is the ratio with no input moved, `by_input` the two outcomes of each, the widest
    first, and `against_cores` the outcome of two choices at once: the fastest recorded core, and a
    GPU that is given one utterance at a time on `host`.
    """

    middle: float
    by_input: Mapping[str, tuple[float, float]]
    against_cores: float
    host: Instance

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest outcome of any one input."""
        outcomes = [end for ends in self.by_input.values() for end in ends]
        return min(outcomes), max(outcomes)


def swings(
    pair: Pair,
    fastest: Speed,
    then: Mapping[str, Instance],
    now: Mapping[str, Instance],
    *,
    idle: float,
) -> Swings:
    """Move every input of the comparison alone from its lowest to its highest value.

    Prices range over regions and over the two days, utilisation from `idle` to 1, and the vCPUs of
    the cores may be threads. A kind of core changes as a whole: RTFx, number of cores and price.

    Args:
        pair: The published speeds.
        fastest: The fastest recorded core with the same model.
        then: Prices on the day of the comparison.
        now: The newest prices.
        idle: Least utilisation of either kind of machine.
    """
    expect(0 < idle <= 1, "idle", "above 0 and at most 1", idle)
    units = then[CORES].cores
    ranges = {
        "core_usd": _around(then[CORES], now[CORES]),
        "gpu_usd": _around(then[GPUS], now[GPUS]),
        "gpu_rtfx": _span(pair.gpu.rtfx.middle, pair.alone.rtfx.middle),
        "core_used": Range(idle, 1, 1),
        "gpu_used": Range(idle, 1, 1),
        "cores": Range(units / 2, units, units),
    }
    gpus = then[GPUS].gpus

    def times(
        core_usd: float,
        gpu_usd: float,
        gpu_rtfx: float,
        core_used: float,
        gpu_used: float,
        cores: float,
        core_rtfx: float = pair.core.rtfx.middle,
    ) -> float:
        on_cores = core_usd / (core_rtfx * cores * core_used)
        on_gpus = gpu_usd / (gpu_rtfx * gpus * gpu_used)
        return on_cores / on_gpus

    middles = {name: one.middle for name, one in ranges.items()}
    middle = times(**middles)
    found = {
        f"{NAMES[name]}: {ranges[name].low:.4g} to {ranges[name].high:,.4g}": ends
        for name, ends in sensitivity(times, **ranges).items()
    }
    host = next(now[name] for name in MACHINES if speeds_for(now[name], [fastest]))
    host = then.get(host.name, host)
    other = middles | {
        "core_usd": host.usd_per_hour.middle,
        "core_rtfx": fastest.rtfx.middle,
        "cores": host.cores,
    }
    slow = f"{_family(CORES)} at RTFx {pair.core.rtfx.middle:.4g}"
    kinds = f"{slow} to {_family(host.name)} at {fastest.rtfx.middle:.4g}"
    found[f"kind of core: {kinds}"] = (middle, times(**other))
    widest_first = sorted(found.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    both = times(**other | {"gpu_rtfx": pair.alone.rtfx.middle})
    return Swings(middle=middle, by_input=dict(widest_first), against_cores=both, host=host)


def _span(middle: float, *others: float) -> Range:
    return Range(min(middle, *others), middle, max(middle, *others))


def _around(then: Instance, now: Instance) -> Range:
    return _span(then.usd_per_hour.middle, *now.usd_per_hour.ends)


def _family(name: str) -> str:
    family, _, _ = name.partition(".")
    return family.capitalize()
