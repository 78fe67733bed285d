"""Notebooks through papermill, each in a process of its own; a failure or a hang stops that notebook only."""

import json
import multiprocessing.connection
import os
import re
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import nbformat
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

from asrkit.records import MIME, content_hash, machine, problem
from asrkit.shapes import expect


@dataclass(frozen=True, kw_only=True)
class NotebookRun:
    """How one notebook fared. `slowest` are (cell id, seconds); `records` are those its outputs carry, hashes checked."""

    name: str
    status: Literal["ran", "failed"]
    seconds: float
    parameters: Mapping[str, Any]
    sha256: str
    error: str = ""
    slowest: Sequence[tuple[str, float]] = ()
    records: Sequence[dict[str, Any]] = field(default=(), repr=False)
    defects: Sequence[str] = ()


def run_notebooks(
    paths: Sequence[Path], out: Path, *, parameters: Mapping[str, Any] | None = None, workers: int | None = None,
    timeout_s: float = 600.0, progress: bool = True,
) -> list[NotebookRun]:  # fmt: skip
    """Execute `paths` into the folder `out`, in the order given; those a notebook's `after` names come before it.

    parameters: set in every notebook that declares them; a name that none declares is a ValueError.
    """
    expect(bool(paths), "notebooks", "at least one", "none", "Name some, or run in a folder that holds notebooks/.")
    for path in paths:
        expect(path.is_file() and path.suffix == ".ipynb", "notebooks", "an .ipynb file", repr(str(path)), "Check the path.")
    expect(len({path.stem for path in paths}) == len(paths), "notebooks", "different names", [path.stem for path in paths])
    notebooks = {path.stem: (path, nbformat.read(path, 4)) for path in paths}
    declared = {name: _declared(notebook) for name, (_, notebook) in notebooks.items()}
    unknown = set(parameters or {}) - {name for names in declared.values() for name in names}
    expect(not unknown, "parameters", f"one of {sorted(set().union(*declared.values()))}", sorted(unknown))
    out.mkdir(parents=True, exist_ok=True)
    workers = max(1, workers or machine()["cpu_usable"] // 2)
    threads = max(1, machine()["cpu_usable"] // min(workers, len(paths)))
    waiting, running, done = dict(notebooks), dict[Future[None], str](), dict[str, NotebookRun]()
    bar = tqdm(total=len(paths), desc="notebooks", unit="nb", disable=None if progress else True)  # None: where a terminal is
    with bar, ExitStack() as end:
        end.push(_stop_workers)
        while waiting or running:
            for name, (path, notebook) in list(waiting.items()):
                after = notebook.metadata.get("asrkit", {}).get("after", [])
                if len(running) < workers and not any(other in waiting or other in running.values() for other in after):
                    given = {key: value for key, value in (parameters or {}).items() if key in declared[name]}
                    # A pool of its own: one that is shared breaks for all when the system kills a worker.
                    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
                    running[pool.submit(_run, path, out / path.name, given, timeout_s, threads)] = name
                    pool.shutdown(wait=False)
                    del waiting[name]
            expect(bool(running), "notebooks", "an order in which each can run", f"a circle among {sorted(waiting)}")
            bar.set_postfix_str(", ".join(running.values()))
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(future)
                done[name] = _result(name, out / f"{name}.ipynb", future.exception())
                bar.update()
    return [done[path.stem] for path in paths]


def _stop_workers(failure: type[BaseException] | None, *_: Any) -> None:
    for worker in multiprocessing.active_children() if failure else ():  # the signal may have reached this process only
        worker.terminate()


def _declared(notebook: Any) -> set[str]:
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    lines = [line.split(":")[0].strip() for cell in cells for line in cell.source.splitlines()]
    return {line for line in lines if line.isidentifier()}


def _run(path: Path, out: Path, parameters: dict[str, Any], timeout_s: float, threads: int) -> None:
    """In the worker: this interpreter as kernel, whatever kernels the user has installed; what it says goes to a log."""
    if parent := multiprocessing.parent_process():  # whoever ends it ends this, and the kernel watches this process
        threading.Thread(target=lambda: multiprocessing.connection.wait([parent.sentinel]) and os._exit(1), daemon=True).start()
    log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import papermill
    from traitlets.config import Config

    os.environ |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    os.environ["KINETO_LOG_LEVEL"] = "99"  # torch's profiler calls it an error that there is no GPU
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "kernels/asrkit/kernel.json")
        spec.parent.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec.write_text(json.dumps({"argv": argv, "display_name": "asrkit", "language": "python"}))
        os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("JUPYTER_PATH")]))
        # Sockets in a folder of their own: ports are raced for, and socket files named alike by two kernels mix them up.
        ipc = Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/ipc"}}) if os.name == "posix" else None
        papermill.execute_notebook(
            str(path), str(out), parameters=parameters, kernel_name="asrkit", language="python", progress_bar=False,
            execution_timeout=max(1, int(timeout_s)), cwd=str(path.parent), request_save_on_cell_execute=True, config=ipc,
        )  # fmt: skip


def _result(name: str, executed: Path, failure: BaseException | None) -> NotebookRun:
    """What the executed copy says, which is there even when the run failed."""
    if not executed.is_file():
        return NotebookRun(name=name, status="failed", seconds=0.0, parameters={}, sha256="", error=str(failure))
    notebook = nbformat.read(executed, 4)
    told, slowest, errors, records, defects = notebook.metadata.get("papermill", {}), [], [], [], list[str]()
    for cell in notebook.cells:
        slowest.append((cell.id, cell.metadata.get("papermill", {}).get("duration") or 0.0))
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                errors.append("\n".join(output.traceback) or f"{output.ename}: {output.evalue}")
            record = output.get("data", {}).get(MIME)
            if record and (wrong := problem(record)):
                defects.append(f"left out a record, {wrong}")
            elif record:
                records.append(record)
    if failure and not isinstance(failure, PapermillExecutionError):  # not the notebook's own words: timeout, dead kernel
        errors.append("\n".join([*errors[-1:], f"{type(failure).__name__}: {failure}".strip()]))
    error = re.sub(r"\x1b\[[0-9;]*m", "", errors[-1] if errors else "")
    return NotebookRun(
        name=name, status="failed" if failure else "ran", seconds=told.get("duration") or 0.0,
        parameters=told.get("parameters", {}), sha256=content_hash(executed.read_bytes())[7:], error=error,
        slowest=sorted(slowest, key=lambda pair: -pair[1])[:3], records=records, defects=defects,
    )  # fmt: skip
