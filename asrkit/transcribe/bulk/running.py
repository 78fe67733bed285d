"""A run: the shards of a part that are still missing, transcribed by an executor."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from asrkit.files import lock
from asrkit.shapes import expect, whole
from asrkit.transcribe.bulk import results
from asrkit.transcribe.bulk.planning import Plan, Shard
from asrkit.transcribe.bulk.results import Counts
from asrkit.transcribe.bulk.tasks import Machine
from asrkit.transcribe.bulk.workers import Event, in_a_process
from asrkit.transcribe.progress import progress_bar

# What transcribes shards: it takes each at least once, on as many machines as it likes, and yields
# what happens. It needs no memory of its own: a result that is there is not made again.
Executor = Callable[[Plan, Sequence[Shard], Machine], Iterator[Event]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The state of a plan after a run.

    Args:
        shards: All of the plan.
        done: Those whose results are there, of all parts.
        missing: Those of this part without a result.
        counts: Of all results that are there.
        transcribed_s: Seconds of audio that this run transcribed: of no shard that others did, and
            twice what it transcribed again because a process had ended.
    """

    shards: int
    done: int
    missing: int
    counts: Counts
    transcribed_s: float


def run(
    plan: Plan,
    *,
    part: tuple[int, int] = (0, 1),
    machine: Machine | None = None,
    executor: Executor = in_a_process,
    progress: bool = False,
) -> Report:
    """Transcribe every shard of a part that has no result yet.

    Parts may run at the same time, on one machine or on several that share the folder. A run that
    was stopped, however it was, goes on where it was: call it again.

    Args:
        plan: As `plan` makes it.
        part: (K, N): of all shards the K-th and every N-th after it, K from 0.
        machine: How each process works; None: one CPU, as torch takes it.
        executor: What transcribes the shards; by default one process here, started again when a
            recording ends it.
        progress: Show on stderr how far it is, once a minute where that is no terminal. Hours are
            those of the plan, where a container's are a guess.

    Raises:
        ValueError: There is no such part, or this part is running already.
        RuntimeError: The shards cannot be transcribed here.
    """
    expect_part(part)
    number, parts = part
    running = f"out: part {number}/{parts} of {plan.out} is being transcribed already."
    with lock(plan.work / f"part-{number}-of-{parts}", refused=running):
        mine = plan.shards[number::parts]
        todo = missing(plan, part)
        total_s = sum(shard.planned_s for shard in mine)
        before_s = total_s - sum(shard.planned_s for shard in todo)
        transcribed_s = 0.0
        with progress_bar(total_s, before_s, show=progress and bool(todo)) as bar:
            for event in executor(plan, todo, machine or Machine()) if todo else ():
                transcribed_s += event.transcribed_s
                bar.update(event.transcribed_s)
        done = plan.done()
        there = [shard for shard in plan.shards if shard.name in done]
        return Report(
            shards=len(plan.shards),
            done=len(done),
            missing=sum(shard.name not in done for shard in mine),
            counts=results.count(plan.result(shard) for shard in there),
            transcribed_s=transcribed_s,
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
