"""Processes of a share: what crashes, hangs or takes all memory ends alone, and what it was at then
is known.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from asrkit.runtime import toolkit
from asrkit.workbench.bench.guards import Blame

Tell = Callable[[Any], object]
NOTHING = Blame("", "")


class Process:
    """Work in a process of its own, which ends with this one; `end` kills it with all it started.

    The work is called with `tell`, which takes a Blame: what it is at now. What it returns,
    (status, why), is `said`; where it ends without, `blame` is what it was at, unless it was killed
    for being late. Its output goes to the file `log`.
    """

    def __init__(
        self, log: Path, work: Callable[[Tell], Any], *, threads: int = 0, alarm_s: float = 0.0
    ) -> None:
        context = multiprocessing.get_context(
            "forkserver"
        )  # which imports torch once; CUDA begins in its children only
        context.set_forkserver_preload(["__main__", "asrkit.workbench.bench.share.supervisor"])
        self.here, there = context.Pipe(duplex=False)
        self.said: tuple[str, str] | None = None
        self.at, self.blame, self.alarm_s = NOTHING, NOTHING, alarm_s
        self.process = context.Process(
            target=_begin, args=(log, threads or torch.get_num_threads(), work, there)
        )
        self.process.start()
        there.close()
        self.sentinel, self.is_alive = self.process.sentinel, self.process.is_alive

    def join(self, seconds: float) -> None:
        """Waits for its end, so many seconds at most."""
        last, open_ = time.monotonic() + seconds, True
        while self.is_alive() and (left := last - time.monotonic()) > 0:
            wait([self.sentinel, *[self.here] * open_], left)
            open_ = open_ and self._hear()

    def _hear(self) -> bool:
        """Takes in what was told by now; False once nothing can come any more."""
        try:
            while self.here.poll():
                told = self.here.recv()
                if isinstance(told, Blame):
                    self.at = told
                else:
                    self.said = told
        except (EOFError, OSError):
            return False
        return True

    def end(self) -> str:
        """Why it did not end well, empty if it did; ended now if it runs still."""
        late = self.process.is_alive()
        if late:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid or 0, signal.SIGKILL)
            self.process.kill()
        self.process.join()
        self._hear()
        if late:
            return "killed: out of time"
        code = self.process.exitcode or 0
        if code == -signal.SIGALRM:
            return f"took longer than {self.alarm_s:g} s"
        if self.said is None or self.said[0] == LOST:
            self.blame = self.at
        return (
            f"the process died of {signal.Signals(-code).name}"
            if code < 0
            else f"the process ended with {code}"
            if code
            else ""
        )

    def close(self) -> None:
        """Leaves nothing behind."""
        if self.process.is_alive():
            self.end()


LOST = "lost"  # the status of work whose device does not answer any more


def _begin(log: Path, threads: int, work: Callable[[Tell], Any], answer: Any) -> None:
    """What a process of a share begins with: a group of its own, its output in the log, an eye on
    the parent, NVVM for Numba.
    """
    os.setsid()
    with log.open("ab", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if folder := toolkit():
        os.environ.setdefault("CUDA_HOME", str(folder))  # before Numba's CUDA is imported
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()  # type: ignore[union-attr]
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()
    said = work(answer.send)
    answer.send(said)
    if said[0] == LOST:
        os._exit(0)  # Python's own end would wait for the device
