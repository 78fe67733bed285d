"""Shards transcribed by several processes of this machine that share one model."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from asrkit.transcribe.bulk.planning import Plan, Shard
from asrkit.transcribe.bulk.shards import ShardTranscriber
from asrkit.transcribe.bulk.tasks import Machine
from asrkit.transcribe.bulk.workers import Event
from asrkit.transcribe.processes import Channel, Ended, Layout, Message, Pool
from asrkit.transcribe.processes.recordings import to_stderr


def in_processes(
    plan: Plan,
    shards: Sequence[Shard],
    machine: Machine,
    *,
    layout: Layout,
    warn: Callable[[str], None] = to_stderr,
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

    def draw(held: list[Shard]) -> Shard | None:
        if held or not todo:
            return None
        return todo.popleft()

    work = partial(_transcribe, ShardTranscriber(plan, machine))
    with Pool(layout, work, draw) as pool:
        for event in pool.events():
            if isinstance(event, Message):
                yield event.value
            elif isinstance(event, Ended):
                todo.extendleft(event.jobs)
                again = [f"shard {job.name} is transcribed again" for job in event.jobs]
                warn(f"{event}; {', '.join(again) or 'it held nothing'}")


def _transcribe(transcriber: ShardTranscriber, channel: Channel) -> None:
    """What each process does: one shard after the other."""

    def progress(audio_s: float) -> None:
        channel.send(Event(transcribed_s=audio_s))

    transcriber.progress = progress
    for shard in channel.jobs():
        counts = transcriber.transcribe(shard)
        channel.send(Event(shard=shard.name, counts=counts))
        channel.done()
