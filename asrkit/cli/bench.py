"""`asrkit bench`."""

import argparse
import contextlib
import functools
import sys
from pathlib import Path
from typing import Any

from asrkit.cli.command import Command, count, finish, say, table_width
from asrkit.cli.options import add_device, apply_runtime_options, check_writable

SUITES = [
    *"losses decoders features aed precision encoder engines workers bulk jasper".split(),
    *"batching training optimizers claims ladder all".split(),
]
SUITES_HELP = (
    "losses: RNN-T and TDT, also from the halves of the joint; decoders: greedy decoding; "
    "features: log-mel; aed: decoding by attention, its caches and drafts, and layers moved from "
    "decoder to encoder; precision: errors of half precision; encoder: FastConformers, and one "
    "recogniser; engines: a FastConformer on one core, with --peers beside OpenVINO and ONNX "
    "Runtime; workers: transcription by a process a core; bulk: whole commands that transcribe in "
    "shards, with --peers also on Ray; jasper: Jasper 10x5 DR, also by its published protocol; "
    "batching: samplers and their padding; training: one step, and an LSTM encoder in phases; "
    "optimizers: LAMB and averaged weights beside those of torch; claims: those of the ledger that "
    "need a GPU; ladder: one recogniser, its speed-ups switched on one by one; all: every suite"
)
PLANNED_MINUTES = 9.0  # of --plan without --minutes


def _bench(args: argparse.Namespace) -> int:
    from asrkit.shapes import expect

    expect(args.suite == "all" or not args.plan, "plan", "the suite all", args.suite)
    if args.plan:
        return _print_plan(args)
    apply_runtime_options(args)
    expect(
        args.minutes is not None or not args.resume,
        "resume",
        "--minutes beside it",
        "none",
        "Only a share can be resumed.",
    )
    if args.minutes is not None:
        return _run_share(args)
    return _run_suites(args)


def _print_plan(args: argparse.Namespace) -> int:
    from asrkit.workbench.bench.share import parts

    lines = parts.lines(args.minutes or PLANNED_MINUTES, width=table_width())
    finish(args, {"parts": [part.name for part in parts.PARTS]}, "\n".join(lines))
    return 0


