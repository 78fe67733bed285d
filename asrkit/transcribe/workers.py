"""Workers: processes that do one job after another; recordings transcribed in several of them.

`Workers` is the only supervisor: a worker that ends is replaced. `transcribe_jobs` tries again what
it was transcribing; `transcribe_in_workers` does both for files, in forked workers that share one
model. They are forked and not started anew since a weight packed for oneDNN cannot be sent. A fork
takes one thread along: whoever forks keeps torch to one thread until then.
"""

import contextlib
import math
import multiprocessing
import os
import platform
import re
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from tqdm import tqdm

from asrkit.models import Checkpoint
from asrkit.runtime import settle_after_fork, usable_cores
from asrkit.shapes import expect, whole
from asrkit.sound_files import Sound
from asrkit.transcribe.audio import recordings
from asrkit.transcribe.formats import Transcript
from asrkit.transcribe.options import WindowOptions
from asrkit.transcribe.pipeline import Recognizer
from asrkit.transcribe.progress import progress_bar
from asrkit.transcribe.windows import Transcriber

CPUS = Path("/sys/devices/system/cpu")
MEMORY = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")
WORKER_BYTES = 2**30  # allowed for each worker beside the weights, which all share
FAILURES = (ValueError, RuntimeError, OSError, MemoryError)  # others end the worker
MOST_DEATHS = 20  # of workers in a row, no job done in between
MOST_BATCHES = 6  # in a job: so many that windows of about one length meet
LEAST_S = 30.0  # of audio in a job: a batch that keeps a core busy
BYTES_PER_S = 32_000  # of a recording, until some are done: 16 bits at 16 kHz
Items = Sequence[Any]
Function = Callable[[Any], Any]
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

    @property
    def pinned(self) -> bool:
        """Whether each worker has cores of its own."""
        return any(self.cores)


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
    system = platform.system()
    expect(hasattr(os, "fork"), "workers", "a system that forks processes", system, remedy)
    pins = hasattr(os, "sched_setaffinity")
    mask = os.sched_getaffinity(0) if pins else range(os.cpu_count() or 1)
    most = usable_cores()
    cores = min(most, len({same_core(cpu) for cpu in mask}))
    why = "as asked"
    if workers == "auto":
        room = max(0, free_memory() - model_bytes)
        limits = {
            "one a core": cores,
            "one a recording": cores if recordings is None else max(1, recordings),
            f"as {room / 2**30:.1f} GiB of free memory allow": max(1, room // WORKER_BYTES),
        }
        why = min(limits, key=lambda name: limits[name])
        workers = int(limits[why])
    wanted = f"auto, or 1 to {most}, the cores of this process"
    expect(whole(workers, 1, most), "workers", wanted, workers)
    number = int(workers)
    pinned: tuple[tuple[int, ...], ...] = ((),) * number
    if pins and most == len(mask):
        cpus = sorted(mask, key=same_core)
        ends = [len(cpus) * one // number for one in range(number + 1)]
        pinned = tuple(tuple(cpus[start:end]) for start, end in pairwise(ends))
    return Layout(cores=pinned, threads=threads or max(1, cores // number), why=why)


def same_core(cpu: int, folder: Path = CPUS) -> str:
    """The logical CPUs that share a core with one, in a form in which they can be compared.

    Args:
        cpu: Its number.
        folder: Where Linux describes them; elsewhere each is alone.
    """
    file = folder / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    return file.read_text() if file.exists() else str(cpu)


def free_memory(machine: Path = MEMORY, container: Path = CONTAINER) -> float:
    """Bytes that processes can take without swapping; infinity where the system does not say.

    Args:
        machine: The file in which Linux says what the machine has.
        container: The folder in which it says what the container may have (cgroups v2).
    """
    free = 1024 * _number(machine, "MemAvailable", math.inf)
    taken = _number(container / "memory.current", "", 0)
    # files that are cached count as taken, and are given up when others need the memory
    cached = _number(container / "memory.stat", "inactive_file", 0)
    left = _number(container / "memory.max", "", math.inf) - taken + cached
    return min(free, max(0, left))


def _number(file: Path, name: str, otherwise: float) -> float:
    """The number that stands behind a name in a file of Linux."""
    found = re.search(rf"^{name}:? *(\d+)", file.read_text() if file.exists() else "", re.M)
    return int(found[1]) if found else otherwise


class Died(str):
    """How a worker ended: "worker 1 (process 123) ended by signal 9", or "exit code 1"."""


@dataclass
class _Worker:
    number: int  # in the layout
    process: Any
    connection: Connection
    key: Any = None  # of its job; None: it waits for one

    def give(self, key: Any, job: Any) -> None:
        self.key = key
        with contextlib.suppress(OSError):  # it has ended, which `Workers` finds out
            self.connection.send(job)


class Workers:
    """Processes that do jobs; all are killed when the block ends, or this process does.

    A worker gets a job, answers with its result, and gets the next. Its stdout is stderr.

    Args:
        layout: How many, and their cores and threads.
        function: Called in a worker with each job; its result is sent back.
        method: "fork", or "spawn" for what cannot be forked, such as a GPU that is in use: then
            `function` is pickled, and cannot be one of a script.

    Raises:
        ValueError: Forked workers are to have several threads, and torch has several here.
    """

    def __init__(
        self,
        layout: Layout,
        function: Function,
        *,
        method: Literal["fork", "spawn"] = "fork",
    ) -> None:
        settled = method == "spawn" or 1 in (layout.threads, torch.get_num_threads())
        wanted = "1, or torch.set_num_threads(1) before torch computes anything here"
        expect(settled, "threads", wanted, layout.threads, "Threads do not outlive a fork.")
        self.layout = layout
        self.function = function
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
            done = [self._receive(worker) for worker in busy if worker.connection.poll()]
            self._hand_out(draw)  # before whoever takes the results makes workers wait
            yield from done

    def _hand_out(self, draw: Draw) -> list[_Worker]:
        """Give jobs to workers that wait, as far as there are some; returns those at work."""
        for worker in self.workers:
            if worker.key is None and (job := draw()) is not None:
                worker.give(*job)
        return [worker for worker in self.workers if worker.key is not None]

    def _receive(self, worker: _Worker) -> tuple[Any, Any]:
        """The key of the job that a worker has done, and the result; it waits again."""
        key, worker.key = worker.key, None
        try:
            result, error = worker.connection.recv()
        except (EOFError, OSError):
            return key, self._replace(worker)
        if error is not None:
            raise error
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
        with _undisturbed():
            process.start()
        theirs.close()
        return _Worker(number, process, ours)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A process started in here never gets Ctrl-C, and does not run the caller's script again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # what "spawn" would run again
    blocks = hasattr(signal, "pthread_sigmask")  # not on Windows
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]) if blocks else []
    try:
        with warnings.catch_warnings():
            # Python warns of forks beside threads: those of libraries wait here, or settle.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        sys.modules["__main__"] = main
        if blocks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(
    connection: Connection,
    cores: tuple[int, ...],
    threads: int | None,
    function: Function,
) -> None:
    """What a worker does: jobs, until it is killed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # stdout is for transcripts
    settle_after_fork()
    if cores:
        os.sched_setaffinity(0, cores)
    if threads is not None:
        torch.set_num_threads(threads)
    with contextlib.suppress(EOFError, BrokenPipeError):  # whoever waits is gone
        while True:
            connection.send(_attempt(function, connection.recv()))


def _attempt(function: Function, job: Any) -> tuple[Any, Exception | None]:
    """(what the function returns, None), or (None, its error)."""
    try:
        return function(job), None
    except FAILURES as error:
        return None, error


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

    A job whose worker ended is tried again item by item; one that ends its worker alone has a
    result that says so. Lines on stderr say what happened.

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
                tqdm.write(f"{done} for a second time with this recording", file=sys.stderr)
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
    paths: str | Path | Sound | Iterable[str | Path | Sound],
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
    jobs = RecordingJobs([*recordings(paths)], layout.workers, options.batch_s)
    done: dict[int, list[Transcript]] = {}  # by number of the job, until it is its turn
    following = 0
    bar = progress_bar(jobs.seconds(jobs.total), show=progress and sys.stderr.isatty())
    with bar, Workers(layout, partial(transcribe_job, transcriber)) as workers:
        for number, transcripts in transcribe_jobs(workers, jobs.drawn(), ended_twice):
            done[number] = transcripts
            audio_s = sum(transcript.audio_s for transcript in transcripts)
            jobs.learn(number, audio_s)
            bar.total = round(jobs.seconds(jobs.total))
            bar.update(audio_s)
            while following in done:
                yield from done.pop(following)
                following += 1


def transcribe_job(transcriber: Transcriber, sounds: Sequence[Sound]) -> list[Transcript]:
    """The transcripts of a job, in a worker; it ends where no later job could be transcribed.

    Args:
        transcriber: Of the worker.
        sounds: Recordings of the job.
    """
    transcripts = transcriber.job(sounds)
    for transcript in transcripts:
        if "CUDA error" in transcript.error:  # lack of memory is another one
            sys.exit(f"{transcript.path}: {transcript.error}")
    return transcripts


def ended_twice(sound: Sound) -> Transcript:
    """The transcript of a recording that ended its worker twice.

    Args:
        sound: The recording.
    """
    return Transcript(path=sound.path, error=ENDED)


class RecordingJobs:
    """Jobs of neighbouring recordings, by the bytes of their files.

    No file is opened here: what it holds may end the process that opens it.

    Args:
        sounds: All recordings.
        workers: That transcribe them.
        batch_s: Most audio in a batch, in seconds.
    """

    def __init__(self, sounds: Sequence[Sound], workers: int, batch_s: float) -> None:
        self.sounds = sounds
        self.workers = workers
        self.batch_s = batch_s
        self.sizes = [_bytes(sound) for sound in sounds]
        self.total = sum(self.sizes)
        self.jobs: list[int] = []  # bytes of each that was drawn
        self.done_bytes = BYTES_PER_S
        self.done_s = 1.0

    def seconds(self, size: int) -> float:
        """Of audio in so many bytes, as in the recordings that are done."""
        return size * self.done_s / self.done_bytes

    def learn(self, number: int, audio_s: float) -> None:
        """Measure later jobs by the seconds of audio in one that is done."""
        self.done_bytes += self.jobs[number]
        self.done_s += audio_s

    def drawn(self) -> Iterator[Sequence[Sound]]:
        """Yield jobs: small ones at first, from which lengths are learned, then larger ones, and
        smaller ones again, so that all workers end at about one time."""
        left = self.total
        first = size = 0
        for end, more in enumerate(self.sizes, start=1):
            size += more
            batches = min(2 ** (len(self.jobs) // self.workers), MOST_BATCHES)
            most_s = min(batches * self.batch_s, self.seconds(left) / self.workers / 2)
            least_s = min(LEAST_S, self.batch_s, self.seconds(self.total) / self.workers)
            if self.seconds(size) >= max(least_s, most_s) or end == len(self.sizes):
                self.jobs.append(size)
                yield self.sounds[first:end]
                left -= size
                first, size = end, 0


def _bytes(sound: Sound) -> int:
    """Bytes that stand for the length of a recording; 0 for what is no file."""
    if sound.duration_s is not None:
        return round(sound.duration_s * BYTES_PER_S)
    if sound.data is not None:
        return len(sound.data)
    return sound.path.stat().st_size if sound.path.exists() else 0
