"""`asrkit transcribe --shards`: bulk transcription, and its options."""

import argparse
import re
import time
from typing import Any

from asrkit.cli.command import count, finish
from asrkit.cli.options import check_writable
from asrkit.cli.workers import asked_layout, tell_layout
from asrkit.transcribe.options import PipelineConfig, WindowOptions

NEED_SHARDS = ("part", "shard_h", "on")
NEED_RAY = ("address", "actors")


def add_shard_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --shards, and the options that need it, to `parser`."""
    shards = parser.add_argument_group("bulk transcription")
    shards.add_argument(
        "--shards",
        action="store_true",
        help="with --out: transcribe in shards, a file of results each, with a line a "
        "recording; FILES may also be manifests (.jsonl, .json: NeMo's or lhotse's cuts) and "
        ".tar with audio. The same command goes on where a killed one stopped",
    )
    shards.add_argument(
        "--part",
        metavar="K/N",
        help="transcribe every N-th shard from the K-th on, K from 0: for N processes, a GPU each, "
        "or an array of jobs (default: 0/1, all)",
    )
    shards.add_argument(
        "--shard-hours",
        type=float,
        dest="shard_h",
        metavar="HOURS",
        help="audio in a shard (default: 0.5 on a CPU, 10 on a GPU, less for less than 20 shards)",
    )
    _add_ray_arguments(parser)


def _add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    cluster = parser.add_argument_group("bulk transcription on several machines")
    cluster.add_argument(
        "--on",
        choices=["ray"],
        help="with --shards, in place of --part: actors of a Ray cluster transcribe the shards; "
        "all its machines have to see the files and --out under the same paths. Has to be "
        "installed: pip install 'asrkit[scale]'",
    )
    cluster.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="of the cluster (default: RAY_ADDRESS); local starts one on this machine, for a try",
    )
    cluster.add_argument(
        "--actors",
        type=int,
        metavar="N",
        help="processes that transcribe, each with --threads CPUs (1 where it is not given) and, "
        "with --device cuda, a GPU (default: as many as there is room for)",
    )


def check_shards(args: argparse.Namespace) -> None:
    """ValueError for options that do not go together with --shards, or without it."""
    from asrkit.shapes import expect

    if args.on is None:
        for name in NEED_RAY:
            value = getattr(args, name)
            expect(value is None, name, "--on ray with it", value)
    else:
        expect(args.part is None, "part", "no --on ray with it", args.part, "Pass one of them.")
        remedy = "--actors N gives processes."
        expect(args.workers is None, "workers", "no --on ray with it", args.workers, remedy)
    if not args.shards:
        for name in NEED_SHARDS:
            value = getattr(args, name)
            expect(value is None, name, "--shards with it", value)
        return
    expect(args.out is not None, "shards", "--out DIR with it", "none")
    expect(args.format in (None, "json"), "format", "json with --shards", args.format)
    expect(args.engine == "torch", "engine", "torch with --shards", args.engine)


def _loaded_dtype(name: str) -> str:
    """Name of the dtype to load the model in; loads torch for int8 only."""
    if name != "int8":
        return name
    from asrkit.models.int8 import loaded_dtype

    return loaded_dtype(name)


def transcribe_shards(
    args: argparse.Namespace, windows: WindowOptions, config: PipelineConfig, model: Any
) -> int:
    """Plan, or find the plan again, and transcribe a part of it; returns the exit code.

    Args:
        args: As the parser returns them.
        windows: How recordings are cut.
        config: How to compute.
        model: Path of the model.
    """
    from asrkit.transcribe.shards import Machine, Task, plan, run

    part = _part(args.part)
    cluster = _cluster(args)
    if not args.out.is_file():
        check_writable(args.out, folder=True)
    machine = Machine(device=args.device, threads=args.threads)
    task = Task(
        model=model,
        dtype=_loaded_dtype(args.dtype),
        context=tuple(args.context) if args.context else None,
        windows=windows,
        config=config,
    )
    layout = asked_layout(args, model)  # before the model is loaded
    planned = plan(args.files, task, args.out, shard_h=args.shard_h, device=args.device)
    tell_layout(args, layout)
    start = time.perf_counter()
    shown = not args.no_progress
    report = run(
        planned, part=part, machine=machine, workers=layout, cluster=cluster, progress=shown
    )
    elapsed_s = time.perf_counter() - start
    result = {
        "recordings": report.counts.recordings,
        "failed": report.counts.failed,
        "audio_s": round(report.counts.audio_s, 2),
        "shards": report.shards,
        "done": report.done,
        "missing": report.missing,
        "transcribed_s": round(report.transcribed_s, 2),
        "rtfx": round(report.transcribed_s / elapsed_s, 1),
        "out": str(args.out),
    }
    finish(args, result, _sentence(result))
    return 1 if report.missing or report.counts.failed else 0


def _cluster(args: argparse.Namespace) -> Any:
    """The actors of a Ray cluster; None without --on ray."""
    if args.on is None:
        return None
    from asrkit.transcribe.ray import RayCluster

    return RayCluster(address=args.address, actors=args.actors)


def _part(text: str | None) -> tuple[int, int]:
    """(K, N) of "K/N"; all for None."""
    from asrkit.shapes import expect
    from asrkit.transcribe.shards import expect_part

    if text is None:
        return 0, 1
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    expect(match is not None, "part", "K/N, such as 0/8", repr(text))
    assert match is not None
    part = int(match[1]), int(match[2])
    expect_part(part)  # now, not after the plan
    return part


def _sentence(result: dict[str, Any]) -> str:
    hours = result["audio_s"] / 3600
    text = f"{result['done']:,} of {count(result['shards'], 'shard')} done: "
    text += f"{count(result['recordings'], 'recording')}, {hours:,.2f} h of audio"
    if result["failed"]:
        text += f", {result['failed']:,} failed"
    text += f"; now {result['transcribed_s'] / 3600:,.2f} h at RTFx {result['rtfx']:,}"
    if result["missing"]:
        text += f"; {count(result['missing'], 'shard')} of this part missing, "
        text += "which another process transcribes, or the same command"
    return f"{text}. Results: {result['out']}"
