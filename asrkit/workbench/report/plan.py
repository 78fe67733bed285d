"""plan.json: what a run of the report was asked for, so that `--resume` can finish it."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asrkit.shapes import expect

DEFAULTS: dict[str, Any] = {"parameters": {}, "size": "quick", "device": "auto", "timeout_s": None}
PROGRAM_NAMES = ("asrkit", "cli.py", "__main__.py", "__init__.py")


def unfinished(out: Path) -> Path:
    """Folder of the newest run in `out`, if it was cut short or a notebook of it failed.

    Raises:
        ValueError: There is no run, or the newest one is complete.
    """
    folders = [plan.parent for plan in out.glob("*/plan.json") if plan.parent.name != "latest"]
    remedy = "Leave --resume away."
    expect(bool(folders), "resume", f"a run in {out}", "none", remedy)
    newest = max(folders)
    is_complete = _is_latest(newest, out) and not _has_failures(newest)
    wanted = "a run that was cut short or had failures"
    expect(not is_complete, "resume", wanted, f"{newest.name}, which is whole", remedy)
    return newest


def _is_latest(folder: Path, out: Path) -> bool:
    """Whether the run was written to its end: then `latest` points to it."""
    manifest = folder / "manifest.json"
    latest = out / "latest" / "manifest.json"
    if not manifest.is_file() or not latest.is_file():
        return False
    return manifest.read_bytes() == latest.read_bytes()


def _has_failures(folder: Path) -> bool:
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    return any(run["status"] != "ran" for run in manifest["runs"])


def read_plan(folder: Path) -> dict[str, Any]:
    """The plan.json of a run.

    Raises:
        ValueError: Another program wrote the file, or it is torn.
    """
    path = folder / "plan.json"
    try:
        plan = json.loads(path.read_text("utf-8"))
        return {**DEFAULTS, **plan, "notebooks": [Path(name) for name in plan["notebooks"]]}
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f"resume: expected a plan of asrkit report in {path}, got another or a torn file. "
            "Move the folder away."
        ) from None


def command_line(argv: Sequence[str]) -> str:
    """The command as it was typed, with the home folder as `~`: `asrkit report --out ~/reports`.

    Args:
        argv: Path of the program and its arguments, as in sys.argv.
    """
    words = [*argv]
    if words:
        words[0] = Path(words[0]).name
        if words[0] in PROGRAM_NAMES:
            words[0] = "asrkit"
    return shlex.join(words).replace(f"{Path.home()}/", "~/")
