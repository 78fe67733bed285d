"""Bulk transcription: recordings in shards, on one machine or many.

`plan_shards` divides the recordings into shards, `run` transcribes the shards that have no result
yet, and `rows` reads the results. The result of a shard is one file, written whole or not at all.
Its name is a hash of model, settings, asrkit's version and recordings: a shard is done when its
file exists. So a run that was killed resumes when it is called again, and neither loses nor doubles
anything.

>>> planned = plan_shards(["talks/"], Plan(model=Path("models/mine")), "text")  # doctest: +SKIP
>>> report = run(planned)  # doctest: +SKIP
"""

import hashlib
import json
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from asrkit.files import atomic, content_hash, lock, version
from asrkit.shapes import count, expect
from asrkit.sound_files import Sound
from asrkit.transcribe.bulk.manifests import Recording, changes, members, read
from asrkit.transcribe.formats import Transcript, summary
from asrkit.transcribe.plan import Plan, expect_same
from asrkit.transcribe.progress import Advance, progress_bar

if TYPE_CHECKING:
    from asrkit.transcribe.bulk.layout import Layout
    from asrkit.transcribe.bulk.workers import Workers

PLAN = "plan.jsonl"  # the head in the first line, then one shard a line
PREFIX = "part-"
CPU_SHARD_H = 0.5  # hours of audio in a shard: some minutes of work
CUDA_SHARD_H = 10.0
SHARDS = 20  # least number of shards, so that the last one is a small share of the work

Row = dict[str, Any]


class Shard(NamedTuple):
    """Recordings that are transcribed together and have one result.

    Args:
        name: A hash of model, settings, asrkit's version and recordings.
        planned_s: Seconds of the recordings, partly estimated where lengths are not known.
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
    """What the shards of a plan were made from.

    Args:
        inputs: A hash of settings, asrkit's version, and paths, sizes and times of all files.
        fingerprint: Recordings, hours in a shard, asrkit's version, settings and model, as text.
    """

    inputs: str
    fingerprint: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Shards in the order in which they are transcribed, longest recordings first.

    Args:
        out: Folder of the plan and the results.
        plan: Model and settings.
        head: What the shards were made from.
        shards: All shards.
    """

    out: Path
    plan: Plan
    head: Head
    shards: list[Shard]

    def result(self, shard: Shard) -> Path:
        """The file of a shard's result."""
        return self.out / f"{PREFIX}{shard.name}.jsonl"

    def done(self, shard: Shard) -> bool:
        """Whether a shard has a result."""
        return self.result(shard).exists()


def plan_shards(
    files: Iterable[str | Path],
    plan: Plan,
    out: str | Path,
    *,
    shard_h: float | None = None,
    device: str = "cpu",
) -> ShardPlan:
    """The plan to transcribe `files` into the folder `out`: a new one, or the one that exists.

    A folder keeps one plan. It is reused without reading recordings or weights as long as no input,
    no model file and no setting has changed.

    Args:
        files: Folders, manifests, containers and sound files, as `manifests.read` takes them.
        plan: Model and settings. The dtype "auto" is the dtype and precision of the plan that
            exists, or else the fastest dtype of `device`.
        out: The folder, which is created if it is missing.
        shard_h: Hours of audio in a shard; None: as in the plan that exists, else half an hour on a
            CPU and ten hours on a GPU, or less for small corpora.
        device: Where shards are transcribed, perhaps on another machine.

    Raises:
        ValueError: An input or the model is damaged, there is no recording, an id occurs twice, the
            model cannot do what the settings require, or `out` was begun with another model, other
            settings or other recordings.
    """
    expect(shard_h is None or shard_h > 0, "shard_h", "more than 0 hours", shard_h)
    inputs = [*map(Path, files)]
    out = Path(out)
    plan = replace(plan, model=plan.model.absolute())  # for processes in other folders
    with lock(out, wait=True):  # other processes wait for the first one
        stored, shards = load_plan(out) if (out / PLAN).exists() else (None, [])
        # The stored dtype may be the choice of another machine.
        plan = plan.resolved(device, stored.fingerprint if stored else None)
        inputs_hash = _inputs_hash(inputs, plan, shard_h)
        if stored and stored.inputs == inputs_hash:
            return ShardPlan(out=out, plan=plan, head=stored, shards=shards)
        recordings = _recordings(inputs)
        if shard_h is None:
            most_h = CUDA_SHARD_H if device.startswith("cuda") else CPU_SHARD_H
            total_h = sum(recording.planned_s for recording in recordings) / 3600
            shard_h = min(most_h, total_h / SHARDS)
            if stored:
                shard_h = float(stored.fingerprint["shard_h"])
        named = f"{count(len(recordings), 'recording')} ({content_hash(str(recordings))[:19]})"
        settings = plan.fingerprint(asrkit=version())
        fingerprint = {"files": named, "shard_h": str(shard_h), **settings}
        if stored:
            expect_same(stored.fingerprint, fingerprint, out)
        else:  # a model that cannot be loaded must not claim the folder
            ShardTranscriber(plan, fingerprint, "cpu").load()
        head = Head(inputs_hash, fingerprint)
        shards = [_shard(group, fingerprint) for group in _grouped(recordings, shard_h * 3600)]
        with atomic(out / PLAN) as part, part.open("w", encoding="utf-8") as file:
            for row in (head._asdict(), *(shard._asdict() for shard in shards)):
                file.write(json.dumps(row) + "\n")
        return ShardPlan(out=out, plan=plan, head=head, shards=shards)


