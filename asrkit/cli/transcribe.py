"""`asrkit transcribe`."""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asrkit.cli.command import Command, count, finish
from asrkit.cli.options import (
    add_device,
    add_no_progress,
    apply_runtime_options,
    check_runtime_options,
    check_writable,
)
from asrkit.cli.shards import add_shard_arguments, check_shards, transcribe_shards
from asrkit.cli.workers import (
    add_workers,
    asked_layout,
    check_workers,
    choose_dtype,
    tell_layout,
)
from asrkit.tasks import TASKS
from asrkit.transcribe.options import (
    BeamOptions,
    PipelineConfig,
    PromptOptions,
    WindowOptions,
    description,
)

NEED_A_LANGUAGE_MODEL = ("lm_units", "lm_weight")
NEED_A_BEAM = (
    "lm",
    "lm_units",
    "lm_weight",
    "label_bonus",
    "word_bonus",
    "top_tokens",
    "ctc_weight",
)


def _transcribe(args: argparse.Namespace) -> int:
    check_workers(args)
    check_runtime_options(args, here=args.on is None)

    from asrkit.transcribe import TIMED

    check_shards(args)
    choose_dtype(args)
    format_ = _transcript_format(args)
    options = WindowOptions(
        batch_s=args.batch_s,
        window_s=args.window_s,
        overlap_s=args.overlap_s,
        timestamps=args.timestamps or format_ in TIMED,
        readers=args.readers,
    )
    _check_format(args, format_, TIMED)
    config = _config(args)
    if args.shards:
        return transcribe_shards(args, options, config, _model_path(args))
    return _transcribe_files(args, options, config, format_)


def _transcribe_files(
    args: argparse.Namespace, options: WindowOptions, config: PipelineConfig, format_: str
) -> int:
    """Transcribe file by file, in this process or in --workers; returns the exit code."""
    apply_runtime_options(args)

    from asrkit.transcribe import Folder, Recognizer, find

    if args.out and not args.out.is_file():
        check_writable(args.out, folder=True)  # now, not when the first file is done
    recordings = find(args.files)
    layout = asked_layout(args, len(recordings))
    start = time.perf_counter()
    checkpoint = _load_model(args)
    folder = None
    todo = [path for path, _ in recordings]
    refused: list[Any] = []
    if args.out:
        how = {"config": config, "kind": format_, "fresh": args.fresh}
        folder = Folder(args.out, recordings, checkpoint, options, **how)
        todo, refused = folder.todo()
    skipped = len(recordings) - len(todo) - len(refused)
    # In place, now that the folder has hashed the weights: a copy would take their memory twice.
    recognizer = Recognizer.from_checkpoint(checkpoint, config, in_place=True)
    if folder is not None and folder.anew:  # now that the model can do what is asked for
        print(f"{folder.anew} made anew: other model, settings or recording", file=sys.stderr)
    tell_layout(args, layout)
    loaded = time.perf_counter()
    transcripts = _transcripts(args, checkpoint, todo, options, recognizer, layout)
    failed, audio_s = _write(itertools.chain(refused, transcripts), folder, format_)
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


def _transcripts(
    args: argparse.Namespace,
    checkpoint: Any,
    todo: list[Path],
    options: WindowOptions,
    recognizer: Any,
    layout: Any,
) -> Iterable[Any]:
    """Yield the transcripts, made in this process or in those of a layout."""
    from asrkit.transcribe import transcribe, transcribe_in_processes

    shared = {"options": options, "recognizer": recognizer, "progress": not args.no_progress}
    if layout is None:
        return transcribe(checkpoint, todo, **shared)
    return transcribe_in_processes(checkpoint, todo, layout, **shared)


def _transcript_format(args: argparse.Namespace) -> str:
    """The format that was asked for; --json without --out prints transcripts as JSON lines."""
    if args.format:
        return args.format
    rows = args.shards or (args.json and not args.out)
    return "json" if rows else "txt"


def _check_format(args: argparse.Namespace, format_: str, timed: Iterable[str]) -> None:
    from asrkit.shapes import expect

    expect(
        args.out is not None or format_ not in timed,
        "format",
        "txt or json without --out",
        format_,
        "Pass --out DIR.",
    )
    expect(
        args.out is not None or not args.json or format_ == "json",
        "json",
        "--out DIR, or transcripts in JSON",
        f"--format {format_}",
    )
    expect(
        not args.timestamps or format_ != "txt",
        "timestamps",
        "a --format with times: json, srt, vtt or ctm",
        format_,
    )


