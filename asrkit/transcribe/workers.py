"""Workers: processes that do one job after another; recordings transcribed in several of them.

`Workers` is the only supervisor: a worker that ends is replaced. `transcribe_jobs` tries again what
it was transcribing; `transcribe_in_workers` does both for files, in forked workers that share one
model. They are forked and not started anew since a weight packed for oneDNN cannot be sent. A fork
takes one thread along: whoever forks keeps torch to one thread until then.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, Literal

import torch
from tqdm import tqdm

from asrkit.memory import free_memory
from asrkit.models import Checkpoint
from asrkit.shapes import expect, whole
from asrkit.sound_files import Sound
from asrkit.threads import same_core, single_thread_after_fork, usable_cores
from asrkit.transcribe.audio import Sources, recordings
from asrkit.transcribe.formats import Transcript
from asrkit.transcribe.options import WindowOptions
from asrkit.transcribe.progress import Advance, progress_bar
from asrkit.transcribe.recognizer import Recognizer
from asrkit.transcribe.windows import FAILURES, POOL, Transcriber

WORKER_BYTES = 2**30  # allowed for each worker beside the weights, which all share
MOST_DEATHS = 100  # of workers in a row, no job done in between
MOST_BATCHES = 6  # in a job: so many that windows of about one length meet
LEAST_S = 30.0  # of audio in a job: a batch that keeps a core busy
BYTES_PER_S = 32_000  # of a recording, about: 16 bits at 16 kHz
Items = Sequence[Any]
Function = Callable[[Any], Any]
Work = Callable[[Any, Advance], Any]
Draw = Callable[[], tuple[Any, Any] | None]
ENDED = "audio: reading or transcribing it ended the process twice."


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Workers, and the cores and threads of each.

    Args:
        cores: Logical CPUs that each worker is pinned to; empty tuples where none is.
        threads: That compute, in each worker; None: as many as torch takes.
        why: What the number of workers follows from, in some words.
    """

    cores: tuple[tuple[int, ...], ...] = ((),)
    threads: int | None = None
    why: str = "as asked"

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.cores)


