"""Notebooks through papermill, each with a kernel of its own, some at a time.

A failure or a hang stops that notebook only. Beside the executed copy of a notebook that ran to its
end stands `NAME.done`, which says what ran; a resumed run keeps those, and runs the rest.
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
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
# What a parameter of a type may be; of another type, whatever is given.
FITS: Mapping[str, set[type]] = {
    "bool": {bool},
    "int": {int},
    "float": {int, float},
    "str": {str},
    "list": {list},
    "tuple": {list},
    "dict": {dict},
    "None": {type(None)},
}
SITE_PAGES = {  # of every report, beside a page for each notebook
    "index": "Findings",
    "claims": "Claims",
    "figures": "Figures",
    "machine": "Machine and run",
}
# Letters of no name of a notebook; the second kind stands for bytes that Python could not decode.
UNLINKED = {*"#?%", *map(chr, range(0xDC80, 0xDD00))}
SLOWEST_OF_NOTEBOOK = 3
# A busy machine keeps a kernel from sending the last output of a cell for longer than nbclient's
# 4 s. The limit of the cell holds all the same.
IOPUB_TIMEOUT_S = 120
# Bytes of the folder of temporary files. A socket's path, a folder and a name deeper, has at most
# 103 on macOS, and 107 on Linux.
LONGEST_FOLDER = 80
STILL_S = 20  # after which a line says how far the notebooks are


@dataclass(frozen=True, kw_only=True)
class Job:
    """A notebook to run.

    Attributes:
        path: Of the notebook.
        parameters: Values for those that it declares.
        device: "auto", "cpu" or "cuda".
        after: Names of notebooks that run before it, where they stand before it in the list.
        untimed: Whether no record of it has a time, so that it may run beside others of its kind.
    """

    path: Path
    parameters: Mapping[str, Any]
    device: str
    after: Sequence[str]
    untimed: bool

    @property
    def name(self) -> str:
        """Name of the notebook, and of its page."""
        return self.path.stem

    def work(self) -> str:
        """What runs, as text: two jobs of the same work have the same result."""
        source = content_hash(self.path.read_bytes())
        return json.dumps([source, self.device, self.parameters], default=str)


@dataclass(frozen=True, kw_only=True)
class NotebookRun:
    """How one notebook fared.

    `cell` is the one that failed, `slowest` are (seconds, cell id), `records` what it published.
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
        """The outcome in one line; for a failure the last line of the traceback and the cell."""
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
    """What will run.

    Args:
        paths: The notebooks.
        parameters: Values for the notebooks that declare them.
        size: "full" sets what a notebook's metadata names in `asrkit.full`; `parameters` win.
        device: "auto", "cpu" (hides GPUs from the notebooks) or "cuda".

    Raises:
        ValueError: A path is no notebook, nobody declares a parameter, or there is no GPU for
            "cuda".
    """
    remedy = "Name some, or run in a folder that holds notebooks/."
    expect(bool(paths), "notebooks", "at least one", "none", remedy)
    names = [path.stem for path in paths]
    are_different = len({*names, *SITE_PAGES}) == len(names) + len(SITE_PAGES)
    wanted = f"different names, none of them {', '.join(SITE_PAGES)}"
    expect(are_different, "notebooks", wanted, names)
    in_links = [name for name in names if {*name} & UNLINKED]
    wanted = "names without # ? %, which links cannot hold, nor letters that the locale cannot name"
    remedy = "For letters, set LC_ALL=C.UTF-8."
    expect(not in_links, "notebooks", wanted, in_links, remedy)
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
            fits = any(type(value) in FITS.get(kind, {type(value)}) for kind in kinds)
            expect(fits, "parameters", f"{types[name]} as {name} of {path.name}", repr(value))
        job = Job(
            path=path,
            parameters=chosen,
            device=device,
            after=settings.get("after", []),
            untimed=settings.get("untimed", False),
        )
        jobs.append(job)
    unknown = sorted({*parameters} - known)
    remedy = "" if known else "Tag the cell that sets them `parameters`."
    expect(not unknown, "parameters", f"one of {sorted(known)}", unknown, remedy)
    return jobs