def _config(args: argparse.Namespace) -> PipelineConfig:
    """How the recogniser computes; a dtype other than int8 is that of the model as it is loaded."""
    search = _search(args)
    prompt = _prompt(args)
    if args.dtype == "int8":
        return PipelineConfig(precision="int8", search=search, prompt=prompt)
    return PipelineConfig(search=search, prompt=prompt)


def _search(args: argparse.Namespace) -> BeamOptions | None:
    """The beam search that was asked for; None for greedy decoding."""
    from asrkit.shapes import expect

    given = {name: getattr(args, name) for name in NEED_A_BEAM if getattr(args, name) is not None}
    if args.beam is None:
        for name, value in given.items():
            expect(False, name, "a beam search with it", value, "Pass --beam 8.")
        return None
    expect(args.lm is None or args.lm.is_file(), "lm", "a file in ARPA format", str(args.lm))
    search = BeamOptions(beam=args.beam, **given)
    if args.lm is None:
        for name in NEED_A_LANGUAGE_MODEL:
            alone = name in given
            expect(not alone, name, "an n-gram model with it", given.get(name), "Pass --lm FILE.")
    return search


def _prompt(args: argparse.Namespace) -> PromptOptions | None:
    """What the model is asked for; None where nothing was given."""
    asked = PromptOptions(
        language=args.language,
        target_language=args.target_language,
        task=args.task,
        punctuation=args.punctuation,
    )
    return asked if asked.given() else None


def _model_path(args: argparse.Namespace) -> Path:
    """--model, or the folder where notebook 00 left one."""
    from asrkit.files import home
    from asrkit.shapes import expect

    demo = home(make=False) / "demo"
    expect(
        args.model is not None or (demo / "model.safetensors").is_file(),
        "model",
        "the demo of notebook 00",
        f"none in {demo}",
        "Run it (make report), or pass --model.",
    )
    return args.model or demo


def _load_model(args: argparse.Namespace) -> Any:
    """The checkpoint of --model, or the one that notebook 00 left, on the device."""
    import torch

    from asrkit.export import is_exported
    from asrkit.models import limit_context, load_checkpoint
    from asrkit.models.int8 import loaded_dtype
    from asrkit.shapes import expect

    if args.engine != "torch":
        return _load_exported(args)
    path = _model_path(args)
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
            tqdm.write(f"{transcript.path}: {transcript.error}", file=sys.stderr)
        elif folder:
            folder.write(transcript)
        else:
            line = f"{transcript.path}\t{transcript.text}"
            if format_ == "json":
                line = json.dumps(summary(transcript))
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()  # so that a reader of a pipe sees each as it comes
    return failed, audio_s


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


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    speech = parser.add_argument_group("what to transcribe")
    speech.add_argument(
        "files",
        nargs="+",
        type=Path,
        help="sound files of any sample rate, or folders, searched to any depth",
    )
    _add_output_arguments(parser)
    add_shard_arguments(parser)
    _add_model_arguments(parser)
    _add_prompt_arguments(parser)
    _add_beam_arguments(parser)
    windows = parser.add_argument_group("windows and batches")
    windows.add_argument(
        "--window",
        type=float,
        default=WindowOptions.window_s,
        dest="window_s",
        metavar="SECONDS",
        help=description(WindowOptions, "window_s"),
    )
    windows.add_argument(
        "--overlap",
        type=float,
        default=WindowOptions.overlap_s,
        dest="overlap_s",
        metavar="SECONDS",
        help=description(WindowOptions, "overlap_s"),
    )
    windows.add_argument(
        "--batch-seconds",
        type=float,
        default=WindowOptions.batch_s,
        dest="batch_s",
        metavar="SECONDS",
        help=description(WindowOptions, "batch_s"),
    )
    windows.add_argument(
        "--readers",
        type=int,
        default=WindowOptions.readers,
        metavar="N",
        help=description(WindowOptions, "readers"),
    )
    device = parser.add_argument_group("device")
    add_device(device)
    add_workers(device)
    add_no_progress(parser)


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(
        "--format",
        choices=["txt", "json", "srt", "vtt", "ctm", "parquet"],
        help="text, JSON, subtitles or CTM; without --out one line a file, so txt or json; "
        "with --shards json or parquet (default: txt, or json with --shards)",
    )
    output.add_argument(
        "--timestamps",
        action="store_true",
        help=description(WindowOptions, "timestamps"),
    )
    output.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write one transcript a file into this folder, and skip those already done",
    )
    output.add_argument(
        "--fresh",
        action="store_true",
        help="with --out: transcribe all files again and overwrite their transcripts",
    )


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        type=Path,
        help="training folder, .safetensors, .nemo, .pt of Jasper, or Hugging Face folder "
        "(default: the model that notebook 00 trained)",
    )
    model.add_argument(
        "--engine",
        choices=["torch", "onnxruntime", "openvino"],
        default="torch",
        help="what computes the encoder, on a CPU; onnxruntime and openvino run a --model that "
        "asrkit export wrote, and have to be installed: pip install 'asrkit[onnx]' or "
        "'asrkit[openvino]'; decoding stays the same",
    )
    model.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16", "int8", "auto"],
        default="float32",
        help="precision of the model; features stay float32; int8: linear layers of a "
        "FastConformer on a CPU with VNNI or AMX, all else in bfloat16 where it has that; auto: "
        "bfloat16 on a CPU with AMX or avx512_bf16, else float32",
    )
    model.add_argument(
        "--context",
        type=int,
        nargs=2,
        metavar=("LEFT", "RIGHT"),
        help="FastConformer: limit attention to so many encoder frames to the left and right",
    )


