"""`asrkit train` and `asrkit transcribe`."""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from asrkit.cli.options import DEVICE, QUIET, THREADS, Commands, prepare
from asrkit.transcribe.options import WindowOptions, description


def _train(args: argparse.Namespace) -> int:
    prepare(args)
    from asrkit.data import corpora
    from asrkit.data.utterances import Utterances
    from asrkit.models import (
        ConvConfig,
        FastConformerConfig,
        LSTMConfig,
        StatelessConfig,
        TransducerConfig,
        load_checkpoint,
    )
    from asrkit.shapes import expect
    from asrkit.text import load_tokenizer
    from asrkit.training import TrainConfig, evaluate, train

    progress, config = (
        not args.no_progress,
        TrainConfig(seconds=args.seconds, steps=args.steps, seed=args.seed),
    )
    tokenizer = load_tokenizer(args.tokenizer)
    expect(not args.out.exists() or args.out.is_dir(), "out", "a folder", repr(str(args.out)))
    encoder = ConvConfig() if args.encoder == "conv" else FastConformerConfig()
    predictor = StatelessConfig() if args.predictor == "stateless" else LSTMConfig()
    model = TransducerConfig(
        vocab_size=tokenizer.vocab_size,
        encoder=encoder,
        predictor=predictor,
        durations=tuple(args.durations),
    )
    sets = corpora.load(
        args.manifest,
        hold_out=args.hold_out,
        join_digits=args.join_digits,
        kinds=args.kinds,
        progress=progress,
    )
    counts = {name: len(cuts) for name, cuts in sets.items()}
    expect(
        counts["train"] > 0,
        "manifest",
        "utterances to train on",
        counts,
        "Set another split, or no --hold-out.",
    )
    loaded = {
        name: Utterances.load(cuts, progress=progress) for name, cuts in sets.items() if len(cuts)
    }
    for text in loaded["test"].texts if "test" in loaded else []:
        tokenizer.encode(text)  # refused now, not after training
    how: dict[str, Any] = {
        "out": args.out,
        "device": args.device,
        "resume": not args.fresh,
        "progress": progress,
        "config": config,
    }
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
    prepare(args)
    import torch
    from tqdm import tqdm

    from asrkit.files import home
    from asrkit.models import limit_context, load_checkpoint
    from asrkit.shapes import expect
    from asrkit.transcribe import (
        TIMED,
        Folder,
        PipelineConfig,
        Recognizer,
        find,
        summary,
        transcribe,
    )

    timed = args.timestamps or args.format in TIMED
    options = WindowOptions(
        batch_s=args.batch_s, window_s=args.window_s, overlap_s=args.overlap_s, timestamps=timed
    )
    expect(
        args.out is not None or args.format not in TIMED,
        "format",
        "txt or json without --out",
        args.format,
        "Pass --out DIR.",
    )
    expect(
        not timed or args.format != "txt",
        "timestamps",
        "a --format with times: json, srt, vtt or ctm",
        args.format,
    )
    demo = home() / "demo"
    known = args.model is not None or (demo / "model.safetensors").is_file()
    expect(
        known,
        "model",
        "the demo of notebook 00",
        f"none in {demo}",
        "Run it (make report), or pass --model.",
    )
    checkpoint = load_checkpoint(
        args.model or demo, device=args.device, dtype=getattr(torch, args.dtype)
    )
    if args.context:
        limit_context(checkpoint.model, tuple(args.context))
    found = find(args.files)
    folder = (
        Folder(args.out, found, checkpoint, options, kind=args.format, fresh=args.fresh)
        if args.out
        else None
    )
    todo, refused = folder.todo() if folder else ([file for file, _ in found], [])
    if folder and folder.anew:
        print(f"{folder.anew} made anew: other model, settings or recording", file=sys.stderr)
    # What "optimized" does on CUDA waits for a measurement. In place, now that the folder has seen
    # the weights: a copy would take their memory twice.
    on_cpu = torch.device(args.device).type == "cpu"
    config = PipelineConfig(encoder="optimized" if on_cpu else "eager")
    recognizer = Recognizer.from_checkpoint(checkpoint, config, in_place=True)
    counts = {"files": len(found), "failed": 0, "skipped": len(found) - len(todo) - len(refused)}
    audio_s, start = 0.0, time.perf_counter()
    transcripts = transcribe(
        checkpoint, todo, options=options, recognizer=recognizer, progress=not args.no_progress
    )
    for one in itertools.chain(refused, transcripts):
        audio_s, counts["failed"] = audio_s + one.audio_s, counts["failed"] + bool(one.error)
        if one.error:
            tqdm.write(f"{one.path}: {one.error}", file=sys.stderr)
        elif folder:
            folder.write(one)
        else:
            tqdm.write(
                json.dumps(summary(one)) if args.format == "json" else f"{one.path}\t{one.text}",
                file=sys.stdout,
            )
            sys.stdout.flush()  # a pipe shows each as it comes
    rtfx = round(
        audio_s / (time.perf_counter() - start), 1
    )  # reading and writing included, loading the model not
    last = (
        sys.stderr if args.format == "json" and not folder else sys.stdout
    )  # a file of JSON lines has recordings only
    print(json.dumps({**counts, "audio_s": round(audio_s, 2), "rtfx": rtfx}), file=last)
    return 1 if counts["failed"] else 0


# fmt: off
COMMANDS: Commands = {
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
        ("--timestamps", {"action": "store_true", "help": description(WindowOptions, "timestamps")}),
        ("--out", {"type": Path, "metavar": "DIR", "help": "one file each, in this folder; those done are skipped"}),
        ("--fresh", {"action": "store_true", "help": "make and overwrite all that --out holds of these files"}),
        ("--window", {"type": float, "default": WindowOptions.window_s, "dest": "window_s",
                      "help": description(WindowOptions, "window_s")}),
        ("--overlap", {"type": float, "default": WindowOptions.overlap_s, "dest": "overlap_s",
                      "help": description(WindowOptions, "overlap_s")}),
        ("--context", {"type": int, "nargs": 2, "metavar": "FRAMES", "help": "local attention: frames to the left and right"}),
        ("--batch-seconds", {"type": float, "default": WindowOptions.batch_s, "dest": "batch_s",
                      "help": description(WindowOptions, "batch_s")}),
        ("--dtype", {"choices": ["float32", "bfloat16", "float16"], "default": "float32", "help": "features stay float32"}),
        DEVICE, THREADS, QUIET]),
}
# fmt: on
