"""The plan of a bulk transcription: recordings in shards, kept in the folder of the results.

A plan is two files. `plan.json` says what is planned and where each shard's recordings stand in
`plan.shards`, which has a shard a line. A process needs the
folder and a shard's name to transcribe it.
"""

import contextlib
import hashlib
import importlib.metadata
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted  # json.dumps of a str, in less time
from pathlib import Path
from typing import Any, NamedTuple

from asrkit.files import atomic, lock
from asrkit.shapes import expect
from asrkit.transcribe.bulk import inputs
from asrkit.transcribe.bulk.inputs import CONTAINERS, Recording
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
        device: Where shards are transcribed. A model that is not known yet is loaded there to
            take its hash, or on the CPU where this machine has no such device.

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
        now = {
            "task": as_json(task),
            "model": model_state(task),
            "inputs": [inputs.state(one) for one in given],
        }
        kept = _kept(out)
        if kept is not None:
            _expect_same_task(kept, now, out)
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
        for name in ("made_by", "shard_h", "asrkit", "model", "inputs"):
            kept[name]  # a KeyError where it is missing
        kept["shards"] = [Shard(*values) for values in kept["shards"]]
        from_json(Task, kept["task"])  # an error where a field is missing or unknown
        kept["task"]["windows"].keys()  # an AttributeError where it has no fields
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(_no_plan(file)) from None
    return kept


def _no_plan(file: Path) -> str:
    """The message about a file of a plan that somebody changed."""
    return f"out: expected a plan of asrkit, got something else in {file}. Name another folder."


def _refuse(out: Path, what: str) -> None:
    message = f"out: {out} was begun with {what}. Name another folder."
    raise ValueError(message)


def _expect_same_task(kept: dict[str, Any], now: dict[str, Any], out: Path) -> None:
    """ValueError unless the settings of both are the same, but for what changes no result."""
    before, after = (_text_task(one["task"]) for one in (kept, now))
    for name, value in after.items():
        if before.get(name) != value:
            _refuse(out, f"other settings: {name} was {before.get(name)!r}, and is {value!r}")


def _text_task(task: dict[str, Any]) -> dict[str, Any]:
    """The settings of a task that results may depend on; the model is known by its hash."""
    windows = {
        name: value for name, value in task["windows"].items() if name not in ("batch_s", "readers")
    }
    others = {name: value for name, value in task.items() if name not in ("windows", "model")}
    return others | windows


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
    made_by = _made_by(task, device, now, kept)
    if kept is not None and kept["made_by"] != made_by:
        _refuse(out, "another model, or other settings")
    rows = _rows(given)
    if shard_h is None:
        shard_h = usual_shard_h(sum(rows.planned_s[row] for row in rows.order), device)
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
        "recordings": len(rows.texts),
        "planned_s": round(sum(shard.planned_s for shard in shards), 3),
        "shards": shards,
    }
    with atomic(out / PLAN) as part:
        part.write_text(json.dumps(contents) + "\n", encoding="utf-8")


def _made_by(task: Task, device: str, now: dict[str, Any], kept: dict[str, Any] | None) -> str:
    """The hash of model and settings, that of the kept plan where no model file has changed."""
    if kept is not None and now["model"] == kept["model"]:
        return kept["made_by"]
    if device.startswith("cuda") and not _has_cuda():
        device = "cpu"
    return key(task, load(task, Machine(device=device)))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def version() -> str:
    """The installed version of asrkit."""
    try:
        return importlib.metadata.version("asrkit")
    except importlib.metadata.PackageNotFoundError:  # a copied source tree
        return "unknown"


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Recordings as they are planned, by column: an object for each would take twice the time.

    Args:
        planned_s: Seconds of each, in the order in which they were read.
        texts: Each one as JSON, which takes least memory.
        containers: Numbers of those that are a shard of their own.
        order: Numbers of all, longest first; of equal length as they were read.
    """

    planned_s: "array[float]"
    texts: list[str]
    containers: set[int]
    order: list[int]


def _rows(given: Sequence[Path]) -> _Rows:
    """All recordings. Ids have to differ."""
    planned_s = array("d")
    texts: list[str] = []
    containers: set[int] = set()
    seen: set[str] = set()
    for number, one in enumerate(inputs.read(given)):
        if one.id in seen:
            remedy = "Give each line an id of its own, or use two folders."
            expect(False, "files", "ids that are all different", f"{one.id!r:.200} twice", remedy)
        seen.add(one.id)
        texts.append(_text(one))
        if one.path.lower().endswith(CONTAINERS):
            containers.add(number)
            planned_s.append(_container_s(one))
        else:
            planned_s.append(UNKNOWN_S if one.duration_s is None else one.duration_s)
    expect(bool(texts), "files", "at least one recording", "none in " + ", ".join(map(str, given)))
    return _Rows(
        planned_s=planned_s,
        texts=texts,
        containers=containers,
        order=_longest_first(planned_s),
    )


def _text(one: Recording) -> str:
    """A recording as JSON: its values in their order, as `json.dumps` writes them."""
    name, path, start_s, duration_s, channel, state = one
    length = "null" if duration_s is None else repr(duration_s)
    others = "null,null"
    if channel is not None or state is not None:
        others = f"{json.dumps(channel)},{json.dumps(state)}"
    return f"[{quoted(name)},{quoted(path)},{start_s!r},{length},{others}]"


def _container_s(one: Recording) -> float:
    """Seconds of audio in a container, guessed by its size."""
    return one.state[0] / BYTES_PER_S if one.state else UNKNOWN_S


def _longest_first(seconds: "array[float]") -> list[int]:
    """Positions of `seconds`, the largest first, and of equal ones the first one first."""
    import numpy

    return numpy.argsort(-numpy.frombuffer(seconds), kind="stable").tolist()


def usual_shard_h(total_s: float, device: str) -> float:
    """Hours of audio in a shard where nobody says.

    Args:
        total_s: Seconds of all recordings.
        device: That transcribes them: cpu, cuda or cuda:N.
    """
    usual_s = SHARD_H.get(device.partition(":")[0], SHARD_H["cpu"]) * 3600
    shard_s = max(LEAST_SHARD_S, min(usual_s, total_s / LEAST_SHARDS))
    return max(shard_s, total_s / MOST_SHARDS) / 3600


def _shards(rows: _Rows, made_by: str, shard_s: float) -> Iterator[tuple[Shard, bytes]]:
    """Yield each shard and its line of the file."""
    offset = 0
    for held in _filled(rows, shard_s):
        text = ",".join([rows.texts[row] for row in held]).encode()
        name = hashlib.sha256(b"%s %s" % (made_by.encode(), text)).hexdigest()[:16]
        line = b'{"name":"%s","recordings":[%s]}\n' % (name.encode(), text)
        planned_s = sum([rows.planned_s[row] for row in held])
        yield Shard(name, offset, len(held), round(planned_s, 3)), line
        offset += len(line)


def _filled(rows: _Rows, shard_s: float) -> Iterator[list[int]]:
    """Yield numbers of recordings of at most `shard_s` seconds together.

    A container, or a recording longer than that, is alone.
    """
    held: list[int] = []
    size_s = 0.0
    for row in rows.order:
        if row in rows.containers:
            yield [row]
            continue
        row_s = rows.planned_s[row]
        if held and size_s + row_s > shard_s:
            yield held
            held, size_s = [], 0.0
        held.append(row)
        size_s += row_s
    if held:
        yield held
