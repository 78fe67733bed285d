"""Shards heard by actors of a Ray cluster.

Ray Data hands the names of shards to a pool of actors, one at a time; everything else is in the
folder of the plan, which all nodes have to share. An actor hears its shards in a process beside it,
as `workers.py` does on one machine: a recording that ends that process does not end the actor. An
actor that ends nevertheless is started again by Ray, on a node that is left, and its shard is heard
again. Nothing of Ray has to be remembered: a shard is done when its result is there.
"""

import contextlib
import json
import platform
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from asrkit.shapes import expect, is_finite, whole
from asrkit.transcribe.bulk.planning import WORK, Plan, Shard
from asrkit.transcribe.bulk.ray_cluster import (
    ClusterLostError,
    address_of,
    connected,
    expect_ray,
    room,
    warn,
    why_silent,
)
from asrkit.transcribe.bulk.results import Counts
from asrkit.transcribe.bulk.tasks import Machine, as_json, from_json
from asrkit.transcribe.bulk.workers import Event, RestartedWorker
from asrkit.transcribe.endings import class_and_message

MOST_STARTS = 20  # of one shard in one run: a node that is lost has it heard again
MOST_ACTORS = 10_000
START_S = 600.0  # until all actors have to be there
LOOK_S = 10.0  # between looks at nodes and head


@dataclass(frozen=True, kw_only=True)
class RayActors:
    """An executor for `bulk.run`: shards are heard by actors of a Ray cluster.

    Nodes have to see the folders of plan, model and recordings under the same paths, and need the
    same asrkit. An actor takes `Machine.threads` CPUs, 1 where that is None. While shards are
    heard, what this process prints to stdout goes to stderr.

    Args:
        address: HOST:PORT of the cluster; "local": one that is started here and ends with the run;
            None: $RAY_ADDRESS.
        actors: How many; (least, most): Ray adds actors as long as there is room for them; None: as
            many as there is room for, and no more than shards.
        gpus: For each actor, fractions too; None: 1 with `Machine.device` cuda, else 0.

    Raises:
        ValueError: Ray is not installed, there is no address, or a number makes no sense.
    """

    address: str | None = None
    actors: int | tuple[int, int] | None = None
    gpus: float | None = None

    def __post_init__(self) -> None:
        expect_ray()
        object.__setattr__(self, "address", address_of(self.address))
        wanted = f"N, or MIN:MAX, of 1 to {MOST_ACTORS:,}"
        expect(_makes_sense(self.actors), "actors", wanted, repr(self.actors))
        fine = self.gpus is None or (is_finite(self.gpus) and 0 <= self.gpus <= MOST_ACTORS)
        expect(fine, "gpus_per_actor", "0 or more GPUs", repr(self.gpus))

    def __call__(self, plan: Plan, shards: Sequence[Shard], machine: Machine) -> Iterator[Event]:
        """Hear shards on the cluster, yielding each as it is done.

        Args:
            plan: Of the shards.
            shards: Those to hear.
            machine: How each actor works. Its device is "cpu" or "cuda".

        Raises:
            ValueError: The device and the GPUs contradict each other, or there is no room.
            RuntimeError: The cluster cannot be joined, or the shards cannot be heard there.
        """
        need = self.need(machine)
        machine = replace(machine, threads=machine.threads or 1)
        todo = {shard.name: shard for shard in shards}
        assert self.address is not None
        with connected(self.address) as ray, _telling_of_nodes(ray):
            while todo:
                busy: dict[str, Shard] = {}
                pool = _Pool(ray, need, self._size(ray, need, len(todo)))
                for event in pool.hear(plan, list(todo), machine):
                    if event.counts is None:
                        busy[event.shard] = todo[event.shard]
                    else:
                        yield event
                left = {name: one for name, one in busy.items() if not plan.result(one).exists()}
                for name in busy.keys() - left.keys():
                    yield Event(name)  # somebody else has heard it
                if len(left) == len(todo):
                    break  # somebody else is hearing all of them
                todo = left
        for name in todo:
            yield Event(name)

    def need(self, machine: Machine) -> dict[str, float]:
        """CPUs and GPUs of an actor, by Ray's names.

        Args:
            machine: How it works.

        Raises:
            ValueError: The device and the GPUs contradict each other.
        """
        known = machine.device in ("cpu", "cuda")
        remedy = "Ray gives each actor its GPU."
        expect(known, "device", "cpu or cuda on Ray", machine.device, remedy)
        on_gpu = machine.device == "cuda"
        gpus = float(on_gpu) if self.gpus is None else float(self.gpus)
        wanted = "more than 0 with --device cuda, and 0 without"
        expect((gpus > 0) == on_gpu, "gpus_per_actor", wanted, f"{gpus:g} with {machine.device}")
        need = {"CPU": float(machine.threads or 1)}
        if gpus > 0:
            need["GPU"] = gpus
        return need

    def _size(self, ray: Any, need: Mapping[str, float], shards: int) -> tuple[int, int]:
        """How many actors there are at least, and at most; no more than shards."""
        if isinstance(self.actors, tuple):
            least, most = (min(number, shards) for number in self.actors)
            return room(ray, need, least, least), most
        if self.actors is None:
            found = min(shards, room(ray, need, 1, None))
        else:
            number = min(self.actors, shards)
            found = room(ray, need, number, number)
        return found, found


