"""The process of one peer, run by the Python that `make peers` set up; see serving.py.

    $ python -m benchmarks.peers.peer_worker warprnnt_numba
    {"shape": [1, 4, 3, 5], "durations": [], "threads": 1, "do": "prepare"}
    {"version": "warprnnt_numba 0.4.1"}
    {"shape": [1, 4, 3, 5], "durations": [], "threads": 1, "do": "observe", "memory": true}
    {"wall_ms": ..., "cpu_ms": ..., "digest": [...], "peak_B": ...}

The tables PEERS of the files peer_*.py list the peers. Each entry has the package, and a function
that takes the rest of a request and returns two functions: the call to time, and one that turns its
result into an answer. Both are kept until a request differs.

"do" is "prepare", "time" or "observe". An observation also answers with a digest of the result to
compare with ours, and with "memory" the peak beyond the memory held before. That peak is the
process's own: torch's profiler takes gigabytes to follow losses that create a tensor per node. With
"device": "cuda" a call is timed by events on an idle device, without "cpu_ms".

Of asrkit only the readers of checkpoints and the writers of engine files are imported, so that both
sides use the same weight names. NeMo may also come from the folder build/peers: a GPU machine
without `make peers` needs no more than

    pip install --no-deps --target build/peers nemo_toolkit==3.0.0 packaging
"""

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.serving import Message, resident_B, serve, timed

COPY = Path(__file__).resolve().parents[2] / "build/peers"


class Server:
    """Answers requests to one peer.

    Args:
        package: the package whose version is reported.
        prepare: takes a request, and returns the call and the function that makes an answer of its
            result.
    """

    def __init__(self, package: str, prepare: Callable[..., Any]) -> None:
        self.package = package
        self.prepare = prepare
        self.prepared: Message = {}
        self.call: Any = None
        self.answer: Any = None

    def __call__(self, request: Message) -> Message:
        """The answer to one request."""
        torch.set_num_threads(request.pop("threads"))
        do = request.pop("do")
        memory = request.pop("memory", False) and do == "observe"
        message: Message = {}
        if do == "prepare":
            message["version"] = f"{self.package} {version(self.package)}"
        if request != self.prepared:
            self.call = self.answer = None  # frees the memory of the request before
            self.prepared = {}
            self.call, self.answer = self.prepare(**request)
            self.prepared = request
        if do == "prepare":
            return message
        held_B = resident_B("VmRSS", reset=True) if memory else None
        timer = timed_on_gpu if request.get("device") == "cuda" else timed
        result, message = timer(self.call)
        if held_B is not None:
            message["peak_B"] = max(0, (resident_B("VmHWM") or 0) - held_B)
        if do == "observe":
            message |= self.answer(result)
        return message


def timed_on_gpu(call: Callable[[], Any]) -> tuple[Any, Message]:
    """The result of a call, with its time by CUDA events."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    result = call()
    end.record()
    end.synchronize()
    return result, {"wall_ms": start.elapsed_time(end), "cpu_ms": None}


def main(peer: str) -> None:
    """Answer requests to the peer of this name."""
    sys.path.append(str(COPY))
    from benchmarks.peers import peer_decoders, peer_encoders, peer_engines, peer_losses

    peers = peer_losses.PEERS | peer_decoders.PEERS | peer_encoders.PEERS | peer_engines.PEERS
    serve(Server(*peers[peer]))


if __name__ == "__main__":
    main(sys.argv[1])
