"""The log of a run: a line a step, which on a GPU is written while the next step runs."""

import json
from collections.abc import Callable
from typing import TextIO

from asrkit.training.state import Step, TrainingRun

Line = dict[str, float]


class StepLog:
    """Reads the numbers of each step, and puts them in the run's history and its file.

    On a GPU the line of a step is read when the next one has been queued, so that the device never
    waits for the CPU to ask. `write` has to be called before the run is saved.

    Args:
        run: Whose steps they are.
        file: Open file of the log; None on all processes but the first.
        tell: Called with each new line.
    """

    def __init__(
        self,
        run: TrainingRun,
        file: TextIO | None = None,
        tell: Callable[[Line], object] | None = None,
    ) -> None:
        self.run = run
        self.file = file
        self.tell = tell
        self.late = next(run.model.parameters()).is_cuda
        self.unread: Step | None = None

    def add(self, step: Step) -> None:
        """Take a step that has been queued, and write the line of the one before.

        Args:
            step: From `TrainingRun.advance`.
        """
        self.write()
        self.unread = step
        if not self.late:
            self.write()

    def write(self) -> None:
        """Write the line that has not been written yet, if any; waits for its step."""
        if self.unread is None:
            return
        line = self.run.read(self.unread)
        self.unread = None
        self.run.history.append(line)
        if self.file is not None:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        if self.tell is not None:
            self.tell(line)
