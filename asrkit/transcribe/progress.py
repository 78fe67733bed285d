"""A bar of the seconds of audio that were transcribed; this file loads no torch."""

import sys
from types import TracebackType

from tqdm import tqdm

LOG_S = 60.0  # between two states of the bar where stderr is no terminal


class Bar:
    """A bar of the seconds that were transcribed, with their RTFx, on stderr.

    Args:
        total_s: seconds of all recordings.
        before_s: of those that were transcribed before.
        show: False: show nothing.
    """

    def __init__(self, total_s: float, before_s: float = 0.0, *, show: bool) -> None:
        self.before_s = before_s
        self.bar = tqdm(
            total=total_s,
            initial=before_s,
            disable=not show,
            mininterval=0.1 if sys.stderr.isatty() else LOG_S,
            bar_format="{l_bar}{bar}| {n:.0f} of {total:.0f} s [{elapsed}<{remaining}{postfix}]",
        )

    def __enter__(self) -> "Bar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.close()

    def expect(self, total_s: float) -> None:
        """Take another number of seconds for that of all recordings."""
        self.bar.total = max(total_s, self.bar.n)

    def advance(self, audio_s: float) -> None:
        """Move the bar; its RTFx is audio over time so far, reading included."""
        self.bar.total = max(self.bar.total, self.bar.n + audio_s)  # it may be a guess
        elapsed_s = max(self.bar.format_dict["elapsed"], 1e-3)
        new_s = self.bar.n + audio_s - self.before_s
        self.bar.set_postfix_str(f"RTFx {new_s / elapsed_s:.0f}", refresh=False)
        self.bar.update(audio_s)
