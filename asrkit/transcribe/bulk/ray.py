"""Shards transcribed by actors of a Ray cluster.

Ray Data gives shards to a pool of actors, one at a time. It restarts an actor that has ended on a
node that still runs, and gives its shard to another actor. Each actor transcribes in a worker
process, as `run` does on one machine, so a recording that ends the worker does not end the actor.
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
from asrkit.transcribe.bulk.shards import LocalWorkers, Row, Shard, ShardTranscriber
from asrkit.transcribe.progress import Advance

ANSWER_S = 30.0  # the time within which a cluster has to accept a connection


@dataclass(frozen=True, kw_only=True)
class RayCluster:
    """An executor of `asrkit.transcribe.bulk.shards.run`: the actors of a Ray cluster.

    All nodes must have the model and the recordings under the same paths, and the same asrkit. An
    actor takes `threads` CPUs, and a GPU if the device is cuda.

    Args:
        address: Address for `ray.init`: HOST:PORT of the cluster, or "local" for a cluster that
            starts here and ends with the run; None: $RAY_ADDRESS, else the cluster of this machine,
            else as "local".
        actors: Number of actors; None: as many as the cluster has room for, but at most one for
            each shard.
        threads: CPU threads of each actor; None: one CPU, and torch's default of threads.

    Raises:
        ValueError: Ray is not installed, or `actors` is not a positive number.
    """

    address: str | None = None
    actors: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.actors is not None:
            expect(whole(self.actors, 1), "actors", "1 or more", repr(self.actors))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray.data  # noqa: F401
        except ImportError as error:
            remedy = "pip install 'ray[data]', or pass --part K/N, which needs no Ray."
            raise ValueError(f"on: expected Ray Data, got {message(error)}. {remedy}") from None

    def results(
        self, transcriber: ShardTranscriber, shards: Sequence[Shard], advance: Advance
    ) -> Iterator[tuple[int, list[Row]]]:
        """Yield (index of a shard, its results) as shards are finished.

        Args:
            transcriber: The function of each actor's worker. Its device is "cpu" or "cuda".
            shards: At least one shard.
            advance: Called with the seconds of audio of each shard that is finished.

        Raises:
            ValueError: The device is a GPU with a number.
            RuntimeError: The cluster cannot be joined, has no room, or fails.
        """
        device, remedy = transcriber.device, "Ray gives each actor its GPU."
        expect(device in ("cpu", "cuda"), "device", "cpu or cuda on Ray", device, remedy)
        import ray

        rows = [{"number": number, **shard._asdict()} for number, shard in enumerate(shards)]
        need = {"CPU": self.threads or 1} | ({"GPU": 1} if device == "cuda" else {})
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
                    fn_constructor_args=(transcriber, self.threads),
                    batch_size=1,
                    concurrency=actors,
                    num_cpus=need["CPU"],
                    num_gpus=need.get("GPU", 0),
                )
                for answer in answers.iter_rows():
                    results = json.loads(answer["results"])
                    advance(sum(row["audio_s"] for row in results))
                    yield answer["number"], results
        except ValueError:
            raise
        except Exception as error:  # any failure of Ray is reported in one line
            why = getattr(error, "cause", None) or error  # the error that an actor raised
            text = f"Ray failed: {type(why).__name__}: {message(why)[:400]}"
            raise RuntimeError(text) from None


@contextlib.contextmanager
def _joined(address: str | None) -> Iterator[None]:
    """Connect to a cluster until the block ends. Ray prints little, and only to stderr.

    Args:
        address: Address for `ray.init`.
    """
    import ray

    place = (address or os.environ.get("RAY_ADDRESS", "")).rpartition("/")[2]
    url = urlsplit(f"//{place}")
    if url.port:  # Ray itself would try for minutes without a message
        socket.create_connection((url.hostname, url.port), ANSWER_S).close()
    with contextlib.redirect_stdout(sys.stderr):
        quiet = {"log_to_driver": False, "include_dashboard": False}
        ray.init(address=address, logging_level=logging.ERROR, **quiet)
        for name in ("ray", "ray.data"):  # Ray's log files have everything
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
        transcriber: The function of the worker.
        threads: Threads of the worker.
    """

    def __init__(self, transcriber: ShardTranscriber, threads: int | None) -> None:
        self.workers = LocalWorkers(threads=threads).workers(transcriber, lambda audio_s: None)
        self.workers.__enter__()  # the worker ends with the actor

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The results of the only shard of a batch, as JSON.

        Args:
            batch: The fields of the shard, and its `number`.
        """
        shard = Shard(*(batch[name][0] for name in Shard._fields))
        ((_, results),) = self.workers.results([shard.recordings()])
        return {"number": batch["number"], "results": [json.dumps(results)]}
