"""Notebooks through papermill, each with a kernel of its own.

A failure or a hang stops that notebook only. A notebook is done when its result is beside its
executed copy, both renamed into place. A run that is killed leaves no other trace that counts, so
the next one with `resume` keeps what is done and runs the rest.
"""

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from asrkit.parents import when_parent_ends
from asrkit.workbench.machine import this_machine
from asrkit.workbench.report.jobs import Job, jobs_of
from asrkit.workbench.report.notebook_run import NotebookRun, finish, kept_run

LONGEST_BASE = 80  # bytes: a socket's path has at most 103 on macOS, and 107 on Linux
# A busy machine keeps a kernel from sending the last output of a cell for longer than nbclient's
# 4 s. The limit of the whole notebook holds all the same.
IOPUB_TIMEOUT_S = 120


def run_notebooks(  # noqa: PLR0913 - the options of `report` that concern notebooks
    paths: Sequence[Path],
    out: Path,
    *,
    parameters: Mapping[str, Any] | None = None,
    size: str = "quick",
    device: str = "auto",
    jobs: int | None = None,
    timeout_s: float = 600.0,
    progress: bool = True,
    resume: bool = False,
) -> list[NotebookRun]:
    """Execute notebooks into a folder; returns how each fared, in the order of `paths`.

    Args:
        paths: The notebooks. Those that a notebook's metadata names in `asrkit.after` run before
            it.
        out: Folder of the executed copies and their results.
        parameters: Values for the notebooks that declare them.
        size: "full" sets what a notebook's metadata names in `asrkit.full`; `parameters` win.
        device: "auto", "cpu" (hides GPUs from the notebooks) or "cuda".
        jobs: Notebooks that run at once; by default half as many as there are cores, or as many as
            cores where all of them measure no time (`asrkit.untimed` in their metadata).
        timeout_s: Limit of one notebook in seconds.
        progress: Print a line when a notebook starts, and one when it has ended.
        resume: Keep what `out` holds of the same notebooks and parameters.

    Raises:
        ValueError: An argument cannot be served, for example a parameter that no notebook declares.
    """
    planned = jobs_of(paths, parameters or {}, size, device)
    out.mkdir(parents=True, exist_ok=True)
    for leftover in out.glob(".*"):
        if leftover.is_file():  # of a run that was killed; Jupyter keeps a folder there
            leftover.unlink()
    done = dict[str, NotebookRun]()
    if resume:
        done = _kept_runs(planned, out)
    say = partial(print, flush=True) if progress else _say_nothing
    for run in done.values():
        say(f"{run.line()}; kept")
    with _Workers(planned, out, jobs, timeout_s) as workers:
        workers.skip(done)
        while workers.busy:
            for name in workers.start_ready():
                say(f"{name}: started")
            for run in workers.wait_for_some():
                done[run.name] = run
                say(run.line())
    return [done[name] for name in planned]


def _kept_runs(planned: Mapping[str, Job], out: Path) -> dict[str, NotebookRun]:
    """What an earlier run has done of the same work."""
    kept = {name: kept_run(out, name, job) for name, job in planned.items()}
    return {name: run for name, run in kept.items() if run is not None}


def _say_nothing(_line: str) -> None:
    pass


