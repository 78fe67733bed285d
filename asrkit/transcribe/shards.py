"""Bulk transcription: recordings in shards, on one machine or many.

`plan` cuts what is to be transcribed into shards, `run` transcribes those that have no result yet,
and `rows` reads the results. A shard's result is one file, whose name is a hash of model, settings,
asrkit's version and recordings, written whole or not at all: a shard is done when its file is
there. So a run that was killed goes on by being called again, and loses and doubles nothing.

>>> task = Task(model=Path("models/mine"))  # doctest: +SKIP
>>> report = run(plan(["talks/"], task, "text"))  # doctest: +SKIP
"""

import contextlib
import hashlib
import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asrkit.files import atomic, lock
from asrkit.shapes import expect, whole
from asrkit.sound_files import Sound
from asrkit.transcribe.formats import Transcript, summary
from asrkit.transcribe.manifests import Recording, changes, members, read
from asrkit.transcribe.options import BeamOptions, PipelineConfig, PromptOptions, WindowOptions
from asrkit.transcribe.progress import progress_bar

if TYPE_CHECKING:
    from asrkit.transcribe.ray import RayCluster
    from asrkit.transcribe.workers import Layout, Workers

DTYPES = ("float32", "bfloat16", "float16")
PLAN = "plan.jsonl"  # what is planned, then a shard a line
PREFIX = "part-"
SHARD_H = {"cpu": 0.5, "cuda": 10.0}  # hours in a shard: some minutes of work
LEAST_SHARDS = 20  # so that the last one is a small part of the work
LEAST_SHARD_S = 60.0
MOST_SHARDS = 50_000  # files in one folder

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model and all settings that the results of a plan depend on.

    Args:
        model: As `asrkit.models.load_checkpoint` takes it.
        dtype: Of its weights, one of DTYPES.
        context: Frames of attention to the left and right, of a FastConformer; None: all.
        windows: How recordings are cut. `batch_s` and `readers` do not change results.
        config: How the recogniser computes.
    """

    model: Path
    dtype: str = "float32"
    context: tuple[int, int] | None = None
    windows: WindowOptions = field(default_factory=WindowOptions)
    config: PipelineConfig = field(default_factory=PipelineConfig)

    def __post_init__(self) -> None:
        expect(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}", repr(self.dtype))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """How one process of a run works. Nothing of it changes results, rounding aside.

    Args:
        device: Where to compute: cpu, cuda or cuda:N.
        threads: CPU threads; None: as many as torch takes.
    """

    device: str = "cpu"
    threads: int | None = None


class Shard(NamedTuple):
    """Some recordings, or one container, that are transcribed together and have one result.

    Args:
        name: A hash of model, settings, asrkit's version and recordings.
        planned_s: Seconds of the recordings, partly guessed where lengths are not known.
        text: The recordings as JSON, which takes a fraction of their memory.
    """

    name: str
    planned_s: float
    text: str

    def recordings(self) -> list[Recording]:
        """The recordings of the shard."""
        return [
            Recording(name, Sound(Path(path), *part), planned_s)
            for name, (path, *part), planned_s in json.loads(self.text)
        ]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Shards in the order in which they are transcribed, longest recordings first.

    Args:
        out: Folder of plan and results.
        task: What is done with each recording.
        head: What the shards follow from: the task as JSON, `asrkit`'s version, hashes of `model`
            and `inputs` by their files, `made_by`, a hash of weights and settings, and `shard_h`.
        shards: All of them.
    """

    out: Path
    task: Task
    head: dict[str, Any]
    shards: list[Shard]

    def result(self, shard: Shard) -> Path:
        """The file of a shard's result, which is there when the shard is done."""
        return self.out / f"{PREFIX}{shard.name}.jsonl"

    def done(self) -> set[Shard]:
        """The shards whose results are there."""
        there = {path.name for path in self.out.glob(f"{PREFIX}*.jsonl")}
        return {shard for shard in self.shards if self.result(shard).name in there}


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
        files: Folders, manifests, containers and sound files, as `manifests.read` takes them.
        task: Model and settings.
        out: The folder, made when missing.
        shard_h: Hours of audio in a shard; None: those of the plan that is there, else half an
            hour on a CPU and ten on a GPU, less for small corpora and more for very large ones.
        device: Where shards are transcribed, which may be on another machine.

    Raises:
        ValueError: An input is damaged or has no recording, ids are twice, or `out` was begun with
            another model, other settings or other recordings.
    """
    given = [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]
    out = Path(out)
    positive = shard_h is None or 0 < shard_h < float("inf")
    expect(positive, "shard_h", "more than 0 hours", shard_h)
    with lock(out, wait=True):  # others wait for the first one
        kept = load_plan(out) if (out / PLAN).exists() else None
        if kept is not None:
            kept_h = kept.head["shard_h"]
            expect(shard_h in (None, kept_h), "shard_h", f"{kept_h}, as in {out / PLAN}", shard_h)
            shard_h = kept_h
        lm = task.config.search and task.config.search.lm
        head: dict[str, Any] = {
            "task": _as_json(task),
            "asrkit": version("asrkit"),
            "model": [changes(file) for file in (task.model, lm) if file],
            "inputs": [changes(file) for file in given],
        }
        if kept is not None and head.items() <= kept.head.items():
            return replace(kept, task=replace(kept.task, windows=task.windows))
        recordings = _recordings(given)
        if shard_h is None:
            shard_h = usual_shard_h(sum(one.planned_s for one in recordings), device)
        _, made_by = _load(task, "cpu")
        head |= {"made_by": made_by, "shard_h": shard_h}
        shards = [_shard(held, made_by) for held in _filled(recordings, shard_h * 3600)]
        if kept is not None and shards != kept.shards:
            what = "other recordings"
            if made_by != kept.head["made_by"]:
                what = "another model, other settings or another version of asrkit"
            raise ValueError(f"out: {out} was begun with {what}. Name another folder.")
        with atomic(out / PLAN) as part, part.open("w", encoding="utf-8") as file:
            for row in (head, *(shard._asdict() for shard in shards)):
                file.write(json.dumps(row) + "\n")
        made = _from_json(head["task"])
        return Plan(out=out, task=replace(made, windows=task.windows), head=head, shards=shards)


def load_plan(out: str | Path) -> Plan:
    """The plan that is kept in a folder.

    Args:
        out: The folder.

    Raises:
        ValueError: There is none, or it is damaged.
    """
    out = Path(out)
    file = out / PLAN
    expect(file.is_file(), "out", "a folder with a plan", f"no {PLAN} in {out}")
    try:
        with file.open(encoding="utf-8") as lines:
            head, *rows = map(json.loads, lines)
        shards = [Shard(**row) for row in rows]
        assert head["made_by"] and head["shard_h"]
        return Plan(out=out, task=_from_json(head["task"]), head=head, shards=shards)
    except (ValueError, KeyError, TypeError):
        message = f"out: expected a plan of asrkit, got something else in {file}."
        raise ValueError(f"{message} Name another folder.") from None


def _as_json(task: Task) -> dict[str, Any]:
    """The fields of a task for processes in any folder, but for those that change no result."""
    text = json.dumps(asdict(task), default=lambda path: str(path.absolute()))
    values = json.loads(text)
    del values["windows"]["batch_s"], values["windows"]["readers"]
    return values


def _from_json(values: dict[str, Any]) -> Task:
    """The task that `_as_json` made `values` of."""
    config = dict(values["config"])
    if config["search"]:
        lm = config["search"]["lm"]
        config["search"] = BeamOptions(**config["search"] | {"lm": lm and Path(lm)})
    if config["prompt"]:
        config["prompt"] = PromptOptions(**config["prompt"])
    return Task(
        model=Path(values["model"]),
        dtype=values["dtype"],
        context=values["context"] and tuple(values["context"]),
        windows=WindowOptions(**values["windows"]),
        config=PipelineConfig(**config),
    )


def _recordings(given: Sequence[Path]) -> list[Recording]:
    """All recordings, longest first. Ids have to differ."""
    found: dict[str, Recording] = {}
    remedy = "Give each line an id of its own, or use two folders."
    for one in read(given):
        got = f"{one.id!r:.200} twice"
        expect(one.id not in found, "files", "ids that are all different", got, remedy)
        found[one.id] = one
    places = ", ".join(map(str, given))
    expect(bool(found), "files", "at least one recording", f"none in {places}")
    return sorted(found.values(), key=lambda one: -one.planned_s)


def usual_shard_h(total_s: float, device: str) -> float:
    """Hours of audio in a shard where nobody says.

    Args:
        total_s: Seconds of all recordings.
        device: That transcribes them: cpu, cuda or cuda:N.
    """
    usual_s = SHARD_H.get(device.partition(":")[0], SHARD_H["cpu"]) * 3600
    shard_s = max(LEAST_SHARD_S, min(usual_s, total_s / LEAST_SHARDS))
    return max(shard_s, total_s / MOST_SHARDS) / 3600


def _shard(held: Sequence[Recording], made_by: str) -> Shard:
    """The shard of some recordings."""
    text = json.dumps(held, default=_plain)
    name = hashlib.sha256(f"{made_by} {text}".encode()).hexdigest()[:16]
    return Shard(name, round(sum(one.planned_s for one in held), 3), text)


def _plain(part: Sound | Path) -> Any:
    """What JSON does not know of a recording: the fields of its sound, and a path."""
    return str(part) if isinstance(part, Path) else [*vars(part).values()]


def _filled(recordings: Sequence[Recording], shard_s: float) -> Iterator[list[Recording]]:
    """Yield recordings of at most `shard_s` seconds together.

    A container, or a recording longer than that, is alone.
    """
    held: list[Recording] = []
    size_s = 0.0
    for one in recordings:
        if one.is_container:
            yield [one]
            continue
        if held and size_s + one.planned_s > shard_s:
            yield held
            held, size_s = [], 0.0
        held.append(one)
        size_s += one.planned_s
    if held:
        yield held


def _load(task: Task, device: str) -> tuple[Any, str]:
    """The checkpoint of a task, and a hash of it, asrkit's version and all that texts depend on."""
    import torch

    from asrkit.models import limit_context, load_checkpoint
    from asrkit.transcribe.folder import made_by, text_settings

    checkpoint = load_checkpoint(task.model, device=device, dtype=getattr(torch, task.dtype))
    if task.context is not None:
        limit_context(checkpoint.model, task.context)
    settings = text_settings(task.windows, task.config)
    settings |= {"context": task.context, "asrkit": version("asrkit")}
    return checkpoint, made_by(checkpoint, settings)


