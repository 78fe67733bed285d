"""One shard heard: its recordings transcribed, its result written, whatever happens on the way.

Whoever calls `Hearer.hear` again for the same shard, in this process or another, on this machine or
another, ends with the same file: exactly once needs nothing else.
"""

import contextlib
import faulthandler
import itertools
import json
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from asrkit.files import lock
from asrkit.shapes import expect
from asrkit.transcribe import Recognizer, Transcript, transcribe
from asrkit.transcribe.bulk import containers, results
from asrkit.transcribe.bulk.containers import Entry
from asrkit.transcribe.bulk.inputs import Recording
from asrkit.transcribe.bulk.planning import Plan, Shard, version
from asrkit.transcribe.bulk.results import Counts, Row
from asrkit.transcribe.bulk.tasks import Machine, key, load, windows_on
from asrkit.transcribe.windows import POOL

TRIES = 2  # of a shard as a whole; then its recordings are heard one by one
BLAMED = 2  # so often has one recording to end its process until it is given up
LONGEST_WAIT_S = 1e9  # of the watchdog, 31 years: a timer takes no longer ones
UNKNOWN_LONGEST_S = 3600.0  # taken for the longest recording, where its length is not known
ENDED = "audio: reading or hearing it ended the process, or took too long."


class PoisonedDeviceError(RuntimeError):
    """A CUDA error after which nothing runs any more in this process: it has to end."""


class Hearer:
    """A loaded model that hears shards of one plan.

    Args:
        plan: As `load_plan` returns it.
        machine: Device, threads and patience of this process; None: one CPU, as torch takes it.
        watch: End this process when no recording is finished for too long (`Machine.hang_s`).
        progress: Called with (seconds of audio, failed recordings) as they are finished.

    Raises:
        ValueError: The model or the asrkit here is not the one of the plan.
    """

    def __init__(
        self,
        plan: Plan,
        machine: Machine | None = None,
        *,
        watch: bool = False,
        progress: Callable[[float, int], None] | None = None,
    ) -> None:
        self.plan = plan
        self.machine = machine or Machine()
        self.windows = windows_on(self.machine, plan.task.windows)
        self.watch = watch
        self.progress = progress
        wanted = f"version {plan.version}, which made the plan in {plan.out}"
        same = version() == plan.version
        expect(same, "asrkit", wanted, version(), "Install that one, or name another folder.")
        self.checkpoint = load(plan.task, self.machine)
        found = key(plan.task, self.checkpoint)
        wanted = f"the model of the plan in {plan.out}"
        expect(found == plan.made_by, "model", wanted, f"another in {plan.task.model}")
        config = plan.task.config
        self.recognizer = Recognizer.from_checkpoint(self.checkpoint, config, in_place=True)

    def hear(self, shard: Shard) -> Counts | None:
        """The counts of a shard's result, which is written unless it is there.

        A recording that cannot be heard is a row with an error. A shard that ended its process
        TRIES times is heard recording by recording, and each one that ends the process BLAMED times
        becomes an error.

        Args:
            shard: Of the plan.

        Returns:
            The counts; None if another process is hearing this shard now.

        Raises:
            PoisonedDeviceError: The process has to end, and the shard to be heard again.
            OSError: The result cannot be written.
        """
        result = self.plan.result(shard)
        work = self.plan.work / shard.name
        if result.exists():
            return results.counts_of(result)
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(lock(work))
            except ValueError:
                return None
            if result.exists():  # since somebody else held the lock
                return results.counts_of(result)
            for torn in result.parent.glob(f".{result.stem}-????????{result.suffix}"):
                torn.unlink()  # what a killed process was writing
            recordings = self.plan.recordings(shard)
            rows = self._rows(recordings, work)
            try:
                counts = results.write(result, rows)
            except OSError as error:
                why = error.strerror or error
                raise OSError(f"{result} cannot be written: {why}. Make room and go on.") from None
            shutil.rmtree(work, ignore_errors=True)
        return counts

    def _rows(self, recordings: list[Recording], work: Path) -> list[Row]:
        """The results of a shard: at once, or one by one where that ended the process before."""
        attempts = work / "attempts"
        before = attempts.stat().st_size if attempts.exists() else 0
        with attempts.open("ab") as file:
            file.write(b".")
        with self._watchdog(recordings, work) as watchdog:

            def heard(some: Iterable[Entry]) -> Iterator[Row]:
                return self._heard(some, watchdog)

            if before >= TRIES:
                return _OneByOne(work, self.windows.timestamps, heard).rows(recordings)
            queue = (entry for one in recordings for entry in containers.entries(one))
            return [*heard(queue)]

    def _watchdog(self, recordings: list[Recording], work: Path) -> "Watchdog":
        longest_s = max(_longest_s(one) for one in recordings)
        ahead_s = POOL * self.windows.batch_s
        limit_s = self.machine.hang_s + longest_s + ahead_s
        return Watchdog(limit_s, work / "hung", watch=self.watch)

    def _heard(self, queue: Iterable[Entry], watchdog: "Watchdog") -> Iterator[Row]:
        """Yield the result of each entry, in order."""
        drawn: deque[Entry] = deque()

        def sounds() -> Iterator[containers.Sound]:
            for entry in queue:
                drawn.append(entry)
                yield entry.sound

        transcripts = transcribe(
            self.checkpoint, sounds(), options=self.windows, recognizer=self.recognizer
        )
        for transcript in transcripts:
            _expect_sane_device(transcript)
            watchdog.restart()
            if self.progress is not None:
                self.progress(transcript.audio_s, int(bool(transcript.error)))
            entry = drawn.popleft()
            yield results.row(entry, transcript, timestamps=self.windows.timestamps)


