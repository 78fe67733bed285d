"""Shards heard by several processes of this machine that share one model."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from asrkit.transcribe.bulk.hearing import Hearer
from asrkit.transcribe.bulk.planning import Plan, Shard
from asrkit.transcribe.bulk.tasks import Machine
from asrkit.transcribe.bulk.workers import Event
from asrkit.transcribe.processes import Channel, Ended, Layout, Pool, Said
from asrkit.transcribe.processes.recordings import to_stderr


def in_processes(
    plan: Plan,
    shards: Sequence[Shard],
    machine: Machine,
    *,
    layout: Layout,
    tell: Callable[[str], None] = to_stderr,
) -> Iterator[Event]:
    """Hear shards in processes forked from this one, each one shard at a time.

    A shard whose process ended is heard by another; see `Hearer.hear` for what becomes of a
    recording that ends them. `functools.partial(in_processes, layout=...)` is an executor of `run`.

    Args:
        plan: Of the shards.
        shards: Those to hear.
        machine: How each process works; the layout says with how many threads.
        layout: Processes, cores and threads.
        tell: Called with a line about a process that ended.

    Raises:
        RuntimeError: The processes cannot work here, or end again and again.
    """
    torch.set_num_threads(1)  # threads do not outlive a fork
    todo = deque(shards)

    def draw(held: list[Shard]) -> Shard | None:
        if held or not todo:
            return None
        return todo.popleft()

    work = partial(_hear, Hearer(plan, machine, watch=True))
    with Pool(layout, work, draw) as pool:
        for event in pool.events():
            if isinstance(event, Said):
                yield event.value
            elif isinstance(event, Ended):
                todo.extendleft(event.jobs)
                tell(_lost(event))


def _hear(hearer: Hearer, channel: Channel) -> None:
    """What each process does: one shard after the other."""

    def progress(audio_s: float, failed: int) -> None:
        channel.say(Event(heard_s=audio_s, failed=failed))

    hearer.progress = progress
    for shard in channel.jobs():
        counts = hearer.hear(shard)
        channel.say(Event(shard=shard.name, counts=counts))
        channel.done()


def _lost(event: Ended) -> str:
    """What happened to a process, in a line."""
    if not event.jobs:
        return f"{event}; it held nothing"
    return f"{event}; shard {event.jobs[0].name} is heard again"
