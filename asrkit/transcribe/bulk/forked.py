"""Shards transcribed by several processes of this machine that share one model."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from asrkit.transcribe.bulk.planning import Plan, Shard
from asrkit.transcribe.bulk.shards import ShardTranscriber
from asrkit.transcribe.bulk.tasks import Machine
from asrkit.transcribe.bulk.workers import Event
from asrkit.transcribe.workers import Died, Layout, Workers


def in_processes(
    plan: Plan,
    shards: Sequence[Shard],
    machine: Machine,
    *,
    layout: Layout,
    warn: Callable[[str], None] = print,
) -> Iterator[Event]:
    """Transcribe shards in processes forked from this one, each one shard at a time.

    A shard whose process ended is transcribed by another; `ShardTranscriber.transcribe` says what
    becomes of a recording that ends them. `functools.partial(in_processes, layout=...)` is an
    executor of `run`.

    Args:
        plan: Of the shards.
        shards: Those to transcribe.
        machine: How each process works; the layout says with how many threads.
        layout: Processes, cores and threads.
        warn: Called with a line about a process that ended.

    Raises:
        RuntimeError: The processes cannot work here, or end again and again.
    """
    torch.set_num_threads(1)  # threads do not outlive a fork
    todo = deque(shards)

    def draw() -> tuple[Shard, Shard] | None:
        return (todo[0], todo.popleft()) if todo else None

    with Workers(layout, ShardTranscriber(plan, machine).transcribe) as workers:
        for shard, counts in workers.results(draw):
            if isinstance(counts, Died):
                todo.appendleft(shard)
                warn(f"{counts}; shard {shard.name} is transcribed again")
            else:
                yield Event(shard=shard.name, counts=counts, transcribed_s=counts.audio_s)
