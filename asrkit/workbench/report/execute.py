"""Notebooks run by papermill, several at a time, each with its own kernel.

A failure or a hang stops that notebook only. When a notebook is complete, the fingerprint of its
work is written to `NAME.done`. A resumed run keeps complete notebooks and runs the rest.
"""

import ast
import contextlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config

from asrkit.files import content_hash
from asrkit.shapes import count, expect, expect_choice
from asrkit.workbench.machine import this_machine
from asrkit.workbench.records import MIME, problem

ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Name, annotation and value, as in "seconds: float = 30  # of each"
ASSIGNMENT = re.compile(r"(?m)^([^\W\d]\w*) *(?::([^=\n]+))?=(?!=)(.*)")
# Types of the values that a parameter may have, by its annotation; any other one allows all values.
ALLOWED_TYPES: Mapping[str, set[type]] = {
    "bool": {bool},
    "int": {int},
    "float": {int, float},
    "str": {str},
    "list": {list},
    "tuple": {list},
    "dict": {dict},
    "None": {type(None)},
}
SITE_PAGES = {  # every report has these, and a page for each notebook
    "index": "Findings",
    "claims": "Claims",
    "figures": "Figures",
    "glossary": "Glossary",  # if there is a glossary.md beside the notebooks
    "machine": "Machine and run",
}
# Characters that no notebook's name may have; the range is how Python decodes invalid bytes.
UNLINKABLE = {*"#?%", *map(chr, range(0xDC80, 0xDD00))}
SLOWEST_OF_NOTEBOOK = 3
# On a busy machine, a kernel may need longer than nbclient's 4 s to send the last output of a cell.
# The time limit of the cell applies all the same.
IOPUB_TIMEOUT_S = 120
# Bytes of the path of the temporary folder. The path of a socket, one folder and a name longer, may
# have 103 on macOS and 107 on Linux.
LONGEST_FOLDER = 80
PROGRESS_EVERY_S = 20


@dataclass(frozen=True, kw_only=True)
class Job:
    """A notebook to run.

    Attributes:
        path: Path of the notebook.
        parameters: Values for parameters that it declares.
        device: "auto", "cpu" or "cuda".
        after: Names of notebooks that have to run first, if they precede it in the list.
        untimed: Whether it records no times, so that several such notebooks may share the cores.
    """

    path: Path
    parameters: Mapping[str, Any]
    device: str
    after: Sequence[str]
    untimed: bool

    @property
    def name(self) -> str:
        """Name of the notebook and of its page."""
        return self.path.stem

    def fingerprint(self) -> str:
        """Source, device and parameters as text; equal jobs have the same result."""
        source = content_hash(self.path.read_bytes())
        return json.dumps([source, self.device, self.parameters], default=str)


@dataclass(frozen=True, kw_only=True)
class NotebookRun:
    """The outcome of one notebook.

    Attributes:
        name: Name of the notebook.
        status: "ran" or "failed".
        seconds: Duration of the run.
        parameters: Values that were set.
        error: Traceback or message; empty if it ran.
        cell: Id of the cell that failed.
        slowest: (seconds, cell id) of the slowest cells.
        records: Records that it published.
    """

    name: str
    status: str
    seconds: float = 0.0
    parameters: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    cell: str = ""
    slowest: Sequence[tuple[float, str]] = ()
    records: Sequence[dict[str, Any]] = field(default=(), repr=False)

    def line(self) -> str:
        """The outcome in one line; for a failure, the last line of the traceback and the cell."""
        if self.status == "ran":
            published = f", {count(len(self.records), 'record')}" if self.records else ""
            return f"{self.name}: ran in {self.seconds:.0f} s{published}"
        reason = self.error.strip().splitlines()[-1]
        if self.cell:
            reason += f" (cell {self.cell})"
        return f"{self.name}: {reason}"


