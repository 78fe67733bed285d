"""The interfaces of the coming workers.py, shards.py and ray.py, over the code of today."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from asrkit.transcribe.bulk import Machine, RayActors, Report, Task, load_plan, plan
from asrkit.transcribe.bulk import run as run_with
from asrkit.transcribe.processes import Layout, choose_layout, transcribe_in_processes

__all__ = [
    "Layout",
    "Machine",
    "RayCluster",
    "Task",
    "choose_layout",
    "load_plan",
    "plan",
    "run",
    "transcribe_in_workers",
]


@dataclass(frozen=True)
class RayCluster:
    """A cluster of Ray."""

    address: str | None = None
    actors: int | None = None


def transcribe_in_workers(*args: Any, **how: Any) -> Iterator[Any]:
    """Yield transcripts that the processes of a layout make."""
    return transcribe_in_processes(*args, **how)


def run(
    planned: Any,
    *,
    workers: Layout | None = None,
    cluster: RayCluster | None = None,
    **how: Any,
) -> Report:
    """Run what is missing of a plan."""
    if cluster is not None:
        return run_with(
            planned, executor=RayActors(address=cluster.address, actors=cluster.actors), **how
        )
    if workers is not None:
        from asrkit.transcribe.bulk.forked import in_processes

        return run_with(planned, executor=partial(in_processes, layout=workers), **how)
    return run_with(planned, **how)
