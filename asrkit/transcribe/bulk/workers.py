"""Workers: processes that do one job after another. `Workers` is their only supervisor.

It replaces a worker that ends, and retries the items of its job one by one. A standard process pool
does neither: when one process ends it ends all of them, and does not say which job was at fault.

Workers are forked where they share one model, since weights packed for oneDNN cannot be pickled. A
fork copies only one thread, so torch must not have used several threads before.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, Literal

import torch
from tqdm import tqdm

from asrkit.shapes import expect
from asrkit.threads import single_thread_after_fork
from asrkit.transcribe.bulk.layout import Layout
from asrkit.transcribe.progress import Advance
from asrkit.transcribe.windows import FAILURES

MOST_DEATHS = 100  # workers that may end in a row without a finished job in between
ENDED = "audio: reading or transcribing it ended the process twice."
Items = Sequence[Any]
Function = Callable[[Any, Advance], Any]


@dataclass
class _Job:
    number: int
    items: Items  # the items of the next attempt
    results: list[Any] = field(default_factory=list)
    singles: Iterator[Any] | None = None  # items to retry one by one, after its worker has ended


@dataclass
class _Worker:
    number: int  # index in the layout
    process: Any
    connection: Connection
    job: _Job | None = None
    is_ready: bool = False
    advanced_s: float = 0.0  # seconds of audio that it has reported for its job


class Workers:
    """Processes that do jobs. All of them end with the `with` block, or with this process.

    A job is a sequence of items, and its result a list. A worker gets a job, sends back its result,
    and gets the next job. Its stdout is redirected to stderr.

    Args:
        layout: The number of workers, and their cores and threads.
        function: Called in a worker with the items of a job, and with a function that takes the
            seconds of audio that are done. The first call has no items: it loads the model.
        failed: Returns the result of an item that has ended its worker twice.
        split: Yields the parts of an item that are retried one by one, such as an archive's files.
        advance: Called here with seconds of audio, which are negative if a worker has ended and its
            job starts again.
        method: "fork", or "spawn" if this process cannot be forked, as when it uses a GPU. Then
            `function` is pickled, so it cannot be defined in a script.

    Raises:
        ValueError: Forked workers would have several threads, and torch has several threads here.
    """

    def __init__(
        self,
        layout: Layout,
        function: Function,
        failed: Callable[[Any], Any],
        *,
        split: Callable[[Any], Iterable[Any]] = lambda item: (item,),
        advance: Advance = lambda audio_s: None,
        method: Literal["fork", "spawn"] = "fork",
    ) -> None:
        safe = method == "spawn" or 1 in (layout.threads, torch.get_num_threads())
        wanted = "1, or torch.set_num_threads(1) before torch computes anything here"
        expect(safe, "threads", wanted, layout.threads, "Threads do not outlive a fork.")
        self.layout = layout
        self.function = function
        self.failed = failed
        self.split = split
        self.advance = advance
        self.context: Any = multiprocessing.get_context(method)
        self.workers: list[_Worker] = []
        self.queue: deque[_Job] = deque()  # the jobs that are handed out next
        self.finished: list[_Job] = []
        self.deaths = 0  # workers that have ended since a job was finished
        self.loaded = False  # whether any worker has loaded the model

    def __enter__(self) -> "Workers":
        self.workers = [self._start(number) for number in range(self.layout.workers)]
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()

    def results(self, jobs: Iterable[Items]) -> Iterator[tuple[int, list[Any]]]:
        """Yield (index of a job, results of its items in order) as jobs are finished.

        If a worker ends, a line on stderr says so, and the items of its job are retried one by one.
        An item that ends its worker again gets the result of `failed`.

        Args:
            jobs: The items of each job. A job is drawn when it is needed.

        Raises:
            ValueError, RuntimeError, OSError, MemoryError: `function` raised it.
            RuntimeError: Workers end again and again, or one ended before its first job.
        """
        upcoming = (_Job(number, items) for number, items in enumerate(jobs))
        while True:
            self._hand_out(upcoming)  # before the caller takes results, so that workers stay busy
            yield from ((job.number, job.results) for job in self.finished)
            self.finished = []
            if not self.queue and not any(worker.job for worker in self.workers):
                return
            waiting = [worker for worker in self.workers if worker.job or not worker.is_ready]
            answered = wait([worker.connection for worker in waiting])
            for worker in waiting:
                if worker.connection in answered:
                    self._receive(worker)

    def _hand_out(self, upcoming: Iterator[_Job]) -> None:
        """Give a job to each worker that is ready for one."""
        for worker in self.workers:
            if not self.queue:
                self.queue.extend(islice(upcoming, 1))
            if self.queue and worker.is_ready and not worker.job:
                worker.job = self.queue.popleft()
                with contextlib.suppress(OSError):  # a worker that has ended; `_receive` notices
                    worker.connection.send(worker.job.items)

    def _receive(self, worker: _Worker) -> None:
        """Take progress or a result from a worker, or notice that it has ended."""
        job = worker.job
        try:
            answer = worker.connection.recv()
        except (EOFError, OSError):
            return self._replace(worker)
        if isinstance(answer, float):
            worker.advanced_s += answer
            self.advance(answer)
            return
        if isinstance(answer, Exception):
            raise answer
        worker.is_ready, worker.job, worker.advanced_s = True, None, 0.0
        self.loaded = True
        if job:
            self.deaths = 0
            job.results += answer
            self._continue(job)

    def _continue(self, job: _Job) -> None:
        """Queue the next item that is retried by itself; without any, the job is finished."""
        for item in job.singles or ():
            job.items = [item]
            return self.queue.append(job)
        self.finished.append(job)

    def _replace(self, worker: _Worker) -> None:
        """Start another worker in place of one that has ended, and retry its job."""
        worker.process.join()
        code = worker.process.exitcode
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        ended = f"worker {worker.number + 1} (process {worker.process.pid}) ended by {cause}"
        if not self.loaded:
            raise RuntimeError(f"{ended} while it loaded the model.")
        self.advance(-worker.advanced_s)
        self.deaths += 1
        if self.deaths >= MOST_DEATHS:
            message = f"the workers ended {self.deaths} times in a row ({cause})."
            raise RuntimeError(f"{message} Fewer --workers take less memory.")
        self.workers[worker.number] = self._start(worker.number)
        job = worker.job
        if job is None:  # a replacement that ended while it loaded the model
            return
        if job.singles:
            job.results.append(self.failed(job.items[0]))
        else:
            tqdm.write(f"{ended}; its recordings are transcribed again", file=sys.stderr)
            job.singles = chain.from_iterable(map(self.split, job.items))
        self._continue(job)

    def _start(self, number: int) -> _Worker:
        ours, theirs = self.context.Pipe()
        arguments = (theirs, self.layout.cores[number], self.layout.threads, self.function)
        process = self.context.Process(target=_work, args=arguments, daemon=True)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # or "spawn" runs the script again
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
        theirs.close()
        return _Worker(number, process, ours)


def _work(
    connection: Connection, cores: tuple[int, ...], threads: int | None, function: Function
) -> None:
    """Do jobs in a worker until it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # stdout is for transcripts
    single_thread_after_fork()
    if cores:
        os.sched_setaffinity(0, cores)
    if threads is not None:
        torch.set_num_threads(threads)
    items: Items = ()
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        while True:
            try:
                answer = function(items, connection.send)
            except FAILURES as error:
                answer = error
            connection.send(answer)
            items = connection.recv()


def _end_with_parent() -> None:
    """End this worker when the process that started it ends, for whatever reason."""
    parent: Any = multiprocessing.parent_process()
    # Forked workers hold the pipes of earlier ones: the last one ends first, then the others.
    parent.join()
    os._exit(1)
