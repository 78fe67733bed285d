"""What each rung of a ladder gains, from timings taken in turns or from records of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from asrkit.workbench.measure import Timing, ratio

Record = Mapping[str, Any]


class Spread(NamedTuple):
    """The median of some ratios, and their quartiles: one estimator for dot and interval."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, kw_only=True)
class RungGain:
    """How many times as fast a rung is: as the baseline, and as the rung below it."""

    rung: str
    total: Spread
    step: Spread


def spread(ratios: Sequence[float]) -> Spread:
    """Quartiles and median of ratios, each of one repeat."""
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    return Spread(float(low), float(middle), float(high))


def gains(times: Mapping[str, Timing], climbed: Mapping[str, str]) -> list[RungGain]:
    """The gain of every rung, from ratios within each repeat.

    Args:
        times: Timings of all arms, taken in turns.
        climbed: Rung -> the arm that stands on it and on all rungs below, the baseline first.
    """
    names = list(climbed.items())
    baseline = names[0][1]
    found = []
    for (_, below), (rung, arm) in pairwise(names):
        total = spread(ratio(times, baseline, arm))
        found.append(RungGain(rung=rung, total=total, step=spread(ratio(times, below, arm))))
    return found


def recorded_run(records: Sequence[Record], what: str) -> list[Record]:
    """The records of the last run of one ladder; of a run on a GPU, where there is one.

    Args:
        records: Records of anything.
        what: Name of the ladder, as "ladder-rnnt".
    """
    found = [record for record in records if record["what"] == what]
    on_gpu = [record for record in found if str(record["params"]["device"]).startswith("cuda")]
    found = on_gpu or found
    if not found:
        return []
    last = _run_of(max(found, key=lambda record: record["captured_at"]))
    return [record for record in found if _run_of(record) == last]


def _run_of(record: Record) -> tuple[Any, ...]:
    """What the records of one run have in common."""
    return record["machine"]["id"], record["code"]["commit"], record["params"]["threads"]


def recorded_gains(records: Sequence[Record]) -> list[RungGain]:
    """The gain of every rung, from the ratios that one run of a ladder recorded.

    Args:
        records: Of `recorded_run`.
    """
    ratios = {
        tuple(record["params"]["arms"]): spread(record["samples"])
        for record in records
        if record["metric"] == "ratio" and record["impl"].startswith("to_")
    }
    climbed = dict.fromkeys(["baseline", *(fast for _, fast in ratios)])
    return [
        RungGain(
            rung=arm.removeprefix("to_"),
            total=ratios["baseline", arm],
            step=ratios[below, arm],
        )
        for below, arm in pairwise(climbed)
    ]
