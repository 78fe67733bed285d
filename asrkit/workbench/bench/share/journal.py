"""Measurements of a case whose repeats still go on, in a file of their own: if the process is
killed, the next one takes them over.

They are marked `cut`, and replaced as repeats are added; the records of a case that ends well take
their place.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.workbench import records
from asrkit.workbench.bench import guards
from asrkit.workbench.records import Measurement

NAME = ".rounds.jsonl"  # records.files leaves out names that begin with a dot
EVERY_S = 2.0


class Journal:
    """The file in the folder of a share, written again every EVERY_S seconds at most."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.last = time.monotonic()

    def keep(self, measure: Callable[[], Iterable[Measurement]]) -> None:
        """Replace what was kept by what `measure` returns, unless the file is new still."""
        if time.monotonic() - self.last < EVERY_S:
            return
        text = "".join(json.dumps(one.sealed()) + "\n" for one in measure())
        with guards.naming(self.path), files.atomic(self.path) as part:
            part.write_text(text, "utf-8")
        self.last = time.monotonic()

    def clear(self) -> None:
        """Remove the file: the case's own records are written."""
        self.path.unlink(missing_ok=True)
        self.last = time.monotonic()


def salvage(folder: Path) -> list[dict[str, Any]]:
    """Move records that a killed process left in its journal to bench.jsonl; returns them."""
    path = folder / NAME
    out = folder / "bench.jsonl"
    for torn in folder.glob(f".{path.stem}-*{path.suffix}"):
        torn.unlink()  # of a process that was killed while it wrote
    if not path.exists():
        return []
    complete = set()
    if out.exists():
        complete = {_key(record) for record in records.read(out)}
    kept = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if not records.problem(record) and _key(record) not in complete:
                kept.append(record)
    if kept:
        records.append(out, *kept)
    path.unlink()
    return kept


def _key(record: Mapping[str, Any]) -> str:
    params = {name: value for name, value in record["params"].items() if name != "cut"}
    return json.dumps([record["what"], record["metric"], record["impl"], params], sort_keys=True)