def _add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_argument_group("encoder-decoder models (others refuse these)")
    prompt.add_argument("--language", metavar="CODE", help=description(PromptOptions, "language"))
    prompt.add_argument(
        "--target-language", metavar="CODE", help=description(PromptOptions, "target_language")
    )
    prompt.add_argument("--task", choices=TASKS, help=description(PromptOptions, "task"))
    prompt.add_argument(
        "--punctuation",
        action=argparse.BooleanOptionalAction,
        help=description(PromptOptions, "punctuation"),
    )


def _add_beam_arguments(parser: argparse.ArgumentParser) -> None:
    beam = parser.add_argument_group("beam search")

    def add(name: str, default: str = "", **options: Any) -> None:
        text = description(BeamOptions, name)
        if default:
            text += f" (default: {default})"
        # no default of argparse's: what is not given needs no --beam
        beam.add_argument("--" + name.replace("_", "-"), help=text, **options)

    add("beam", "greedy decoding", type=int, metavar="K")
    add("lm", type=Path, metavar="FILE")
    add("lm_units", BeamOptions.lm_units, choices=["words", "tokens"])
    add("lm_weight", str(BeamOptions.lm_weight), type=float, metavar="WEIGHT")
    add("label_bonus", str(BeamOptions.label_bonus), type=float, metavar="NATS")
    add("word_bonus", str(BeamOptions.word_bonus), type=float, metavar="NATS")
    add("top_tokens", type=int, metavar="N")
    add("ctc_weight", type=float, metavar="WEIGHT")


COMMAND = Command(
    name="transcribe",
    summary="Transcribe sound files, long ones in windows.",
    details="A file that cannot be read is reported, the others are transcribed, and the exit "
    "code is 1. With --json, stdout has one JSON line a file, or with --out one JSON document of "
    "counts. With --shards, the counts and the exit code are of all results in the folder, those "
    "of earlier runs included, and of the shards of this part.",
    run=_transcribe,
    add_arguments=_add_arguments,
    examples=[
        "asrkit transcribe talk.wav",
        "asrkit transcribe talks/ call.mp3 --model models/mine --format srt --out text",
        "asrkit transcribe talk.wav --model parakeet.nemo --dtype bfloat16",
        "asrkit transcribe talk.wav --model parakeet.nemo --dtype int8",
        "asrkit transcribe talk.wav --model exported/mine --engine onnxruntime",
        "asrkit transcribe talk.wav --model models/jasper --beam 8 --lm words.arpa --word-bonus 3",
        "asrkit transcribe talk.wav --model models/aed --beam 4 --ctc-weight 0.5",
        "asrkit transcribe talk.wav --model canary.nemo --language de --task translate",
        "asrkit transcribe talks/ --json --timestamps > talks.jsonl",
        "asrkit transcribe talks/ --out text --workers auto --dtype auto",
        "asrkit transcribe manifest.jsonl --out text --shards --part 0/8",
        "asrkit transcribe manifest.jsonl --out text --shards --on ray --address 10.0.0.1:6379",
    ],
)
