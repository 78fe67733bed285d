"""Training by several processes of this machine, under torch's elastic agent in this process.

Nothing listens but on loopback: the agent and the ranks find each other through files in a folder
that only this user can read, and gloo connects them over the loopback interface.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from asrkit.runtime import usable_cores
from asrkit.shapes import expect
from asrkit.training.processes import STORE, was_started_as_rank

FOLDER = "ASRKIT_RANKS"  # the folder through which ranks and their agent speak
RESTARTS = 3  # of all ranks, when one has failed
ERROR = "error"  # the file in it with the error that restarts would not mend
STOPPED = "stopped"  # the file in it that says that a rank was asked to stop


def check_ranks(ranks: int | None, lanes: int | None, device: str) -> int:
    """Lanes of a run.

    Args:
        ranks: Processes to start; None for none.
        lanes: Asked for; None for as many as there are ranks.
        device: "cpu" or "cuda".

    Raises:
        ValueError: The processes cannot be started here, or do not divide the lanes.
    """
    if ranks is not None:
        started = was_started_as_rank() and FOLDER not in os.environ
        remedy = "torchrun --nproc-per-node says how many."
        expect(not started, "ranks", "no --ranks under torchrun", ranks, remedy)
        most = usable_cores()
        what = "cores"
        if device.startswith("cuda"):
            most = torch.cuda.device_count()
            what = "GPUs"
        expect(1 <= ranks <= most, "ranks", f"from 1 to the {most} {what} here", ranks)
    processes = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    if lanes is None:
        return processes
    wanted = f"a multiple of the {processes} ranks"
    expect(lanes >= 1 and lanes % processes == 0, "lanes", wanted, lanes)
    return lanes


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run `asrkit` with these arguments as `ranks` processes; they are restarted when one fails.

    Args:
        arguments: Of each process, the command first.
        ranks: How many.

    Returns:
        An exit code: 0 when all have ended well; 128 and the number of the signal that asked to
        stop.

    Raises:
        ValueError: A rank found an argument or its input wrong.
        RuntimeError: Ranks have failed once more than they are restarted.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="asrkit-ranks-") as name:  # mode 0700
        folder = Path(name)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id="asrkit",
            rdzv_backend="c10d",
            rdzv_endpoint=str(folder / "agent"),
            rdzv_configs={"store_type": "file"},
            max_restarts=RESTARTS,
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        )
        with _environment(_loopback(folder)):
            try:
                elastic_launch(config, sys.executable)("-m", "asrkit", *arguments)
            except SignalException as asked:
                return 128 + asked.sigval
            except ChildFailedError as error:
                rank, failure = error.get_first_failure()
                raise RuntimeError(
                    f"rank {rank} ended with exit code {failure.exitcode}, and so did {RESTARTS} "
                    "restarts. Its error stands above."
                ) from None
        if (folder / ERROR).exists():
            raise ValueError((folder / ERROR).read_text())
        if (folder / STOPPED).exists():
            return 128 + signal.SIGTERM
    return 0


def note_error(error: Exception) -> bool:
    """Tell the agent of an error that a restart would not mend, so that all ranks end.

    Args:
        error: Of this rank. One that only follows from the end of another rank is passed over
            when that one has told.

    Returns:
        Whether the agent knows now, so that this rank can end without a word.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return False
    file = Path(folder) / ERROR
    if isinstance(error, ValueError | OSError) and not file.exists():
        file.write_text(str(error))
    return file.exists()


def note_stop() -> None:
    """Tell the agent that this run was asked to stop, and has saved."""
    folder = os.environ.get(FOLDER)
    if folder is not None:
        (Path(folder) / STOPPED).touch()


def _loopback(folder: Path) -> dict[str, str]:
    """Variables that keep ranks on loopback, and have each attempt meet in a file of its own."""
    interface = "lo"
    if sys.platform == "darwin":
        interface = "lo0"
    return {
        FOLDER: str(folder),
        STORE: str(folder / "ranks"),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        # else the agent opens a TCP store on all interfaces, which also outlives restarts
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a block."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
