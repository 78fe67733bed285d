"""The command line: a thin parser over the doors. Errors are one line (exit code 2); results end with one JSON line."""

import argparse
import contextlib
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any


def _report(args: argparse.Namespace) -> int:
    import yaml

    from asrkit.report import report

    parameters = {name: yaml.safe_load(value) for name, value in args.parameter}  # `-p quick false` is False, never "false"
    rest: dict[str, Any] = {"workers": args.workers, "timeout_s": args.timeout, "progress": not args.no_progress}
    result = report(args.notebooks or None, args.out, parameters=parameters, **rest)
    print(result.summary())
    return result.exit_code


def _bench(args: argparse.Namespace) -> int:
    _prepare(args)
    from asrkit import bench
    from asrkit.shapes import expect

    expect(not args.out.is_dir(), "out", "a file", repr(str(args.out)))
    expect(not args.peers or args.device == "cpu", "peers", "--device cpu: the rivals run on a CPU", args.device)
    records, say = [], functools.partial(print, file=sys.stderr)
    with bench.Peers() if args.peers else contextlib.nullcontext() as peers:
        for suite in bench.SUITES if args.suite == "all" else [args.suite]:
            records += bench.run(suite, device=args.device, out=args.out, quick=args.quick, peers=peers, say=say)
    print("\n".join([*bench.table(records), bench.LEGEND]))
    print(json.dumps({"records": len(records), "out": str(args.out)}))
    return 0


def _train(args: argparse.Namespace) -> int:
    _prepare(args)
    from asrkit.data import corpora
    from asrkit.data.batching import Utterances
    from asrkit.models import ConvConfig, FastConformerConfig, LSTMConfig, StatelessConfig, TransducerConfig, load_checkpoint
    from asrkit.shapes import expect
    from asrkit.text import load_tokenizer
    from asrkit.training import TrainConfig, evaluate, train

    progress, config = not args.no_progress, TrainConfig(seconds=args.seconds, steps=args.steps, seed=args.seed)
    tokenizer = load_tokenizer(args.tokenizer)
    expect(not args.out.exists() or args.out.is_dir(), "out", "a folder", repr(str(args.out)))
    encoder = ConvConfig() if args.encoder == "conv" else FastConformerConfig()
    predictor = StatelessConfig() if args.predictor == "stateless" else LSTMConfig()
    model = TransducerConfig(vocab_size=tokenizer.vocab_size, encoder=encoder, predictor=predictor, durations=tuple(args.durations))
    sets = corpora.load(args.manifest, hold_out=args.hold_out, join_digits=args.join_digits, kinds=args.kinds, progress=progress)
    counts = {name: len(cuts) for name, cuts in sets.items()}
    expect(counts["train"] > 0, "manifest", "utterances to train on", counts, "Set another split, or no --hold-out.")
    loaded = {name: Utterances.load(cuts, progress=progress) for name, cuts in sets.items() if len(cuts)}
    for text in loaded["test"].texts if "test" in loaded else []:
        tokenizer.encode(text)  # refused now, not after training
    how: dict[str, Any] = {"out": args.out, "device": args.device, "resume": not args.fresh, "progress": progress, "config": config}
    result = train(model, tokenizer, loaded["train"], loaded.get("dev"), **how)
    summary: dict[str, Any] = {"model": str(result.path), "steps": len(result.history)}
    for name in ("dev", "test"):
        if name in loaded:
            rate, _, rtfx = evaluate(load_checkpoint(result.path, device=args.device), loaded[name])
            print(f"{name} WER {rate} at RTFx {rtfx:.0f}")
            summary |= {f"{name}_wer": rate.rate, f"{name}_rtfx": round(rtfx)}
    print(json.dumps(summary))
    return 0


def _transcribe(args: argparse.Namespace) -> int:
    _prepare(args)
    from asrkit.models import load_checkpoint
    from asrkit.records import home
    from asrkit.transcribe import transcribe

    model = args.model or home() / "demo"
    failed = audio_s = compute_s = 0.0
    for one in transcribe(load_checkpoint(model, device=args.device), args.files):
        failed, audio_s, compute_s = failed + bool(one.error), audio_s + one.audio_s, compute_s + one.compute_s
        if one.error:
            print(f"{one.path}: {one.error}", file=sys.stderr)
        elif args.format == "json":
            print(json.dumps({"file": str(one.path), "text": one.text, "audio_s": one.audio_s, "compute_s": one.compute_s}))
        else:
            print(f"{one.path}\t{one.text or '(nothing heard)'}\t({one.audio_s:.1f} s of speech in {one.compute_s:.2f} s)")
    rtfx = round(audio_s / compute_s, 1) if compute_s else None
    print(json.dumps({"files": len(args.files), "failed": int(failed), "audio_s": round(audio_s, 2), "rtfx": rtfx}))
    return 1 if failed else 0


def _doctor(args: argparse.Namespace) -> int:
    from asrkit.doctor import diagnose, render

    checks = diagnose()
    print(render(checks))
    return 1 if any(check.status == "missing" for check in checks) else 0


def _verify(args: argparse.Namespace) -> int:
    from asrkit.ledger import load_claims
    from asrkit.records import shipped, verify

    paths = args.paths or sorted(shipped("records").rglob("*.jsonl"))
    problems = verify(paths)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(json.dumps({"files": len(paths), "claims": len(load_claims()), "problems": len(problems)}))
    return 1 if problems else 0


