"""`asrkit report`."""

import argparse
from pathlib import Path
from typing import Any

from asrkit.cli.options import QUIET, Commands


def _report(args: argparse.Namespace) -> int:
    import yaml

    from asrkit.report import report

    parameters = {name: yaml.safe_load(value) for name, value in args.parameter}  # `-p quick false` is False, never "false"
    rest: dict[str, Any] = {"workers": args.workers, "timeout_s": args.timeout_s, "progress": not args.no_progress}
    result = report(args.notebooks or None, args.out, parameters=parameters, **rest)
    print(result.summary())
    return result.exit_code


# fmt: off
COMMANDS: Commands = {
    "report": (_report, "Run the notebooks and build one HTML report with the ledger of claims.", [
        ("notebooks", {"nargs": "*", "type": Path, "help": "notebooks to run (none: the whole series)"}),
        ("--out", {"type": Path, "default": Path("reports"), "help": "folder that gets one subfolder a run, and `latest`"}),
        ("--parameter", {"nargs": 2, "action": "append", "default": [], "metavar": ("NAME", "VALUE"),
                         "help": "set a parameter in every notebook that has it; VALUE is YAML"}),
        ("--workers", {"type": int, "help": "notebooks at once (none: half the cores)"}),
        ("--timeout", {"type": float, "default": 600.0, "dest": "timeout_s", "help": "seconds a cell may take"}), QUIET]),
}
# fmt: on
