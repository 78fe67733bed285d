"""Losses, decoders, encoders and engines of other packages, each in its own process, run by the
Python that `make peers` set up.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders import Hypotheses
from asrkit.shapes import expect
from asrkit.workbench.measure.comparison import Answer, RemoteArm
from benchmarks.peers import peer_losses
from benchmarks.peers.peer_decoders import GRAPHS, LOOPS
from benchmarks.peers.peer_encoders import PEERS as ENCODERS
from benchmarks.peers.peer_encoders import sketch
from benchmarks.peers.peer_worker import COPY

CHECKOUT = Path(__file__).resolve().parents[2]
PYTHON = CHECKOUT / ".venv-peers/bin/python"
WORKER = "benchmarks.peers.peer_worker"
NAMES = {  # kind of a request: peers that can answer it
    "rnnt": ("fast_rnnt", "warprnnt_numba", "nemo_numba", "nemo_pytorch"),
    "rnnt-large": ("fast_rnnt", "nemo_numba"),  # NeMo's others are no faster than nemo_numba
    "tdt": ("transformers_tdt",),
    "rnnt-greedy": LOOPS[:1],
    "tdt-greedy": LOOPS[:1],
    "rnnt-greedy-loops": LOOPS,
    "tdt-greedy-loops": (LOOPS[0], LOOPS[2]),
    "rnnt-greedy-cuda": (LOOPS[0], GRAPHS),
    "tdt-greedy-cuda": (LOOPS[0], GRAPHS),
    "rnnt-greedy-loops-cuda": (*LOOPS, GRAPHS),
    "tdt-greedy-loops-cuda": (LOOPS[0], LOOPS[2], GRAPHS),
    "encoder": (*ENCODERS,),
    "jasper-engines-bfloat16": ("openvino_bfloat16",),
    "jasper-engines-float32": ("openvino_float32", "onnxruntime_float32"),
    "engines-float32": ("openvino_float32", "onnxruntime_float32"),
    "engines-bfloat16": ("openvino_bfloat16",),
    "engines-int8": ("openvino_int8", "onnxruntime_int8"),
}


def digest(result: Any, logits: Tensor | None) -> tuple[Tensor, ...]:
    """The part of a result that a peer sends back to be compared.

    Args:
        result: Hypotheses, (cost, gradient) of a loss, or (frames, lengths) of an encoder.
        logits: logits of a loss; else None.

    Returns:
        For hypotheses: labels, lengths and frames, as scores differ between packages. For a loss:
        `peer_losses.digest`. For an encoder: a sketch of the frames, and their lengths.
    """
    if isinstance(result, Hypotheses):
        return result.labels, result.lengths, result.frames
    if logits is None:
        return sketch(*result), result[1]
    return peer_losses.digest(result, logits)


@dataclass(frozen=True, kw_only=True)
class Peer(RemoteArm):
    """An arm that sends one request to a peer's process.

    Attributes:
        process: process that answers each line with a line.
        name: name of the peer.
        request: fields of every request.
        version: package and its version.
    """

    process: subprocess.Popen[str]
    name: str
    request: Mapping[str, Any]
    version: str = ""

    def request_answer(self, do: str) -> dict[str, Any]:
        """The answer to "prepare", "time" or "observe".

        Raises:
            RuntimeError: the peer failed, or its process ended.
        """
        assert self.process.stdin and self.process.stdout
        request = {"threads": torch.get_num_threads(), **self.request, "do": do}
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            answer = json.loads(self.process.stdout.readline() or '{"error": "its process ended"}')
        except BrokenPipeError:
            answer = {"error": "its process ended"}
        if "error" in answer:
            raise RuntimeError(f"peer {self.name}: {answer['error']}")
        return answer

    def __call__(self, observe: bool = False) -> Answer:
        answer = self.request_answer("observe" if observe else "time")
        return Answer(
            wall_ms=answer["wall_ms"],
            cpu_ms=answer["cpu_ms"],
            digest=tuple(torch.tensor(part) for part in answer.get("digest", ())),
            peak_B=answer.get("peak_B"),
        )


class Peers:
    """The installed peers. Each starts at its first request, and all end with the `with` block.

    Args:
        python: interpreter that runs them; None: .venv-peers, or this one if build/peers exists.
        names: names of the peers by kind of request.
        worker: module that answers requests.
    """

    def __init__(
        self,
        python: str | None = None,
        names: Mapping[str, tuple[str, ...]] = NAMES,
        worker: str = WORKER,
    ) -> None:
        if python is None and not PYTHON.exists() and COPY.is_dir():
            python = sys.executable
        self.python = Path(python or PYTHON)
        self.names = names
        self.worker = worker
        expect(
            self.python.exists(),
            "peers",
            "the environment .venv-peers",
            "none",
            "`make peers` installs it.",
        )
        self.running: dict[str, Peer | None] = {}

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *_: object) -> None:
        self._end([*self.running])

    def arms(self, kind: str, **request: Any) -> dict[str, Peer]:
        """An arm for each peer of a kind, a key of NAMES; one that fails is reported on standard
        error and left out.
        """
        names = self.names.get(kind, ())
        missing = [name for name in names if name not in self.running]
        started = {name: self._start(name, request) for name in missing}  # they import in parallel
        for name, peer in started.items():
            self.running[name] = _ready(peer)
        peers = {name: self.running[name] for name in names}
        return {name: replace(peer, request=request) for name, peer in peers.items() if peer}

    def end(self, kind: str) -> None:
        """End the peers of a kind, to free their memory; a later request starts them again."""
        self._end([name for name in self.names.get(kind, ()) if name in self.running])

    def _end(self, names: list[str]) -> None:
        for name in names:
            peer = self.running.pop(name)
            if peer:
                peer.process.communicate()  # closes its standard input, which ends it

    def _start(self, name: str, request: Mapping[str, Any]) -> Peer:
        process = subprocess.Popen(
            [str(self.python), "-W", "ignore", "-m", self.worker, name],
            env=worker_environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return Peer(process=process, name=name, request=request)


def worker_environment() -> dict[str, str]:
    """The environment of a worker, which imports this checkout first."""
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _ready(peer: Peer) -> Peer | None:
    """The peer with its version once it is prepared; None, and a line on standard error, if that
    fails.
    """
    try:
        return replace(peer, version=peer.request_answer("prepare")["version"])
    except RuntimeError as error:
        print(f"{error}; left out. `make peers` installs all but fast_rnnt.", file=sys.stderr)
        peer.process.communicate()
        return None
