"""A package of others in a process of its own, run by the Python of `make peers`: a request a line
in, an answer a line out.

    $ python peer_worker.py warprnnt_numba
    {"shape": [1, 4, 3, 5], "durations": [], "threads": 1, "do": "observe", "memory": true}
    {"wall_ms": ..., "cpu_ms": ..., "digest": [...], "peak_B": ..., "version": "..."}

The tables PEERS of the files peer_*.py hold what there is: by name a package, and a function that
takes the rest of a request and makes the call that is timed, and what makes an answer of its
result. What a request asks for is made once, and kept until another is asked for. A request to
"prepare" ends there, one to "time" calls, and one to "observe" answers with the result too: a
digest to compare ours with, and with "memory" the peak beyond what was held before. It is the
process's own, for torch's profiler takes gigabytes to follow losses that make a tensor a node.
With "device": "cuda" a call is timed by events on an idle device, without "cpu_ms".

What fails answers {"error": ...}. Of asrkit no more is imported than what reads checkpoints and
writes engines' files, so that these share its names of weights. NeMo is found in the folder
build/peers too: a GPU's machine without `make peers` needs no more than

    pip install --no-deps --target build/peers nemo_toolkit==3.0.0 packaging
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

CHECKOUT = Path(__file__).resolve().parents[2]
COPY = CHECKOUT / "build/peers"
Request = dict[str, Any]


class Server:
    """Answers requests to one peer.

    Args:
        package: whose version the answers name.
        prepare: makes of a request the call and what makes an answer of its result.
    """

    def __init__(self, package: str, prepare: Callable[..., Any]) -> None:
        self.version = f"{package} {version(package)}"
        self.prepare = prepare
        self.prepared: Request = {}
        self.call: Any = None
        self.answer: Any = None

    def __call__(self, request: Request) -> Request:
        """The answer to one request."""
        torch.set_num_threads(request.pop("threads"))
        do = request.pop("do")
        memory = request.pop("memory", False) and do == "observe"
        if request != self.prepared:
            self.call = self.answer = None  # the memory of one at a time
            self.prepared = {}
            self.call, self.answer = self.prepare(**request)
            self.prepared = request
        if do == "prepare":
            return {"version": self.version}
        held_B = _resident("VmRSS", forget=True) if memory else None
        result, times = timed(self.call, request.get("device", "cpu"))
        answer = {"version": self.version, **times}
        if held_B is not None:
            answer["peak_B"] = max(0, (_resident("VmHWM") or 0) - held_B)
        if do == "observe":
            answer |= self.answer(result)
        return answer


def timed(call: Callable[[], Any], device: str) -> tuple[Any, dict[str, float | None]]:
    """What the call returns; milliseconds on the clock and, on a CPU, of all threads."""
    if device != "cuda":
        wall_start = time.perf_counter_ns()
        cpu_start = time.process_time_ns()
        result = call()
        cpu_ns = time.process_time_ns() - cpu_start
        wall_ns = time.perf_counter_ns() - wall_start
        return result, {"wall_ms": wall_ns / 1e6, "cpu_ms": cpu_ns / 1e6}
    with torch.cuda.device(device):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return result, {"wall_ms": start.elapsed_time(end), "cpu_ms": None}


def _resident(field: str, forget: bool = False) -> int | None:
    """Bytes of memory this process holds (VmRSS), or held at most (VmHWM) since it was last asked
    to forget; None but on Linux.
    """
    try:
        if forget:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    (line,) = [line for line in status.splitlines() if line.startswith(field)]
    return 1024 * int(line.split()[1])


def main(peer: str) -> None:
    """Answer until the requests end. What a peer prints goes to standard error."""
    sys.path += [str(COPY), str(CHECKOUT)]
    import peer_decoders
    import peer_encoders
    import peer_engines
    import peer_losses

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    files = (peer_losses, peer_decoders, peer_encoders, peer_engines)
    (found,) = [file.PEERS[peer] for file in files if peer in file.PEERS]
    serve = None
    for line in sys.stdin:
        try:
            serve = serve or Server(*found)
            answer = serve(json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
