"""Shards transcribed by actors of a Ray cluster.

Ray Data hands shards to a pool of actors, one at a time, starts an actor that ended again, on a
node that is left, and gives its shard to another one. An actor transcribes in a worker beside it,
as `run` does on one machine: a recording that ends the worker does not end the actor.
"""

import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from asrkit.shapes import expect, message, whole
from asrkit.transcribe.shards import Row, Shard, ShardTranscriber, transcribed

ANSWER_S = 30.0  # in which a cluster accepts a connection


@dataclass(frozen=True, kw_only=True)
class RayCluster:
    """A Ray cluster, whose actors transcribe the shards of `asrkit.transcribe.shards.run`.

    Nodes have to see model and recordings under the same paths, and need the same asrkit. An actor
    takes the `threads` of `run` as CPUs, 1 where that is None, and a GPU where `device` is cuda.

    Args:
        address: As `ray.init` takes it: HOST:PORT of the cluster, or "local" for one that is
            started here and ends with the run; None: $RAY_ADDRESS, else the one that this machine
            is in, else as "local".
        actors: How many; None: as many as the cluster has room for, and no more than shards.

    Raises:
        ValueError: Ray is not installed, or `actors` makes no sense.
    """

    address: str | None = None
    actors: int | None = None

    def __post_init__(self) -> None:
        fine = self.actors is None or whole(self.actors, 1)
        expect(fine, "actors", "1 or more", repr(self.actors))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray.data  # noqa: F401
        except ImportError as error:
            remedy = "pip install 'ray[data]', or pass --part K/N, which needs no Ray."
            raise ValueError(f"on: expected Ray Data, got {message(error)}. {remedy}") from None

    def transcribed(
        self, transcriber: ShardTranscriber, shards: Sequence[Shard], threads: int | None
    ) -> Iterator[tuple[int, list[Row]]]:
        """Yield (number of a shard from 0, its results) as shards are done.

        Args:
            transcriber: What each actor does. Its device is "cpu" or "cuda".
            shards: At least one.
            threads: CPUs of each actor.

        Raises:
            ValueError: The device is a GPU by number.
            RuntimeError: The cluster cannot be joined, has no room, or cannot go on.
        """
        wanted, remedy = "cpu or cuda on Ray", "Ray gives each actor its GPU."
        known = transcriber.device in ("cpu", "cuda")
        expect(known, "device", wanted, transcriber.device, remedy)
        import ray

        rows = [{"number": number, **shard._asdict()} for number, shard in enumerate(shards)]
        need = {"CPU": threads or 1} | ({"GPU": 1} if transcriber.device == "cuda" else {})
        try:
            with _joined(self.address):
                room = sum(
                    min(int(node["Resources"].get(name, 0) // each) for name, each in need.items())
                    for node in ray.nodes()
                )
                actors = min(self.actors or max(1, room), len(shards))
                wanted = f"room for {actors} with {need} each"
                expect(room >= actors, "actors", wanted, f"room for {room}")
                answers = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
                    ShardActor,
                    fn_constructor_args=(transcriber, threads),
                    batch_size=1,
                    concurrency=actors,
                    num_cpus=need["CPU"],
                    num_gpus=need.get("GPU", 0),
                )
                for answer in answers.iter_rows():
                    yield answer["number"], json.loads(answer["results"])
        except ValueError:
            raise
        except Exception as error:  # whatever keeps Ray from working is one line
            why = getattr(error, "cause", None) or error  # what an actor raised
            text = f"Ray cannot go on: {type(why).__name__}: {message(why)[:400]}"
            raise RuntimeError(text) from None


@contextlib.contextmanager
def _joined(address: str | None) -> Iterator[None]:
    """Connected to a cluster until the block ends; Ray prints to stderr, and that little.

    Args:
        address: As `ray.init` takes it.
    """
    import ray

    place = (address or os.environ.get("RAY_ADDRESS", "")).rpartition("/")[2]
    url = urlsplit(f"//{place}")
    if url.port:  # Ray would try for minutes, in silence
        socket.create_connection((url.hostname, url.port), ANSWER_S).close()
    with contextlib.redirect_stdout(sys.stderr):
        quiet = {"log_to_driver": False, "include_dashboard": False}
        ray.init(address=address, logging_level=logging.ERROR, **quiet)
        for name in ("ray", "ray.data"):  # Ray's log files have the rest
            logging.getLogger(name).setLevel(logging.ERROR)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_no_progress_timeout_s = -1  # a shard may take longer than half an hour
        try:
            yield
        finally:
            ray.shutdown()


class ShardActor:
    """Transcribes shards on a node, in a worker that loads the model once.

    Args:
        transcriber: Of the run.
        threads: Of the worker.
    """

    def __init__(self, transcriber: ShardTranscriber, threads: int | None) -> None:
        from asrkit.transcribe.workers import Layout, Workers

        workers = Workers(Layout(threads=threads), transcriber, method="spawn")
        self.workers = workers.__enter__()  # the worker ends with the actor

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The results of the one shard of a batch, as JSON.

        Args:
            batch: Its fields, and its `number`.
        """
        shard = Shard(*(batch[name][0] for name in Shard._fields))
        ((_, results),) = transcribed(self.workers, [shard])
        return {"number": batch["number"], "results": [json.dumps(results)]}
