"""Bulk transcription: recordings in shards, on one machine or many.

`plan` cuts what is to be transcribed into shards, `run` transcribes those that have no result yet,
and `rows` reads the results. A shard's result is one file, whose name is a hash of model, settings,
asrkit's version and recordings, written whole or not at all: a shard is done when its file is
there. So a run that was killed goes on by being called again, and loses and doubles nothing.

>>> task = Task(model=Path("models/mine"))  # doctest: +SKIP
>>> report = run(plan(["talks/"], task, "text"))  # doctest: +SKIP
"""

import hashlib
import json
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asrkit.files import atomic, content_hash, lock, version
from asrkit.shapes import count, expect
from asrkit.sound_files import Sound
from asrkit.transcribe.folder import expect_same, made_by, settled, text_settings
from asrkit.transcribe.formats import Transcript, summary
from asrkit.transcribe.manifests import Recording, changes, members, read
from asrkit.transcribe.options import PipelineConfig, WindowOptions
from asrkit.transcribe.progress import Advance, progress_bar

if TYPE_CHECKING:
    from asrkit.transcribe.ray import RayCluster
    from asrkit.transcribe.workers import Layout, Workers

PLAN = "plan.jsonl"  # its head, then a shard a line
PREFIX = "part-"
CPU_SHARD_H = 0.5  # hours in a shard: some minutes of work
CUDA_SHARD_H = 10.0
SHARDS = 20  # at least so many where shards can be smaller: the last one is a small part of all

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model and all settings that the results of a plan depend on.

    Args:
        model: As `asrkit.models.load_checkpoint` takes it.
        dtype: Of its weights: float32, bfloat16 or float16; for `plan` also "auto", which is dtype
            and precision of the plan that is there, else the dtype that `device` is fast in.
        context: Frames of attention to the left and right, of a FastConformer; None: all.
        windows: How recordings are cut. `batch_s` and `readers` do not change results.
        config: How the recogniser computes.
    """

    model: Path
    dtype: str = "float32"
    context: tuple[int, int] | None = None
    windows: WindowOptions = field(default_factory=WindowOptions)
    config: PipelineConfig = field(default_factory=PipelineConfig)


class Shard(NamedTuple):
    """Some recordings that are transcribed together and have one result.

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
            Recording(name, Sound(Path(path), *part), planned_s, state)
            for name, planned_s, state, path, *part in json.loads(self.text)
        ]


class Head(NamedTuple):
    """What the shards of a plan follow from.

    Args:
        given: A hash of settings and asrkit's version, and of paths, sizes and times of all files.
        made_by: Recordings, hours in a shard, asrkit's version, settings and model, as text.
    """

    given: str
    made_by: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Shards in the order in which they are transcribed, longest recordings first.

    Args:
        out: Folder of plan and results.
        task: What is done with each recording.
        head: What the shards follow from.
        shards: All of them.
    """

    out: Path
    task: Task
    head: Head
    shards: list[Shard]

    def result(self, shard: Shard) -> Path:
        """The file of a shard's result."""
        return self.out / f"{PREFIX}{shard.name}.jsonl"

    def done(self, shard: Shard) -> bool:
        """Whether a shard has a result."""
        return self.result(shard).exists()