class ShardTranscriber:
    """What each worker of a run does: it loads the model of a plan, and transcribes shards.

    Args:
        plan: Whose model is loaded.
        machine: Device and threads of the worker.
    """

    def __init__(self, plan: Plan, machine: Machine) -> None:
        self.plan = replace(plan, shards=[])  # to be sent to a worker
        self.machine = machine
        self.transcriber: Any = None

    def load(self) -> None:
        """Load the model.

        Raises:
            ValueError: It, a setting or asrkit is not what the plan was made of.
        """
        from asrkit.transcribe.recognizer import Recognizer
        from asrkit.transcribe.windows import Transcriber

        task = self.plan.task
        checkpoint, made_by = _load(task, self.machine.device)
        wanted = f"model, settings and version of asrkit of the plan in {self.plan.out}"
        got = f"others with {task.model} and asrkit {version('asrkit')}"
        expect(made_by == self.plan.head["made_by"], "model", wanted, got)
        recognizer = Recognizer.from_checkpoint(checkpoint, task.config, in_place=True)
        self.transcriber = Transcriber(recognizer, checkpoint.tokenizer, task.windows)

    @contextlib.contextmanager
    def workers(self, layout: "Layout | None" = None) -> Iterator["Workers"]:
        """Workers that have the model, until the block ends.

        Args:
            layout: Of workers that are forked from this process, which loads the model; None: one
                that loads it itself.

        Raises:
            RuntimeError: The worker ended while it loaded the model.
        """
        from asrkit.transcribe.workers import Died, Layout, Workers

        if layout is not None:
            self.load()
            with Workers(layout, self) as forked:
                yield forked
            return
        alone = Layout(threads=self.machine.threads)
        first: Iterator[Any] = iter([("the model", [])])
        with Workers(alone, self, method="spawn") as spawned:
            for key, result in spawned.results(lambda: next(first, None)):
                if isinstance(result, Died):  # else each recording would seem to be the reason
                    raise RuntimeError(f"{result} while it loaded {key}.")
            yield spawned

    def transcribe(
        self, shards: Sequence[Shard], layout: "Layout | None" = None
    ) -> Iterator[tuple[Shard, list[Row]]]:
        """Yield each shard with its results as it is done.

        Args:
            shards: Of the plan.
            layout: As `workers` takes it.
        """
        with self.workers(layout) as workers:
            for number, results in transcribed(workers, shards):
                yield shards[number], results

    def __call__(self, recordings: Sequence[Recording]) -> list[Row]:
        """The results of a shard, in the order of its recordings.

        Args:
            recordings: Of the shard, or some of them.
        """
        if self.transcriber is None:
            self.load()
        taken: deque[Recording] = deque()

        def sounds() -> Iterator[Sound]:
            for recording in recordings:
                for one in members(recording):
                    taken.append(one)
                    yield one.sound

        results = []
        for transcript in self.transcriber.recordings(sounds(), lambda audio_s: None):
            if "CUDA error" in transcript.error:  # lack of memory is another one
                sys.exit(transcript.error)  # nothing runs any more in this process
            results.append(_row(taken.popleft(), transcript))
        return results


