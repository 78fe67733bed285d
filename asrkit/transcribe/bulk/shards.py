"""One shard transcribed: its recordings, its result, whatever happens on the way.

Whoever calls `ShardTranscriber.transcribe` again for the same shard, in this process or another, on
this machine or another, ends with the same file: exactly once needs nothing else.
"""

import contextlib
import json
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from asrkit.files import lock
from asrkit.shapes import expect
from asrkit.transcribe import Recognizer, Transcript, transcribe
from asrkit.transcribe.bulk import containers, results
from asrkit.transcribe.bulk.containers import Entry, Sound
from asrkit.transcribe.bulk.planning import Plan, Shard, version
from asrkit.transcribe.bulk.results import Counts, Row
from asrkit.transcribe.bulk.tasks import Machine, key, load, windows_on

TRIES = 2  # of a shard as a whole, then of each of its recordings alone
ENDED = "audio: reading or transcribing it ended the process."


class PoisonedDeviceError(Exception):
    """A CUDA error after which nothing runs any more in this process: it has to end."""


class ShardTranscriber:
    """A loaded model that transcribes shards of one plan.

    Args:
        plan: As `load_plan` returns it.
        machine: Device and threads of this process; None: one CPU, as torch takes it.
        progress: Called with seconds of audio as they are finished.

    Raises:
        ValueError: The model or the asrkit here is not the one of the plan.
    """

    def __init__(
        self,
        plan: Plan,
        machine: Machine | None = None,
        *,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.plan = plan
        machine = machine or Machine()
        self.windows = windows_on(machine, plan.task.windows)
        self.progress = progress
        wanted = f"version {plan.version}, which made the plan in {plan.out}"
        same = version() == plan.version
        expect(same, "asrkit", wanted, version(), "Install that one, or name another folder.")
        self.checkpoint = load(plan.task, machine)
        found = key(plan.task, self.checkpoint)
        wanted = f"the model of the plan in {plan.out}"
        expect(found == plan.made_by, "model", wanted, f"another in {plan.task.model}")
        config = plan.task.config
        self.recognizer = Recognizer.from_checkpoint(self.checkpoint, config, in_place=True)

    def transcribe(self, shard: Shard) -> Counts | None:
        """The counts of a shard's result, which is written unless it is there.

        A recording that cannot be read is a row with an error. A shard that ended its process TRIES
        times is transcribed recording by recording, and each one that ends the process as often
        becomes an error.

        Args:
            shard: Of the plan.

        Returns:
            The counts; None if another process is transcribing this shard now.

        Raises:
            PoisonedDeviceError: The process has to end, and the shard to be transcribed again.
            OSError: The result cannot be written.
        """
        result = self.plan.result(shard)
        work = self.plan.work / shard.name
        if result.exists():
            return results.count([result])
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(lock(work))
            except ValueError:
                return None
            if result.exists():  # since somebody else held the lock
                return results.count([result])
            for torn in result.parent.glob(f".{result.stem}-????????{result.suffix}"):
                torn.unlink()  # what a killed process was writing
            rows = self._rows(shard, work)
            try:
                results.write(result, rows)
            except OSError as error:
                why = error.strerror or error
                raise OSError(f"{result} cannot be written: {why}. Make room and go on.") from None
            shutil.rmtree(work, ignore_errors=True)
        return results.count([result])

    def _rows(self, shard: Shard, work: Path) -> list[Row]:
        """The results of a shard: at once, or one by one where that ended the process before."""
        recordings = self.plan.recordings(shard)
        entries = (entry for one in recordings for entry in containers.entries(one))
        steps = _Steps(work / "steps")
        if steps.begin("shard"):
            return [*self._transcripts(entries)]
        return self._one_by_one(entries, steps, work / "rows.jsonl")

    def _one_by_one(self, entries: Iterable[Entry], steps: "_Steps", kept: Path) -> list[Row]:
        """The results of all entries, each transcribed alone and kept at once."""
        rows = _whole_rows(kept)
        for number, entry in enumerate(entries):
            if number < len(rows):
                continue
            if steps.begin(str(number)):
                (row,) = self._transcripts([entry])
            else:
                row = self._row(entry, Transcript(path=entry.sound.path, error=ENDED))
            rows.append(row)
            with kept.open("ab") as file:
                file.write(json.dumps(row).encode() + b"\n")
        return rows

    def _transcripts(self, entries: Iterable[Entry]) -> Iterator[Row]:
        """Yield the result of each entry, in order."""
        drawn: deque[Entry] = deque()

        def sounds() -> Iterator[Sound]:
            for entry in entries:
                drawn.append(entry)
                yield entry.sound

        transcripts = transcribe(
            self.checkpoint, sounds(), options=self.windows, recognizer=self.recognizer
        )
        for transcript in transcripts:
            if "CUDA error" in transcript.error:  # lack of memory is another one
                raise PoisonedDeviceError(transcript.error)
            if self.progress is not None:
                self.progress(transcript.audio_s)
            yield self._row(drawn.popleft(), transcript)

    def _row(self, entry: Entry, transcript: Transcript) -> Row:
        return results.row(entry, transcript, timestamps=self.windows.timestamps)


class _Steps:
    """A log of what was begun: what stands there and is not done ended its process.

    Args:
        file: Has the name of a step on each line.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.begun = Counter(file.read_text().split() if file.exists() else [])

    def begin(self, step: str) -> bool:
        """Log a step; False, and nothing is logged, where it was begun TRIES times before."""
        if self.begun[step] >= TRIES:
            return False
        with self.file.open("a") as file:
            file.write(f"{step}\n")
        return True


def _whole_rows(kept: Path) -> list[Row]:
    """Rows that were written whole; what a crash tore is cut off."""
    if not kept.exists():
        return []
    whole, newline, _ = kept.read_bytes().rpartition(b"\n")
    kept.write_bytes(whole + newline)
    return [json.loads(line) for line in whole.splitlines()]