def _suite_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that some suites take (`Suite.options`) and that were passed."""
    names = ("lengths", "ranks", "published", "model", "kinds")
    options = {name: getattr(args, name) for name in names}
    return {name: value for name, value in options.items() if value}


def _expect_taken(options: dict[str, Any], suite: str) -> None:
    """Raise ValueError unless the suite takes these options."""
    from asrkit.shapes import expect
    from asrkit.workbench.bench import SUITES

    takers = [name for name, one in SUITES.items() if options.keys() <= {*one.options}]
    wanted = "the suite " + " or ".join(takers)
    expect(not options or suite in takers, ", ".join(options), wanted, suite)


def _run_suites(args: argparse.Namespace) -> int:
    from asrkit.shapes import expect
    from asrkit.workbench import bench

    out = args.out or Path("reports/bench.jsonl")
    expect(
        not out.is_dir(),
        "out",
        "a file",
        repr(str(out)),
        "A folder takes what `bench all --minutes` finds.",
    )
    options = _suite_options(args)
    _expect_taken(options, args.suite)
    check_writable(out)
    suites = [args.suite]
    if args.suite == "all":
        suites = list(bench.SUITES)
    processes: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if args.peers:
        processes = bench.Peers()
    records = []
    with processes as peers:
        for suite in suites:
            try:
                records += bench.run(
                    suite,
                    device=args.device,
                    out=out,
                    quick=args.quick,
                    peers=peers,
                    say=functools.partial(print, file=sys.stderr),
                    **options,
                )
            except ModuleNotFoundError as error:  # a bare GPU machine lacks what training needs
                print(f"{suite} is left out: {error}", file=sys.stderr)
    say(args, *bench.table(records, width=table_width()), *bench.legend(records))
    result = {"records": len(records), "out": str(out)}
    finish(args, result, f"{count(len(records), 'record')} appended to {out}")
    return 0


def _run_share(args: argparse.Namespace) -> int:
    from asrkit.shapes import expect
    from asrkit.workbench import bench
    from asrkit.workbench.bench.share import report, share
    from asrkit.workbench.records import read

    expect(
        args.suite == "all",
        "minutes",
        "the suite all",
        args.suite,
        "Other suites take the time they take.",
    )
    unfit = [*_suite_options(args)]
    if args.peers:
        unfit.append("peers")
    expect(
        not unfit,
        ", ".join(unfit),
        "nothing with --minutes",
        "both",
        "What these measure needs no GPU.",
    )
    out = args.out or Path("reports/share")
    expect(
        not out.is_file(),
        "out",
        "a folder",
        repr(str(out)),
        "A file takes what `bench all` without --minutes finds.",
    )
    manifest = share(
        out,
        device=args.device,
        minutes=args.minutes,
        quick=args.quick,
        resume=args.resume,
        say=functools.partial(print, file=sys.stderr, flush=True),
    )
    records = read(out / "bench.jsonl")
    say(args, *bench.table(records, width=table_width()), *report(manifest))
    return _finish_share(args, manifest, len(records), out)


def _finish_share(
    args: argparse.Namespace, manifest: dict[str, Any], records: int, out: Path
) -> int:
    checks = manifest["checks"]
    parts = {name: part["status"] for name, part in manifest["parts"].items()}
    result = {
        "records": records,
        "passed": checks["passed"],
        "not_passed": [*checks["not_passed"]],
        "not_checked": [*checks["not_checked"]],
        "parts": parts,
        "seconds": manifest["seconds"],
        "out": str(out),
    }
    failures = count(len(result["not_passed"]), "check")
    finish(args, result, f"{count(records, 'record')}, {failures} not passed: {out}")
    as_planned = set(parts.values()) <= {"done", "stopped", "no time", "no package"}
    if checks["not_passed"] or not as_planned:
        return 1
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to measure")
    what.add_argument("suite", choices=SUITES, help=SUITES_HELP)
    what.add_argument("--quick", action="store_true", help="small sizes and few repeats")
    what.add_argument(
        "--peers",
        action="store_true",
        help="also time the packages that `make peers` installed, in a checkout; on a GPU NeMo's "
        "decoders",
    )
    add_device(parser.add_argument_group("device"))
    batching = parser.add_argument_group("suite batching")
    batching.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="a table of your own: CSV with the columns seconds and tokens",
    )
    batching.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of ranks (default: 1 8 64 1024)",
    )
    parser.add_argument_group("suite jasper").add_argument(
        "--published",
        action="store_true",
        help="batch sizes by durations with the published protocol: mean and percentiles as "
        "published beside median and quartiles",
    )
    _add_precision_arguments(parser)
    _add_share_arguments(parser)
    parser.add_argument_group("output").add_argument(
        "--out",
        type=Path,
        help="file that records are appended to (default: reports/bench.jsonl); with --minutes a "
        "folder of records, checks, log and manifest (default: reports/share)",
    )


def _add_precision_arguments(parser: argparse.ArgumentParser) -> None:
    precision = parser.add_argument_group("suite precision")
    precision.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a trained model: only count the words that bfloat16 and int8 cost it on this CPU, "
        "over synthetic speech in voices that are in no training set of asrkit",
    )
    precision.add_argument(
        "--kinds",
        nargs="+",
        choices=["digits", "commands", "sentences"],
        help="with --model: kinds of that speech that the model was trained on (default: all)",
    )


def _add_share_arguments(parser: argparse.ArgumentParser) -> None:
    share = parser.add_argument_group("a time limit, with the suite all")
    share.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="measure what matters most in N minutes: first check every path, then run the suites "
        "in processes of their own, most important first. Run again with the same --out, it "
        "continues. Without a GPU it only rehearses, as with --quick",
    )
    share.add_argument(
        "--plan",
        action="store_true",
        help="only print what --minutes (default: 9) would measure, in which order and why",
    )
    share.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="with --minutes: continue the run in this folder, of the same code on the "
        "same kind of machine; it is copied into --out, which has to be empty",
    )


COMMAND = Command(
    name="bench",
    summary="Measure fast implementations against their references, side by side in one run.",
    run=_bench,
    add_arguments=_add_arguments,
    examples=[
        "asrkit bench losses",
        "asrkit bench decoders --threads 1 --quick",
        "asrkit bench jasper --published --quick",
        "asrkit bench precision --model models/mine --threads 1",
        "asrkit bench batching --lengths mine.csv.gz",
        "asrkit bench all --device cuda --minutes 9 --out share",
        "asrkit bench all --device cuda --minutes 9 --plan",
    ],
)
