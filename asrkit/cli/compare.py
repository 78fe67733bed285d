"""`asrkit report compare`."""

import argparse
from pathlib import Path

from asrkit.cli.command import Command, finish, say


def _compare(args: argparse.Namespace) -> int:
    from asrkit.workbench.report import compare

    comparison = compare(_folder(args.a, args.reports), _folder(args.b, args.reports), args.out)
    say(args, comparison.summary())
    finish(args, comparison.facts(), f"comparison: {comparison.path}")
    return 0


def _folder(name: str, reports: Path) -> Path:
    """The folder of a run, named by its path or by its name in `reports`."""
    path = Path(name)
    if path.is_dir():
        return path
    return reports / name


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "a", metavar="A", help="folder of a run, or its name in --reports, as `latest`"
    )
    parser.add_argument("b", metavar="B", help="the run to compare with; ratios are B over A")
    parser.add_argument(
        "--reports", type=Path, metavar="DIR", default=Path("reports"), help="folder with the runs"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="HTML page to write (default: compare-A-B.html beside B)",
    )


COMMAND = Command(
    name="report compare",
    summary="Compare two runs: seconds, records with their ratios, and verdicts that differ.",
    run=_compare,
    add_arguments=_add_arguments,
    examples=["asrkit report compare 2026-01-01T10-00-00 latest"],
)
