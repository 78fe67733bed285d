"""The command line: a thin parser over the doors. Errors are one line (exit code 2); results end with one JSON line."""

import argparse
import contextlib
import functools
import importlib.metadata
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def _report(args: argparse.Namespace) -> int:
    import yaml

    from asrkit.report import report

    parameters = {name: yaml.safe_load(value) for name, value in args.parameter}  # `-p quick false` is False, never "false"
    rest: dict[str, Any] = {"workers": args.workers, "timeout_s": args.timeout_s, "progress": not args.no_progress}
    result = report(args.notebooks or None, args.out, parameters=parameters, **rest)
    print(result.summary())
    return result.exit_code


def _bench(args: argparse.Namespace) -> int:
    _prepare(args)
    from asrkit import bench
    from asrkit.shapes import expect

    expect(not args.out.is_dir(), "out", "a file", repr(str(args.out)))
    expect(not args.peers or args.device == "cpu", "peers", "--device cpu: the rivals run on a CPU", args.device)
    own = {name: value for name in ("lengths", "ranks") if (value := getattr(args, name))}
    expect(not own or args.suite == "batching", ", ".join(own), "the suite batching", args.suite)
    records, say = [], functools.partial(print, file=sys.stderr)
    with bench.Peers() if args.peers else contextlib.nullcontext() as peers:
        for suite in bench.SUITES if args.suite == "all" else [args.suite]:
            records += bench.run(suite, device=args.device, out=args.out, quick=args.quick, peers=peers, say=say, **own)
    print("\n".join([*bench.table(records), *[bench.LEGEND] * (args.suite != "batching")]))
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
    import torch
    from tqdm import tqdm

    from asrkit.models import limit_context, load_checkpoint
    from asrkit.models.packed import pack, packs
    from asrkit.records import home
    from asrkit.shapes import expect
    from asrkit.transcribe import TIMED, Folder, Options, find, summary, transcribe

    timed = args.timestamps or args.format in TIMED
    options = Options(batch_s=args.batch_s, window_s=args.window_s, overlap_s=args.overlap_s, timestamps=timed)
    expect(args.out is not None or args.format not in TIMED, "format", "txt or json without --out", args.format, "Pass --out DIR.")
    expect(not timed or args.format != "txt", "timestamps", "a --format with times: json, srt, vtt or ctm", args.format)
    demo = home() / "demo"
    known = args.model is not None or (demo / "model.safetensors").is_file()
    expect(known, "model", "the demo of notebook 00", f"none in {demo}", "Run it (make report), or pass --model.")
    checkpoint = load_checkpoint(args.model or demo, device=args.device, dtype=getattr(torch, args.dtype))
    if args.context:
        limit_context(checkpoint.model, tuple(args.context))
    found = find(args.files)
    folder = Folder(args.out, found, checkpoint, options, kind=args.format, fresh=args.fresh) if args.out else None
    todo, refused = folder.todo() if folder else ([file for file, _ in found], [])
    if folder and folder.anew:
        print(f"{folder.anew} made anew: other model, settings or recording", file=sys.stderr)
    if packs(checkpoint.model):
        pack(checkpoint.model)  # now that the folder has seen the weights
    counts = {"files": len(found), "failed": 0, "skipped": len(found) - len(todo) - len(refused)}
    audio_s, start = 0.0, time.perf_counter()
    for one in itertools.chain(refused, transcribe(checkpoint, todo, options=options, progress=not args.no_progress)):
        audio_s, counts["failed"] = audio_s + one.audio_s, counts["failed"] + bool(one.error)
        if one.error:
            tqdm.write(f"{one.path}: {one.error}", file=sys.stderr)
        elif folder:
            folder.write(one)
        else:
            tqdm.write(json.dumps(summary(one)) if args.format == "json" else f"{one.path}\t{one.text}", file=sys.stdout)
            sys.stdout.flush()  # a pipe shows each as it comes
    rtfx = round(audio_s / (time.perf_counter() - start), 1)  # reading and writing included, loading the model not
    last = sys.stderr if args.format == "json" and not folder else sys.stdout  # a file of JSON lines has recordings only
    print(json.dumps({**counts, "audio_s": round(audio_s, 2), "rtfx": rtfx}), file=last)
    return 1 if counts["failed"] else 0


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


def _data_prepare(args: argparse.Namespace) -> int:
    from asrkit.data.prepare import prepare

    how: dict[str, Any] = {"out": args.out, "parts": args.parts, "mirror": args.mirror, "jobs": args.jobs}
    summary = prepare(args.corpus, **how, progress=not args.no_progress, say=functools.partial(print, file=sys.stderr))
    print(json.dumps(summary))
    return 0