def load_plan(out: str | Path) -> tuple[Head, list[Shard]]:
    """The plan that a folder holds.

    Args:
        out: The folder.

    Raises:
        FileNotFoundError: It has no plan.
        ValueError: The plan is damaged, or another version of asrkit wrote it.
    """
    file = Path(out) / PLAN
    try:
        with file.open(encoding="utf-8") as lines:
            head, *shards = map(json.loads, lines)
        return Head(**head), [Shard(**row) for row in shards]
    except (ValueError, TypeError):
        message = f"out: expected a plan of this asrkit, got something else in {file}."
        raise ValueError(f"{message} Name another folder.") from None


def _inputs_hash(inputs: Sequence[Path], plan: Plan, shard_h: float | None) -> str:
    """A hash of everything that a plan is made from; files are not opened."""
    windows = replace(plan.windows, batch_s=1.0, readers=1)  # neither changes a text
    settings = f"{replace(plan, windows=windows)} {shard_h}"
    files = [*inputs, plan.model]
    if plan.config.search and plan.config.search.lm:
        files.append(plan.config.search.lm)
    return content_hash([version(), settings, *map(changes, files)])


def _recordings(inputs: Sequence[Path]) -> list[Recording]:
    """All recordings, longest first; ValueError if there is none or an id occurs twice."""
    recordings = sorted(read(inputs), key=lambda recording: -recording.planned_s)
    expect(bool(recordings), "files", "at least one recording", "none")
    ((name, times),) = Counter(recording.id for recording in recordings).most_common(1)
    remedy = "Give each line an id of its own, or use two folders."
    expect(times == 1, "files", "ids that are all different", f"{name!r:.200} twice", remedy)
    return recordings


def _shard(recordings: Sequence[Recording], fingerprint: dict[str, str]) -> Shard:
    """The shard of these recordings."""
    fields = [
        [recording.id, recording.planned_s, recording.state, *vars(recording.sound).values()]
        for recording in recordings
    ]
    text = json.dumps(fields, default=str)  # a path is no JSON
    name = hashlib.sha256(f"{fingerprint} {text}".encode()).hexdigest()[:16]
    return Shard(name, sum(recording.planned_s for recording in recordings), text)


def _grouped(recordings: Sequence[Recording], shard_s: float) -> Iterator[list[Recording]]:
    """Yield groups of at most `shard_s` seconds; a longer recording is a group of its own."""
    group: list[Recording] = []
    size_s = 0.0
    for recording in recordings:
        if group and size_s + recording.planned_s > shard_s:
            yield group
            group, size_s = [], 0.0
        group.append(recording)
        size_s += recording.planned_s
    yield group


