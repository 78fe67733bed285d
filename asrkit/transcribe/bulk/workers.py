"""Shards heard by a process of this machine, which is started again when one of them ends it."""

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
from asrkit.transcribe.endings import Faults, how_it_ended

WORKER = [sys.executable, "-m", "asrkit.transcribe.bulk.worker"]
# Threads that spin while they wait slow down whoever else is there; a missing GPU is no error.
QUIET = {"OMP_WAIT_POLICY": "passive", "KINETO_LOG_LEVEL": "99"}
MOST_DEATHS = 100  # of processes in a row that finish no shard
MOST_STILLBORN = 3  # of processes in a row that end before they have loaded the model


class Event(NamedTuple):
    """Something that happened to the shards of a run.

    Args:
        shard: Its name, once its result is there or somebody else is hearing it; "" before.
        counts: Of its result; None where somebody else is hearing it.
        heard_s: Seconds of audio that were heard since the event before.
        failed: Recordings that failed since then.
    """

    shard: str = ""
    counts: Counts | None = None
    heard_s: float = 0.0
    failed: int = 0


def in_a_process(plan: Plan, shards: Sequence[Shard], machine: Machine) -> Iterator[Event]:
    """Hear shards one after the other in a process of this machine, yielding what happens.

    Args:
        plan: Of the shards.
        shards: Those to hear.
        machine: How the process works.

    Raises:
        RuntimeError: The process cannot work here, or ends again and again.
    """
    with RestartedWorker(plan.out, machine) as worker:
        for shard in shards:
            yield from worker.hear(shard.name)


class RestartedWorker:
    """A process that hears shards, started when it is needed, and again when one of them ends it.

    It is killed when the block ends.

    Args:
        out: Folder of the plan.
        machine: How it works.
    """

    def __init__(self, out: Path, machine: Machine) -> None:
        self.out = out
        self.machine = machine
        self.worker: _Worker | None = None
        self.deaths = 0  # since a shard was done
        self.faults = Faults()  # of these, by an error in asrkit
        self.stillborn = 0

    def __enter__(self) -> "RestartedWorker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def hear(self, name: str) -> Iterator[Event]:
        """Yield what happens until a shard is done, that last.

        Args:
            name: Of the shard.

        Raises:
            RuntimeError: The process cannot work here, or ends again and again.
        """
        while True:
            try:
                yield from self._ready().hear(name)
            except _DeathError as death:
                self._end()
                self._count(death)
            else:
                self.deaths = 0
                self.faults.forget()
                return

    def _ready(self) -> "_Worker":
        """The process, with the model loaded."""
        if self.worker is None:
            self.worker = _Worker(self.out, self.machine)
        if not self.worker.ready:
            self.worker.wait_until_ready()
            self.stillborn = 0
        return self.worker

    def _end(self) -> None:
        if self.worker is not None:
            self.stillborn += not self.worker.ready
            self.worker.kill()
            self.worker = None

    def _count(self, death: "_DeathError") -> None:
        """RuntimeError where the process has ended too often."""
        self.deaths += 1
        if death.trace:
            self.faults.note(death.trace)
        often = self.deaths >= MOST_DEATHS or self.faults.too_many
        if often or self.stillborn >= MOST_STILLBORN:
            times = max(self.deaths, self.stillborn)
            message = f"the process that transcribes ended {times} times ({death})."
            raise RuntimeError(f"{message} The same command goes on from here.") from None


class _DeathError(Exception):
    """The process has ended.

    Args:
        why: "signal 9", "exit code 1", or an error in asrkit.
        trace: The traceback of that error.
    """

    def __init__(self, why: str, trace: str = "") -> None:
        super().__init__(why)
        self.trace = trace


class _Worker:
    """A running process that hears shards.

    Args:
        out: Folder of the plan.
        machine: How it works.
    """

    def __init__(self, out: Path, machine: Machine) -> None:
        package = str(Path(asrkit.__file__).parents[1])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        self.ready = False
        self.process = subprocess.Popen(
            [*WORKER, str(out), json.dumps(as_json(machine))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**QUIET, **os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the one who waits
        )

    def kill(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()

    def wait_until_ready(self) -> None:
        """Wait until the model is loaded."""
        self._next()
        self.ready = True

    def hear(self, name: str) -> Iterator[Event]:
        """Yield what happens until a shard is done, that last."""
        try:
            self._stdin.write(name + "\n")
            self._stdin.flush()
        except OSError:  # it has ended
            raise self._death() from None
        while "shard" not in (event := self._next()):
            yield Event(heard_s=event["heard_s"], failed=event["failed"])
        counts = event["counts"]
        yield Event(shard=name, counts=None if counts is None else Counts(**counts))

    @property
    def _stdin(self) -> Any:
        return self.process.stdin

    def _next(self) -> dict[str, Any]:
        """The next event; RuntimeError where it says that it cannot go on."""
        stream: Any = self.process.stdout
        line = stream.readline()
        if not line.endswith("\n"):
            raise self._death()
        event = json.loads(line)
        if "stop" in event:
            raise RuntimeError(event["stop"])
        if "fault" in event:
            raise _DeathError(event["fault"], event["trace"])
        return event

    def _death(self) -> _DeathError:
        return _DeathError(how_it_ended(self.process.wait()))
