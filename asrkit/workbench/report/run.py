"""Notebooks through papermill, each in a process of its own; a failure or a hang stops that
notebook only.

A notebook is done when its result stands beside its executed copy, both renamed into place. A run
that is killed leaves no other trace that counts, so the next one with `resume` keeps what is done
and runs the rest.
"""

import json
import multiprocessing.connection
import os
import re
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import nbformat
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

from asrkit.files import atomic, content_hash
from asrkit.shapes import expect
from asrkit.workbench.machine import code, this_machine
from asrkit.workbench.records import MIME, problem

DEVICES = ("auto", "cpu", "cuda")
SIZES = ("quick", "full")


@dataclass(frozen=True, kw_only=True)
class NotebookRun:
    """How one notebook fared. `slowest` are (cell id, seconds); `records` are those its outputs
    carry, hashes checked.

    `sha256` is of the executed copy, `source` of the notebook as it was read, `cell` the one that
    failed, `commit` the code's.
    """

    name: str
    status: Literal["ran", "failed"]
    seconds: float
    parameters: Mapping[str, Any]
    sha256: str
    error: str = ""
    cell: str = ""
    slowest: Sequence[Sequence[Any]] = ()
    records: Sequence[dict[str, Any]] = field(default=(), repr=False)
    defects: Sequence[str] = ()
    source: str = ""
    device: str = "auto"
    commit: str = ""

    def line(self) -> str:
        """What became of it in one line: for a failure the last row of the traceback and the cell."""
        if self.status == "ran":
            return f"{self.name}: ran in {self.seconds:.0f} s, {len(self.records)} record{'s' * (len(self.records) != 1)}"
        where = f" (cell {self.cell})" if self.cell else ""
        return f"{self.name}: {(self.error.strip().splitlines() or ['failed'])[-1]}{where}"


@dataclass(frozen=True, kw_only=True)
class _Job:
    path: Path
    given: dict[str, Any]
    source: str
    device: str
    after: Sequence[str]


def jobs_of(
    paths: Sequence[Path], parameters: Mapping[str, Any], size: str = "quick", device: str = "auto"
) -> dict[str, _Job]:
    """What will run, by name; ValueError for what cannot: no notebook, names that clash, parameters
    nobody declares.
    """
    expect(
        bool(paths),
        "notebooks",
        "at least one",
        "none",
        "Name some, or run in a folder that holds notebooks/.",
    )
    for path in paths:
        expect(
            path.is_file() and path.suffix == ".ipynb",
            "notebooks",
            "an .ipynb file",
            repr(str(path)),
            "Check the path.",
        )
    names = [path.stem for path in paths]
    expect(
        len({*names}) == len(names) and "index" not in names,
        "notebooks",
        "different names, none of them index",
        names,
    )
    expect(size in SIZES, "size", " or ".join(SIZES), repr(size))
    expect(device in DEVICES, "device", ", ".join(DEVICES), repr(device))
    if device == "cuda":
        import torch

        expect(
            torch.cuda.is_available(),
            "device",
            "cpu or auto where torch finds no GPU",
            "cuda",
            "asrkit doctor says more.",
        )
    notebooks = {path.stem: _read(path) for path in paths}
    declared = {name: _declared(notebook) for name, notebook in notebooks.items()}
    unknown = {*parameters} - {name for names in declared.values() for name in names}
    expect(
        not unknown,
        "parameters",
        f"one of {sorted(set().union(*declared.values()))}",
        sorted(unknown),
    )
    found = {}
    for path in paths:
        told, known = notebooks[path.stem].metadata.get("asrkit", {}), declared[path.stem]
        full = told.get("full", {}) if size == "full" else {}
        expect(
            {*full} <= known,
            f"{path.stem}, metadata asrkit.full",
            f"names among {sorted(known)}",
            sorted({*full} - known),
        )
        given = {**full, **{name: value for name, value in parameters.items() if name in known}}
        source = content_hash(path.read_bytes())[7:]
        found[path.stem] = _Job(
            path=path, given=given, source=source, device=device, after=told.get("after", [])
        )
    left = dict(found)
    while ready := [
        name for name, job in left.items() if not any(other in left for other in job.after)
    ]:
        left = {name: job for name, job in left.items() if name not in ready}
    expect(
        not left,
        "notebooks",
        "an order in which each can run",
        f"a circle among {sorted(left)}",
        "See asrkit.after there.",
    )
    return found