@dataclass
class ShardTranscriber:
    """The function of a worker, which transcribes recordings; its first call loads the model.

    Args:
        plan: Model and settings.
        fingerprint: The fingerprint in the head of the plan.
        device: Where to compute.
    """

    plan: Plan
    fingerprint: dict[str, str]
    device: str
    transcriber: Any = None

    def load(self) -> None:
        """Load the model.

        Raises:
            ValueError: The model, a setting or asrkit has changed since the plan was made.
        """
        from asrkit.transcribe.windows import Transcriber

        plan = self.plan
        same = plan.fingerprint(asrkit=version()).items() <= self.fingerprint.items()
        expect(same, "model", "model, settings and version of asrkit of the plan", "others")
        checkpoint, recognizer = plan.load(self.device)
        self.transcriber = Transcriber(recognizer, checkpoint.tokenizer, plan.windows)

    def __call__(self, recordings: Iterable[Recording], advance: Advance) -> list[Row]:
        """The results of recordings, in their order.

        Args:
            recordings: Recordings of a shard; none: the model is loaded.
            advance: Called with seconds of audio that were recognised.
        """
        if self.transcriber is None:
            self.load()
        opened: deque[Recording] = deque()

        def sounds() -> Iterator[Sound]:
            for recording in chain.from_iterable(map(members, recordings)):
                opened.append(recording)
                yield recording.sound

        results = []
        for transcript in self.transcriber.recordings(sounds(), advance):
            if "CUDA error" in transcript.error:  # other than a lack of memory
                sys.exit(transcript.error)  # this process can compute nothing more
            results.append(_row(opened.popleft(), transcript))
        return results


class Executor(Protocol):
    """Where the shards of a run are transcribed: `LocalWorkers`, or `ray.RayCluster`."""

    def results(
        self, transcriber: ShardTranscriber, shards: Sequence[Shard], advance: Advance
    ) -> Iterator[tuple[int, list[Row]]]:
        """Yield (index of a shard, its results) as shards are finished.

        Args:
            transcriber: The function of each worker.
            shards: At least one shard.
            advance: Called with seconds of audio that were recognised.
        """


@dataclass(frozen=True)
class LocalWorkers:
    """Workers on this machine.

    Args:
        layout: Forked workers, which share a model that is loaded in this process. None: one
            spawned worker, which loads the model itself, as a GPU requires.
        threads: Threads of that one worker; None: torch's default.
    """

    layout: "Layout | None" = None
    threads: int | None = None

    def results(
        self, transcriber: ShardTranscriber, shards: Sequence[Shard], advance: Advance
    ) -> Iterator[tuple[int, list[Row]]]:
        """As `Executor` has it.

        Args:
            transcriber: The function of each worker.
            shards: At least one shard.
            advance: Called with seconds of audio that were recognised.

        Raises:
            RuntimeError: Workers end again and again.
        """
        if self.layout:
            from asrkit.memory import share_memory_pool

            share_memory_pool()
            transcriber.load()
        with self.workers(transcriber, advance) as workers:
            yield from workers.results(shard.recordings() for shard in shards)

    def workers(self, transcriber: ShardTranscriber, advance: Advance) -> "Workers":
        """The workers, which have not been started yet.

        Args:
            transcriber: The function of each worker.
            advance: Called with seconds of audio that were recognised.
        """
        from asrkit.transcribe.bulk.layout import Layout
        from asrkit.transcribe.bulk.workers import ENDED, Workers

        def failed(recording: Recording) -> Row:
            return _row(recording, Transcript(path=recording.sound.path, error=ENDED))

        return Workers(
            self.layout or Layout(threads=self.threads),
            transcriber,
            failed,
            split=members,
            advance=advance,
            method="fork" if self.layout else "spawn",
        )


def _row(recording: Recording, transcript: Transcript) -> Row:
    """The result of one recording, which depends on its transcript only."""
    row = {"id": recording.id, "start_s": recording.sound.start_s}
    return row | summary(transcript) | {"error": transcript.error}