def _declared(notebook: Any) -> dict[str, str]:
    """Name and type of each parameter of a notebook: as annotated, or that of a plain default.

    A whole number as default allows any number.
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
    """A notebook of nbformat 4; ValueError names a file that is none."""
    try:
        return nbformat.read(path, 4)
    except Exception as error:  # nbformat has no common base for what it raises
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
    """Execute notebooks into a folder; returns how each fared, in the order of `jobs`.

    Args:
        jobs: What runs.
        out: Folder of the executed copies and of the log.
        at_once: Notebooks that run at once; by default half as many as there are cores, or as many
            as cores where all of them measure no time.
        timeout_s: Limit of one cell in seconds.
        progress: Print a line when a notebook starts, every 20 s, and when it has ended.
        resume: Keep the copies in `out` that ran to their end, of the same work.
    """
    out.mkdir(parents=True, exist_ok=True)
    cores = int(this_machine()["cpu_usable"])
    say = partial(print, flush=True) if progress else _say_nothing
    kept = [job for job in jobs if resume and _is_done(job, out)]
    runs = {job.name: outcome(job.name, out, job.parameters) for job in kept}
    for run in runs.values():
        say(f"{run.line()}; kept")
    waiting = [job for job in jobs if job not in kept]
    running = dict[Future[None], tuple[Job, ProcessPoolExecutor]]()
    idle: list[ProcessPoolExecutor] = []
    with _workers_end_on_errors():
        while waiting or running:
            while job := _next_job(waiting, [one for one, _ in running.values()], at_once, cores):
                waiting.remove(job)
                worker = idle.pop() if idle else _new_worker(jobs, out, at_once, cores)
                try:
                    future = worker.submit(_execute, job, out, timeout_s)
                except BrokenProcessPool:  # it died while it was idle
                    worker = _new_worker(jobs, out, at_once, cores)
                    future = worker.submit(_execute, job, out, timeout_s)
                running[future] = job, worker
                say(f"{job.name}: started")
            ended = wait(running, STILL_S, return_when=FIRST_COMPLETED).done
            if not ended:
                say("; ".join(_so_far(job, out) for job, _ in running.values()))
            for future in ended:
                job, worker = running.pop(future)
                failure = future.exception()
                if not isinstance(failure, BrokenProcessPool):
                    idle.append(worker)
                runs[job.name] = outcome(job.name, out, job.parameters, failure)
                say(runs[job.name].line())
    for worker in idle:
        worker.shutdown()
    return [runs[job.name] for job in jobs]


def _so_far(job: Job, out: Path) -> str:
    """At which cell a notebook is that runs; papermill writes its copy after each."""
    try:
        notebook = _read(out / f"{job.name}.ipynb")
    except ValueError:  # it is being written
        return f"{job.name}: running"
    cells = [_papermill(cell) for cell in notebook.cells if cell.cell_type == "code"]
    begun = sum(cell.get("status", "pending") != "pending" for cell in cells)
    return f"{job.name}: cell {begun} of {len(cells)}"


def _say_nothing(_line: str) -> None:
    pass


@contextlib.contextmanager
def _workers_end_on_errors() -> Iterator[None]:
    try:
        yield
    except BaseException:
        _kill_workers()  # a signal may have reached us only
        raise


def _kill_workers() -> None:
    """End all workers; their kernels see it and end."""
    for process in multiprocessing.active_children():
        process.kill()


def _done_file(job: Job, out: Path) -> Path:
    return out / f"{job.name}.done"


def _is_done(job: Job, out: Path) -> bool:
    """Whether an earlier run has finished the same work."""
    file = _done_file(job, out)
    return file.is_file() and file.read_text("utf-8") == job.work()


def _next_job(
    waiting: Sequence[Job], running: Sequence[Job], at_once: int | None, cores: int
) -> Job | None:
    """The first job that may start: what is timed must not be disturbed."""
    unfinished = {job.name for job in running}
    for job in waiting:
        beside = [*running, job]
        if all(other.untimed for other in beside):
            limit = at_once or cores
        else:
            limit = at_once or max(1, cores // 2)
        if len(beside) <= limit and unfinished.isdisjoint(job.after):
            return job
        unfinished.add(job.name)
    return None


def _new_worker(
    jobs: Sequence[Job], out: Path, at_once: int | None, cores: int
) -> ProcessPoolExecutor:
    """A process that runs one notebook after the other, since it takes seconds to import papermill.

    Each is a pool of its own, so that one that dies takes no other notebook with it.
    """
    timed_at_once = min(at_once or max(1, cores // 2), len(jobs))
    environment = {
        "OMP_NUM_THREADS": str(max(1, cores // timed_at_once)),
        "OMP_WAIT_POLICY": "passive",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYTHONSTARTUP": "",  # IPython runs it as well
    }
    if jobs[0].device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, _begin_worker, (out / "log", environment))


def _begin_worker(log: Path, environment: Mapping[str, str]) -> None:
    """In a worker: what it and its kernels print goes to the log, and it ends with its parent."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= environment
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Kernel(AsyncKernelManager):
    """A kernel of this interpreter, whatever kernels the user has installed."""

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
    with tempfile.TemporaryDirectory(dir=short_path) as own:
        os.environ["IPYTHONDIR"] = own  # the user's profile may change what a page shows
        if os.name == "posix":  # sockets are files there: ports are raced for
            config.KernelManager.transport = "ipc"
            config.KernelManager.ip = f"{own}/ipc"
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
            shutdown_kernel="immediate",  # asked to end, it takes three seconds
            kernel_manager_class=_Kernel,
            config=config,
        )
    _done_file(job, out).write_text(job.work(), "utf-8")


