"""Shards transcribed by actors of a Ray cluster.

Ray Data hands the names of shards to a pool of actors, one at a time; everything else is in the
folder of the plan, which all nodes have to share. An actor transcribes its shards in a process
beside it, as `workers.py` does on one machine: a recording that ends that process does not end the
actor. An actor that ends nevertheless is started again by Ray, on a node that is left, and its
shard is transcribed again. A shard is done when its result is there.
"""

import contextlib
import importlib.util
import json
import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asrkit.shapes import expect, whole
from asrkit.transcribe.bulk.planning import Plan, Shard
from asrkit.transcribe.bulk.results import Counts
from asrkit.transcribe.bulk.tasks import Machine, as_json, from_json
from asrkit.transcribe.bulk.workers import Event, RestartedWorker

NEEDED = ("ray", "pyarrow", "pandas")  # the last two by Ray Data; plain Ray installs none of them
INSTEAD = "or pass --part K/N, which needs no Ray."
MOST_ACTORS = 10_000


def class_and_message(error: BaseException) -> str:
    """What an error says that asrkit did not expect: "KeyError: 'x'"."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


@dataclass(frozen=True, kw_only=True)
class RayActors:
    """An executor for `bulk.run`: shards are transcribed by actors of a Ray cluster.

    Nodes have to see the folders of plan, model and recordings under the same paths, and need the
    same asrkit. An actor takes `Machine.threads` CPUs, 1 where that is None, and a GPU where
    `Machine.device` is cuda.

    Args:
        address: As `ray.init` takes it: HOST:PORT of the cluster, or "local" for one that is
            started here and ends with the run; None: $RAY_ADDRESS.
        actors: How many; None: as many as the cluster has room for, and no more than shards.

    Raises:
        ValueError: Ray is not installed, there is no address, or a number makes no sense.
    """

    address: str | None = None
    actors: int | None = None

    def __post_init__(self) -> None:
        absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        remedy = f"pip install 'asrkit[scale]', {INSTEAD}"
        expect(not absent, "on", "Ray Data", f"no {' and no '.join(absent)}", remedy)
        address = self.address or os.environ.get("RAY_ADDRESS")
        wanted = "HOST:PORT of a Ray cluster, or local to start one here"
        remedy = f"Start a cluster (docs/scale.md), {INSTEAD}"
        expect(bool(address), "address", wanted, "none", remedy)
        object.__setattr__(self, "address", address)
        fine = self.actors is None or whole(self.actors, 1, MOST_ACTORS)
        expect(fine, "actors", f"1 to {MOST_ACTORS:,}", repr(self.actors))

    def __call__(self, plan: Plan, shards: Sequence[Shard], machine: Machine) -> Iterator[Event]:
        """Transcribe shards on the cluster, yielding each as it is done.

        Args:
            plan: Of the shards.
            shards: Those to transcribe.
            machine: How each actor works. Its device is "cpu" or "cuda".

        Raises:
            ValueError: The device is a GPU by number, or there is no room.
            RuntimeError: The cluster cannot be joined, or the shards cannot be transcribed there.
        """
        need = self.need(machine)
        machine = replace(machine, threads=machine.threads or 1)
        with _joined(self.address) as ray:
            todo = [shard.name for shard in shards]
            while todo:
                number = self._number(ray.nodes(), need, len(todo))
                busy = []
                for event in _events(ray, plan, todo, machine, need, number):
                    if event.counts is None:
                        busy.append(event.shard)
                    else:
                        yield event
                if len(busy) == len(todo):
                    break  # somebody else is transcribing all of them
                todo = busy
            yield from map(Event, todo)

    def need(self, machine: Machine) -> dict[str, float]:
        """CPUs and GPUs of an actor, by Ray's names.

        Args:
            machine: How it works.

        Raises:
            ValueError: The device is a GPU by number.
        """
        known = machine.device in ("cpu", "cuda")
        remedy = "Ray gives each actor its GPU."
        expect(known, "device", "cpu or cuda on Ray", machine.device, remedy)
        need = {"CPU": float(machine.threads or 1)}
        if machine.device == "cuda":
            need["GPU"] = 1.0
        return need

    def _number(
        self, nodes: Sequence[Mapping[str, Any]], need: Mapping[str, float], shards: int
    ) -> int:
        """How many actors work: no more than shards, and as many as the nodes have room for."""
        room = sum(
            min(int(node["Resources"].get(name, 0.0) / amount) for name, amount in need.items())
            for node in nodes
            if node["Alive"]
        )
        each = " and ".join(f"{amount:g} {name}" for name, amount in need.items())
        wanted = min(self.actors or 1, shards)
        expect(room >= wanted, "actors", f"room for {wanted} with {each} each", f"room for {room}")
        return min(self.actors or room, shards)


@contextlib.contextmanager
def _joined(address: str | None) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster until the block ends; Ray prints to stderr.

    Args:
        address: As `ray.init` takes it.

    Raises:
        RuntimeError: The cluster cannot be joined.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    import ray.data

    options = {"include_dashboard": False} if address == "local" else {}
    with contextlib.redirect_stdout(sys.stderr):
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except Exception as error:  # whatever keeps Ray from working is one line
            wanted = f"address: expected a Ray cluster that can be joined at {address}"
            message = f"{wanted}, got {class_and_message(error)}. Start it, {INSTEAD}"
            raise RuntimeError(message) from None
        for name in ("ray", "ray.data"):  # Ray's log files have the rest
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield ray
        finally:
            ray.shutdown()


def _events(
    ray: Any,
    plan: Plan,
    names: Sequence[str],
    machine: Machine,
    need: Mapping[str, float],
    number: int,
) -> Iterator[Event]:
    """Yield each shard as it is done, without counts where somebody else transcribes it."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_no_progress_timeout_s = -1  # a shard may take longer than half an hour
    # a node that goes down while an actor starts there is no reason to end
    context.max_consecutive_actor_init_deaths = 3
    rows = ray.data.from_items([{"name": name} for name in names], override_num_blocks=len(names))
    answers = rows.map_batches(
        ShardActor,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=number, max_tasks_in_flight_per_actor=1),
        num_cpus=need["CPU"],
        num_gpus=need.get("GPU"),
        fn_constructor_args=(str(plan.out.absolute()), json.dumps(as_json(machine))),
    )
    try:
        for row in answers.iter_rows():
            answer = json.loads(row["answer"])
            if "stop" in answer:
                raise RuntimeError(answer["stop"])
            if answer["counts"] is not None:
                answer["counts"] = Counts(**answer["counts"])
            yield Event(**answer)
    except ray.exceptions.RayError as error:
        message = f"Ray cannot go on: {class_and_message(error)}"
        raise RuntimeError(f"{message} The same command goes on from here.") from None


class ShardActor:
    """Transcribes shards on a node, in a process of its own; the model is loaded once.

    Args:
        out: Folder of the plan.
        machine: A `Machine`, as JSON.
    """

    def __init__(self, out: str, machine: str) -> None:
        self.worker = RestartedWorker(Path(out), from_json(Machine, json.loads(machine)))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        """The answer for the one shard of a batch, as JSON. It raises nothing.

        Args:
            batch: The shard's `name`.
        """
        (name,) = map(str, batch["name"])
        try:
            events = [*self.worker.transcribe(name)]
        except Exception as error:  # on another machine no traceback would be seen
            why = str(error) if isinstance(error, RuntimeError) else class_and_message(error)
            return {"answer": [json.dumps({"stop": f"{why} ({platform.node()})"})]}
        counts = events[-1].counts
        answer = {
            "shard": name,
            "counts": None if counts is None else asdict(counts),
            "transcribed_s": sum(event.transcribed_s for event in events),
        }
        return {"answer": [json.dumps(answer)]}
