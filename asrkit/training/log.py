"""The log of a run, `log.jsonl`: its lines, the progress bar, and a warning of skipped steps."""

import json
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asrkit.training.evaluation import DevScores

if TYPE_CHECKING:
    from tqdm import tqdm

Line = dict[str, Any]
OnStep = Callable[[list[Line]], None]
SKIPPED = "Step {step} was skipped: its loss or gradient is not finite, or no utterance has enough \
frames for its labels. The log alone shows later ones."


class RunLog(ExitStack):
    """Writes each line of a log once, shows it, and calls `on_step`.

    Args:
        file: `log.jsonl` of the run.
        history: All lines of the run, to which later ones are appended. Those in it are written.
        progress: Whether to show a progress bar.
        on_step: Called after every new line with the log so far.
    """

    def __init__(
        self, file: Path, history: list[Line], *, progress: bool, on_step: OnStep | None
    ) -> None:
        super().__init__()
        self.history = history
        self.on_step = on_step
        self.written = len(history)
        self.warned = False
        self.file = self.enter_context(file.open("a"))
        self.bar = self.enter_context(_bar(progress))

    def write(self, done: float, scores: DevScores) -> None:
        """Write the new lines.

        Args:
            done: Share of the run that is done, 0..1.
            scores: Scores on the dev set; those that have arrived are taken.
        """
        scores.collect(wait=False)
        for line in self.history[self.written :]:
            self.written += 1
            # in float16 a finite loss with other gradients is an overflow, which is counted
            finite = math.isfinite(line["loss" if "overflows" in line else "gradient_norm"])
            if not (self.warned or finite):
                self.bar.write(SKIPPED.format(**line), file=sys.stderr)
                self.warned = True
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
            self.bar.set_postfix(
                loss=f"{line['loss']:.2f}",
                rtfx=f"{line['rtfx']:.0f}",
                wer="-" if scores.last is None else f"{100 * scores.last.rate:.1f} %",
                refresh=False,
            )
            self.bar.update(100 * done - self.bar.n)
            if self.on_step is not None:
                self.on_step(self.history)


def _bar(progress: bool) -> "tqdm":
    """A progress bar in per cent, hidden without `progress`."""
    from tqdm import tqdm  # lazily, so that a machine without it can import asrkit

    bar_format = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
    bar = tqdm(total=100, disable=not progress, unit="%", bar_format=bar_format)
    if not sys.stderr.isatty():
        bar.mininterval = 10.0  # seconds: a log file needs no line for every step
    return bar