def jobs_of(
    paths: Sequence[Path], parameters: Mapping[str, Any], size: str = "quick", device: str = "auto"
) -> list[Job]:
    """The jobs to run.

    Args:
        paths: The notebooks.
        parameters: Values for the notebooks that declare them.
        size: "full" sets the values in `asrkit.full` of a notebook's metadata; `parameters` win.
        device: "auto", "cpu" (hides GPUs from the notebooks) or "cuda".

    Raises:
        ValueError: A path is not a notebook, no notebook declares a parameter, or there is no GPU
            for "cuda".
    """
    remedy = "Name some, or run in a folder that holds notebooks/."
    expect(bool(paths), "notebooks", "at least one", "none", remedy)
    names = [path.stem for path in paths]
    are_different = len({*names, *SITE_PAGES}) == len(names) + len(SITE_PAGES)
    wanted = f"different names, none of them {', '.join(SITE_PAGES)}"
    expect(are_different, "notebooks", wanted, names)
    unlinkable = [name for name in names if {*name} & UNLINKABLE]
    wanted = "names without # ? %, which links cannot have, and without undecodable bytes"
    remedy = "For such bytes, set LC_ALL=C.UTF-8."
    expect(not unlinkable, "notebooks", wanted, unlinkable, remedy)
    expect_choice("size", size, ("quick", "full"))
    expect_choice("device", device, ("auto", "cpu", "cuda"))
    if device == "cuda":
        import torch

        wanted = "cpu or auto where torch finds no GPU"
        expect(torch.cuda.is_available(), "device", wanted, "cuda", "asrkit doctor says more.")
    known = set[str]()
    jobs = []
    for path in paths:
        notebook = _read(path)
        types = _declared(notebook)
        known |= types.keys()
        settings = notebook.metadata.get("asrkit", {})
        wanted = f"an object as asrkit's metadata of {path.name}"
        expect(isinstance(settings, dict), "notebooks", wanted, settings)
        full = settings.get("full", {}) if size == "full" else {}
        chosen = {name: value for name, value in {**full, **parameters}.items() if name in types}
        for name, value in chosen.items():
            kinds = [kind.partition("[")[0].strip() for kind in types[name].split("|")]
            fits = any(type(value) in ALLOWED_TYPES.get(kind, {type(value)}) for kind in kinds)
            expect(fits, "parameters", f"{types[name]} as {name} of {path.name}", repr(value))
        after, untimed = settings.get("after", []), settings.get("untimed", False)
        job = Job(path=path, parameters=chosen, device=device, after=after, untimed=untimed)
        jobs.append(job)
    unknown = sorted({*parameters} - known)
    remedy = "" if known else "Give the cell that sets them the tag `parameters`."
    expect(not unknown, "parameters", f"one of {sorted(known)}", unknown, remedy)
    return jobs


def _declared(notebook: Any) -> dict[str, str]:
    """Name and type of each parameter of a notebook: its annotation, or the type of its default.

    An integer as default allows any number.
    """
    types = {}
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            for name, annotation, default in ASSIGNMENT.findall(cell.source):
                types[name] = annotation.strip("'\" ")
                with contextlib.suppress(ValueError, SyntaxError, TypeError):
                    kind = type(ast.literal_eval(default.strip())).__name__
                    types[name] = types[name] or {"int": "float"}.get(kind, kind)
    return types


def _read(path: Path) -> Any:
    """A notebook of nbformat 4; ValueError names a file that is not one."""
    try:
        return nbformat.read(path, 4)
    except Exception as error:  # the errors of nbformat have no common base class
        reason = str(error).strip().partition("\n")[0][:100]
        raise ValueError(
            f"notebook {path}: expected a notebook of nbformat 4, "
            f"got a file that cannot be read: {reason}"
        ) from None


