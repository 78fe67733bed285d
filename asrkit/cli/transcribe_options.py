"""Options of `asrkit transcribe`, and what they ask of the recogniser."""

import argparse
from pathlib import Path

from asrkit.cli.options import add_device, add_fields, add_no_progress, given
from asrkit.cli.shards import add_shard_arguments
from asrkit.cli.workers import add_workers
from asrkit.transcribe.options import (
    BeamOptions,
    PipelineConfig,
    PromptOptions,
    WindowOptions,
)

NEED_A_LANGUAGE_MODEL = ("lm_units", "lm_weight")


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
    add_fields(
        parser.add_argument_group("encoder-decoder models (others refuse these)"), PromptOptions
    )
    add_fields(parser.add_argument_group("beam search"), BeamOptions)
    add_fields(parser.add_argument_group("windows and batches"), WindowOptions)
    device = parser.add_argument_group("device")
    add_device(device)
    add_workers(device)
    add_no_progress(parser)


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(
        "--format",
        choices=["txt", "json", "srt", "vtt", "ctm"],
        help="text, JSON, subtitles or CTM; without --out one line a file, so txt or json; "
        "with --shards json (default: txt, or json with --shards)",
    )
    output.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write one transcript a file into this folder, and skip those already done",
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

    timestamps = bool(args.timestamps) or format_ in TIMED
    return WindowOptions(**given(args, WindowOptions) | {"timestamps": timestamps})


def check_format(args: argparse.Namespace, format_: str) -> None:
    """ValueError for --format, --json or --timestamps that do not go with the others.

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


def pipeline_config(args: argparse.Namespace) -> PipelineConfig:
    """How the recogniser computes; a dtype other than int8 is that of the model as it is loaded."""
    asked = given(args, PromptOptions)
    return PipelineConfig(
        precision="int8" if args.dtype == "int8" else "as_loaded",
        search=_search(args),
        prompt=PromptOptions(**asked) if asked else None,
    )


def _search(args: argparse.Namespace) -> BeamOptions | None:
    """The beam search that was asked for; None for greedy decoding."""
    from asrkit.shapes import expect

    asked = given(args, BeamOptions)
    for name, value in asked.items():
        expect(args.beam is not None, name, "a beam search with it", value, "Pass --beam 8.")
        alone = args.lm is None and name in NEED_A_LANGUAGE_MODEL
        expect(not alone, name, "an n-gram model with it", value, "Pass --lm FILE.")
    expect(args.lm is None or args.lm.is_file(), "lm", "a file in ARPA format", str(args.lm))
    return BeamOptions(**asked) if asked else None


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
