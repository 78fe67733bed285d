"""Checks before work begins: the device, torch's threads, and whether results can be written."""

import os
import sys
import tempfile
from pathlib import Path

from asrkit.shapes import expect, whole

MAX_THREADS = 1024  # torch itself has no limit


def prepare_torch(device: str, threads: int | None = None) -> None:
    """Check --device and --threads, and set torch's environment and number of threads.

    torch is imported only if it has to be, so that a command with nothing left to do is fast.

    Args:
        device: Value of --device.
        threads: Value of --threads; None keeps torch's own choice.

    Raises:
        ValueError: The device is not there, or the number of threads is out of range.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # plug-ins for other devices
    # How long a thread spins before it sleeps. Measured with a Whisper on two cores: on an idle
    # machine the default of 300,000 turns is no faster than 5,000, and sleeping at once takes 1.4
    # times as long. With two other processes on the cores, the default takes twice as long.
    if sys.platform != "linux":  # another OpenMP, where this was not measured
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    elif "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    fits = device == "cpu"
    if device.partition(":")[0] == "cuda":
        import torch

        fits = torch.cuda.is_available()
    expect(fits, "device", "cpu, or cuda where there is a GPU", device, "asrkit doctor says more.")
    if threads is not None:
        expect(whole(threads, 1, MAX_THREADS), "threads", f"1 to {MAX_THREADS:,}", threads)
        import torch

        torch.set_num_threads(threads)


def check_writable(path: Path, *, folder: bool = True) -> None:
    """Raise OSError before the work, rather than after it, if a file or folder is not writable.

    A test file is written to the nearest folder that exists, and removed.

    Args:
        path: A file or a folder, which may not exist yet.
        folder: Whether `path` is a folder.

    Raises:
        ValueError: `path` exists and is of the other kind.
    """
    fits = not path.exists() or path.is_dir() == folder
    expect(fits, "out", "a folder" if folder else "a file", repr(str(path)))
    path = path.absolute()
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        if path.is_file():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}") from error
