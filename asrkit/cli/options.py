"""Options that commands share, and what has to be set before torch is imported."""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

MOST_THREADS = 1024  # torch starts as many as it is told to


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json to `parser`."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the result as JSON on stdout; text for people goes to stderr",
    )


def add_no_progress(parser: argparse.ArgumentParser) -> None:
    """Add --no-progress to `parser`."""
    parser.add_argument("--no-progress", action="store_true", help="show no progress bars")


def add_device(
    group: argparse._ArgumentGroup, *, threads: bool = True, choices: Sequence[str] | None = None
) -> None:
    """Add --device to `group`, and --threads unless `threads` is False.

    Args:
        group: Gets the options.
        threads: Whether the command takes --threads.
        choices: The devices, where it takes no number of a GPU.
    """
    words = "where to compute" if choices else "where to compute: cpu, cuda or cuda:N"
    group.add_argument("--device", default="cpu", choices=choices, help=words)
    if threads:
        group.add_argument(
            "--threads", type=int, metavar="N", help="CPU threads (default: as many as torch takes)"
        )


def add_fields(group: argparse._ArgumentGroup, config: type) -> None:
    """Add an option for each field of a config class: an option that is not given is None.

    Args:
        group: Gets the options.
        config: A dataclass of fields that `asrkit.transcribe.options.described` made.
    """
    hints = get_type_hints(config)
    for one in fields(config):
        flag = one.metadata.get("flag", one.name.replace("_", "-"))
        default = one.metadata.get("shown", one.default)
        text = one.metadata["help"]
        if default is not None and default is not False:
            text += f" (default: {default})"
        kind = hints[one.name]
        if type(None) in get_args(kind):
            kind = get_args(kind)[0]
        how: dict[str, Any] = {"type": kind, "metavar": one.metadata.get("metavar")}
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
            if one.default is False:
                how = {"action": "store_true", "default": None}
        elif get_origin(kind) is Literal:
            how = {"choices": get_args(kind)}
        group.add_argument(f"--{flag}", dest=one.name, help=text, **how)


def given(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """The fields of a config class whose options were given, by name.

    Args:
        args: As the parser returns them.
        config: As `add_fields` took it.
    """
    values = {one.name: getattr(args, one.name) for one in fields(config)}
    return {name: value for name, value in values.items() if value is not None}


def apply_runtime_options(args: argparse.Namespace) -> None:
    """Do what `check_runtime_options` does, then give torch the --threads.

    Call it before anything else imports torch.

    Args:
        args: as the parser returns them.

    Raises:
        ValueError: the device is not there, or the number of threads is not positive.
    """
    check_runtime_options(args)
    threads = getattr(args, "threads", None)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def check_runtime_options(args: argparse.Namespace, *, here: bool = True) -> None:
    """Set the environment that torch reads when it is imported, and check --device and --threads.

    Loads torch only to look for a GPU: a command that may have nothing left to do answers at once.

    Args:
        args: as the parser returns them.
        here: False: the device is another machine's, so it need not be here.

    Raises:
        ValueError: the device is not there, or the number of threads is not positive.
    """
    # torch's profiler reports a missing GPU as an error
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # threads that spin while they wait make two processes on two cores eight times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from asrkit.shapes import expect

    expect(
        _is_a_device(args.device, here=here),
        "device",
        "cpu, or cuda where there is a GPU",
        args.device,
        "asrkit doctor says more.",
    )
    threads = getattr(args, "threads", None)
    if threads is not None:
        expect(threads > 0, "threads", "at least 1", threads)
        expect(threads <= MOST_THREADS, "threads", f"at most {MOST_THREADS:,}", threads)


def _is_a_device(device: str, *, here: bool) -> bool:
    """Whether `device` is a CPU or a GPU; `here`: one that torch finds on this machine."""
    if device.partition(":")[0] != "cuda":
        return device == "cpu"
    if not here:
        return True
    import torch

    return torch.cuda.is_available()


def check_writable(path: Path, *, folder: bool = False) -> None:
    """Raise OSError now, rather than after the work, if `path` cannot be written.

    Leaves nothing behind: the test file in the nearest folder that exists is removed.

    Args:
        path: A file, which may not exist yet.
        folder: Whether `path` is a folder to write to, in place of a file.
    """
    path = path.absolute()
    candidates = [path, *path.parents] if folder else path.parents
    nearest = next(candidate for candidate in candidates if candidate.exists())
    try:
        if path.is_file():
            path.open("ab").close()
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}") from error