def _escape(path: Path) -> str:
    """A path for papermill, which puts parameters where it has braces."""
    return str(path).replace("{", "{{").replace("}", "}}")


def outcome(
    name: str,
    out: Path,
    parameters: Mapping[str, Any],
    failure: BaseException | None = None,
) -> NotebookRun:
    """How a notebook fared, as its executed copy has it.

    Args:
        name: Of the notebook.
        out: Folder of the executed copies.
        parameters: What it was given.
        failure: What the run raised, or None.
    """
    if isinstance(failure, PapermillExecutionError):
        error = ANSI_COLOUR.sub("", "\n".join(failure.traceback))
        error = error.strip() or f"{failure.ename}: {failure.evalue}"  # IPython may print none
    elif failure:
        first, _, _ = str(failure).strip().partition("\n")  # a timeout goes on with the cell
        error = f"{type(failure).__name__}: {first}"
    else:
        error = ""
    status = "failed" if failure else "ran"
    executed = out / f"{name}.ipynb"
    try:
        notebook = _read(executed)
    except ValueError:  # none, or torn by what ended the run: no page either
        executed.unlink(missing_ok=True)
        return NotebookRun(name=name, status=status, parameters=parameters, error=error)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    published = [output.data[MIME] for output in outputs if MIME in output.get("data", {})]
    timed = [(_papermill(cell).get("duration") or 0.0, cell.id) for cell in cells]
    begun = [cell.id for cell in cells if _papermill(cell).get("status", "pending") != "pending"]
    return NotebookRun(
        name=name,
        status=status,
        seconds=_papermill(notebook).get("duration") or 0.0,
        parameters=parameters,
        error=error,
        cell=begun[-1] if failure and begun else "",
        slowest=sorted(timed, reverse=True)[:SLOWEST_OF_NOTEBOOK],
        records=[record for record in published if not problem(record)],
    )


def _papermill(part: Any) -> Mapping[str, Any]:
    """What papermill noted of a notebook or a cell."""
    return part.metadata.get("papermill", {})
