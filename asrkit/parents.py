"""What a process does once its parent has ended. This file loads no torch, which takes seconds."""

import multiprocessing
import threading
from collections.abc import Callable


def when_parent_ends(act: Callable[[], object]) -> None:
    """Call `act` as soon as the parent of this process has ended, however that ended.

    A thread waits for it. In a process that multiprocessing did not start, nothing happens.

    Args:
        act: ends this process.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        act()

    threading.Thread(target=watch, daemon=True).start()
