"""A bar of the seconds of audio that were transcribed; this file loads no torch."""

import math
import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

Advance = Callable[[float], object]  # called with seconds of audio that are done
LOG_S = 60.0  # between two states of the bar where stderr is no terminal


class _Bar(tqdm):
    """A bar whose end moves on where a guess of it was too near."""

    n: float
    total: float

    def update(self, n: float | None = 1) -> bool | None:
        self.total = max(self.total, math.ceil(self.n + (n or 0)))
        return super().update(n)


def progress_bar(total_s: float, *, show: bool) -> Any:
    """A tqdm bar on stderr of seconds of audio, with the RTFx so far: reading is included.

    Args:
        total_s: seconds of all recordings; it may be a guess.
        show: False: show nothing.
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