def _data_lengths(args: argparse.Namespace) -> int:
    from asrkit.data.statistics import TABLE
    from asrkit.shapes import expect

    expect(str(args.out).endswith(TABLE), "out", "a name that ends in .csv or .csv.gz", repr(str(args.out)))
    lengths = _lengths(args)
    lengths.save(args.out)
    hours, tokens = round(lengths.hours, 4), int(lengths.tokens.sum())
    print(json.dumps({"out": str(args.out), "utterances": len(lengths), "hours": hours, "tokens": tokens}))
    return 0


def _data_stats(args: argparse.Namespace) -> int:
    from asrkit.data.statistics import histogram, length_stats, length_table
    from asrkit.records import atomic
    from asrkit.shapes import expect

    picture = args.out is None or args.out.suffix in (".png", ".svg", ".pdf")
    expect(picture, "out", "a name that ends in .png, .svg or .pdf", repr(str(args.out)))
    lengths = _lengths(args)
    stats = length_stats(lengths, batch=args.batch)
    if args.out:
        try:
            from asrkit import plots
        except ModuleNotFoundError as error:
            raise RuntimeError(f'out: a picture needs {error.name}. Run pip install -e ".[notebooks]" in the checkout.') from None
        known = bool(stats["tokens"])
        title = f"{args.target}: {len(lengths):,} utterances, {lengths.hours:,.1f} hours"
        figure, axes = plots.canvas(title, columns=3 if known else 1, size=(11, 3.3) if known else (5, 3.3))
        plots.lengths(lengths.seconds, lengths.tokens, axes if known else [axes])  # type: ignore[arg-type, list-item]
        with atomic(args.out) as part:
            figure.savefig(part, dpi=110)
    if not args.json:
        print(length_table(stats), histogram(lengths.seconds), sep="\n")
    print(json.dumps(stats))
    return 0


def _lengths(args: argparse.Namespace) -> Any:
    from asrkit.data.statistics import read_lengths
    from asrkit.text import load_tokenizer

    tokens = load_tokenizer(args.tokenizer) if args.tokenizer else None
    return read_lengths(args.target, tokens=tokens, progress=not args.no_progress)


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
TARGET = ("target", {"help": "lhotse cuts, supervisions, recordings or a folder of them; JSON lines with duration and text; a "
                     "table (.csv, .csv.gz), or one that asrkit has: librispeech_eval, librispeech_train_clean_100, ami_segments"})