def _read(path: Path) -> Any:
    try:
        notebook = nbformat.read(path, 4)
        told = notebook.metadata.get("asrkit", {})
        whole = all(isinstance(cell.source, str) for cell in notebook.cells)
        whole &= isinstance(told.get("full", {}), dict) and isinstance(told.get("after", []), list)
    except Exception as error:  # nbformat has no common base for what it finds
        why = str(error).strip().partition("\n")[0][:100]
        raise ValueError(
            f"notebook {path}: expected a notebook of nbformat 4, got a file that cannot be read: {why}"
        ) from None
    expect(
        whole,
        f"notebook {path}",
        "cells of text, metadata asrkit with full (a dict) and after (a list)",
        told,
    )
    return notebook


def run_notebooks(
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
    """Execute `paths` into the folder `out`, in the order given; those a notebook's `after` names
    come before it.

    parameters: set in every notebook that declares them; a name that none declares is a ValueError.
    size: "full" sets what a notebook's metadata names in `asrkit.full`; `parameters` win over it.
    device: "cpu" hides GPUs from the notebooks. resume: keep what `out` holds of the same notebooks
    and parameters.
    """
    plan = jobs_of(paths, parameters or {}, size, device)
    expect(jobs is None or jobs > 0, "jobs", "at least 1", jobs)
    out.mkdir(parents=True, exist_ok=True)
    for part in filter(
        Path.is_file, out.glob(".*")
    ):  # what a killed run left; Jupyter has a folder there
        part.unlink()
    jobs = jobs or max(1, this_machine()["cpu_usable"] // 2)
    threads = max(1, this_machine()["cpu_usable"] // min(jobs, len(plan)))
    done = {name: kept for name, job in plan.items() if resume and (kept := _kept(out, name, job))}
    waiting, running = (
        {name: job for name, job in plan.items() if name not in done},
        dict[Future[None], tuple[str, Path]](),
    )
    bar = tqdm(
        total=len(plan),
        initial=len(done),
        desc="notebooks",
        unit="nb",
        disable=None if progress else True,
    )
    say = (
        print if progress and bar.disable else lambda *_, **__: None
    )  # None above: a bar where a terminal is, here lines
    for run in done.values():
        say(f"{run.line()}; kept", flush=True)
    with bar, ExitStack() as end:
        end.push(_stop_workers)
        while waiting or running:
            for name, job in list(waiting.items()):
                busy = {other for other, _ in running.values()}
                if len(running) < jobs and not any(
                    other in waiting or other in busy for other in job.after
                ):
                    part = out / f".{name}-{os.urandom(4).hex()}.part.ipynb"
                    # A pool of its own: one that is shared breaks for all when the system kills a
                    # worker.
                    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
                    running[
                        pool.submit(_run, job, part, out / f"{name}.log", timeout_s, threads)
                    ] = (name, part)
                    pool.shutdown(wait=False)
                    del waiting[name]
                    say(f"{name}: started", flush=True)
            bar.set_postfix_str(", ".join(name for name, _ in running.values()))
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name, part = running.pop(future)
                done[name] = _finish(out, name, plan[name], part, future.exception())
                say(done[name].line(), flush=True)
                bar.update()
    return [done[name] for name in plan]


def _stop_workers(failure: type[BaseException] | None, *_: Any) -> None:
    for worker in (
        multiprocessing.active_children() if failure else ()
    ):  # the signal may have reached this process only
        worker.terminate()


def _declared(notebook: Any) -> set[str]:
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    return {
        name
        for cell in cells
        for name in re.findall(r"(?m)^([^\W\d]\w*) *(?::[^=\n]+)?=(?!=)", cell.source)
    }


def _run(job: _Job, part: Path, told: Path, timeout_s: float, threads: int) -> None:
    """In the worker: this interpreter as kernel, whatever kernels the user has installed; what it
    says goes to a log.
    """
    if (
        parent := multiprocessing.parent_process()
    ):  # whoever ends it ends this, and the kernel watches this process
        threading.Thread(
            target=lambda: multiprocessing.connection.wait([parent.sentinel]) and os._exit(1),
            daemon=True,
        ).start()
    log = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import papermill
    from traitlets.config import Config

    os.environ |= {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    os.environ["KINETO_LOG_LEVEL"] = "99"  # torch's profiler calls it an error that there is no GPU
    os.environ |= {"CUDA_VISIBLE_DEVICES": ""} if job.device == "cpu" else {}
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "kernels/asrkit/kernel.json")
        spec.parent.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec.write_text(json.dumps({"argv": argv, "display_name": "asrkit", "language": "python"}))
        os.environ["JUPYTER_PATH"] = os.pathsep.join(
            filter(None, [folder, os.environ.get("JUPYTER_PATH")])
        )
        # Sockets in a folder of their own: ports are raced for, and socket files named alike by two
        # kernels mix them up.
        ipc = (
            Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/ipc"}})
            if os.name == "posix"
            else None
        )
        papermill.execute_notebook(
            str(job.path),
            str(part),
            parameters=job.given,
            kernel_name="asrkit",
            language="python",
            progress_bar=False,
            execution_timeout=max(1, int(timeout_s)),
            cwd=str(job.path.parent),
            request_save_on_cell_execute=True,
            config=ipc,
        )


def _kept(out: Path, name: str, job: _Job) -> NotebookRun | None:
    """What an earlier run left of the same work, whole; None where anything about it is missing or
    another.
    """
    with suppress(OSError, ValueError, TypeError, KeyError):
        run = NotebookRun(**json.loads((out / f"{name}.json").read_text("utf-8")))
        whole = content_hash((out / f"{name}.ipynb").read_bytes())[7:] == run.sha256
        same = (run.source, run.device, run.parameters) == (
            job.source,
            job.device,
            json.loads(json.dumps(job.given, default=str)),
        )
        return run if whole and same and run.status == "ran" else None
    return None


def _finish(
    out: Path, name: str, job: _Job, part: Path, failure: BaseException | None
) -> NotebookRun:
    """Move the executed copy into place, which is there even when the run failed, and write what it
    says beside it.
    """
    for old in (out / f"{name}.json", out / f"{name}.ipynb"):
        old.unlink(missing_ok=True)
    run = NotebookRun(
        name=name,
        **_told(part, failure),
        parameters=job.given,
        source=job.source,
        device=job.device,
        commit=(code()["commit"] or "") + "+" * bool(code()["dirty"]),
    )
    if part.is_file():
        os.replace(part, out / f"{name}.ipynb")
    with atomic(out / f"{name}.json") as whole:
        whole.write_text(json.dumps(asdict(run), default=str), "utf-8")
    return run


def _told(executed: Path, failure: BaseException | None) -> dict[str, Any]:
    """What an executed copy says about how it went."""
    if not executed.is_file():
        return {"status": "failed", "seconds": 0.0, "sha256": "", "error": str(failure)}
    notebook = nbformat.read(executed, 4)
    slowest, errors, records, defects, failed = [], [], [], list[str](), ""
    for cell in notebook.cells:
        timed = cell.metadata.get("papermill", {})
        slowest.append((cell.id, timed.get("duration") or 0.0))
        failed = failed or cell.id * (
            cell.cell_type == "code" and timed.get("status") in ("failed", "running")
        )
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                errors.append("\n".join(output.traceback) or f"{output.ename}: {output.evalue}")
            record = output.get("data", {}).get(MIME)
            if record and (wrong := problem(record)):
                defects.append(f"left out a record, {wrong}")
            elif record:
                records.append(record)
    if failure and not isinstance(
        failure, PapermillExecutionError
    ):  # not the notebook's own words: timeout, dead kernel
        errors.append("\n".join([*errors[-1:], f"{type(failure).__name__}: {failure}".strip()]))
    return {
        "status": "failed" if failure else "ran",
        "seconds": notebook.metadata.get("papermill", {}).get("duration") or 0.0,
        "sha256": content_hash(executed.read_bytes())[7:],
        "error": re.sub(r"\x1b\[[0-9;]*m", "", errors[-1] if errors else ""),
        "slowest": sorted(slowest, key=lambda pair: -pair[1])[:3],
        "records": records,
        "defects": defects,
        "cell": failed if failure else "",
    }