class _Workers:
    """The jobs that wait and those that run, some at a time.

    A worker is a pool of one process: a larger one breaks for all when the system kills a process.
    It runs one notebook after the other, since it takes seconds to import what it needs.
    """

    def __init__(
        self, jobs: Mapping[str, Job], out: Path, at_once: int | None, timeout_s: float
    ) -> None:
        cores = this_machine()["cpu_usable"]
        self.jobs = jobs
        self.out = out
        self.at_once = at_once or max(1, cores // 2)
        self.untimed_at_once = at_once or cores
        self.threads = max(1, cores // min(self.at_once, len(jobs)))
        self.timeout_s = timeout_s
        self.waiting = dict(jobs)
        self.running = dict[Future[None], tuple[str, Path, ProcessPoolExecutor]]()
        self.idle = list[ProcessPoolExecutor]()

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            for worker in self.idle:
                worker.shutdown()
            return
        for process in multiprocessing.active_children():  # a signal may have reached us only
            process.terminate()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def running_names(self) -> list[str]:
        return [name for name, _, _ in self.running.values()]

    def skip(self, done: Mapping[str, NotebookRun]) -> None:
        """Leave out what an earlier run has done."""
        for name in done:
            del self.waiting[name]

    def start_ready(self) -> list[str]:
        """Start jobs that wait for no other one, as many as may run; returns their names."""
        started = []
        for name, job in list(self.waiting.items()):
            unfinished = {*self.waiting, *self.running_names}
            if self._has_room(job) and unfinished.isdisjoint(job.after):
                self._start(name, job)
                started.append(name)
        return started

    def _has_room(self, job: Job) -> bool:
        """Whether a job may start beside those that run: what is timed must not be disturbed."""
        beside = [self.jobs[name] for name in self.running_names]
        if job.untimed and all(other.untimed for other in beside):
            return len(beside) < self.untimed_at_once
        return len(beside) < self.at_once

    def _start(self, name: str, job: Job) -> None:
        part = self.out / f".{name}-{os.urandom(4).hex()}.part.ipynb"
        log = self.out / f"{name}.log"
        worker = self.idle.pop() if self.idle else _new_worker()
        future = worker.submit(_execute, job, part, log, self.timeout_s, self.threads)
        self.running[future] = (name, part, worker)
        del self.waiting[name]

    def wait_for_some(self) -> list[NotebookRun]:
        """Results of the jobs that end first."""
        runs = []
        for future in wait(self.running, return_when=FIRST_COMPLETED).done:
            name, part, worker = self.running.pop(future)
            failure = future.exception()
            if isinstance(failure, BrokenProcessPool):
                worker.shutdown(wait=False)
            else:
                self.idle.append(worker)
            runs.append(finish(self.out, name, self.jobs[name], part, failure))
        return runs


def _new_worker() -> ProcessPoolExecutor:
    """A process that ends with this one."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, when_parent_ends, (partial(os._exit, 1),))


def _execute(job: Job, part: Path, log: Path, timeout_s: float, threads: int) -> None:
    """In the worker: execute a notebook with this interpreter as kernel; output goes to `log`."""
    log_file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log_file, 1)
    os.dup2(log_file, 2)
    os.close(log_file)
    import papermill

    os.environ |= {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "KINETO_LOG_LEVEL": "99",  # torch's profiler calls it an error that there is no GPU
    }
    if job.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with _kernel_installed(), _socket_folder() as sockets:
        papermill.execute_notebook(
            str(job.path),
            str(part),
            parameters=job.parameters,
            kernel_name="asrkit",
            language="python",
            progress_bar=False,
            execution_timeout=max(1, int(timeout_s)),
            cwd=str(job.path.parent),
            request_save_on_cell_execute=True,
            iopub_timeout=IOPUB_TIMEOUT_S,
            shutdown_kernel="immediate",  # asked to end, it takes three seconds
            config=_sockets_in(sockets),
        )


@contextlib.contextmanager
def _kernel_installed() -> Iterator[None]:
    """Make this interpreter a kernel, whatever kernels the user has installed."""
    before = os.environ.get("JUPYTER_PATH")
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "kernels" / "asrkit" / "kernel.json"
        spec.parent.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec.write_text(json.dumps({"argv": argv, "display_name": "asrkit", "language": "python"}))
        path = [folder]
        if before:
            path.append(before)
        os.environ["JUPYTER_PATH"] = os.pathsep.join(path)
        try:
            yield
        finally:
            os.environ.pop("JUPYTER_PATH")
            if before is not None:
                os.environ["JUPYTER_PATH"] = before


@contextlib.contextmanager
def _socket_folder() -> Iterator[str]:
    """Yield a new folder whose path is short enough for sockets; "" where there is none.

    A long $TMPDIR gives way to /tmp. Windows has no such sockets.
    """
    for base in (tempfile.gettempdir(), "/tmp"):
        if os.name != "posix" or len(os.fsencode(base)) > LONGEST_BASE:
            continue
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(tempfile.TemporaryDirectory(dir=base))
            except OSError:
                continue
            yield folder
            return
    yield ""


def _sockets_in(folder: str) -> Any:
    """Configuration that puts the kernel's sockets into a folder of their own.

    Ports are raced for, and socket files of one name mix two kernels up. None, for ports, where
    there is no folder.
    """
    if not folder:
        return None
    from traitlets.config import Config

    return Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/ipc"}})
