"""Shards transcribed by actors of a Ray cluster.

Ray Data hands shards to a pool of actors, one at a time, starts an actor that ended again, on a
node that is left, and gives its shard to another one. An actor transcribes in a worker beside it,
as `run` does on one machine: a recording that ends the worker does not end the actor.
"""

import contextlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asrkit.shapes import expect, message, whole
from asrkit.transcribe.shards import Row, Shard, ShardTranscriber, transcribed

NEEDED = ("ray", "pyarrow", "pandas")  # the last two by Ray Data; plain Ray installs none of them
INSTEAD = "or pass --part K/N, which needs no Ray."


@dataclass(frozen=True, kw_only=True)
class RayCluster:
    """A Ray cluster, whose actors transcribe the shards of `asrkit.transcribe.shards.run`.

    Nodes have to see model and recordings under the same paths, and need the same asrkit. An actor
    takes `Machine.threads` CPUs, 1 where that is None, and a GPU where `Machine.device` is cuda.

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
        fine = self.actors is None or whole(self.actors, 1)
        expect(fine, "actors", "1 or more", repr(self.actors))

    def transcribe(
        self, transcriber: ShardTranscriber, shards: Sequence[Shard]
    ) -> Iterator[tuple[Shard, list[Row]]]:
        """Yield each shard with its results as it is done.

        Args:
            transcriber: What each actor does. Its device is "cpu" or "cuda".
            shards: At least one.

        Raises:
            ValueError: The device is a GPU by number, there is no room, or the model of a node is
                not that of the plan.
            RuntimeError: The cluster cannot be joined, or cannot go on.
        """
        machine = transcriber.machine
        known = machine.device in ("cpu", "cuda")
        remedy = "Ray gives each actor its GPU."
        expect(known, "device", "cpu or cuda on Ray", machine.device, remedy)
        need = {"CPU": float(machine.threads or 1), "GPU": float(machine.device == "cuda")}
        with _joined(self.address) as ray:
            room = sum(_room(node, need) for node in ray.nodes())
            actors = min(self.actors or max(1, room), len(shards))
            each = f"{need['CPU']:g} CPU and {need['GPU']:g} GPU each"
            expect(room >= actors, "actors", f"room for {actors} with {each}", f"room for {room}")
            rows = [{"number": number, **shard._asdict()} for number, shard in enumerate(shards)]
            dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
            answers = dataset.map_batches(
                ShardActor,
                fn_constructor_args=(transcriber,),
                batch_size=1,
                concurrency=actors,
                num_cpus=need["CPU"],
                num_gpus=need["GPU"],
            )
            try:
                for answer in answers.iter_rows():
                    yield shards[answer["number"]], json.loads(answer["results"])
            except ray.exceptions.RayError as error:
                why = getattr(error, "cause", None) or error  # what an actor raised
                text = f"Ray cannot go on: {type(why).__name__}: {message(why)[:400]}"
                raise RuntimeError(f"{text} The same command goes on from here.") from None


def _room(node: Mapping[str, Any], need: Mapping[str, float]) -> int:
    """How many actors fit on a node."""
    there = node["Resources"] if node["Alive"] else {}
    return min(int(there.get(name, 0.0) / amount) for name, amount in need.items() if amount)


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
            got = f"{type(error).__name__}: {message(error)[:400]}"
            raise RuntimeError(f"{wanted}, got {got}. Start it, {INSTEAD}") from None
        for name in ("ray", "ray.data"):  # Ray's log files have the rest
            logging.getLogger(name).setLevel(logging.ERROR)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_no_progress_timeout_s = -1  # a shard may take longer than half an hour
        try:
            yield ray
        finally:
            ray.shutdown()


class ShardActor:
    """Transcribes shards on a node, in a worker that loads the model once.

    Args:
        transcriber: Of the run.
    """

    def __init__(self, transcriber: ShardTranscriber) -> None:
        self.stack = contextlib.ExitStack()  # what it holds lives as long as the actor
        self.workers = self.stack.enter_context(transcriber.workers())

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The results of the one shard of a batch, as JSON.

        Args:
            batch: Its fields, and its `number`.
        """
        fields = {name: values[0] for name, values in batch.items()}
        number = int(fields.pop("number"))
        ((_, results),) = transcribed(self.workers, [Shard(**fields)])
        return {"number": [number], "results": [json.dumps(results)]}
