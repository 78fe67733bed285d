"""Records of a case whose repeats still go on, in a file of their own: who is killed in between
leaves them to who comes after.

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
from asrkit.workbench.records import Measurement

NAME = ".rounds.jsonl"  # which records.files leaves out, as it does all that begins so
EVERY_S = 2.0


class Journal:
    """The file in the folder of a share, written again every EVERY_S seconds at most."""

    def __init__(self, folder: Path) -> None:
        self.path, self.last = folder / NAME, time.monotonic()

    def keep(self, made: Callable[[], Iterable[Measurement]]) -> None:
        """What `made` gives takes the place of what was kept, unless that is new still."""
        if time.monotonic() - self.last >= EVERY_S:
            with files.atomic(self.path) as part:
                part.write_text("".join(json.dumps(one.sealed()) + "\n" for one in made()), "utf-8")
            self.last = time.monotonic()

    def clear(self) -> None:
        """Nothing is kept: the case's own records are written."""
        self.path.unlink(missing_ok=True)
        self.last = time.monotonic()


def salvage(folder: Path) -> list[dict[str, Any]]:
    """Records that a killed process left in its journal: they are in the folder's bench.jsonl now,
    and the journal is gone.
    """
    path, out = folder / NAME, folder / "bench.jsonl"
    for torn in folder.glob(f".{path.stem}-*{path.suffix}"):
        torn.unlink()  # killed while it was written
    if not path.exists():
        return []
    left = list[dict[str, Any]]()
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            left.append(json.loads(line))
    whole = {_key(one) for one in records.read(out)} if out.exists() else set()
    left = [one for one in left if not records.problem(one) and _key(one) not in whole]
    if left:
        records.append(out, *left)
    path.unlink()
    return left


def _key(record: Mapping[str, Any]) -> str:
    params = {name: value for name, value in record["params"].items() if name != "cut"}
    return json.dumps([record["what"], record["metric"], record["impl"], params], sort_keys=True)