def _makes_sense(actors: int | tuple[int, int] | None) -> bool:
    """Whether a pool can have so many actors."""
    if actors is None:
        return True
    if not isinstance(actors, tuple):
        return whole(actors, 1, MOST_ACTORS)
    both = len(actors) == 2 and all(whole(number, 1, MOST_ACTORS) for number in actors)
    return both and actors[0] <= actors[1]


class _Pool:
    """Actors of Ray Data that hear shards.

    Args:
        ray: The module, connected.
        need: CPUs and GPUs of each actor.
        size: How many there are at least, and at most.
    """

    def __init__(self, ray: Any, need: Mapping[str, float], size: tuple[int, int]) -> None:
        self.ray = ray
        self.need = need
        self.least, self.most = size

    def hear(self, plan: Plan, names: list[str], machine: Machine) -> Iterator[Event]:
        """Yield each shard as it is done, without counts where somebody else hears it."""
        data = self.ray.data
        _settle(data.DataContext.get_current())
        rows = data.from_items([{"name": name} for name in names], override_num_blocks=len(names))
        run = secrets.token_hex(4)
        out = str(plan.out.absolute())
        heard = rows.map_batches(
            ShardActor,
            batch_size=1,
            compute=self._strategy(),
            num_cpus=self.need["CPU"],
            num_gpus=self.need.get("GPU"),
            fn_constructor_args=(out, json.dumps(as_json(machine)), run),
        )
        for answer in self._answers(heard):
            if "stop" in answer:
                raise RuntimeError(f"{answer['stop']} ({answer['node']})")
            if answer["counts"] is not None:
                answer["counts"] = Counts(**answer["counts"])
            yield Event(**{name: answer[name] for name in Event._fields})

    def _strategy(self) -> Any:
        """Of the pool. A shard waits for no slow actor, but to grow, Ray has to see some wait."""
        waiting = 1 if self.least == self.most else 2
        return self.ray.data.ActorPoolStrategy(
            min_size=self.least, max_size=self.most, max_tasks_in_flight_per_actor=waiting
        )

    def _answers(self, heard: Any) -> Iterator[dict[str, Any]]:
        """The answers of actors; what keeps Ray from going on is one line.

        Another thread waits for them, for Ray itself says nothing of a head that is lost, and ends
        this process after a minute.
        """
        address = self.ray.get_runtime_context().gcs_address
        answers: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=_pass_on, args=(heard, answers), daemon=True).start()
        while (answer := _next_answer(answers, address)) is not None:
            if isinstance(answer, Exception):
                _expect_head(address)
                message = f"Ray cannot go on: {class_and_message(answer)}"
                raise RuntimeError(f"{message} The same command goes on from here.")
            yield json.loads(answer)