def run_notebooks(
    jobs: Sequence[Job],
    out: Path,
    *,
    at_once: int | None = None,
    timeout_s: float = 600.0,
    progress: bool = True,
    resume: bool = False,
) -> list[NotebookRun]:
    """Execute notebooks into a folder and return the outcome of each, in the order of `jobs`.

    Args:
        jobs: The notebooks to run.
        out: Folder for the executed copies and the log.
        at_once: Notebooks that run at once; by default half as many as there are cores, or as many
            as cores if no notebook measures time.
        timeout_s: Time limit of a cell in seconds.
        progress: Print a line when a notebook starts, every 20 s, and when it ends.
        resume: Keep the copies in `out` that are complete and come from the same work.
    """
    out.mkdir(parents=True, exist_ok=True)
    cores = int(this_machine()["cpu_usable"])
    runs: dict[str, NotebookRun] = {}

    def log(line: str) -> None:
        if progress:
            print(line, flush=True)

    for job in jobs:
        if resume and _is_done(job, out):
            runs[job.name] = outcome(job.name, out, job.parameters)
            log(f"{runs[job.name].line()}; kept")
    waiting = [job for job in jobs if job.name not in runs]
    try:
        environment = _environment(jobs, at_once, cores)
        for job, failure in _completed(waiting, out, environment, at_once, cores, timeout_s, log):
            runs[job.name] = outcome(job.name, out, job.parameters, failure)
            log(runs[job.name].line())
    except BaseException:  # the signal may have reached this process alone
        for process in multiprocessing.active_children():
            process.kill()  # its kernel notices, and ends too
        raise
    return [runs[job.name] for job in jobs]


def _completed(
    jobs: Sequence[Job],
    out: Path,
    environment: Mapping[str, str],
    at_once: int | None,
    cores: int,
    timeout_s: float,
    log: Callable[[str], None],
) -> Iterator[tuple[Job, BaseException | None]]:
    """Run jobs in workers; yields each job when it ends, with the exception that it raised."""
    waiting = [*jobs]
    running: dict[Future[None], tuple[Job, ProcessPoolExecutor]] = {}
    idle: list[ProcessPoolExecutor] = []
    while waiting or running:
        while job := _next_job(waiting, [other for other, _ in running.values()], at_once, cores):
            waiting.remove(job)
            worker = idle.pop() if idle else _new_worker(out, environment)
            try:
                future = worker.submit(_execute, job, out, timeout_s)
            except BrokenProcessPool:  # the worker died while it was idle
                worker = _new_worker(out, environment)
                future = worker.submit(_execute, job, out, timeout_s)
            running[future] = job, worker
            log(f"{job.name}: started")
        ended = wait(running, PROGRESS_EVERY_S, return_when=FIRST_COMPLETED).done
        if not ended:
            log("; ".join(_current_cell(job, out) for job, _ in running.values()))
        for future in ended:
            job, worker = running.pop(future)
            failure = future.exception()
            if not isinstance(failure, BrokenProcessPool):
                idle.append(worker)
            yield job, failure
    for worker in idle:
        worker.shutdown()


def _current_cell(job: Job, out: Path) -> str:
    """The cell that a running notebook is at; papermill writes its copy after each cell."""
    try:
        notebook = _read(out / f"{job.name}.ipynb")
    except ValueError:  # the copy is being written
        return f"{job.name}: running"
    cells = [_papermill(cell) for cell in notebook.cells if cell.cell_type == "code"]
    begun = sum(cell.get("status", "pending") != "pending" for cell in cells)
    return f"{job.name}: cell {begun} of {len(cells)}"


def _done_file(job: Job, out: Path) -> Path:
    return out / f"{job.name}.done"


def _is_done(job: Job, out: Path) -> bool:
    """Whether an earlier run has completed the same work."""
    file = _done_file(job, out)
    return file.is_file() and file.read_text("utf-8") == job.fingerprint()


