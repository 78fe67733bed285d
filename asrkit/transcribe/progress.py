"""A progress bar of the seconds of audio that were transcribed; importing it needs no torch."""

import math
import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

Advance = Callable[[float], object]  # called with seconds of audio that are done
LOG_S = 60.0  # between two updates of the bar if stderr is not a terminal


class _Bar(tqdm):
    """A bar whose total grows if its estimate was too small."""

    n: float
    total: float

    def update(self, n: float | None = 1) -> bool | None:
        self.total = max(self.total, math.ceil(self.n + (n or 0)))
        return super().update(n)


def progress_bar(total_s: float, *, show: bool) -> Any:
    """A tqdm bar on stderr of seconds of audio and the RTFx so far, which includes reading.

    Args:
        total_s: Seconds of all recordings; an estimate is enough.
        show: Whether to show the bar.
    """
    return _Bar(
        total=round(total_s),
        disable=not show,
        unit=" s",
        smoothing=0,  # the average speed
        mininterval=0.1 if sys.stderr.isatty() else LOG_S,
        bar_format="{l_bar}{bar}| {n:.0f} of {total_fmt} s [{elapsed}<{remaining}, "
        "RTFx {rate_noinv_fmt}]",
    )
