"""Which notebooks run, with which parameters, and after which others."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import nbformat

from asrkit.files import content_hash
from asrkit.shapes import expect
from asrkit.workbench.report.frame import SITE_PAGES

DEVICES = ("auto", "cpu", "cuda")
SIZES = ("quick", "full")
ASSIGNMENT = re.compile(r"(?m)^([^\W\d]\w*) *(?::[^=\n]+)?=(?!=)")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A notebook to run.

    Attributes:
        path: Of the notebook.
        parameters: Values for those that it declares.
        source: Hash of the file.
        device: "auto", "cpu" or "cuda".
        after: Names of notebooks that run before it.
        untimed: Whether no record of it has a time, so that it may run beside others of its kind.
    """

    path: Path
    parameters: dict[str, Any]
    source: str
    device: str
    after: Sequence[str]
    untimed: bool


def jobs_of(
    paths: Sequence[Path], parameters: Mapping[str, Any], size: str = "quick", device: str = "auto"
) -> dict[str, Job]:
    """What will run, by name of the notebook.

    Args:
        paths: The notebooks.
        parameters: Values for the notebooks that declare them.
        size: "full" sets what a notebook's metadata names in `asrkit.full`; `parameters` win.
        device: "auto", "cpu" or "cuda".

    Raises:
        ValueError: A path is no notebook, names clash, nobody declares a parameter, notebooks wait
            for each other, or there is no GPU for "cuda".
    """
    _expect_notebooks(paths)
    expect(size in SIZES, "size", " or ".join(SIZES), repr(size))
    _expect_device(device)
    notebooks = {path.stem: _read(path) for path in paths}
    declared = {name: _declared(notebook) for name, notebook in notebooks.items()}
    known = set[str]().union(*declared.values())
    unknown = {*parameters} - known
    expect(not unknown, "parameters", f"one of {sorted(known)}", sorted(unknown))
    jobs = {}
    for path in paths:
        name = path.stem
        settings = notebooks[name].metadata.get("asrkit", {})
        chosen = dict(settings.get("full", {})) if size == "full" else {}
        undeclared = sorted({*chosen} - declared[name])
        wanted = f"names among {sorted(declared[name])}"
        expect(not undeclared, f"{name}, metadata asrkit.full", wanted, undeclared)
        chosen |= {key: value for key, value in parameters.items() if key in declared[name]}
        jobs[name] = Job(
            path=path,
            parameters=chosen,
            source=content_hash(path.read_bytes()).removeprefix("sha256:"),
            device=device,
            after=settings.get("after", []),
            untimed=settings.get("untimed", False),
        )
    _expect_order(jobs)
    return jobs


def _expect_notebooks(paths: Sequence[Path]) -> None:
    remedy = "Name some, or run in a folder that holds notebooks/."
    expect(bool(paths), "notebooks", "at least one", "none", remedy)
    for path in paths:
        is_notebook = path.is_file() and path.suffix == ".ipynb"
        expect(is_notebook, "notebooks", "an .ipynb file", repr(str(path)), "Check the path.")
    names = [path.stem for path in paths]
    are_different = len({*names}) == len(names) and SITE_PAGES.keys().isdisjoint(names)
    reserved = ", ".join(SITE_PAGES)
    expect(are_different, "notebooks", f"different names, none of them {reserved}", names)


def _expect_device(device: str) -> None:
    expect(device in DEVICES, "device", ", ".join(DEVICES), repr(device))
    if device == "cuda":
        import torch

        wanted = "cpu or auto where torch finds no GPU"
        expect(torch.cuda.is_available(), "device", wanted, "cuda", "asrkit doctor says more.")


def _expect_order(jobs: Mapping[str, Job]) -> None:
    """Raise ValueError where notebooks wait for each other in a circle."""
    try:
        TopologicalSorter({name: job.after for name, job in jobs.items()}).prepare()
    except CycleError as error:
        circle = sorted({*error.args[1]})
        wanted = "an order in which each can run"
        remedy = "See asrkit.after there."
        expect(False, "notebooks", wanted, f"a circle among {circle}", remedy)


def _read(path: Path) -> Any:
    """A notebook; its metadata `asrkit` is a dict if there is any."""
    try:
        notebook = nbformat.read(path, 4)
        dict(notebook.metadata.get("asrkit", {}))
        return notebook
    except Exception as error:  # nbformat has no common base for what it raises
        reason = str(error).strip().partition("\n")[0][:100]
        raise ValueError(
            f"notebook {path}: expected a notebook of nbformat 4, "
            f"got a file that cannot be read: {reason}"
        ) from None


def _declared(notebook: Any) -> set[str]:
    """Names that the cells with the tag `parameters` assign."""
    names = set[str]()
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            names.update(ASSIGNMENT.findall(cell.source))
    return names
