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
    *"transcription losses decoders encoders ladder claims precision".split(),
    *"training batching all".split(),
]
SUITES_HELP = (
    "transcription: files to text, with --peers beside other programs, then one recogniser; "
    "losses: RNN-T and TDT, also from the halves of the joint; decoders: greedy decoding, "
    "by attention too, with its caches and drafts; precision: errors of half precision; "
    "encoders: FastConformers and Jasper 10x5 DR, with --peers beside NeMo, "
    "transformers, OpenVINO and ONNX Runtime, and one recogniser on one core; "
    "batching: samplers and their padding; training: one step, an LSTM encoder in phases, LAMB "
    "beside AdamW; claims: those of the ledger that need a GPU; ladder: "
    "one recogniser, its speed-ups switched on one by one; all: every suite"
)


def _bench(args: argparse.Namespace) -> int:
    from asrkit.shapes import expect

    apply_runtime_options(args)
    options = _suite_options(args)
    if args.suite == "all":
        return _run_all(args)
    expect(args.minutes is None, "minutes", "the suite all", args.suite)
    return _run_suite(args, options)


def _run_suite(args: argparse.Namespace, options: dict[str, Any]) -> int:
    from asrkit.shapes import expect
    from asrkit.workbench import bench

    out = args.out or Path("reports/bench.jsonl")
    expect(not out.is_dir(), "out", "a file", repr(str(out)))
    check_writable(out)
    processes: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if args.peers:
        processes = bench.Peers()
    records = []
    with processes as peers:
        try:
            records = bench.run(
                args.suite,
                device=args.device,
                out=out,
                quick=args.quick,
                peers=peers,
                say=functools.partial(print, file=sys.stderr, flush=True),
                **options,
            )
        except ModuleNotFoundError as error:  # a bare GPU machine lacks what training needs
            print(f"{args.suite} is left out: {error}", file=sys.stderr)
    lines = bench.table(records, width=table_width())
    say(args, *lines, *bench.legend(lines))
    result = {"records": len(records), "out": str(out)}
    finish(args, result, f"{count(len(records), 'record')} appended to {out}")
    return 0


def _run_all(args: argparse.Namespace) -> int:
    from asrkit.shapes import expect
    from asrkit.workbench.bench.run_all import run_all

    out = args.out or Path("reports/bench")
    expect(not out.is_file(), "out", "a folder", repr(str(out)))
    check_writable(out, folder=True)
    passed_on = ["--quick"] * args.quick + ["--peers"] * args.peers
    if args.threads is not None:
        passed_on += ["--threads", str(args.threads)]
    outcomes = run_all(
        out,
        device=args.device,
        minutes=args.minutes,
        options=passed_on,
        say=functools.partial(print, file=sys.stderr, flush=True),
    )
    result = {"suites": [outcome._asdict() for outcome in outcomes], "out": str(out)}
    finish(args, result, "\n".join([*map(str, outcomes), f"records and logs: {out}"]))
    return int(any(outcome.status != "done" for outcome in outcomes))


def _suite_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of single suites that were passed; ValueError unless this one takes them."""
    from asrkit.shapes import expect
    from asrkit.workbench.bench import SUITES

    values = {name: getattr(args, name) for name in ("lengths", "ranks", "model", "kinds")}
    options = {name: value for name, value in values.items() if value}
    takers = [name for name, suite in SUITES.items() if options.keys() <= {*suite.options}]
    wanted = "the suite " + " or ".join(takers)
    expect(not options or args.suite in takers, ", ".join(options), wanted, args.suite)
    return options


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
    add_device(parser.add_argument_group("device"), choices=("cpu", "cuda"))
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
    _add_precision_arguments(parser)
    parser.add_argument_group("suite all").add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="end after N minutes: each suite in turn may take half of what is left, and is ended "
        "there (default: two hours each). Run again with the same --out, suites that ended well "
        "are skipped, others are measured again",
    )
    parser.add_argument_group("output").add_argument(
        "--out",
        type=Path,
        help="file that records are appended to (default: reports/bench.jsonl); with the suite all "
        "a folder of records, logs and a list of finished suites (default: reports/bench)",
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


COMMAND = Command(
    name="bench",
    summary="Measure fast implementations against their references, side by side in one run.",
    run=_bench,
    add_arguments=_add_arguments,
    examples=[
        "asrkit bench losses",
        "asrkit bench decoders --threads 1 --quick",
        "asrkit bench precision --model models/mine --threads 1",
        "asrkit bench batching --lengths mine.csv.gz",
        "asrkit bench all --device cuda --minutes 50 --out share",
    ],
)