def choose_layout(
    workers: int | str = "auto",
    *,
    threads: int | None = None,
    recordings: int | None = None,
    model_bytes: int = 0,
) -> Layout:
    """The layout of `workers` forked processes on the cores that this process may use.

    A worker is pinned to its share of the affinity mask; logical CPUs of one core stay together.
    None is pinned where a container's quota is smaller than the mask (others may use the same
    cores), or where the system pins nothing, such as macOS.

    Args:
        workers: How many; "auto" is one for each core, as far as recordings and free memory go.
        threads: Of each worker; None: cores over workers, rounded down.
        recordings: That are to be transcribed, if that is known.
        model_bytes: Memory that the model will take, where it is not loaded yet.

    Raises:
        ValueError: There are not so many cores, or this system cannot fork processes.
    """
    remedy = "--shards with --part K/N works there, a process a part."
    expect(hasattr(os, "fork"), "workers", "a system that forks processes", sys.platform, remedy)
    pins = hasattr(os, "sched_setaffinity")
    mask = os.sched_getaffinity(0) if pins else range(os.cpu_count() or 1)
    most = usable_cores()
    cores = min(most, len({same_core(cpu) for cpu in mask}))
    why = "as asked"
    if workers == "auto":
        room = max(0, free_memory() - model_bytes)
        limits = {
            "one a core": cores,
            "one a recording": recordings or cores,
            "as free memory allows": room / WORKER_BYTES,
        }
        why = min(limits, key=limits.__getitem__)
        workers = max(1, int(limits[why]))
    wanted = f"auto, or 1 to {most}, the cores of this process"
    expect(whole(workers, 1, most), "workers", wanted, workers)
    number = int(workers)
    pinned: tuple[tuple[int, ...], ...] = ((),) * number
    if pins and most == len(mask):
        shares = torch.tensor(sorted(mask, key=same_core), device="cpu").tensor_split(number)
        pinned = tuple(tuple(share.tolist()) for share in shares)
    return Layout(cores=pinned, threads=threads or max(1, cores // number), why=why)


class Died(str):
    """How a worker ended: "worker 1 (process 123) ended by signal 9", or "exit code 1"."""


@dataclass
class _Worker:
    number: int  # in the layout
    process: Any
    connection: Connection
    key: Any = None  # of its job; None: it waits for one
    told_s: float = 0.0  # of the audio of this job


class Workers:
    """Processes that do jobs; all are killed when the block ends, or this process does.

    A worker gets a job, answers with its result, and gets the next. Its stdout is stderr.

    Args:
        layout: How many, and their cores and threads.
        function: Called in a worker with each job, and with what it may call with seconds of audio
            that are done; its result, which is no float, is sent back.
        advance: Called here with these seconds, and less those of a job whose worker ended.
        method: "fork", or "spawn" for what cannot be forked, such as a GPU that is in use: then
            `function` is pickled, and cannot be one of a script.

    Raises:
        ValueError: Forked workers are to have several threads, and torch has several here.
    """

    def __init__(
        self,
        layout: Layout,
        function: Work,
        advance: Advance = lambda audio_s: None,
        *,
        method: Literal["fork", "spawn"] = "fork",
    ) -> None:
        settled = method == "spawn" or 1 in (layout.threads, torch.get_num_threads())
        wanted = "1, or torch.set_num_threads(1) before torch computes anything here"
        expect(settled, "threads", wanted, layout.threads, "Threads do not outlive a fork.")
        self.layout = layout
        self.function = function
        self.advance = advance
        self.context: Any = multiprocessing.get_context(method)
        self.workers: list[_Worker] = []
        self.deaths = 0  # since a job was done

    def __enter__(self) -> "Workers":
        self.workers = [self._start(number) for number in range(self.layout.workers)]
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()

    def results(self, draw: Draw) -> Iterator[tuple[Any, Any]]:
        """Yield (key of a job, its result) as jobs are done; (key, Died) where its worker ended.

        Ends when all workers wait and `draw` has nothing for them.

        Args:
            draw: Returns (key, job) for a worker that waits, which gets the job; None where there
                is none at the moment.

        Raises:
            ValueError, RuntimeError, OSError, MemoryError: As `function` raised it.
            RuntimeError: Workers end again and again.
        """
        while busy := self._hand_out(draw):
            wait([worker.connection for worker in busy])
            told = [worker for worker in busy if worker.connection.poll()]
            done = [*filter(None, map(self._receive, told))]
            self._hand_out(draw)  # before whoever takes the results makes workers wait
            yield from done

    def _hand_out(self, draw: Draw) -> list[_Worker]:
        """Give jobs to workers that wait, as far as there are some; returns those at work."""
        for worker in self.workers:
            if worker.key is None and (drawn := draw()) is not None:
                worker.key, job = drawn
                with contextlib.suppress(OSError):  # it has ended, which `_receive` finds out
                    worker.connection.send(job)
        return [worker for worker in self.workers if worker.key is not None]

    def _receive(self, worker: _Worker) -> tuple[Any, Any] | None:
        """The key of the job that a worker has done, and the result, and it waits again; None where
        it is under way.
        """
        key = worker.key
        try:
            result = worker.connection.recv()
        except (EOFError, OSError):
            self.advance(-worker.told_s)  # another worker tells of them again
            return key, self._replace(worker)
        if isinstance(result, float):
            worker.told_s += result
            self.advance(result)
            return None
        worker.key, worker.told_s = None, 0.0
        if isinstance(result, Exception):
            raise result
        self.deaths = 0
        return key, result

    def _replace(self, worker: _Worker) -> Died:
        """Start another worker in place of one that ended; returns how it did."""
        worker.process.join()
        code = worker.process.exitcode
        why = f"signal {-code}" if code < 0 else f"exit code {code}"
        self.deaths += 1
        if self.deaths >= MOST_DEATHS:
            message = f"the workers ended {self.deaths} times in a row ({why})."
            raise RuntimeError(f"{message} Fewer --workers take less memory.")
        self.workers[worker.number] = self._start(worker.number)
        return Died(f"worker {worker.number + 1} (process {worker.process.pid}) ended by {why}")

    def _start(self, number: int) -> _Worker:
        ours, theirs = self.context.Pipe()
        arguments = (theirs, self.layout.cores[number], self.layout.threads, self.function)
        process = self.context.Process(target=_work, args=arguments, daemon=True)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # else "spawn" runs the script again
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
        theirs.close()
        return _Worker(number, process, ours)


def _work(
    connection: Connection,
    cores: tuple[int, ...],
    threads: int | None,
    function: Work,
) -> None:
    """What a worker does: jobs, until it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # stdout is for transcripts
    single_thread_after_fork()
    if cores:
        os.sched_setaffinity(0, cores)
    if threads is not None:
        torch.set_num_threads(threads)
    with contextlib.suppress(EOFError, BrokenPipeError):  # whoever waits is gone
        while True:
            job = connection.recv()
            try:
                answer = function(job, connection.send)
            except FAILURES as error:
                answer = error
            connection.send(answer)


def _end_with_parent() -> None:
    """End this worker with the process that started it, however that ended."""
    parent: Any = multiprocessing.parent_process()
    # Forked workers hold the pipes of those before them: the last one ends first, then the others.
    parent.join()
    os._exit(1)


def transcribe_jobs(
    workers: Workers,
    jobs: Iterable[Items],
    failed: Function,
    split: Callable[[Any], Iterable[Any]] = lambda item: (item,),
) -> Iterator[tuple[int, list[Any]]]:
    """Yield (number of a job from 0, results of its items in order) as jobs are done.

    A job whose worker ended is tried again item by item, which a line on stderr says. An item that
    ends its worker once more has a result that says so.

    Args:
        workers: Their function turns a sequence of items into as many results.
        jobs: Items each; drawn when a worker waits for one.
        failed: Returns the result of an item that ended its worker twice.
        split: Yields what is tried alone where an item holds several recordings, such as an
            archive.

    Raises:
        RuntimeError: Workers end again and again.
    """
    again: deque[Any] = deque()  # ((number, tries of a job), items to try next)

    def tries(job: Items) -> Generator[Items, Any, list[Any]]:
        """Yield items for a worker to try, and take their results; returns those of the job."""
        done = yield job
        if not isinstance(done, Died):
            return done
        tqdm.write(f"{done}; its recordings are transcribed again", file=sys.stderr)
        results = []
        for item in chain.from_iterable(map(split, job)):
            done = yield [item]
            if isinstance(done, Died):
                done = [failed(item)]
            results += done
        return results

    begun = ((key, next(key[1])) for key in enumerate(map(tries, jobs)))

    def draw() -> Any:
        return again.popleft() if again else next(begun, None)

    for key, done in workers.results(draw):
        number, job = key
        try:
            again.append((key, job.send(done)))
        except StopIteration as end:
            yield number, end.value


def transcribe_in_workers(
    checkpoint: Checkpoint,
    paths: Sources,
    layout: Layout,
    *,
    options: WindowOptions | None = None,
    recognizer: Recognizer | None = None,
    progress: bool = False,
) -> Iterator[Transcript]:
    """Yield one `Transcript` a file, in the order given, as `transcribe` does.

    Each worker gets jobs of some minutes of audio, whose windows it batches by length. So texts are
    those of `transcribe`, but for the rounding that other batches bring.

    When a worker ends (a recording that crashes a decoder, somebody's kill -9), another one
    transcribes what it had, recording by recording; one that ends its worker again is an error.

    The workers are forked when the first transcript is asked for. Until then torch must not have
    computed on several threads (`torch.set_num_threads(1)`), or `layout.threads` has to be 1.

    Args:
        checkpoint: Model, tokenizer and feature settings, on a CPU.
        paths: As `transcribe` takes them.
        layout: Workers, cores and threads, as `choose_layout` returns them.
        options: Windows and batches; None: the defaults. Each worker has `readers` threads.
        recognizer: Of this checkpoint, to compute with another config than the default one.
        progress: Show a bar over all workers on stderr, if that is a terminal.

    Raises:
        RuntimeError: The workers end again and again.
    """
    options = options or WindowOptions()
    recognizer = recognizer or Recognizer.from_checkpoint(checkpoint)
    transcriber = Transcriber(recognizer, checkpoint.tokenizer, options)

    def transcribe_job(sounds: Sequence[Sound], advance: Advance) -> list[Transcript]:
        return list(transcriber.recordings(sounds, advance, batches=POOL))

    sounds = [*recordings(paths)]
    jobs = [*recording_jobs(sounds, layout.workers, transcriber.batch_s)]
    done: dict[int, list[Transcript]] = {}  # by number of the job, until it is its turn
    following = 0
    about_s = sum(map(_about_s, sounds))
    done_s = about_done_s = 0.0
    with (
        progress_bar(about_s, show=progress and sys.stderr.isatty()) as bar,
        Workers(layout, transcribe_job, bar.update) as workers,
    ):
        for number, transcripts in transcribe_jobs(
            workers, jobs, lambda sound: Transcript(path=sound.path, error=ENDED)
        ):
            done[number] = transcripts
            done_s += sum(one.audio_s for one in transcripts)
            about_done_s += sum(map(_about_s, jobs[number]))
            bar.total = round(done_s * about_s / (about_done_s or 1))
            while following in done:
                yield from done.pop(following)
                following += 1


def recording_jobs(
    sounds: Sequence[Sound], workers: int, batch_s: float
) -> Iterator[Sequence[Sound]]:
    """Yield jobs of neighbouring recordings, by the bytes of their files.

    The first one is small, so that its transcripts come soon, the next ones twice as large each;
    towards the end they shrink, so that all workers end at about one time. No file is opened here:
    what it holds may end the process that opens it.

    Args:
        sounds: All recordings.
        workers: That transcribe them.
        batch_s: Most audio in a batch, in seconds.
    """
    sizes_s = [*map(_about_s, sounds)]
    left_s = sum(sizes_s)
    least_s = min(LEAST_S, batch_s, left_s / workers)
    most_s = batch_s
    job: list[Sound] = []
    job_s = 0.0
    for sound, size_s in zip(sounds, sizes_s, strict=True):
        job.append(sound)
        job_s += size_s
        if job_s >= max(least_s, min(most_s, left_s / workers / 2)):
            yield job
            left_s -= job_s
            most_s = min(2 * most_s, MOST_BATCHES * batch_s)
            job, job_s = [], 0.0
    if job:
        yield job


def _about_s(sound: Sound) -> float:
    """Seconds of a recording, guessed from its bytes; 0 for what is no file."""
    if sound.duration_s is not None:
        return sound.duration_s
    try:
        return sound.path.stat().st_size / BYTES_PER_S
    except OSError:  # which reading it reports
        return 0.0
