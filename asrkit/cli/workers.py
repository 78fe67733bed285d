"""`asrkit transcribe --workers` and `--dtype auto`: what is chosen on a CPU, and why."""

import argparse
import sys
from pathlib import Path
from typing import Any

from asrkit.cli.command import count


def add_workers(group: argparse._ArgumentGroup) -> None:
    """Add --workers to `group`."""
    group.add_argument(
        "--workers",
        metavar="N",
        help="transcribe in N processes that have one model in memory, each on its own cores; "
        "auto: one a core, as far as memory goes (default: in this process alone)",
    )


def choose_dtype(args: argparse.Namespace) -> None:
    """Put the dtype that this CPU is fast in where --dtype is auto, and say so on stderr."""
    from asrkit.shapes import expect

    if args.dtype != "auto":
        return
    named = "one by name on a GPU: bfloat16, float16 or float32"
    expect(args.device == "cpu", "dtype", named, args.dtype)
    from asrkit.cpu import bfloat16_instructions, fast_dtype

    args.dtype = fast_dtype()
    why = bfloat16_instructions() or "neither AMX nor avx512_bf16"
    print(f"dtype: {args.dtype}, as this CPU has {why}", file=sys.stderr)


def check_workers(args: argparse.Namespace) -> None:
    """ValueError for options that do not go together with --workers."""
    from asrkit.shapes import expect

    if args.workers is None:
        return
    remedy = "--shards --part K/N gives a process to each GPU."
    expect(args.device == "cpu", "workers", "--device cpu with it", args.device, remedy)
    remedy = "The engine has threads of its own: --threads."
    expect(args.engine == "torch", "engine", "torch with --workers", args.engine, remedy)


def asked_layout(args: argparse.Namespace, model: Path, recordings: int | None = None) -> Any:
    """The processes that --workers asks for; None where it was not given.

    Call it before torch computes anything: this process keeps to one thread from here on.

    Args:
        args: As the parser returns them.
        model: That will be loaded.
        recordings: How many are to be transcribed, if that is known.
    """
    if args.workers is None:
        return None
    import torch

    from asrkit.transcribe.workers import choose_layout

    asked = args.workers
    if asked != "auto":
        asked = _whole(asked)
    layout = choose_layout(
        asked, threads=args.threads, recordings=recordings, model_bytes=_weights_bytes(model)
    )
    torch.set_num_threads(1)  # threads do not outlive a fork
    return layout


def _weights_bytes(model: Path) -> int:
    """Bytes of a model's file, or of the weights in its folder; 0 where there are none."""
    files = [model]
    if model.is_dir():
        files = [*model.glob("*.safetensors")]
    return sum(file.stat().st_size for file in files if file.is_file())


def _whole(text: str) -> Any:
    """The number that a text is; the text where it is none, for the error to show."""
    try:
        return int(text)
    except ValueError:
        return text


def tell_layout(args: argparse.Namespace, layout: Any) -> None:
    """Say on stderr what was chosen, and why; nothing without --workers.

    Args:
        args: As the parser returns them.
        layout: As `asked_layout` returns it.
    """
    if layout is None:
        return
    workers = f"{count(layout.workers, 'worker')} ({layout.why})"
    threads = f"{count(layout.threads, 'thread')} each"
    pinned = "pinned to their cores" if layout.pinned else "not pinned"
    print(f"{workers}, {threads}, {pinned}; {args.dtype}", file=sys.stderr)
