"""`asrkit report`."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asrkit.cli.command import Command, ProgressOptions, finish, print_text, text_stream
from asrkit.shapes import expect
from asrkit.transcribe.options import described


@dataclass(frozen=True, kw_only=True)
class ReportOptions(ProgressOptions):
    """The options of the command."""

    notebooks: list[str] = described(
        (),
        "paths, numbers or first letters of names (default: the whole series)",
        flag="",
        nargs="*",
        group="which notebooks",
    )
    resume: bool = described(
        False,
        "finish the newest run: only notebooks that did not complete run again",
    )
    size: Literal["quick", "full"] | None = described(
        None,
        "full: the larger parameters that the notebooks declare (default: quick)",
        group="how to run them",
    )
    device: Literal["auto", "cpu", "cuda"] | None = described(
        None, "cpu hides GPUs, cuda fails without one (default: auto)"
    )
    jobs: int | None = described(
        None,
        "notebooks that run at once (default: half the cores, or all of them if no notebook "
        "measures time)",
        metavar="N",
    )
    parameter: list[tuple[str, str]] = described(
        (),
        "set a parameter in every notebook that has it; VALUE is JSON, a literal of papermill's "
        "-p (True, None), or text",
        flag="-p --parameter",
        nargs=2,
        action="append",
        metavar=("NAME", "VALUE"),
    )
    timeout_s: float | None = described(
        None,
        "time limit of a cell (default: 600, or 7200 with --size full)",
        flag="--timeout",
        metavar="SECONDS",
    )
    out: Path = described(
        Path("reports"),
        "folder for a subfolder per run, and `latest`",
        metavar="DIR",
        group="output",
    )


def _report(options: ReportOptions) -> int:
    from asrkit.workbench.report import report

    with text_stream(options):
        result = report(
            find_notebooks(options.notebooks),
            options.out,
            parameters={name: parse_value(text) for name, text in options.parameter},
            size=options.size,
            device=options.device,
            jobs=options.jobs,
            timeout_s=options.timeout_s,
            progress=not options.no_progress,
            resume=options.resume,
        )
    print_text(options, result.summary())
    finish(options, result.facts(), f"report: {result.path}")
    return result.exit_code


def parse_value(text: str) -> Any:
    """The value of `text` as JSON, or as papermill reads its own `-p`; else the text itself.

    So `false` and `False` are False, and `1e3`, `.5` and `inf` are numbers.
    """
    for read in (json.loads, int, float):
        with contextlib.suppress(ValueError):
            return read(text)
    return {"True": True, "False": False, "None": None}.get(text, text)


def find_notebooks(names: Sequence[str], folder: Path = Path("notebooks")) -> list[Path] | None:
    """Paths of the named notebooks, each once; None, which means all, if there are no names.

    Args:
        names: Paths, numbers ("2" or "02"), names, or first letters of names.
        folder: Folder in which numbers and names are looked up.

    Raises:
        ValueError: A name fits no notebook.
    """
    known = sorted(folder.glob("*.ipynb"))
    wanted = "one of " + ", ".join(path.stem for path in known)
    if not known:
        wanted = f"a file, as there is no folder {folder}/ here"
    paths: list[Path] = []
    for name in names:
        prefix = f"{int(name):02d}_" if name.isdecimal() else name
        matches = [path for path in known if path.name.startswith(prefix)]
        if Path(name).is_file():
            matches = [Path(name)]
        expect(bool(matches), "notebooks", wanted, repr(name))
        paths += matches
    return list(dict.fromkeys(paths)) or None


COMMAND = Command(
    name="report",
    summary="Run the notebooks and build one HTML report, with every claim and its verdict.",
    details="The notebooks are part of a checkout of asrkit; elsewhere, name the files to run.",
    resume="Run the same command with --resume to continue: completed notebooks are kept.",
    options=ReportOptions,
    run=_report,
    examples=[
        "asrkit report",
        "asrkit report 02 06 --size full",
        "asrkit report mine.ipynb -p seconds 30",
        "asrkit report --resume",
    ],
)