TOKENS = ("--tokenizer", {"help": "char, or a SentencePiece .model file: what tokens are (none: characters)"})
GROUPS = {"data": "Prepare speech corpora; see and write down how long their utterances are."}
COMMANDS: dict[str, tuple[Any, str, list[tuple[str, dict[str, Any]]]]] = {
    "report": (_report, "Run the notebooks and build one HTML report with the ledger of claims.", [
        ("notebooks", {"nargs": "*", "type": Path, "help": "notebooks to run (none: the whole series)"}),
        ("--out", {"type": Path, "default": Path("reports"), "help": "folder that gets one subfolder a run, and `latest`"}),
        ("--parameter", {"nargs": 2, "action": "append", "default": [], "metavar": ("NAME", "VALUE"),
                         "help": "set a parameter in every notebook that has it; VALUE is YAML"}),
        ("--workers", {"type": int, "help": "notebooks at once (none: half the cores)"}),
        ("--timeout", {"type": float, "default": 600.0, "dest": "timeout_s", "help": "seconds a cell may take"}), QUIET]),
    "bench": (_bench, "Measure fast paths against their references and peers, both arms in one run.", [
        ("suite", {"choices": ["losses", "decoders", "features", "precision", "encoder", "batching", "all"],
                   "help": "what to measure"}),
        DEVICE, THREADS,
        ("--quick", {"action": "store_true", "help": "small sizes and few repeats"}),
        ("--peers", {"action": "store_true", "help": "also time the rivals that `make peers` installed, on CPU"}),
        ("--lengths", {"type": Path, "metavar": "FILE", "help": "batching: a table of your own, CSV with seconds and tokens"}),
        ("--ranks", {"type": int, "nargs": "+", "metavar": "N", "help": "batching: numbers of ranks (none: 1 8 64 1024)"}),
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
        ("files", {"nargs": "+", "type": Path, "help": "sound files of any rate, or folders of them, searched to any depth"}),
        ("--model", {"type": Path, "help": "training folder, .safetensors, .nemo or Hugging Face folder (none: notebook 00's)"}),
        ("--format", {"choices": ["txt", "json", "srt", "vtt", "ctm"], "default": "txt",
                      "help": "text, JSON (a line each; without --out the counts go to stderr), subtitles, CTM"}),
        ("--timestamps", {"action": "store_true", "help": "json: with times of words (srt, vtt and ctm have them anyway); "
                          "of an RNN-T, whose labels have no length, a word ends where its last label was said"}),
        ("--out", {"type": Path, "metavar": "DIR", "help": "one file each, in this folder; those done are skipped"}),
        ("--fresh", {"action": "store_true", "help": "make and overwrite all that --out holds of these files"}),
        ("--window", {"type": float, "default": 30.0, "dest": "window_s", "help": "longer files are cut into windows of this"}),
        ("--overlap", {"type": float, "default": 4.0, "dest": "overlap_s", "help": "what a window shares with the next"}),
        ("--context", {"type": int, "nargs": 2, "metavar": "FRAMES", "help": "local attention: frames to the left and right"}),
        ("--batch-seconds", {"type": float, "default": 120.0, "dest": "batch_s", "help": "audio of a batch at most, with padding"}),
        ("--dtype", {"choices": ["float32", "bfloat16", "float16"], "default": "float32", "help": "features stay float32"}),
        DEVICE, THREADS, QUIET]),
    "data prepare": (_data_prepare, "Make a corpus ready: load, check and unpack it, or find it in a folder; write lhotse cuts.", [
        ("corpus", {"help": "digits or spoken_commands (synthesised here); yesno, mini_librispeech, librispeech (openslr.org); or "
                    "a folder of LibriSpeech's layout, of lhotse recordings and supervisions, or of sound files each with a .txt"}),
        ("--out", {"type": Path, "metavar": "DIR", "help": "folder for archives and cuts_<part>.jsonl.gz (none: corpora/<name> in "
                   "$ASRKIT_HOME or ~/.cache/asrkit)"}),
        ("--parts", {"nargs": "+", "default": [], "metavar": "PART", "help": "only these, or all (none: all, but of "
                     "librispeech's 61 GB dev-clean test-clean train-clean-100, 7 GB)"}),
        ("--mirror", {"default": "https://www.openslr.org/resources", "metavar": "URL", "help": "where archives come from"}),
        ("--jobs", {"type": int, "default": 2, "help": "threads that read, or processes that speak"}), QUIET]),
    "data stats": (_data_stats, "Lengths of a corpus: quantiles, hours, padding of random batches, a histogram in the terminal.", [
        TARGET, ("--out", {"type": Path, "metavar": "PICTURE", "help": "also draw them: .png, .svg or .pdf"}),
        ("--json", {"action": "store_true", "help": "only the line of JSON"}),
        ("--batch", {"type": int, "default": 32, "help": "utterances of the random batches whose padding is told"}),
        TOKENS, QUIET]),
    "data lengths": (_data_lengths, "Write the table of lengths of a manifest, which `bench batching --lengths` takes.", [
        TARGET, ("--out", {"type": Path, "required": True, "metavar": "TABLE", "help": "a .csv or .csv.gz file: seconds,tokens"}),
        TOKENS, QUIET]),
    "doctor": (_doctor, "Say what this machine has, what is missing for which notebook, and the remedy.", []),
    "verify": (_verify, "Recompute the hashes of records and check the claims' schema.", [
        ("paths", {"nargs": "*", "type": Path, "help": "record files (none: those the project ships)"})]),
}
# fmt: on


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something: not None, off, or an empty list."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = action.default not in (None, []) and action.default is not False
        return super()._get_help_string(action) if said else action.help


def parser() -> argparse.ArgumentParser:
    """The whole grammar of `asrkit`, also what `--help` prints."""
    top = argparse.ArgumentParser(prog="asrkit", description="Speech recognition made fast, and measured on your machine.")
    top.add_argument("--version", action="version", version=f"asrkit {importlib.metadata.version('asrkit')}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    groups = {"": commands}
    for name, (run, text, arguments) in COMMANDS.items():
        group, _, leaf = name.rpartition(" ")
        if group not in groups:
            sub = commands.add_parser(group, help=GROUPS[group], description=GROUPS[group])
            sub.set_defaults(run=lambda args: args.parser.print_help(sys.stderr) or 2, parser=sub)
            groups[group] = sub.add_subparsers(metavar="COMMAND")
        sub = groups[group].add_parser(leaf, help=text, description=text, formatter_class=_Help)
        sub.set_defaults(run=run, parser=sub)
        for flag, rules in arguments:
            sub.add_argument(*(["-p"] if flag == "--parameter" else []), flag, **rules)
    return top


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `asrkit` command; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # nobody reads on, as in `| head -1`: quiet, with the code that a shell gives such a program
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python has yet to flush
        return 141
    except (ValueError, RuntimeError, OSError, AssertionError) as error:  # the last: arms of a benchmark disagree
        print(f"{args.parser.prog}: {_typed(' '.join(str(error).split()), args.parser)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{args.parser.prog}: stopped", file=sys.stderr)
        return 130


def _typed(message: str, command: argparse.ArgumentParser) -> str:
    """An argument's error with the flag that was typed: `batch_s: expected …` is `--batch-seconds: expected …`."""
    names, colon, rest = message.partition(": expected ")
    flags = {action.dest: action.option_strings[-1] for action in command._actions if action.option_strings}
    return ", ".join(flags.get(name, name) for name in names.split(", ")) + colon + rest


if __name__ == "__main__":
    sys.exit(main())