def _write(path: Path, results: Sequence[Row]) -> None:
    """Write the results of a shard, whole or not at all."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in results)
    with atomic(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


def rows(folder: str | Path) -> Iterator[Row]:
    """Yield the results of all shards in a folder, shard by shard.

    Args:
        folder: The --out of a run.

    Raises:
        ValueError: A result is damaged.
    """
    for path in sorted(Path(folder).glob(f"{PREFIX}*.jsonl")):
        try:
            with path.open(encoding="utf-8") as file:
                for row in map(json.loads, file):
                    if not {"id", "audio_s", "error"} <= {*row}:
                        raise ValueError
                    yield row
        except (ValueError, TypeError):
            message = f"out: expected a result of asrkit, got something else in {path}."
            raise ValueError(f"{message} Remove it: the same command makes it again.") from None


@dataclass(frozen=True, kw_only=True)
class Report:
    """The state of a folder of results after a run.

    Args:
        shards: Number of shards in the plan.
        done: Number of shards that have a result.
        transcribed_s: Seconds of audio that this run transcribed.
        recordings: Number of recordings in all results.
        failed: Number of recordings with an error.
        audio_s: Seconds of audio in all results.
    """

    shards: int
    done: int
    transcribed_s: float
    recordings: int
    failed: int
    audio_s: float


def run(
    planned: ShardPlan,
    *,
    part: tuple[int, int] = (0, 1),
    device: str = "cpu",
    executor: Executor | None = None,
    progress: bool = False,
) -> Report:
    """Transcribe every shard of a part that has no result yet.

    Parts may run at the same time, on one machine or on several that share the folder. A run that
    was stopped for any reason resumes when it is called again. A worker that ends is replaced, and
    its shard is transcribed again, recording by recording. A recording that ends its worker twice
    is an error.

    Args:
        planned: The plan, as `plan_shards` makes it.
        part: (K, N): every N-th shard from shard K on, K from 0.
        device: Where each worker computes: cpu, cuda or cuda:N.
        executor: Where shards are transcribed; None: in one spawned worker on this machine.
        progress: Show errors and progress on stderr; once a minute if that is not a terminal.

    Raises:
        ValueError: There is no such part, this part is already running, the model has changed since
            the plan was made, or a result is damaged.
        RuntimeError: Workers end again and again, or Ray fails.
        OSError: A result cannot be written.
    """
    number, parts = part
    expect(0 <= number < parts, "part", "K/N with K from 0 to N - 1", f"{number}/{parts}")
    running = f"out: part {number}/{parts} of {planned.out} is being transcribed already."
    with lock(planned.out / f".part-{number}-of-{parts}", message=running):
        todo = [shard for shard in planned.shards[number::parts] if not planned.done(shard)]
        transcriber = ShardTranscriber(planned.plan, planned.head.fingerprint, device)
        executor = executor or LocalWorkers()
        transcribed_s = 0.0
        todo_s = sum(shard.planned_s for shard in todo)
        with progress_bar(todo_s, show=progress and bool(todo)) as bar:
            finished = executor.results(transcriber, todo, bar.update) if todo else ()
            for index, results in finished:
                _write(planned.result(todo[index]), results)
                for row in results:
                    if progress and row["error"]:
                        bar.write(f"{row['id']}: {row['error']}", file=sys.stderr)
                audio_s = sum(row["audio_s"] for row in results)
                bar.total = round(bar.total + audio_s - todo[index].planned_s)
                transcribed_s += audio_s
    return _report(planned, transcribed_s)


def _report(planned: ShardPlan, transcribed_s: float) -> Report:
    """Count all results in the folder of a plan."""
    recordings, failed, audio_s = 0, 0, 0.0
    for row in rows(planned.out):
        recordings += 1
        failed += bool(row["error"])
        audio_s += row["audio_s"]
    return Report(
        shards=len(planned.shards),
        done=sum(map(planned.done, planned.shards)),
        transcribed_s=round(transcribed_s, 2),
        recordings=recordings,
        failed=failed,
        audio_s=round(audio_s, 2),
    )
