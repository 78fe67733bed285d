"""`asrkit transcribe` without --shards: file by file, in this process or in --workers."""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asrkit.cli.command import count, finish
from asrkit.cli.options import apply_runtime_options, check_writable
from asrkit.cli.transcribe_options import model_path
from asrkit.cli.workers import asked_layout, tell_layout
from asrkit.transcribe.options import PipelineConfig, WindowOptions


def transcribe_files(
    args: argparse.Namespace, options: WindowOptions, config: PipelineConfig, format_: str
) -> int:
    """Transcribe file by file, in this process or in --workers; returns the exit code.

    Args:
        args: As the parser returns them.
        options: How recordings are cut.
        config: How to compute.
        format_: Of the transcripts.
    """
    apply_runtime_options(args)

    from asrkit.transcribe import Folder, Recognizer, find

    if args.out and not args.out.is_file():
        check_writable(args.out, folder=True)  # now, not when the first file is done
    recordings = find(args.files)
    layout = None
    if args.workers is not None:
        layout = asked_layout(args, model_path(args), len(recordings))
    start = time.perf_counter()
    checkpoint = _load_model(args)
    folder = None
    todo = [path for path, _ in recordings]
    if args.out:
        folder = Folder(args.out, recordings, checkpoint, options, config=config, kind=format_)
        todo = folder.todo()
    skipped = len(recordings) - len(todo)
    # In place, now that the folder has hashed the weights: a copy would take their memory twice.
    recognizer = Recognizer.from_checkpoint(checkpoint, config, in_place=True)
    tell_layout(args, layout)
    loaded = time.perf_counter()
    transcripts = _transcripts(args, checkpoint, todo, options, recognizer, layout)
    failed, audio_s = _write(transcripts, folder, format_)
    elapsed_s = time.perf_counter() - loaded  # with reading and writing, without loading the model
    result = {
        "files": len(recordings),
        "failed": failed,
        "skipped": skipped,
        "audio_s": round(audio_s, 2),
        "rtfx": round(audio_s / elapsed_s, 1),
    }
    if layout is not None:
        result |= {"workers": layout.workers, "load_s": round(loaded - start, 2)}
    _report(args, result)
    return 1 if failed else 0


def _load_model(args: argparse.Namespace) -> Any:
    """The checkpoint of --model, or the one that notebook 00 left, on the device."""
    import torch

    from asrkit.export import is_exported
    from asrkit.models import limit_context, load_checkpoint
    from asrkit.models.int8 import loaded_dtype
    from asrkit.shapes import expect

    if args.engine != "torch":
        return _load_exported(args)
    path = model_path(args)
    remedy = "Pass --engine onnxruntime or --engine openvino."
    expect(not is_exported(path), "engine", "one for an exported model", "torch", remedy)
    dtype = getattr(torch, loaded_dtype(args.dtype))
    checkpoint = load_checkpoint(path, device=args.device, dtype=dtype)
    if args.context:
        limit_context(checkpoint.model, tuple(args.context))
    return checkpoint


def _load_exported(args: argparse.Namespace) -> Any:
    """The checkpoint of an exported folder, its encoder in the engine of --engine."""
    from asrkit.shapes import expect
    from asrkit.transcribe import load_exported

    with_engine = f"with --engine {args.engine}"
    made = "Make one: asrkit export --model M --format onnx --out DIR."
    exported = f"a folder of asrkit export {with_engine}"
    expect(args.model is not None, "model", exported, "none", made)
    expect(args.device == "cpu", "device", f"cpu {with_engine}", args.device)
    expect(not args.context, "context", f"none {with_engine}", args.context)
    remedy = "Export with --int8, and pass --dtype float32."
    expect(args.dtype != "int8", "dtype", f"float32 or bfloat16 {with_engine}", "int8", remedy)
    return load_exported(args.model, args.engine, precision=args.dtype)


def _transcripts(
    args: argparse.Namespace,
    checkpoint: Any,
    todo: list[Path],
    options: WindowOptions,
    recognizer: Any,
    layout: Any,
) -> Iterable[Any]:
    """Yield the transcripts, made in this process or in those of a layout."""
    from asrkit.transcribe import transcribe, transcribe_in_workers

    shared = {"options": options, "recognizer": recognizer, "progress": not args.no_progress}
    if layout is None:
        return transcribe(checkpoint, todo, **shared)
    return transcribe_in_workers(checkpoint, todo, layout, **shared)


def _write(transcripts: Iterable[Any], folder: Any, format_: str) -> tuple[int, float]:
    """Write each transcript as it comes, to `folder` or else to stdout, and errors to stderr.

    Returns (number of files that failed, seconds of audio transcribed).
    """
    from tqdm import tqdm

    from asrkit.transcribe import summary

    failed = 0
    audio_s = 0.0
    for transcript in transcripts:
        audio_s += transcript.audio_s
        if transcript.error:
            failed += 1
            error = f"{transcript.path}: {transcript.error}{_hint(transcript.path)}"
            tqdm.write(error, file=sys.stderr)
        elif folder:
            folder.write(transcript)
        else:
            line = f"{transcript.path}\t{transcript.text}"
            if format_ == "json":
                line = json.dumps(summary(transcript))
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()  # so that a reader of a pipe sees each as it comes
    return failed, audio_s


def _hint(path: Path) -> str:
    """What reads a file that is no sound file but holds or names recordings; else nothing."""
    from asrkit.transcribe.manifests import CONTAINERS, MANIFESTS

    if path.name.lower().endswith((*CONTAINERS, *MANIFESTS)):
        return " Pass --out DIR --shards to transcribe the recordings in it."
    return ""


def _report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Say how many files were transcribed; on stderr where stdout holds the transcripts."""
    done = result["files"] - result["failed"] - result["skipped"]
    sentence = f"{done} of {count(result['files'], 'file')} transcribed"
    if result["skipped"]:
        sentence += f", {result['skipped']} done before"
    if result["failed"]:
        sentence += f", {result['failed']} failed"
    sentence += f"; {result['audio_s']:,} s of audio at RTFx {result['rtfx']:,}"
    if "workers" in result:
        sentence += f" by {count(result['workers'], 'worker')}"
        sentence += f" (without {result['load_s']:,} s in which the model was loaded)"
    if args.out:
        finish(args, result | {"out": str(args.out)}, f"{sentence}. Transcripts: {args.out}")
    else:
        print(sentence, file=sys.stderr)
