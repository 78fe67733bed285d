"""The plan of a bulk transcription: recordings in shards, kept in the folder of the results.

A plan is two files. `plan.json` says what is planned and where each shard's recordings stand in
`plan.shards`, which has a shard a line. A process needs the folder and a shard's name to transcribe
it.
"""

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from asrkit.files import atomic, lock
from asrkit.shapes import expect
from asrkit.transcribe.bulk import inputs
from asrkit.transcribe.bulk.inputs import Recording
from asrkit.transcribe.bulk.results import PREFIX
from asrkit.transcribe.bulk.tasks import (
    Machine,
    Task,
    absolute,
    as_json,
    from_json,
    key,
    load,
    model_state,
)

PLAN = "plan.json"
KEPT = {"task", "model", "inputs", "made_by", "asrkit", "shard_h", "shards"}  # in it
SHARDS = "plan.shards"
WORK = ".work"  # what is under way, and what saves time
UNKNOWN_S = 10.0  # guessed for a recording of unknown length
BYTES_PER_S = 32_000  # guessed for a container: 16 bits at 16 kHz
SHARD_H = {"cpu": 0.5, "cuda": 10.0}  # hours in a shard: some minutes of work
LEAST_SHARDS = 20  # so that the last one is a small part of the work
LEAST_SHARD_S = 60.0
MOST_SHARDS = 50_000  # files in one folder


class Shard(NamedTuple):
    """Some recordings, or one container, that are transcribed together and have one result.

    Args:
        name: A hash of model, settings and recordings.
        offset: Where its line begins in the file of shards, in bytes.
        recordings: Lines of manifests and files in it; a container is one.
        planned_s: Their seconds, partly guessed where lengths are not known.
    """

    name: str
    offset: int
    recordings: int
    planned_s: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Shards in the order in which they are transcribed, longest recordings first.

    Args:
        out: Folder of plan and results.
        task: What is done with each recording.
        made_by: Hash of model and settings.
        shards: All of them.
        shard_h: Hours in a shard.
        version: Of the asrkit that made the plan.
    """

    out: Path
    task: Task
    made_by: str
    shards: list[Shard]
    shard_h: float
    version: str

    @property
    def work(self) -> Path:
        """Folder of what is under way."""
        return self.out / WORK

    def result(self, shard: Shard) -> Path:
        """The file of a shard's result, which is there when the shard is done."""
        return self.out / f"{PREFIX}{shard.name}.jsonl"

    def recordings(self, shard: Shard) -> list[Recording]:
        """The recordings of a shard.

        Args:
            shard: Of this plan.

        Raises:
            ValueError: The file of shards was changed.
        """
        path = self.out / SHARDS
        with path.open("rb") as file:
            file.seek(shard.offset)
            line = file.readline()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            if row["name"] == shard.name:
                return [Recording(*values) for values in row["recordings"]]
        raise ValueError(_no_plan(path))

    def done(self) -> set[str]:
        """Names of the shards whose results are there."""
        there = {path.name for path in self.out.glob(f"{PREFIX}*.jsonl")}
        return {shard.name for shard in self.shards if self.result(shard).name in there}


def plan(
    files: str | Path | Iterable[str | Path],
    task: Task,
    out: str | Path,
    *,
    shard_h: float | None = None,
    device: str = "cpu",
) -> Plan:
    """The plan of transcribing `files` into the folder `out`: made, or the one that is there.

    A folder keeps one plan. It is found again without a look at recordings or weights as long as
    no input, no model file and no setting has changed.

    Args:
        files: Folders, manifests, containers and sound files, as `bulk.inputs.read` takes them.
        task: Model and settings.
        out: The folder, made when missing.
        shard_h: Hours of audio in a shard; None: those of the plan that is there, else half an
            hour on a CPU and ten on a GPU, less for small corpora and more for very large ones.
        device: Where shards are transcribed, which may be on another machine.

    Raises:
        ValueError: An input is damaged or has no recording, ids are twice, or `out` was begun with
            another model, other settings or other recordings.
    """
    if isinstance(files, str | Path):
        files = [files]
    given = [Path(file) for file in files]
    out = Path(out)
    expect(not out.exists() or out.is_dir(), "out", "a folder", repr(str(out)))
    positive = shard_h is None or 0 < shard_h < float("inf")
    expect(positive, "shard_h", "more than 0 hours", shard_h)
    for one in given:
        expect(one.exists(), "files", inputs.KINDS, repr(str(one)), "Check the path.")
    task = absolute(task)
    with lock(out / WORK / "plan", wait=True):  # others wait for the first one
        now: dict[str, Any] = {
            "task": as_json(task),
            "model": model_state(task),
            "inputs": [inputs.state(one) for one in given],
        }
        kept = _kept(out)
        if kept is not None:
            if _text_task(kept["task"]) != _text_task(now["task"]):
                _refuse(out, "other settings")
            same_size = shard_h is None or shard_h == kept["shard_h"]
            expect(same_size, "shard_h", f"{kept['shard_h']}, as in {out / PLAN}", shard_h)
            shard_h = kept["shard_h"]
            if all(now[name] == kept[name] for name in ("model", "inputs")):
                return load_plan(out)
        _write(given, task, out, shard_h=shard_h, device=device, now=now, kept=kept)
        return load_plan(out)


def load_plan(out: str | Path) -> Plan:
    """The plan that is kept in a folder.

    Args:
        out: The folder.

    Raises:
        ValueError: There is none, or it is damaged.
    """
    out = Path(out)
    kept = _kept(out)
    if kept is None:
        raise ValueError(f"out: expected a folder with a plan, got no {PLAN} in {out}.")
    return Plan(
        out=out,
        task=from_json(Task, kept["task"]),
        made_by=kept["made_by"],
        shards=kept["shards"],
        shard_h=kept["shard_h"],
        version=kept["asrkit"],
    )


