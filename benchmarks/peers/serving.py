"""The worker's side of a peer process: reads one JSON request per line, writes one JSON answer per
line.

It imports no torch, because some peers run without it.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Message = dict[str, Any]


def serve(answer: Callable[[Message], Message]) -> None:
    """Answer requests until standard input ends.

    An exception becomes the answer {"error": ...}. What the peer prints goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            message = answer(json.loads(line))
        except Exception as error:
            message = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(message), file=answers, flush=True)


def timed(call: Callable[[], Any]) -> tuple[Any, Message]:
    """The result of a call, with its wall time and the CPU time of all threads."""
    wall_start = time.perf_counter_ns()
    cpu_start = time.process_time_ns()
    result = call()
    cpu_ns = time.process_time_ns() - cpu_start
    wall_ns = time.perf_counter_ns() - wall_start
    return result, {"wall_ms": wall_ns / 1e6, "cpu_ms": cpu_ns / 1e6}


def resident_B(field: str, reset: bool = False) -> int | None:
    """Memory of this process in bytes; None except on Linux.

    Args:
        field: "VmRSS" for the current size, "VmHWM" for the peak.
        reset: reset the peak to the current size first.
    """
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    (line,) = [line for line in status.splitlines() if line.startswith(field)]
    return 1024 * int(line.split()[1])
