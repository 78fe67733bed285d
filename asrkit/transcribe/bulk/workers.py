"""Shards transcribed by a process of this machine, which is started again when one ends it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import asrkit
from asrkit.transcribe.bulk.planning import Plan, Shard
from asrkit.transcribe.bulk.results import Counts
from asrkit.transcribe.bulk.tasks import Machine, as_json
from asrkit.transcribe.processes.pool import how_it_ended

WORKER = [sys.executable, "-m", "asrkit.transcribe.bulk.worker"]
# Threads that spin while they wait slow down whoever else is there; a missing GPU is no error.
QUIET = {"OMP_WAIT_POLICY": "passive", "KINETO_LOG_LEVEL": "99"}
MOST_DEATHS = 100  # of processes in a row that finish no shard
MOST_STILLBORN = 3  # of processes in a row that end before they have loaded the model


class Event(NamedTuple):
    """Something that happened to the shards of a run.

    Args:
        shard: Its name, once its result is there or somebody else is transcribing it; "" before.
        counts: Of its result; None where somebody else is transcribing it.
        transcribed_s: Seconds of audio that were transcribed since the event before.
    """

    shard: str = ""
    counts: Counts | None = None
    transcribed_s: float = 0.0


def in_a_process(plan: Plan, shards: Sequence[Shard], machine: Machine) -> Iterator[Event]:
    """Transcribe shards one after the other in a process of this machine, yielding what happens.

    Args:
        plan: Of the shards.
        shards: Those to transcribe.
        machine: How the process works.

    Raises:
        RuntimeError: The process cannot work here, or ends again and again.
    """
    with RestartedWorker(plan.out, machine) as worker:
        for shard in shards:
            yield from worker.transcribe(shard.name)


class _DeathError(Exception):
    """The process has ended: by "signal 9", or "exit code 1"."""


class RestartedWorker:
    """A process that transcribes shards, started when it is needed, and again when one ends it.

    It is killed when the block ends.

    Args:
        out: Folder of the plan.
        machine: How it works.
    """

    def __init__(self, out: Path, machine: Machine) -> None:
        self.out = out
        self.machine = machine
        self.process: Any = None
        self.deaths = 0  # since a shard was done
        self.stillborn = 0  # since a process was ready

    def __enter__(self) -> "RestartedWorker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def transcribe(self, name: str) -> Iterator[Event]:
        """Yield what happens until a shard is done, that last.

        Args:
            name: Of the shard.

        Raises:
            RuntimeError: The process cannot work here, or ends again and again.
        """
        while True:
            try:
                yield from self._events(name)
            except _DeathError as death:
                self._end()
                self.deaths += 1
                if self.deaths >= MOST_DEATHS or self.stillborn >= MOST_STILLBORN:
                    message = f"the process that transcribes ended {self.deaths} times ({death})."
                    raise RuntimeError(f"{message} The same command goes on from here.") from None
            else:
                self.deaths = 0
                return

    def _events(self, name: str) -> Iterator[Event]:
        """Yield what a process that lives says of a shard, its end last."""
        if self.process is None:
            self._start()
        try:
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()
        except OSError:  # it has ended
            raise self._death() from None
        while "shard" not in (event := self._next()):
            yield Event(transcribed_s=event["transcribed_s"])
        counts = event["counts"]
        yield Event(shard=name, counts=None if counts is None else Counts(**counts))

    def _start(self) -> None:
        """Start the process, and wait until the model is loaded."""
        package = str(Path(asrkit.__file__).parents[1])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [*WORKER, str(self.out), json.dumps(as_json(self.machine))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**QUIET, **os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the one who waits
        )
        self.stillborn += 1
        self._next()
        self.stillborn = 0

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _next(self) -> dict[str, Any]:
        """The next event; RuntimeError where it says that it cannot go on."""
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            raise self._death()
        event = json.loads(line)
        if "stop" in event:
            raise RuntimeError(event["stop"])
        return event

    def _death(self) -> _DeathError:
        return _DeathError(how_it_ended(self.process.wait()))
