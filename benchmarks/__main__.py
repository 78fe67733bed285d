"""`python -m benchmarks SUITE`."""

import contextlib
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

from asrkit.cli import run_alone
from asrkit.cli.command import Command, Options, finish, print_text, progress, table_width
from asrkit.cli.options import check_writable, prepare_torch
from asrkit.shapes import count, expect
from asrkit.transcribe.options import described

SUITES_HELP = (
    "transcription: a recogniser from samples to labels; with --peers also whole programs from "
    "files to text, with word error rates for Whisper's published weights; "
    "losses: RNN-T and TDT, also from the halves of the joint, and the memory of both; "
    "decoders: greedy decoding, "
    "also with attention, its caches and drafts; precision: word errors of bfloat16 and int8; "
    "encoders: FastConformers and Jasper 10x5 DR, with --peers also NeMo, "
    "transformers, OpenVINO and ONNX Runtime, and a recogniser on one core; "
    "batching: samplers and their padding; training: a step, and an LSTM encoder in phases; "
    "claims: claims of the ledger that need a GPU; ladder: "
    "a recogniser whose speed-ups are switched on one by one; jasper-inference, jasper-training "
    "and jasper-seeds: the published tables of Jasper; encoder-decoder: two trained models, one "
    "with most layers in the decoder, one in the encoder; all: every suite but the last four"
)
SUITE_OPTIONS = {  # option: its suites
    "manifest": "transcription",
    "lengths": "batching",
    "ranks": "batching",
    "model": "precision",
    "kinds": "precision",
    "batch": "jasper-inference jasper-training",
    "seconds": "jasper-inference jasper-training",
    "iterations": "jasper-inference",
    "precisions": "jasper-inference",
    "processes": "jasper-training",
    "seeds": "jasper-seeds",
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
        "jasper-inference",
        "jasper-training",
        "jasper-seeds",
        "encoder-decoder",
        "all",
    ] = described(MISSING, SUITES_HELP, flag="", group="what to measure")
    quick: bool = described(False, "small sizes and few repeats")
    peers: bool = described(
        False,
        "also time the packages that `make peers` installed; on a GPU only NeMo's decoders",
    )
    only: str = described(
        "",
        "only the cases whose title contains TEXT, as in rnnt-greedy; a run prints its titles",
        metavar="TEXT",
    )
    device: Literal["cpu", "cuda"] = described("cpu", "where to compute", group="device")
    threads: int | None = described(
        None, "CPU threads (default: as many as torch takes)", metavar="N"
    )
    manifest: Path | None = described(
        None,
        "with --peers, recordings for Whisper in a manifest as of `asrkit train --manifest` "
        "(default: two minutes that asrkit ships)",
        metavar="FILE",
        group="suite transcription",
    )
    lengths: Path | None = described(
        None,
        "your own table: CSV with the columns seconds and tokens",
        metavar="FILE",
        group="suite batching",
    )
    ranks: list[int] = described((), "numbers of ranks (default: 1 8 64 1024)", metavar="N")
    model: Path | None = described(
        None,
        "a trained model (default: that of notebook 00); it transcribes synthetic speech in "
        "voices that no training set of asrkit has",
        metavar="PATH",
        group="suite precision",
    )
    kinds: list[Literal["digits", "commands", "sentences"]] = described(
        (), "kinds of that speech that the model was trained on (default: all)"
    )
    batch: list[int] = described(
        (),
        "numbers of utterances of a call, or of a training step in each process (default: 1 2 4 8 "
        "16 for inference, 32 for training)",
        metavar="N",
        group="suites jasper-inference, jasper-training and jasper-seeds",
    )
    seconds: list[float] = described(
        (),
        "lengths of the utterances (default: 2 7 16.7 for inference, 16.7 for training)",
        metavar="S",
    )
    iterations: int | None = described(
        None, "timed calls for each cell of jasper-inference (default: 500)", metavar="N"
    )
    precisions: list[Literal["float32", "tf32", "bfloat16", "float16"]] = described(
        (),
        "precisions of jasper-inference; the first is the baseline (default: float32 bfloat16; on "
        "CUDA tf32 float16)",
    )
    processes: list[int] = described(
        (),
        "processes that train together, started by torchrun, each on a GPU or, on a CPU, with "
        "--threads threads (default: 1 4 8, those that this machine has GPUs or cores for)",
        metavar="N",
    )
    seeds: int | None = described(
        None, "number of trainings of jasper-seeds (default: 8)", metavar="N"
    )
    minutes: float | None = described(
        None,
        "stop after N minutes, which the suites share by their importance (default: two hours "
        "each). A second run with the same --out skips finished suites and measures the "
        "others again",
        metavar="N",
        group="suite all",
    )
    out: Path | None = described(
        None,
        "file that records are appended to (default: reports/bench.jsonl); for the suite all a "
        "folder of records and logs (default: reports/bench)",
        group="output",
    )