def transcribed(workers: "Workers", shards: Iterable[Shard]) -> Iterator[tuple[int, list[Row]]]:
    """Yield (number of a shard from 0, its results) as shards are done.

    Args:
        workers: Of a `ShardTranscriber`.
        shards: In order.
    """
    from asrkit.transcribe.workers import ENDED, transcribe_jobs

    def ended(recording: Recording) -> Row:
        return _row(recording, Transcript(path=recording.sound.path, error=ENDED))

    jobs = (shard.recordings() for shard in shards)
    return transcribe_jobs(workers, jobs, ended, members)


def _row(recording: Recording, transcript: Transcript) -> Row:
    """The result of one recording: the same for the same transcript, whenever it was made."""
    start_s = recording.sound.start_s
    result = summary(transcript)
    return {"id": recording.id, "start_s": start_s, **result, "error": transcript.error}


def _write(path: Path, results: Sequence[Row]) -> None:
    """Write the results of a shard, whole or not at all."""
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in results)
    try:
        with atomic(path) as part:
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"{path} cannot be written: {why}. Make room and go on.") from None


def _read(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def rows(folder: str | Path) -> Iterator[Row]:
    """Yield the results of all shards in a folder, shard by shard.

    Args:
        folder: The --out of a run.
    """
    for path in sorted(Path(folder).glob(f"{PREFIX}*")):
        yield from _read(path)


@dataclass(frozen=True)
class Counts:
    """What results hold: recordings, those that failed, and seconds of audio transcribed."""

    recordings: int = 0
    failed: int = 0
    audio_s: float = 0.0


def _count(paths: Iterable[Path]) -> Counts:
    """The counts of the results in files. ValueError where a file was changed since."""
    recordings, failed, audio_s = 0, 0, 0.0
    for path in paths:
        try:
            for one in _read(path):
                recordings += 1
                failed += bool(one["error"])
                audio_s += one["audio_s"]
        except (KeyError, TypeError, ValueError):
            message = f"out: expected a result of asrkit, got something else in {path}."
            raise ValueError(f"{message} Remove it: the same command makes it again.") from None
    return Counts(recordings, failed, round(audio_s, 3))


@dataclass(frozen=True, kw_only=True)
class Report:
    """The state of a plan after a run.

    Args:
        shards: All of the plan.
        done: Those whose results are there, of all parts.
        missing: Those of this part without a result.
        counts: Of all results that are there.
        transcribed_s: Seconds of audio that this run transcribed.
    """

    shards: int
    done: int
    missing: int
    counts: Counts
    transcribed_s: float


def run(
    plan: Plan,
    *,
    part: tuple[int, int] = (0, 1),
    machine: Machine | None = None,
    workers: "Layout | None" = None,
    cluster: "RayCluster | None" = None,
    progress: bool = False,
) -> Report:
    """Transcribe every shard of a part that has no result yet.

    Parts may run at the same time, on one machine or on several that share the folder. A run that
    was stopped, however it was, goes on where it was: call it again. A worker that ends is replaced
    and its shard transcribed again, recording by recording; one that ends its worker twice is an
    error.

    Args:
        plan: As `plan` makes it.
        part: (K, N): of all shards the K-th and every N-th after it, K from 0.
        machine: How each worker works; None: one CPU, as torch takes it.
        workers: Forked from this process, in which the model is loaded; None: one, which loads it.
        cluster: Whose actors transcribe instead.
        progress: Show on stderr how far it is, once a minute where that is no terminal.

    Raises:
        ValueError: There is no such part, this part is running already, or the model is not that
            of the plan.
        RuntimeError: Workers end again and again, or Ray cannot go on.
        OSError: A result cannot be written.
    """
    expect_part(part)
    number, parts = part
    running = f"out: part {number}/{parts} of {plan.out} is being transcribed already."
    with lock(plan.out / f".part-{number}-of-{parts}", refused=running):
        mine = plan.shards[number::parts]
        there = plan.done()
        todo = [shard for shard in mine if shard not in there]
        total_s = sum(shard.planned_s for shard in mine)
        before_s = total_s - sum(shard.planned_s for shard in todo)
        transcribed_s = 0.0
        transcriber = ShardTranscriber(plan, machine or Machine())
        if not todo:
            new: Iterator[tuple[Shard, list[Row]]] = iter(())
        elif cluster is not None:
            new = cluster.transcribe(transcriber, todo)
        else:
            new = transcriber.transcribe(todo, workers)
        with progress_bar(total_s, before_s, show=progress and bool(todo)) as bar:
            for shard, results in new:
                _write(plan.result(shard), results)
                bar.update(shard.planned_s)
                transcribed_s += sum(one["audio_s"] for one in results)
    there = plan.done()
    return Report(
        shards=len(plan.shards),
        done=len(there),
        missing=sum(shard not in there for shard in mine),
        counts=_count(plan.result(shard) for shard in plan.shards if shard in there),
        transcribed_s=transcribed_s,
    )


def expect_part(part: tuple[int, int]) -> None:
    """ValueError unless there is such a part.

    Args:
        part: (K, N), as `run` takes it.
    """
    number, parts = part
    expect(whole(parts, 1), "part", "K/N with N of 1 or more", f"{number}/{parts}")
    expect(whole(number, 0, parts - 1), "part", f"K/{parts} with K in 0..{parts - 1}", number)
