"""Options of `asrkit transcribe`, and what they ask of the recogniser."""

import argparse
from pathlib import Path
from typing import Any

from asrkit.cli.options import add_device, add_no_progress
from asrkit.cli.shards import add_shard_arguments
from asrkit.cli.workers import add_workers
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options of the command to `parser`."""
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
    _add_window_arguments(parser)
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


def _add_window_arguments(parser: argparse.ArgumentParser) -> None:
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


def transcript_format(args: argparse.Namespace) -> str:
    """The format that was asked for; --json without --out prints transcripts as JSON lines."""
    if args.format:
        return args.format
    rows = args.shards or (args.json and not args.out)
    return "json" if rows else "txt"


def window_options(args: argparse.Namespace, format_: str) -> WindowOptions:
    """How recordings are cut into windows, and whether words get times.

    Args:
        args: As the parser returns them.
        format_: As `transcript_format` returns it.
    """
    from asrkit.transcribe import TIMED

    return WindowOptions(
        batch_s=args.batch_s,
        window_s=args.window_s,
        overlap_s=args.overlap_s,
        timestamps=args.timestamps or format_ in TIMED,
        readers=args.readers,
    )


def check_format(args: argparse.Namespace, format_: str) -> None:
    """ValueError for --format, --json, --timestamps or --fresh that do not go with the others.

    Args:
        args: As the parser returns them.
        format_: As `transcript_format` returns it.
    """
    from asrkit.shapes import expect
    from asrkit.transcribe import TIMED

    expect(
        args.out is not None or format_ not in TIMED,
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
    expect(args.out is not None or not args.fresh, "fresh", "--out DIR with it", "none")


def pipeline_config(args: argparse.Namespace) -> PipelineConfig:
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


def model_path(args: argparse.Namespace) -> Path:
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
