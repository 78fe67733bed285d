"""`asrkit report`."""

import argparse
import contextlib
from pathlib import Path
from typing import Any

from asrkit.cli.command import Command, finish, say, text_stream
from asrkit.cli.options import add_no_progress


def _report(args: argparse.Namespace) -> int:
    from asrkit.workbench.report import report

    with text_stream(args):
        result = report(
            find_notebooks(args.notebooks),
            args.out,
            parameters={name: parse_value(name, text) for name, text in args.parameter},
            size=args.size,
            device=args.device,
            jobs=args.jobs,
            timeout_s=args.timeout_s,
            progress=not args.no_progress,
            resume=args.resume,
        )
    say(args, result.summary())
    finish(args, result.facts(), f"report: {result.path}")
    return result.exit_code


def parse_value(name: str, text: str) -> Any:
    """The value of `text` as YAML, so that `-p quick false` is False and not "false".

    Unlike YAML 1.1, dates stay text and 1e-3 is a number. `name` is the parameter's, for the error.

    Raises:
        ValueError: `text` is not YAML.
    """
    import yaml
    from papermill.iorw import NoDatesSafeLoader

    try:
        value = yaml.load(text, NoDatesSafeLoader)
    except yaml.YAMLError:
        raise ValueError(
            f"parameter {name}: expected a value in YAML, got {text!r}. Quote it."
        ) from None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def find_notebooks(names: list[str], folder: Path = Path("notebooks")) -> list[Path] | None:
    """Paths of the notebooks that `names` stand for, without repetition; None, for all, if there
    are no names.

    Args:
        names: paths, numbers ("2" or "02"), names, or beginnings of names.
        folder: where notebooks are looked up by number and name.

    Raises:
        ValueError: a name fits no notebook.
    """
    from asrkit.shapes import expect

    known = sorted(folder.glob("*.ipynb"))
    wanted = "one of " + ", ".join(path.stem for path in known)
    if not known:
        wanted = f"a file, as there is no folder {folder}/ here"
    paths: list[Path] = []
    for name in names:
        fitting = _fitting(name, known)
        expect(bool(fitting), "notebooks", wanted, repr(name))
        paths += fitting
    return list(dict.fromkeys(paths)) or None


def _fitting(name: str, known: list[Path]) -> list[Path]:
    """The notebooks that `name` stands for: a file, one of just this name, or all that begin so."""
    if Path(name).is_file():
        return [Path(name)]
    stem = name.removesuffix(".ipynb")
    if stem.isdecimal():
        stem = f"{int(stem):02d}_"
    exact = [path for path in known if path.stem == stem]
    return exact or [path for path in known if path.stem.startswith(stem)]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_argument_group("which notebooks")
    which.add_argument(
        "notebooks",
        nargs="*",
        help="paths, numbers or beginnings of names (default: the whole series)",
    )
    which.add_argument(
        "--resume",
        action="store_true",
        help="finish the newest run with its notebooks: what has not run to its end runs again",
    )
    execution = parser.add_argument_group("how to run them")
    execution.add_argument(
        "--size",
        choices=["quick", "full"],
        help="full: the larger parameters that the notebooks name (default: quick)",
    )
    execution.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        help="cpu hides GPUs, cuda fails without one (default: auto)",
    )
    execution.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="notebooks at once (default: half the cores; all of them for notebooks that measure "
        "no time)",
    )
    execution.add_argument(
        "-p",
        "--parameter",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="set a parameter in every notebook that has it; VALUE is YAML",
    )
    execution.add_argument(
        "--timeout",
        type=float,
        dest="timeout_s",
        metavar="SECONDS",
        help="longest time for a cell (default: 600; 7200 with --size full)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("reports"),
        help="folder that gets one subfolder a run, and `latest`",
    )
    add_no_progress(parser)


COMMAND = Command(
    name="report",
    summary="Run the notebooks and build one HTML report, with every claim and its verdict.",
    details="Notebooks come with a checkout of asrkit; elsewhere, name the files to run.",
    run=_report,
    add_arguments=_add_arguments,
    examples=[
        "asrkit report",
        "asrkit report 02 06 --size full",
        "asrkit report mine.ipynb -p seconds 30",
        "asrkit report --resume",
    ],
)
