"""`asrkit bench`."""

import contextlib
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

from asrkit.cli.command import Command, Options, finish, print_text, progress, table_width
from asrkit.cli.options import check_writable, prepare_torch
from asrkit.shapes import count, expect
from asrkit.transcribe.options import described

SUITES_HELP = (
    "transcription: one recogniser, samples to labels; with --peers, files to text beside other "
    "programs, by published weights of a Whisper with word error rates too; "
    "losses: RNN-T and TDT, also from the halves of the joint; decoders: greedy decoding, "
    "by attention too, with its caches and drafts; precision: words that bfloat16 and int8 cost; "
    "encoders: FastConformers and Jasper 10x5 DR, with --peers beside NeMo, "
    "transformers, OpenVINO and ONNX Runtime, and one recogniser on one core; "
    "batching: samplers and their padding; training: one step, an LSTM encoder in phases; claims: "
    "those of the ledger that need a GPU; ladder: "
    "one recogniser, its speed-ups switched on one by one; all: every suite"
)
OF_SUITE = {  # options of one suite
    "manifest": "transcription",
    "lengths": "batching",
    "ranks": "batching",
    "model": "precision",
    "kinds": "precision",
    "minutes": "all",
}


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Options):
    """The options of the command."""

    suite: Literal[
        "transcription",
        "losses",
        "decoders",
        "encoders",
        "ladder",
        "claims",
        "precision",
        "training",
        "batching",
        "all",
    ] = described(MISSING, SUITES_HELP, flag="", group="what to measure")
    quick: bool = described(False, "small sizes and few repeats")
    peers: bool = described(
        False,
        "also time the packages that `make peers` installed, in a checkout; on a GPU NeMo's "
        "decoders",
    )
    device: Literal["cpu", "cuda"] = described("cpu", "where to compute", group="device")
    threads: int | None = described(
        None, "CPU threads (default: as many as torch takes)", metavar="N"
    )
    manifest: Path | None = described(
        None,
        "with --peers, recordings that a Whisper reads, as `asrkit train --manifest` takes them "
        "(default: two minutes that asrkit ships)",
        metavar="FILE",
        group="suite transcription",
    )
    lengths: Path | None = described(
        None,
        "a table of your own: CSV with the columns seconds and tokens",
        metavar="FILE",
        group="suite batching",
    )
    ranks: list[int] = described((), "numbers of ranks (default: 1 8 64 1024)", metavar="N")
    model: Path | None = described(
        None,
        "a trained model (default: that of notebook 00), which reads synthetic speech in voices "
        "that are in no training set of asrkit",
        metavar="PATH",
        group="suite precision",
    )
    kinds: list[Literal["digits", "commands", "sentences"]] = described(
        (), "kinds of that speech that the model was trained on (default: all)"
    )
    minutes: float | None = described(
        None,
        "end after N minutes: each suite in turn may take half of what is left, and is ended "
        "there (default: two hours each). Run again with the same --out, suites that ended well "
        "are skipped, others are measured again",
        metavar="N",
        group="suite all",
    )
    out: Path | None = described(
        None,
        "file that records are appended to (default: reports/bench.jsonl); with the suite all "
        "a folder of records, logs and a list of finished suites (default: reports/bench)",
        group="output",
    )


def _bench(asked: BenchOptions) -> int:
    prepare_torch(asked.device, asked.threads)
    given = {name: getattr(asked, name) for name in OF_SUITE if getattr(asked, name)}
    for name in given:
        expect(asked.suite == OF_SUITE[name], name, f"the suite {OF_SUITE[name]}", asked.suite)
    expect(asked.peers or not asked.manifest, "manifest", "--peers too", "none")
    if asked.suite == "all":
        return _run_all(asked)
    return _run_suite(asked, given)


def _run_suite(asked: BenchOptions, options: dict[str, Any]) -> int:
    from asrkit.workbench import bench

    out = asked.out or Path("reports/bench.jsonl")
    check_writable(out, folder=False)
    records = []
    with bench.Peers() if asked.peers else contextlib.nullcontext() as peers:
        try:
            records = bench.run(
                asked.suite,
                device=asked.device,
                out=out,
                quick=asked.quick,
                peers=peers,
                say=progress,
                **options,
            )
        except ModuleNotFoundError as error:  # a bare GPU machine lacks what training needs
            progress(f"{asked.suite} is left out: {error}")
    lines = bench.table(records, width=table_width())
    print_text(asked, *lines, *bench.legend(lines))
    result = {"records": len(records), "out": str(out)}
    finish(asked, result, f"{count(len(records), 'record')} appended to {out}")
    return 0


def _run_all(asked: BenchOptions) -> int:
    from asrkit.workbench.bench.run_all import run_all

    out = asked.out or Path("reports/bench")
    check_writable(out)
    options = ["--quick"] * asked.quick + ["--peers"] * asked.peers
    if asked.threads is not None:
        options += ["--threads", str(asked.threads)]
    outcomes = run_all(
        out, device=asked.device, minutes=asked.minutes, options=options, say=progress
    )
    result = {"suites": [outcome._asdict() for outcome in outcomes], "out": str(out)}
    finish(asked, result, "\n".join([*map(str, outcomes), f"records and logs: {out}"]))
    return int(any(outcome.status != "done" for outcome in outcomes))


COMMAND = Command(
    name="bench",
    summary="Measure fast implementations against their references, side by side in one run.",
    resume="Run the suite all again to continue: suites that succeeded are kept.",
    options=BenchOptions,
    run=_bench,
    examples=[
        "asrkit bench losses",
        "asrkit bench decoders --threads 1 --quick",
        "asrkit bench precision --model models/mine --threads 1",
        "asrkit bench batching --lengths mine.csv.gz",
        "asrkit bench all --device cuda --minutes 50 --out share",
    ],
)