def plan(
    files: Iterable[str | Path],
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
            hour on a CPU and ten on a GPU, less for small corpora.
        device: Where shards are transcribed, which may be on another machine.

    Raises:
        ValueError: An input or the model is damaged, there is no recording, ids are twice, the
            model cannot do what the settings ask for, or `out` was begun with another model, other
            settings or other recordings.
    """
    expect(shard_h is None or shard_h > 0, "shard_h", "more than 0 hours", shard_h)
    inputs = [*map(Path, files)]
    out = Path(out)
    task = replace(task, model=task.model.absolute())  # for processes in any folder
    with lock(out, wait=True):  # others wait for the first one
        kept, shards = load_plan(out) if (out / PLAN).exists() else (None, [])
        if task.dtype == "auto":
            # That of the plan, perhaps of another machine.
            begun = kept.made_by if kept else {}
            dtype, config = settled(begun, task.config, device)
            task = replace(task, dtype=dtype, config=config)
        given = _given(inputs, task, shard_h)
        if kept and kept.given == given:
            return Plan(out=out, task=task, head=kept, shards=shards)
        recordings = _recordings(inputs)
        if shard_h is None:
            most_h = CUDA_SHARD_H if device.startswith("cuda") else CPU_SHARD_H
            total_h = sum(one.planned_s for one in recordings) / 3600
            shard_h = float(kept.made_by["shard_h"]) if kept else min(most_h, total_h / SHARDS)
        files = f"{count(len(recordings), 'recording')} ({content_hash(str(recordings))[:19]})"
        made_of = {"files": files, "shard_h": str(shard_h), **_made_by(task)}
        if kept:
            expect_same(kept.made_by, made_of, out)
        else:  # what cannot be loaded binds no folder
            ShardTranscriber(task, made_of, "cpu").load()
        head = Head(given, made_of)
        made = [_shard(some, made_of) for some in _filled(recordings, shard_h * 3600)]
        with atomic(out / PLAN) as part, part.open("w", encoding="utf-8") as file:
            for row in (head._asdict(), *(shard._asdict() for shard in made)):
                file.write(json.dumps(row) + "\n")
        return Plan(out=out, task=task, head=head, shards=made)


def load_plan(out: str | Path) -> tuple[Head, list[Shard]]:
    """The plan that is kept in a folder.

    Args:
        out: The folder.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is damaged, or another version of asrkit wrote it.
    """
    file = Path(out) / PLAN
    try:
        with file.open(encoding="utf-8") as lines:
            head, *shards = map(json.loads, lines)
        return Head(**head), [Shard(**row) for row in shards]
    except (ValueError, TypeError):
        message = f"out: expected a plan of this asrkit, got something else in {file}."
        raise ValueError(f"{message} Name another folder.") from None


def _given(inputs: Sequence[Path], task: Task, shard_h: float | None) -> str:
    """A hash of all that a plan is made of, without a look into files."""
    windows = replace(task.windows, batch_s=1.0, readers=1)  # neither changes a text
    settings = f"{replace(task, windows=windows)} {shard_h}"
    files = [*inputs, task.model]
    if task.config.search and task.config.search.lm:
        files.append(task.config.search.lm)
    return content_hash([version(), settings, *map(changes, files)])


def _made_by(task: Task) -> dict[str, str]:
    """All that the texts of a task depend on."""
    settings = text_settings(task.windows, task.config, task.dtype)
    settings |= {"asrkit": version(), "context": task.context}
    return made_by(task.model, **settings)


def _recordings(inputs: Sequence[Path]) -> list[Recording]:
    """All recordings, longest first. Ids have to differ."""
    found = sorted(read(inputs), key=lambda one: -one.planned_s)
    expect(bool(found), "files", "at least one recording", "none")
    ((name, times),) = Counter(one.id for one in found).most_common(1)
    remedy = "Give each line an id of its own, or use two folders."
    expect(times == 1, "files", "ids that are all different", f"{name!r:.200} twice", remedy)
    return found


def _shard(recordings: Sequence[Recording], made_by: dict[str, str]) -> Shard:
    """The shard of some recordings."""
    fields = [[one.id, one.planned_s, one.state, *vars(one.sound).values()] for one in recordings]
    text = json.dumps(fields, default=str)  # of the path
    name = hashlib.sha256(f"{made_by} {text}".encode()).hexdigest()[:16]
    return Shard(name, sum(one.planned_s for one in recordings), text)


def _filled(recordings: Sequence[Recording], shard_s: float) -> Iterator[list[Recording]]:
    """Yield recordings of at most `shard_s` seconds together; one that is longer is alone."""
    some: list[Recording] = []
    size_s = 0.0
    for one in recordings:
        if some and size_s + one.planned_s > shard_s:
            yield some
            some, size_s = [], 0.0
        some.append(one)
        size_s += one.planned_s
    yield some


@dataclass
class ShardTranscriber:
    """What a worker calls with recordings of a plan; the first call loads the model there.

    Args:
        task: Of the plan.
        made_by: Of its head.
        device: Where to compute.
    """

    task: Task
    made_by: dict[str, str]
    device: str
    transcriber: Any = None

    def load(self) -> None:
        """Load the model.

        Raises:
            ValueError: It, a setting or asrkit is not what the plan was made of.
        """
        import torch

        from asrkit.models import limit_context, load_checkpoint
        from asrkit.transcribe.recognizer import Recognizer
        from asrkit.transcribe.windows import Transcriber

        task = self.task
        same = _made_by(task).items() <= self.made_by.items()
        expect(same, "model", "model, settings and version of asrkit of the plan", "others")
        dtype = getattr(torch, task.dtype)
        checkpoint = load_checkpoint(task.model, device=self.device, dtype=dtype)
        if task.context is not None:
            limit_context(checkpoint.model, task.context)
        recognizer = Recognizer.from_checkpoint(checkpoint, task.config, in_place=True)
        self.transcriber = Transcriber(recognizer, checkpoint.tokenizer, task.windows)

    def __call__(self, recordings: Iterable[Recording], advance: Advance) -> list[Row]:
        """The results of recordings, in their order.

        Args:
            recordings: Of a shard.
            advance: Called with seconds of audio that were recognised.
        """
        if self.transcriber is None:
            self.load()
        opened: deque[Recording] = deque()

        def sounds() -> Iterator[Sound]:
            for one in chain.from_iterable(map(members, recordings)):
                opened.append(one)
                yield one.sound

        results = []
        for transcript in self.transcriber.recordings(sounds(), advance):
            if "CUDA error" in transcript.error:  # lack of memory is another one
                sys.exit(transcript.error)  # nothing runs any more in this process
            results.append(_row(opened.popleft(), transcript))
        return results


def transcribed(workers: "Workers", shards: Iterable[Shard]) -> Iterator[tuple[int, list[Row]]]:
    """Yield (number of a shard from 0, its results) as shards are done.

    Args:
        workers: Of a `ShardTranscriber`.
        shards: In order.

    Raises:
        RuntimeError: A worker ended while it loaded the model.
    """
    from asrkit.transcribe.workers import ENDED, Died, transcribe_jobs

    # A first job of nothing loads the model: else each recording would seem to end its worker.
    nothing: list[Any] = [("", [])]
    for _, result in workers.results(lambda: nothing.pop() if nothing else None):
        if isinstance(result, Died):
            raise RuntimeError(f"{result} while it loaded the model.")
    jobs = (shard.recordings() for shard in shards)
    yield from transcribe_jobs(
        workers, jobs, lambda one: _row(one, Transcript(path=one.sound.path, error=ENDED)), members
    )


def _transcribed_here(
    transcriber: ShardTranscriber,
    shards: Sequence[Shard],
    layout: "Layout | None",
    threads: int | None,
    advance: Advance,
) -> Iterator[tuple[int, list[Row]]]:
    """`transcribed` by forked workers that share a model loaded here, or by one that loads it."""
    from asrkit.transcribe.workers import Layout, Workers

    if layout is None:
        workers = Workers(Layout(threads=threads), transcriber, advance, method="spawn")
    else:
        transcriber.load()
        workers = Workers(layout, transcriber, advance)
    with workers:
        yield from transcribed(workers, shards)


def _row(recording: Recording, transcript: Transcript) -> Row:
    """The result of one recording: the same for the same transcript, whenever it was made."""
    row = {"id": recording.id, "start_s": recording.sound.start_s}
    return row | summary(transcript) | {"error": transcript.error}


def _write(path: Path, results: Sequence[Row]) -> None:
    """Write the results of a shard, whole or not at all."""
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in results)
    with atomic(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


def rows(folder: str | Path) -> Iterator[Row]:
    """Yield the results of all shards in a folder, shard by shard.

    Args:
        folder: The --out of a run.

    Raises:
        ValueError: A result was damaged.
    """
    for path in sorted(Path(folder).glob(f"{PREFIX}*.jsonl")):
        try:
            with path.open(encoding="utf-8") as file:
                for one in map(json.loads, file):
                    expect({"id", "audio_s", "error"} <= {*one}, "out", "a result", one)
                    yield one
        except (ValueError, TypeError):
            message = f"out: expected a result of asrkit, got something else in {path}."
            raise ValueError(f"{message} Remove it: the same command makes it again.") from None


@dataclass
class Report:
    """What a folder of results holds after a run.

    Args:
        shards: Of the plan.
        done: Those that have a result.
        transcribed_s: Seconds of audio that this run transcribed.
        recordings: In all results.
        failed: Those that have an error.
        audio_s: Seconds of audio in all results.
    """

    shards: int
    done: int
    transcribed_s: float
    recordings: int = 0
    failed: int = 0
    audio_s: float = 0.0


def run(
    plan: Plan,
    *,
    part: tuple[int, int] = (0, 1),
    device: str = "cpu",
    threads: int | None = None,
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
        device: Where each worker computes: cpu, cuda or cuda:N.
        threads: CPU threads of each worker; None: as many as torch takes.
        workers: Forked from this process, in which the model is loaded; None: one, which loads it.
        cluster: Whose actors transcribe instead.
        progress: Show on stderr what fails, and how far it is: once a minute where that is no
            terminal.

    Raises:
        ValueError: There is no such part, this part is running already, the model is not that of
            the plan, or a result was damaged.
        RuntimeError: Workers end again and again, or Ray cannot go on.
        OSError: A result cannot be written.
    """
    number, parts = part
    expect(0 <= number < parts, "part", "K/N with K from 0 to N - 1", f"{number}/{parts}")
    running = f"out: part {number}/{parts} of {plan.out} is being transcribed already."
    with lock(plan.out / f".part-{number}-of-{parts}", message=running):
        todo = [shard for shard in plan.shards[number::parts] if not plan.done(shard)]
        transcriber = ShardTranscriber(plan.task, plan.head.made_by, device)
        transcribed_s = 0.0
        todo_s = sum(shard.planned_s for shard in todo)
        with progress_bar(todo_s, show=progress and bool(todo)) as bar:
            if cluster is not None:
                new = cluster.transcribed(transcriber, todo, threads)
            else:
                new = _transcribed_here(transcriber, todo, workers, threads, bar.update)
            for place, results in new if todo else ():
                _write(plan.result(todo[place]), results)
                for one in results:
                    if progress and one["error"]:
                        bar.write(f"{one['id']}: {one['error']}", file=sys.stderr)
                audio_s = sum(one["audio_s"] for one in results)
                bar.total = round(bar.total + audio_s - todo[place].planned_s)
                bar.update(audio_s if cluster else 0)  # whose actors tell of whole shards only
                transcribed_s += audio_s
    done = sum(map(plan.done, plan.shards))
    report = Report(len(plan.shards), done, round(transcribed_s, 2))
    for one in rows(plan.out):
        report.recordings += 1
        report.failed += bool(one["error"])
        report.audio_s += one["audio_s"]
    report.audio_s = round(report.audio_s, 2)
    return report
