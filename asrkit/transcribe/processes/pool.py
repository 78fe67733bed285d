"""Processes forked from this one, which work on jobs that it hands out.

They share the memory of this process until they write to it: what it has loaded is there once, in
whatever layout. That is why they are forked and not started anew; a packed weight cannot be sent.
A fork takes one thread along. So whoever forks keeps torch to one thread until then, and processes
that are to have several start their own.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from asrkit.runtime import settle_after_fork
from asrkit.shapes import expect, message
from asrkit.transcribe.processes.cores import Layout

MOST_HELD = 2  # jobs of one process: that which it works on, and the next, which it reads ahead
MOST_DEATHS = 100  # of processes in a row that finish no job
FAILURES = (ValueError, RuntimeError, OSError, MemoryError)


def how_it_ended(code: int) -> str:
    """How a process ended, by its exit code: "signal 9", or "exit code 1"."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


class Message(NamedTuple):
    """What a process sends while it works on a job."""

    job: Any
    value: Any


class Done(NamedTuple):
    """A job that a process has finished."""

    job: Any


class Ended(NamedTuple):
    """A process that ended, by itself or because somebody killed it.

    Args:
        number: Of the process in its layout, from 1.
        pid: Its id.
        why: "signal 9", or "exit code 1".
        jobs: What it held, the one that it worked on first.
    """

    number: int
    pid: int
    why: str
    jobs: list[Any]

    def __str__(self) -> str:
        return f"worker {self.number} (process {self.pid}) ended by {self.why}"


class Channel:
    """What a forked process sees of the one that forked it.

    Args:
        connection: Jobs come from there, and messages go there.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.queue: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Keep the jobs that come; end this process with the one that sends them."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.queue.put(self.connection.recv())
        os._exit(0)

    def jobs(self) -> Iterator[Any]:
        """Yield each job as it comes; there is no last one."""
        while True:
            yield self.queue.get()

    def send(self, value: Any) -> None:
        """Send a message about the oldest job that is not done."""
        self._send("message", value)

    def done(self) -> None:
        """Report that the oldest job is done."""
        self._send("done", None)

    def stop(self, why: str) -> None:
        """Report that nothing can go on."""
        self._send("stop", why)

    def _send(self, kind: str, value: Any) -> None:
        try:
            self.connection.send((kind, value))
        except OSError:  # nobody is there any more
            os._exit(0)


class _Worker:
    """A forked process as the one that forked it sees it."""

    def __init__(self, process: Any, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.held: list[Any] = []


class Pool:
    """Forked processes that work on jobs; all are killed when the block ends.

    Args:
        layout: How many, and their cores and threads.
        work: Called in each process with its `Channel`; goes on until the process is killed.
        draw: Called with the jobs that a process holds; returns one more for it, or None.

    Raises:
        ValueError: The processes are to have several threads, and torch has several here.
    """

    def __init__(
        self,
        layout: Layout,
        work: Callable[[Channel], None],
        draw: Callable[[list[Any]], Any],
    ) -> None:
        settled = layout.threads == 1 or torch.get_num_threads() == 1
        wanted = "1, or torch.set_num_threads(1) before torch computes anything here"
        expect(settled, "threads", wanted, layout.threads, "Threads do not outlive a fork.")
        self.layout = layout
        self.work = work
        self.draw = draw
        self.workers: dict[int, _Worker] = {}  # by number in the layout, from 0
        self.deaths = 0  # since a job was finished

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self.workers.values():
            worker.process.kill()
        for worker in self.workers.values():
            worker.process.join()
            worker.connection.close()
        self.workers.clear()

    def events(self) -> Iterator[Message | Done | Ended]:
        """Yield what happens until no job is left, handing out jobs in between.

        Another process takes the place of one that ended. Its jobs are gone unless `draw` returns
        them again.

        Raises:
            RuntimeError: A process reports that it cannot go on, or they end again and again.
        """
        while True:
            self._hand_out()
            if not any(worker.held for worker in self.workers.values()):
                return
            numbers: dict[Any, int] = {
                worker.connection: number for number, worker in self.workers.items()
            }
            for connection in wait([*numbers]):
                yield self._event(numbers[connection])

    def _hand_out(self) -> None:
        """Give each process one job, then each its next one, as far as there are jobs."""
        for depth in range(MOST_HELD):
            for number in range(self.layout.workers):
                worker = self.workers.get(number)
                held = [] if worker is None else worker.held
                if len(held) > depth:
                    continue
                job = self.draw(held)
                if job is not None:
                    self._give(number, job)

    def _give(self, number: int, job: Any) -> None:
        if number not in self.workers:
            self.workers[number] = self._fork(number)
        worker = self.workers[number]
        worker.held.append(job)
        with contextlib.suppress(OSError):  # it has ended, which `_event` finds out
            worker.connection.send(job)

    def _event(self, number: int) -> Message | Done | Ended:
        """The next message of a process, or its end."""
        worker = self.workers[number]
        try:
            kind, value = worker.connection.recv()
        except (EOFError, OSError):
            return self._ended(number)
        if kind == "stop":
            raise RuntimeError(value)
        if kind == "message":
            return Message(worker.held[0], value)
        self.deaths = 0
        return Done(worker.held.pop(0))

    def _ended(self, number: int) -> Ended:
        worker = self.workers.pop(number)
        worker.connection.close()
        worker.process.join()
        why = how_it_ended(worker.process.exitcode)
        self.deaths += 1
        if self.deaths >= MOST_DEATHS:
            said = f"the processes that transcribe ended {self.deaths} times in a row ({why})."
            raise RuntimeError(f"{said} Fewer --workers take less memory.")
        return Ended(number + 1, worker.process.pid, why, worker.held)

    def _fork(self, number: int) -> _Worker:
        context: Any = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=self._serve, args=(number, ours, theirs), daemon=True)
        # Until the new process ignores Ctrl-C, none may reach it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            with warnings.catch_warnings():
                # Python warns of forks beside threads: those of libraries wait here, or settle.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return _Worker(process, ours)

    def _serve(self, number: int, ours: Connection, theirs: Connection) -> None:
        """What the forked process does."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who waits
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        # Else the end of the process that forked would not close these, and none would notice it.
        ours.close()
        for other in self.workers.values():
            other.connection.close()
        os.dup2(2, 1)  # stdout is for transcripts
        tqdm.set_lock(threading.RLock())  # a thread that held it is not here
        cores = self.layout.cores[number]
        if cores:
            os.sched_setaffinity(0, cores)
        settle_after_fork()
        torch.set_num_threads(self.layout.threads)
        channel = Channel(theirs)
        try:
            self.work(channel)
        except FAILURES as error:
            channel.stop(message(error))
