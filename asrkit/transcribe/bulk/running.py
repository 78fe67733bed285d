"""A run: the shards of a part that are still missing, heard by whatever hears shards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from asrkit.files import lock
from asrkit.shapes import expect, whole
from asrkit.transcribe.bulk.planning import Plan, Shard
from asrkit.transcribe.bulk.progress import Progress
from asrkit.transcribe.bulk.results import Counts, Tally
from asrkit.transcribe.bulk.tasks import Machine
from asrkit.transcribe.bulk.workers import Event, in_a_process

# What hears shards: it takes each at least once, on as many machines as it likes, and yields what
# happens. It needs no memory of its own, because a result that is there is not heard again.
Executor = Callable[[Plan, Sequence[Shard], Machine], Iterator[Event]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The state of a plan after a run.

    Args:
        shards: All of the plan.
        done: Those whose results are there, of all parts.
        missing: Those of this part without a result.
        counts: Of all results that are there.
        heard_s: Seconds of audio that this run heard: of no shard that others heard, and twice what
            it heard again because a process had ended.
    """

    shards: int
    done: int
    missing: int
    counts: Counts
    heard_s: float


def run(
    plan: Plan,
    *,
    part: tuple[int, int] = (0, 1),
    machine: Machine | None = None,
    executor: Executor = in_a_process,
    progress: bool = False,
) -> Report:
    """Hear every shard of a part that has no result yet.

    Parts may run at the same time, on one machine or on several that share the folder. A run that
    was stopped, however it was, goes on where it was: call it again.

    Args:
        plan: As `plan` makes it.
        part: (K, N): of all shards the K-th and every N-th after it, K from 0.
        machine: How each process works; None: one CPU, as torch takes it.
        executor: What hears the shards; by default one process here, started again when a
            recording ends it.
        progress: Say on stderr how far it is.

    Raises:
        ValueError: There is no such part, or this part is running already.
        RuntimeError: The shards cannot be heard here.
    """
    expect_part(part)
    number, parts = part
    name = f"{number}-of-{parts}"
    running = f"out: part {number}/{parts} of {plan.out} is being transcribed already."
    with lock(plan.work / f"part-{name}", refused=running):
        tally = Tally(plan.out, plan.work, name)
        mine = plan.shards[number::parts]
        todo = missing(plan, part)
        heard_s = 0.0
        if todo:
            heard_s = _hear(plan, mine, todo, machine or Machine(), executor, progress)
        done = plan.done()
        there = [shard for shard in plan.shards if shard.name in done]
        counts = tally.total([plan.result(shard) for shard in there])
        return Report(
            shards=len(plan.shards),
            done=len(done),
            missing=sum(shard.name not in done for shard in mine),
            counts=counts,
            heard_s=heard_s,
        )


def missing(plan: Plan, part: tuple[int, int]) -> list[Shard]:
    """The shards of a part that have no result yet, in the order of the plan.

    Args:
        plan: As `plan` makes it.
        part: (K, N), as `run` takes it.

    Raises:
        ValueError: There is no such part.
    """
    expect_part(part)
    number, parts = part
    done = plan.done()
    return [shard for shard in plan.shards[number::parts] if shard.name not in done]


def expect_part(part: tuple[int, int]) -> None:
    """ValueError unless there is such a part.

    Args:
        part: (K, N), as `run` takes it.
    """
    number, parts = part
    expect(whole(parts, 1), "part", "K/N with N of 1 or more", f"{number}/{parts}")
    expect(whole(number, 0, parts - 1), "part", f"K/{parts} with K in 0..{parts - 1}", number)


def _hear(
    plan: Plan,
    mine: Sequence[Shard],
    todo: Sequence[Shard],
    machine: Machine,
    executor: Executor,
    show: bool,
) -> float:
    """Hear the shards `todo` of a part; returns the seconds of audio that were heard."""
    planned_s = {shard.name: shard.planned_s for shard in todo}
    before_s = sum(shard.planned_s for shard in mine) - sum(planned_s.values())
    with Progress(before_s + sum(planned_s.values()), before_s, show=show) as progress:
        for event in executor(plan, todo, machine):
            progress.heard(event.heard_s, event.failed)
            if event.shard:
                progress.finished(planned_s[event.shard])
    return progress.heard_s
