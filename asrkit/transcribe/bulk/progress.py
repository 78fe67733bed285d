"""How far a bulk transcription is: hours done, RTFx, errors and the time that is left."""

import sys
import time
from types import TracebackType

from tqdm import tqdm

LINE_S = 60.0  # between lines, where stderr is no terminal


class Progress:
    """Hours done of all hours: a bar on a terminal, else a line a minute, both on stderr.

    Hours are those of the plan, where a container's are a guess. RTFx is seconds of audio heard
    over seconds of time.

    Args:
        total_s: Planned seconds of all shards.
        before_s: Those of shards that were done before.
        show: False: say nothing.
    """

    def __init__(self, total_s: float, before_s: float, *, show: bool) -> None:
        self.total_s = max(total_s, 1e-3)
        self.before_s = before_s
        self.finished_s = 0.0  # planned seconds of shards finished since then
        self.since_s = 0.0  # heard since the last of them
        self.heard_s = 0.0
        self.failed = 0
        self.show = show
        self.start = time.perf_counter()
        self.said = self.start
        hidden = not (show and sys.stderr.isatty())
        self.bar = tqdm(
            total=100, disable=hidden, bar_format="{l_bar}{bar}| {postfix}", leave=False
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.close()

    def heard(self, audio_s: float, failed: int) -> None:
        """Count a recording of so many seconds, and whether it failed."""
        self.heard_s += audio_s
        self.since_s += audio_s
        self.failed += failed
        self._tell()

    def finished(self, planned_s: float) -> None:
        """Count a shard of so many planned seconds."""
        self.finished_s += planned_s
        self.since_s = 0.0
        self._tell()

    def text(self, elapsed_s: float) -> str:
        """The state after `elapsed_s` seconds: "1.5 of 20.0 h, RTFx 310, 2 errors, 03:35 left"."""
        done_s = min(self.before_s + self.finished_s + self.since_s, self.total_s)
        new_s = done_s - self.before_s
        left = "?"
        if new_s > 0:
            left = tqdm.format_interval(elapsed_s * (self.total_s - done_s) / new_s)
        rtfx = self.heard_s / max(elapsed_s, 1e-3)
        hours = f"{done_s / 3600:,.1f} of {self.total_s / 3600:,.1f} h"
        return f"{hours}, RTFx {rtfx:,.0f}, {self.failed:,} errors, {left} left"

    def _tell(self) -> None:
        now = time.perf_counter()
        if not self.show:
            return
        if not self.bar.disable:
            done_s = self.before_s + self.finished_s + self.since_s
            self.bar.n = min(100.0, 100 * done_s / self.total_s)
            self.bar.set_postfix_str(self.text(now - self.start))
        elif now - self.said >= LINE_S:
            self.said = now
            print(self.text(now - self.start), file=sys.stderr, flush=True)
