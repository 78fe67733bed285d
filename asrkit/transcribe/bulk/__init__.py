"""Bulk transcription: millions of recordings in shards, on one machine or many.

`plan` cuts what is to be transcribed into shards, `run` transcribes those that have no result yet,
and `rows` reads the results. A shard's result is one file, whose name is a hash of model, settings
and recordings, written whole or not at all: a shard is done when its file is there. So a run that
was killed goes on by being called again, and loses and doubles nothing.

>>> task = Task(model=Path("models/mine"))  # doctest: +SKIP
>>> report = run(plan(["talks/"], task, "text"))  # doctest: +SKIP
"""

from asrkit.transcribe.bulk.planning import Plan, Shard, load_plan, plan
from asrkit.transcribe.bulk.ray_actors import RayActors
from asrkit.transcribe.bulk.results import Counts, rows
from asrkit.transcribe.bulk.running import Executor, Report, run
from asrkit.transcribe.bulk.tasks import Machine, Task
from asrkit.transcribe.bulk.workers import Event

__all__ = [
    "Counts",
    "Event",
    "Executor",
    "Machine",
    "Plan",
    "RayActors",
    "Report",
    "Shard",
    "Task",
    "load_plan",
    "plan",
    "rows",
    "run",
]
