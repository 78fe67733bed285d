"""The interfaces of the coming workers.py, shards.py and ray.py, over the code of today."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any


def __getattr__(name: str) -> Any:
    from asrkit.transcribe import bulk
    from asrkit.transcribe.bulk import inputs

    return getattr(inputs if name in ("CONTAINERS", "MANIFESTS") else bulk, name)


@dataclass(frozen=True)
class RayCluster:
    """A cluster of Ray."""

    address: str | None = None
    actors: int | None = None


def choose_layout(*args: Any, **how: Any) -> Any:
    """The layout of processes."""
    from asrkit.transcribe.processes import choose_layout as choose

    return choose(*args, **how)


def transcribe_in_workers(*args: Any, **how: Any) -> Iterator[Any]:
    """Yield transcripts that the processes of a layout make."""
    from asrkit.transcribe.processes import transcribe_in_processes

    return transcribe_in_processes(*args, **how)


def run(
    planned: Any,
    *,
    workers: Any = None,
    cluster: RayCluster | None = None,
    **how: Any,
) -> Any:
    """Run what is missing of a plan."""
    from asrkit.transcribe.bulk import RayActors
    from asrkit.transcribe.bulk import run as run_with

    if cluster is not None:
        return run_with(
            planned, executor=RayActors(address=cluster.address, actors=cluster.actors), **how
        )
    if workers is not None:
        from asrkit.transcribe.bulk.forked import in_processes

        return run_with(planned, executor=partial(in_processes, layout=workers), **how)
    return run_with(planned, **how)
