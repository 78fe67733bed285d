"""Work in processes of their own: what crashes, hangs or takes all memory ends alone, and the
parent learns which case it was at.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asrkit.parents import when_parent_ends
from asrkit.runtime import toolkit
from asrkit.workbench.bench.guards import NO_BLAME, Blame

LOST = "lost"  # the status of work whose device does not answer any more
DIED = "died"
NO_TIME = "no time"
NO_PACKAGE = "no package"
STOPPED = "stopped"  # by the clock


class Outcome(NamedTuple):
    """How a process ended: status, why it is not "done", and the case it died of, if of one."""

    status: str
    why: str
    blame: Blame = NO_BLAME


Tell = Callable[[Blame], object]
Work = Callable[[Tell], tuple[str, str]]


class Process:
    """Runs `work` in a process of its own, which ends with this one.

    The work is called with a function that takes the case and arm it is at, and returns its status
    and why that is not "done".

    Args:
        log: the file that its output is appended to.
        work: what to run; it is pickled.
        threads: of torch in the process; 0 for as many as here.
        alarm_s: seconds after which the work ends its process by SIGALRM, for the message.
    """

    def __init__(self, log: Path, work: Work, *, threads: int = 0, alarm_s: float = 0.0) -> None:
        # The fork server imports torch once; CUDA begins in its children only.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", "asrkit.workbench.bench.share.supervisor"])
        self.messages, answer = context.Pipe(duplex=False)
        self.result: tuple[str, str] | None = None
        self.at = NO_BLAME
        self.alarm_s = alarm_s
        arguments = (log, threads or torch.get_num_threads(), work, answer)
        self.process = context.Process(target=_begin, args=arguments)
        self.process.start()
        answer.close()
        self.sentinel = self.process.sentinel

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self.process.is_alive()

    def join(self, seconds: float) -> None:
        """Wait until it ends, at most so many seconds, and listen to what it tells."""
        last = time.monotonic() + seconds
        awaited: list[Any] = [self.sentinel, self.messages]
        while self.is_alive() and time.monotonic() < last:
            wait(awaited, max(0.0, last - time.monotonic()))
            if not self._listen():
                awaited = [self.sentinel]

    def _listen(self) -> bool:
        """Take in all messages that have come; False once no more can come."""
        try:
            while self.messages.poll():
                message = self.messages.recv()
                if isinstance(message, Blame):
                    self.at = message
                else:
                    self.result = message
        except (EOFError, OSError):
            return False
        return True

    def end(self) -> Outcome:
        """How it ended; a process that still runs is killed with all it started."""
        killed = self.is_alive()
        if killed:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid or 0, signal.SIGKILL)
            self.process.kill()
        self.process.join()
        self._listen()
        if self.result is not None:
            status, why = self.result
            return Outcome(status, why, self.at if status == LOST else NO_BLAME)
        if killed:
            return Outcome(STOPPED, "killed: out of time")
        code = self.process.exitcode or 0
        if code == -signal.SIGALRM:
            return Outcome(DIED, f"took longer than {self.alarm_s:g} s")
        if code < 0:
            return Outcome(DIED, f"the process died of {signal.Signals(-code).name}", self.at)
        return Outcome(DIED, f"the process ended with {code}", self.at)


def _begin(log: Path, threads: int, work: Work, answer: Connection) -> None:
    """Set up the process, run the work and answer with its result."""
    os.setsid()  # so that all it starts can be killed with it
    with log.open("ab", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    folder = toolkit()
    if folder:
        os.environ.setdefault("CUDA_HOME", str(folder))  # before Numba's CUDA is imported
    torch.set_num_threads(threads)
    when_parent_ends(partial(os.killpg, 0, signal.SIGKILL))
    result = work(answer.send)
    answer.send(result)
    if result[0] == LOST:
        os._exit(0)  # Python's own end would wait for the device
