"""What commands share: options, and what has to be set before torch is imported."""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

Commands = dict[
    str, tuple[Any, str, list[tuple[str, dict[str, Any]]]]
]  # what runs, what it does, arguments

# fmt: off
DEVICE = ("--device", {"default": "cpu", "help": "cpu or cuda"})
THREADS = ("--threads", {"type": int, "help": "CPU threads (none: torch's default)"})
QUIET = ("--no-progress", {"action": "store_true", "help": "no progress bars"})
# fmt: on


def prepare(args: argparse.Namespace) -> None:
    """Before torch is imported: OpenMP reads its settings then. --device and --threads are checked
    before any work.
    """
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # torch's profiler calls it an error that there is no GPU
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "passive"
    )  # spinning threads slow two processes on two cores eightfold
    import torch

    from asrkit.shapes import expect

    ok = args.device == "cpu" or (
        args.device.partition(":")[0] == "cuda" and torch.cuda.is_available()
    )
    expect(
        ok, "device", "cpu, or cuda where there is a GPU", args.device, "asrkit doctor says more."
    )
    count = getattr(args, "threads", None)
    expect(count is None or count > 0, "threads", "at least 1", count)
    if count:
        torch.set_num_threads(count)


def writable(path: Path) -> None:
    """OSError before the work, not after it, where `path` cannot be written; nothing is left of the
    attempt.
    """
    try:
        if path.is_file():
            path.open("ab").close()
        tempfile.TemporaryFile(
            dir=next(folder for folder in path.absolute().parents if folder.exists())
        ).close()
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}") from error
