"""What has to be set before torch computes, and where results can be written."""

import os
import sys
import tempfile
from pathlib import Path

from asrkit.shapes import expect, whole

MOST_THREADS = 1024  # torch starts as many as it is told to


def prepare_torch(device: str, threads: int | None = None) -> None:
    """Check --device and --threads, set the environment that torch reads when it is imported, and
    give it the threads.

    Loads torch only where it has to: a command that may have nothing left to do answers at once.

    Args:
        device: As --device has it.
        threads: As --threads has it; None: as many as torch takes.

    Raises:
        ValueError: The device is not there, or the number of threads is out of range.
    """
    # How long a thread spins before it sleeps. A Whisper on two cores: where nothing else runs, the
    # default of 300,000 turns is no faster, and threads that sleep at once take 1.4 times as long.
    # Where two other processes have the cores, the default takes twice as long.
    if sys.platform != "linux":  # another OpenMP, where that is not known
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    elif "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    fits = device == "cpu"
    if device.partition(":")[0] == "cuda":
        import torch

        fits = torch.cuda.is_available()
    expect(fits, "device", "cpu, or cuda where there is a GPU", device, "asrkit doctor says more.")
    if threads is not None:
        expect(whole(threads, 1, MOST_THREADS), "threads", f"1 to {MOST_THREADS:,}", threads)
        import torch

        torch.set_num_threads(threads)


def check_writable(path: Path, *, folder: bool = True) -> None:
    """Raise OSError now, rather than after the work, if a file or folder cannot be written.

    Leaves nothing behind: the test file in the nearest folder that exists is removed.

    Args:
        path: A file or a folder, which may not exist yet.
        folder: Which of them.

    Raises:
        ValueError: There is one of the other kind.
    """
    fits = not path.exists() or path.is_dir() == folder
    expect(fits, "out", "a folder" if folder else "a file", repr(str(path)))
    path = path.absolute()
    nearest = next(one for one in (path, *path.parents) if one.exists())
    try:
        if path.is_file():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}") from error
