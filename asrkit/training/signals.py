"""Wishes to stop a training run: SIGTERM, Ctrl-C, and a parent process that has ended."""

import os
import signal
import threading
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopWish:
    """Notes SIGTERM and Ctrl-C within a `with` block, so that a step is finished and saved first.

    A second Ctrl-C raises KeyboardInterrupt at once, except in a rank: its agent sends signals
    of its own. Outside of Python's main thread no signal is noted.

    Args:
        rank: Whether this process is one of several. A rank whose parent, the agent, has ended
            wishes to stop too: the next start must not meet it in the same folder.
    """

    def __init__(self, *, rank: bool) -> None:
        self.rank = rank
        self.number: int | None = None
        self.parent = os.getppid()
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopWish":
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                self.previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        orphaned = self.rank and os.getppid() != self.parent
        return orphaned or self.number is not None

    def pass_on(self) -> None:
        """Act on the signal that was noted, now that all is saved: as if it had come just now.

        A rank ends normally instead, so that its agent does not take it for a failure.
        """
        if self.number is not None and not self.rank:
            signal.raise_signal(self.number)

    def _note(self, number: int, _: FrameType | None) -> None:
        repeated = self.number is not None
        self.number = number
        if repeated and number == signal.SIGINT and not self.rank:
            raise KeyboardInterrupt