def _pass_on(heard: Any, answers: "SimpleQueue[Any]") -> None:
    """Put the answers of a dataset into a queue; last None, or the error that ended it."""
    last: Exception | None = None
    try:
        for row in heard.iter_rows():
            answers.put(row["answer"])
    except Exception as error:  # Ray's own are of many kinds
        last = error
    answers.put(last)


def _next_answer(answers: "SimpleQueue[Any]", address: str) -> Any:
    """The next answer in a queue; ClusterLostError where the head at `address` is lost first."""
    while True:
        try:
            return answers.get(timeout=LOOK_S)
        except Empty:
            _expect_head(address)


def _expect_head(address: str) -> None:
    """ClusterLostError where nobody answers at `address`, and again nobody a little later."""
    if why_silent(address):
        time.sleep(LOOK_S)
        silence = why_silent(address)
        if silence:
            message = f"the head of the Ray cluster at {address} is lost ({silence})."
            raise ClusterLostError(f"{message} The same command goes on from here, on any cluster.")


def _settle(context: Any) -> None:
    """Change the defaults of Ray Data that do not fit shards that take long."""
    context.enable_progress_bars = False
    context.wait_for_min_actors_s = START_S
    # a shard may take longer than half an hour; workers have a watchdog of their own
    context.execution_no_progress_timeout_s = -1
    # a node that goes down while an actor starts there is no reason to end
    context.max_consecutive_actor_init_deaths = 3


class ShardActor:
    """Hears shards on a node, in a process of its own; the model is loaded once.

    Args:
        out: Folder of the plan.
        machine: A `Machine`, as JSON.
        run: A name of the run.
    """

    def __init__(self, out: str, machine: str, run: str) -> None:
        self.out = Path(out)
        self.run = run
        self.worker = RestartedWorker(self.out, from_json(Machine, json.loads(machine)))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        """The answer for the one shard of a batch, as JSON. It raises nothing.

        Args:
            batch: The shard's `name`.
        """
        (name,) = map(str, batch["name"])
        try:
            self._count(name)
            answer = _together([*self.worker.hear(name)])
        except RuntimeError as error:
            answer = {"stop": str(error)}
        except Exception as error:  # on another machine no traceback would be seen
            answer = {"stop": class_and_message(error)}
        return {"answer": [json.dumps(answer | {"node": platform.node()})]}

    def _count(self, name: str) -> None:
        """RuntimeError where this run has begun a shard MOST_STARTS times.

        Ray starts actors again without end, and a shard that is done is not asked for again.
        """
        log = self.out / WORK / name / f"starts-{self.run}"
        with contextlib.suppress(OSError):  # a full disk: the worker says so
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                file.write(b".")
            if log.stat().st_size > MOST_STARTS:
                message = f"the actors that heard shard {name} ended {MOST_STARTS} times."
                raise RuntimeError(f"{message} The same command goes on from here.")


def _together(events: Sequence[Event]) -> dict[str, Any]:
    """All that happened to one shard as the fields of one event, which JSON can hold."""
    last = events[-1]
    return {
        "shard": last.shard,
        "counts": None if last.counts is None else asdict(last.counts),
        "heard_s": sum(event.heard_s for event in events),
        "failed": sum(event.failed for event in events),
    }


@contextlib.contextmanager
def _telling_of_nodes(ray: Any) -> Iterator[None]:
    """Say on stderr when nodes of the cluster come or go, while the block runs."""
    stopped = threading.Event()

    def watch() -> None:
        with contextlib.suppress(Exception):  # a cluster that is gone: the run says so
            before = _nodes(ray)
            while not stopped.wait(LOOK_S):
                now = _nodes(ray)
                if now != before:
                    warn(f"the Ray cluster has {now} nodes now, it had {before}.")
                before = now

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(1.0)  # a cluster that is gone may not answer


def _nodes(ray: Any) -> int:
    return sum(bool(node["Alive"]) for node in ray.nodes())