def _longest_s(recording: Recording) -> float:
    """Seconds that a recording, or the longest one of a container, may last."""
    if recording.duration_s is not None:
        return recording.duration_s
    header_failed = recording.state is not None and not recording.is_container
    return 0.0 if header_failed else UNKNOWN_LONGEST_S


def _expect_sane_device(transcript: Transcript) -> None:
    """PoisonedDeviceError for an error of CUDA that is not about memory."""
    if "CUDA error" in transcript.error:
        raise PoisonedDeviceError(transcript.error)


class Watchdog:
    """Ends the process when `restart` is not called for `limit_s`, also in the midst of C code.

    Args:
        limit_s: Seconds; 31 years at most.
        file: Gets the stacks of all threads then.
        watch: False: do nothing.
    """

    def __init__(self, limit_s: float, file: Path, *, watch: bool) -> None:
        self.limit_s = min(limit_s, LONGEST_WAIT_S)
        self.path = file
        self.watch = watch

    def __enter__(self) -> "Watchdog":
        if self.watch:
            self.file = self.path.open("w")
        self.restart()
        return self

    def restart(self) -> None:
        """Wait for `limit_s` again, from now on."""
        if self.watch:
            faulthandler.dump_traceback_later(self.limit_s, exit=True, file=self.file)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.watch:
            faulthandler.cancel_dump_traceback_later()
            self.file.close()


class _OneByOne:
    """Recordings of a shard that ended its process: each is heard alone, and kept at once.

    A log has a line for each step that begins: "read" for the next recording of a container,
    "hear" for what came of it. The last line of a process that ended is what ended it.

    Args:
        work: Folder of results and log.
        timestamps: Results have words.
        hear: Yields the results of entries.
    """

    def __init__(
        self, work: Path, timestamps: bool, hear: Callable[[Iterable[Entry]], Iterator[Row]]
    ) -> None:
        self.kept = work / "rows.jsonl"
        self.log = work / "steps"
        self.timestamps = timestamps
        self.hear = hear
        self.begun: Counter[str] = Counter()
        if self.log.exists():
            self.begun = Counter(self.log.read_text().split("\n"))

    def rows(self, recordings: Sequence[Recording]) -> list[Row]:
        """The results of all recordings, those kept by earlier processes included."""
        rows = self._kept_rows()
        if self.begun["end"]:
            return rows
        queue = (entry for one in recordings for entry in containers.entries(one))
        for number in itertools.count():
            if number == len(rows) and self._reading_ended(number):
                rows.append(self._keep(self._error(_rest_of(recordings[-1]))))
                break  # what comes after it in its container is out of reach
            self._note(f"read {number}")
            entry = next(queue, None)
            if entry is None:
                break
            if number == len(rows):
                rows.append(self._keep(self._row(entry, f"hear {number}")))
        self._note("end")
        return rows

    def _reading_ended(self, number: int) -> bool:
        """Whether to draw this recording has ended the process BLAMED times."""
        return self.begun[f"read {number}"] - self.begun[f"hear {number}"] >= BLAMED

    def _row(self, entry: Entry, step: str) -> Row:
        if self.begun[step] >= BLAMED:
            return self._error(entry)
        self._note(step)
        return next(self.hear([entry]))

    def _error(self, entry: Entry) -> Row:
        transcript = Transcript(path=entry.sound.path, error=ENDED)
        return results.row(entry, transcript, timestamps=self.timestamps)

    def _note(self, step: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{step}\n")

    def _keep(self, row: Row) -> Row:
        with self.kept.open("ab") as file:
            file.write(json.dumps(row).encode() + b"\n")
        return row

    def _kept_rows(self) -> list[Row]:
        """Rows that were written whole; what a crash tore is cut off."""
        if not self.kept.exists():
            return []
        whole, newline, _ = self.kept.read_bytes().rpartition(b"\n")
        self.kept.write_bytes(whole + newline)
        return [json.loads(line) for line in whole.splitlines()]


def _rest_of(container: Recording) -> Entry:
    """The entry that stands for what cannot be drawn from a container."""
    path = Path(container.path)
    return Entry(f"{container.id}/", container.path, 0.0, containers.Sound(path))