def _next_job(
    waiting: Sequence[Job], running: Sequence[Job], at_once: int | None, cores: int
) -> Job | None:
    """The first job that may start. Timed notebooks get cores of their own."""
    unfinished = {job.name for job in running}
    for job in waiting:
        together = [*running, job]
        if all(other.untimed for other in together):
            limit = at_once or cores
        else:
            limit = at_once or max(1, cores // 2)
        if len(together) <= limit and unfinished.isdisjoint(job.after):
            return job
        unfinished.add(job.name)
    return None


def _environment(jobs: Sequence[Job], at_once: int | None, cores: int) -> dict[str, str]:
    """The environment variables of workers and kernels: timed notebooks share the cores."""
    timed_at_once = min(at_once or max(1, cores // 2), len(jobs))
    environment = {
        "OMP_NUM_THREADS": str(max(1, cores // timed_at_once)),
        "OMP_WAIT_POLICY": "passive",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYTHONSTARTUP": "",  # IPython would run it
    }
    if jobs[0].device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _new_worker(out: Path, environment: Mapping[str, str]) -> ProcessPoolExecutor:
    """A process that runs notebooks one after another, because importing papermill takes seconds.

    Each worker is its own pool, so that one that dies ends no other notebook.
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, _start_worker, (out / "log", environment))


def _start_worker(log: Path, environment: Mapping[str, str]) -> None:
    """In a worker: send its and its kernels' output to the log, and make it end with its parent."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= environment
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Kernel(AsyncKernelManager):
    """A kernel of this interpreter, regardless of the kernels that the user has installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="asrkit", language="python")


def _execute(job: Job, out: Path, timeout_s: float) -> None:
    """In a worker: execute a notebook."""
    import papermill

    _done_file(job, out).unlink(missing_ok=True)
    config = Config()
    short_path = None
    if os.name == "posix" and len(os.fsencode(tempfile.gettempdir())) > LONGEST_FOLDER:
        short_path = "/tmp"
    with tempfile.TemporaryDirectory(dir=short_path) as folder:
        os.environ["IPYTHONDIR"] = folder  # the user's profile could change a page
        if os.name == "posix":  # sockets as files; two kernels could pick the same port
            config.KernelManager.transport = "ipc"
            config.KernelManager.ip = f"{folder}/ipc"
        papermill.execute_notebook(
            _escape(job.path),
            _escape(out / f"{job.name}.ipynb"),
            parameters=job.parameters,
            kernel_name="python3",
            language="python",
            progress_bar=False,
            execution_timeout=max(1, int(timeout_s)),
            cwd=str(job.path.parent),
            iopub_timeout=IOPUB_TIMEOUT_S,
            shutdown_kernel="immediate",  # a graceful end takes three seconds
            kernel_manager_class=_Kernel,
            config=config,
        )
    _done_file(job, out).write_text(job.fingerprint(), "utf-8")


def _escape(path: Path) -> str:
    """A path for papermill, which replaces parameters in braces."""
    return str(path).replace("{", "{{").replace("}", "}}")


def outcome(
    name: str,
    out: Path,
    parameters: Mapping[str, Any],
    failure: BaseException | None = None,
) -> NotebookRun:
    """The outcome of a notebook, read from its executed copy.

    Args:
        name: Name of the notebook.
        out: Folder of the executed copies.
        parameters: Values that were set.
        failure: The exception that the run raised, or None.
    """
    if isinstance(failure, PapermillExecutionError):
        error = ANSI_COLOUR.sub("", "\n".join(failure.traceback))
        error = error.strip() or f"{failure.ename}: {failure.evalue}"  # IPython may print none
    elif failure:
        first_line, _, _ = str(failure).strip().partition("\n")  # a timeout also prints the cell
        error = f"{type(failure).__name__}: {first_line}"
    else:
        error = ""
    status = "failed" if failure else "ran"
    executed = out / f"{name}.ipynb"
    try:
        notebook = _read(executed)
    except ValueError:  # there is no complete copy, so there is no page
        executed.unlink(missing_ok=True)
        return NotebookRun(name=name, status=status, parameters=parameters, error=error)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    published = [output.data[MIME] for output in outputs if MIME in output.get("data", {})]
    durations = [(_papermill(cell).get("duration") or 0.0, cell.id) for cell in cells]
    begun = [cell.id for cell in cells if _papermill(cell).get("status", "pending") != "pending"]
    return NotebookRun(
        name=name,
        status=status,
        seconds=_papermill(notebook).get("duration") or 0.0,
        parameters=parameters,
        error=error,
        cell=begun[-1] if failure and begun else "",
        slowest=sorted(durations, reverse=True)[:SLOWEST_OF_NOTEBOOK],
        records=[record for record in published if not problem(record)],
    )


def _papermill(part: Any) -> Mapping[str, Any]:
    """Papermill's metadata of a notebook or a cell."""
    return part.metadata.get("papermill", {})
