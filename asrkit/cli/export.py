"""`asrkit export`."""

import argparse
from pathlib import Path

from asrkit.cli.command import Command, finish
from asrkit.cli.options import check_writable


def _export(args: argparse.Namespace) -> int:
    from asrkit.export import export
    from asrkit.models import load_checkpoint

    check_writable(args.out, folder=True)  # now, not when the graphs are done
    checkpoint = load_checkpoint(args.model)
    exported = export(checkpoint, args.out, format=args.format, head=args.head, int8=args.int8)
    files = sorted(args.out.iterdir())
    names = [file.name for file in files]
    size = sum(file.stat().st_size for file in files)
    result = {
        "out": str(args.out),
        "format": exported.format,
        "head": exported.head,
        "int8": args.int8,
        "files": names,
        "bytes": size,
    }
    lines = [
        f"{exported.head} in {exported.format}: {', '.join(names)}; {size / 1e6:,.1f} MB",
        f"Exported: {args.out}",
    ]
    finish(args, result, "\n".join(lines))
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        help="training folder, .safetensors, .nemo, .pt of Jasper, or Hugging Face folder",
    )
    parser.add_argument(
        "--format",
        choices=["onnx", "openvino"],
        required=True,
        help="ONNX files, or OpenVINO's IR; needs pip install 'asrkit[onnx]' or 'asrkit[openvino]'",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="the folder to write, which is not there yet or is empty; whole or not at all",
    )
    parser.add_argument(
        "--head",
        choices=["ctc", "transducer"],
        help="of a transducer with a CTC head: which of the two leaves (default: transducer)",
    )
    parser.add_argument(
        "--int8",
        action="store_true",
        help="weights in 8 bits: ONNX quantises activations as they come, OpenVINO keeps them "
        "float32; measure what your model loses by it",
    )


COMMAND = Command(
    name="export",
    summary="Write a model for ONNX Runtime, OpenVINO and sherpa-onnx.",
    details="CTC models and transducers (RNN-T, TDT) leave in the layout that sherpa-onnx reads "
    "for NeMo's models: encoder, decoder and joiner, or one model.onnx of CTC, with tokens.txt. "
    "See docs/export.md.",
    run=_export,
    add_arguments=_add_arguments,
    examples=[
        "asrkit export --model models/mine --format onnx --out exported/mine",
        "asrkit export --model parakeet.nemo --format openvino --out exported/parakeet",
        "asrkit export --model models/hybrid --format onnx --head ctc --int8 --out exported/ctc",
    ],
)