def _bench(options: BenchOptions) -> int:
    prepare_torch(options.device, options.threads)
    suite_options = {name: getattr(options, name) for name in SUITE_OPTIONS}
    suite_options = {
        name: value for name, value in suite_options.items() if value not in (None, ())
    }
    for name in suite_options:
        suites = SUITE_OPTIONS[name].split()
        expect(options.suite in suites, name, f"the suite {' or '.join(suites)}", options.suite)
    expect(options.suite != "all" or not options.only, "only", "a suite other than all", "all")
    expect(options.peers or not options.manifest, "manifest", "--peers too", "none")
    if options.suite == "all":
        return _run_all(options)
    return _run_suite(options, suite_options)


def _run_suite(options: BenchOptions, suite_options: dict[str, Any]) -> int:
    from benchmarks.harness.runner import run
    from benchmarks.harness.table import legend, rows_table, table
    from benchmarks.peers.processes import Peers
    from benchmarks.suites import SUITES

    out = options.out or Path("reports/bench.jsonl")
    check_writable(out, folder=False)
    records = []
    kept: list[list[dict[str, Any]]] = []  # by cell
    with Peers() if options.peers else contextlib.nullcontext() as peers:
        try:
            records = run(
                options.suite,
                device=options.device,
                out=out,
                quick=options.quick,
                peers=peers,
                log=progress,
                kept=kept.append,
                only=options.only,
                **suite_options,
            )
        except ModuleNotFoundError as error:  # a bare GPU machine lacks what training needs
            progress(f"{options.suite} is left out: {error}")
    if rows := SUITES[options.suite].rows:
        lines = rows_table(rows(records), width=table_width())
    else:
        lines = table(records, width=table_width())
    print_text(options, *lines, *legend(lines))
    new = len(records) - sum(map(len, kept))
    line = f"{count(new, 'record')} appended to {out}"
    if kept:
        line += f"; {count(len(kept), 'cell')} already measured"
    finish(options, {"records": new, "kept_cells": len(kept), "out": str(out)}, line)
    return 0


def _run_all(options: BenchOptions) -> int:
    from benchmarks.harness.all_suites import run_all

    out = options.out or Path("reports/bench")
    check_writable(out)
    passed_on = ["--quick"] * options.quick + ["--peers"] * options.peers
    if options.threads is not None:
        passed_on += ["--threads", str(options.threads)]
    status = run_all(
        out, device=options.device, minutes=options.minutes, options=passed_on, log=progress
    )
    lines = [f"{suite}: {text}" for suite, text in status.items()]
    result = {"suites": status, "out": str(out)}
    finish(options, result, "\n".join([*lines, f"records and logs: {out}"]))
    return int(any(text != "done" for text in status.values()))


COMMAND = Command(
    name="benchmarks",
    summary="Measure fast implementations against their references, interleaved in one run.",
    resume="The same command resumes `all`, where finished suites are skipped, the suites of "
    "Jasper's tables and `encoder-decoder`, where what is in --out is skipped.",
    options=BenchOptions,
    run=_bench,
    examples=[
        "python -m benchmarks losses",
        "python -m benchmarks decoders --threads 1 --quick",
        "python -m benchmarks precision --model models/mine --threads 1",
        "python -m benchmarks batching --lengths mine.csv.gz",
        "python -m benchmarks jasper-inference --batch 1 2 --seconds 2 7 --iterations 50",
        "python -m benchmarks jasper-training --batch 1 --seconds 2 --processes 1 2 --threads 1",
        "python -m benchmarks all --device cuda --minutes 50 --out share",
    ],
)


def main(argv: list[str] | None = None) -> int:
    """Run `python -m benchmarks`; returns the exit code."""
    return run_alone(COMMAND, "python -m benchmarks", argv)


if __name__ == "__main__":
    sys.exit(main())