def _kept(out: Path) -> dict[str, Any] | None:
    """What `plan.json` says, with a `Shard` for each of its shards; None where there is none."""
    file = out / PLAN
    if not file.exists():
        return None
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        kept["shards"] = [Shard(*values) for values in kept["shards"]]
        from_json(Task, kept["task"])
        if not kept.keys() >= KEPT:
            raise KeyError(PLAN)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(_no_plan(file)) from None
    return kept


def _no_plan(file: Path) -> str:
    """The message about a file of a plan that somebody changed."""
    return f"out: expected a plan of asrkit, got something else in {file}. Name another folder."


def _refuse(out: Path, what: str) -> None:
    message = f"out: {out} was begun with {what}. Name another folder."
    raise ValueError(message)


def _text_task(task: dict[str, Any]) -> dict[str, Any]:
    """The settings of a task that results may depend on; the model is known by its hash."""
    windows = {
        name: value for name, value in task["windows"].items() if name not in ("batch_s", "readers")
    }
    return task | {"windows": windows, "model": ""}


def _write(
    given: Sequence[Path],
    task: Task,
    out: Path,
    *,
    shard_h: float | None,
    device: str,
    now: dict[str, Any],
    kept: dict[str, Any] | None,
) -> None:
    """Make the plan anew and write it, unless another one is kept."""
    made_by = _made_by(task, now, kept)
    if kept is not None and kept["made_by"] != made_by:
        _refuse(out, "another model, or other settings")
    rows = _rows(given)
    if shard_h is None:
        shard_h = usual_shard_h(sum(row.planned_s for row in rows), device)
    shards: list[Shard] = []
    with atomic(out / SHARDS) as part:
        with part.open("wb") as file:
            for shard, line in _shards(rows, made_by, shard_h * 3600):
                shards.append(shard)
                file.write(line)
        names = [shard.name for shard in shards]
        if kept is not None and names != [shard.name for shard in kept["shards"]]:
            _refuse(out, "other recordings")
    contents = now | {
        "made_by": made_by,
        "asrkit": version(),
        "shard_h": shard_h,
        "recordings": len(rows),
        "planned_s": round(sum(shard.planned_s for shard in shards), 3),
        "shards": shards,
    }
    with atomic(out / PLAN) as part:
        part.write_text(json.dumps(contents) + "\n", encoding="utf-8")


def _made_by(task: Task, now: dict[str, Any], kept: dict[str, Any] | None) -> str:
    """The hash of model and settings, that of the kept plan where no model file has changed."""
    if kept is not None and now["model"] == kept["model"]:
        return kept["made_by"]
    return key(task, load(task, Machine()))


def version() -> str:
    """The installed version of asrkit."""
    try:
        return importlib.metadata.version("asrkit")
    except importlib.metadata.PackageNotFoundError:  # a copied source tree
        return "unknown"


class _Row(NamedTuple):
    """A recording as it is planned.

    Args:
        planned_s: Its seconds, guessed where they are not known.
        text: The recording as JSON.
        is_container: Whether it is a shard of its own.
    """

    planned_s: float
    text: str
    is_container: bool


def _rows(given: Sequence[Path]) -> list[_Row]:
    """All recordings, longest first. Ids have to differ."""
    rows: list[_Row] = []
    seen: set[str] = set()
    for one in inputs.read(given):
        if one.id in seen:
            remedy = "Give each line an id of its own, or use two folders."
            expect(False, "files", "ids that are all different", f"{one.id!r:.200} twice", remedy)
        seen.add(one.id)
        planned_s = one.duration_s
        if one.is_container and one.state:
            planned_s = one.state[0] / BYTES_PER_S
        text = json.dumps(one, separators=(",", ":"))
        rows.append(_Row(planned_s or UNKNOWN_S, text, one.is_container))
    expect(bool(rows), "files", "at least one recording", "none in " + ", ".join(map(str, given)))
    rows.sort(key=lambda row: -row.planned_s)
    return rows


def usual_shard_h(total_s: float, device: str) -> float:
    """Hours of audio in a shard where nobody says.

    Args:
        total_s: Seconds of all recordings.
        device: That transcribes them: cpu, cuda or cuda:N.
    """
    usual_s = SHARD_H.get(device.partition(":")[0], SHARD_H["cpu"]) * 3600
    shard_s = max(LEAST_SHARD_S, min(usual_s, total_s / LEAST_SHARDS))
    return max(shard_s, total_s / MOST_SHARDS) / 3600


def _shards(rows: Sequence[_Row], made_by: str, shard_s: float) -> Iterator[tuple[Shard, bytes]]:
    """Yield each shard and its line of the file."""
    offset = 0
    for held in _filled(rows, shard_s):
        text = ",".join(row.text for row in held)
        name = hashlib.sha256(f"{made_by} {text}".encode()).hexdigest()[:16]
        line = f'{{"name":"{name}","recordings":[{text}]}}\n'.encode()
        planned_s = sum(row.planned_s for row in held)
        yield Shard(name, offset, len(held), round(planned_s, 3)), line
        offset += len(line)


def _filled(rows: Sequence[_Row], shard_s: float) -> Iterator[list[_Row]]:
    """Yield recordings of at most `shard_s` seconds together.

    A container, or a recording longer than that, is alone.
    """
    held: list[_Row] = []
    size_s = 0.0
    for row in rows:
        if row.is_container:
            yield [row]
            continue
        if held and size_s + row.planned_s > shard_s:
            yield held
            held, size_s = [], 0.0
        held.append(row)
        size_s += row.planned_s
    if held:
        yield held