def _prepare(args: argparse.Namespace) -> None:
    """Before torch is imported: OpenMP reads its settings then. --device and --threads are checked before any work."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler calls it an error that there is no GPU
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads slow two processes on two cores eightfold
    import torch

    from asrkit.shapes import expect

    ok = args.device == "cpu" or (args.device.partition(":")[0] == "cuda" and torch.cuda.is_available())
    expect(ok, "device", "cpu, or cuda where there is a GPU", args.device, "asrkit doctor says more.")
    count = getattr(args, "threads", None)
    expect(count is None or count > 0, "threads", "at least 1", count)
    if count:
        torch.set_num_threads(count)


# fmt: off
DEVICE = ("--device", {"default": "cpu", "help": "cpu or cuda"})
THREADS = ("--threads", {"type": int, "help": "CPU threads (none: torch's default)"})
QUIET = ("--no-progress", {"action": "store_true", "help": "no progress bars"})
COMMANDS: dict[str, tuple[Any, str, list[tuple[str, dict[str, Any]]]]] = {
    "report": (_report, "Run the notebooks and build one HTML report with the ledger of claims.", [
        ("notebooks", {"nargs": "*", "type": Path, "help": "notebooks to run (none: the whole series)"}),
        ("--out", {"type": Path, "default": Path("reports"), "help": "folder that gets one subfolder a run, and `latest`"}),
        ("--parameter", {"nargs": 2, "action": "append", "default": [], "metavar": ("NAME", "VALUE"),
                         "help": "set a parameter in every notebook that has it; VALUE is YAML"}),
        ("--workers", {"type": int, "help": "notebooks at once (none: half the cores)"}),
        ("--timeout", {"type": float, "default": 600.0, "help": "seconds a cell may take"}), QUIET]),
    "bench": (_bench, "Measure fast paths against their references and peers, both arms in one run.", [
        ("suite", {"choices": ["losses", "decoders", "features", "all"], "help": "what to measure"}), DEVICE, THREADS,
        ("--quick", {"action": "store_true", "help": "small sizes and few repeats"}),
        ("--peers", {"action": "store_true", "help": "also time rival losses and decoders that `make peers` installed, on CPU"}),
        ("--out", {"type": Path, "default": Path("reports/bench.jsonl"), "help": "records are appended to this file"})]),
    "train": (_train, "Train a transducer into a folder; run again to resume.", [
        ("--out", {"type": Path, "required": True, "help": "folder for log, state and model.safetensors"}),
        ("--manifest", {"nargs": "+", "default": ["spoken_commands"],
                        "help": "spoken_commands (synthetic, built in), lhotse cuts, or JSON lines with audio and text; mixed"}),
        ("--hold-out", {"metavar": "SPEAKER", "help": "this speaker's utterances become the test set"}),
        ("--join-digits", {"type": int, "default": 0, "metavar": "N", "help": "add N strings of 1-6 one-word utterances"}),
        ("--kinds", {"nargs": "+", "choices": ["digits", "commands", "sentences"],
                     "help": "only these kinds of spoken_commands (none: all)"}),
        ("--encoder", {"choices": ["conv", "fastconformer"], "default": "conv", "help": "encoder"}),
        ("--predictor", {"choices": ["stateless", "lstm"], "default": "stateless", "help": "prediction network"}),
        ("--durations", {"type": int, "nargs": "+", "default": [], "metavar": "FRAMES",
                         "help": "train a token-and-duration transducer (TDT) with these jumps, e.g. 0 1 2 3 4"}),
        ("--tokenizer", {"default": "char", "help": "char, or a SentencePiece .model file"}),
        ("--seconds", {"type": float, "default": 300.0, "help": "training time; a run cannot be extended, only resumed"}),
        ("--steps", {"type": int, "default": 100_000, "help": "optimizer steps at most"}),
        ("--seed", {"type": int, "default": 0, "help": "seed of weights, batches and augmentation"}),
        ("--fresh", {"action": "store_true", "help": "start anew instead of resuming what the folder holds"}), DEVICE, QUIET]),
    "transcribe": (_transcribe, "Transcribe sound files; a broken file is reported and the rest goes on.", [
        ("files", {"nargs": "+", "type": Path, "help": "WAV, FLAC, OGG or MP3 files, any rate"}),
        ("--model", {"type": Path, "help": "checkpoint or training folder (none: the model notebook 00 trained)"}),
        ("--format", {"choices": ["txt", "json"], "default": "txt", "help": "a line a file as text or JSON"}), DEVICE, THREADS]),
    "doctor": (_doctor, "Say what this machine has, what is missing for which notebook, and the remedy.", []),
    "verify": (_verify, "Recompute the hashes of records and check the claims' schema.", [
        ("paths", {"nargs": "*", "type": Path, "help": "record files (none: those the project ships)"})]),
}
# fmt: on


def parser() -> argparse.ArgumentParser:
    """The whole grammar of `asrkit`, also what `--help` prints."""
    top = argparse.ArgumentParser(prog="asrkit", description="Speech recognition made fast, and measured on your machine.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (run, text, arguments) in COMMANDS.items():
        show_defaults = argparse.ArgumentDefaultsHelpFormatter
        sub = commands.add_parser(name, help=text, description=text, formatter_class=show_defaults)
        sub.set_defaults(run=run)
        for flag, rules in arguments:
            sub.add_argument(*(["-p"] if flag == "--parameter" else []), flag, **rules)
    return top


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `asrkit` command; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, RuntimeError, OSError, AssertionError) as error:  # the last: arms of a benchmark disagree
        print(f"asrkit {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"asrkit {args.command}: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
