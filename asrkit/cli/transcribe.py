"""`asrkit transcribe`: which of the ways to transcribe runs, and with which options."""

import argparse

from asrkit.cli.command import Command
from asrkit.cli.options import check_runtime_options
from asrkit.cli.shards import check_shards, transcribe_shards
from asrkit.cli.transcribe_files import transcribe_files
from asrkit.cli.transcribe_options import (
    add_arguments,
    check_format,
    model_path,
    pipeline_config,
    transcript_format,
    window_options,
)
from asrkit.cli.workers import check_workers, choose_dtype


def _transcribe(args: argparse.Namespace) -> int:
    check_workers(args)
    check_runtime_options(args, here=args.on is None)
    check_shards(args)
    format_ = transcript_format(args)
    windows = window_options(args, format_)
    check_format(args, format_)
    choose_dtype(args)
    config = pipeline_config(args)
    if args.shards:
        return transcribe_shards(args, windows, config, model_path(args))
    return transcribe_files(args, windows, config, format_)


COMMAND = Command(
    name="transcribe",
    summary="Transcribe sound files, long ones in windows.",
    details="A file that cannot be read is reported, the others are transcribed, and the exit "
    "code is 1. With --json, stdout has one JSON line a file, or with --out one JSON document of "
    "counts. With --shards, the counts and the exit code are of all results in the folder, those "
    "of earlier runs included, and of the shards of this part.",
    run=_transcribe,
    add_arguments=add_arguments,
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
