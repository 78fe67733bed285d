"""`asrkit export`."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from asrkit.cli.command import Command, Options, finish
from asrkit.cli.options import check_writable
from asrkit.transcribe.options import described


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """The options of the command."""

    model: Path = described(
        MISSING, "training folder, .safetensors, .nemo, .pt of Jasper, or Hugging Face folder"
    )
    format: Literal["onnx", "openvino"] = described(
        MISSING,
        "ONNX files, or OpenVINO's IR; needs pip install onnx onnxscript, and onnxruntime or "
        "openvino",
    )
    out: Path = described(
        MISSING,
        "folder to write; it must be new or empty, and is written completely or not at all",
        metavar="DIR",
    )
    head: Literal["ctc", "transducer"] | None = described(
        None, "which head to export, for a transducer with a CTC head (default: transducer)"
    )
    int8: bool = described(
        False,
        "weights in 8 bits: ONNX quantises activations at run time, OpenVINO keeps them in "
        "float32; measure how much accuracy your model loses",
    )


def _export(options: ExportOptions) -> int:
    from asrkit.export import export
    from asrkit.models import load_checkpoint

    out = options.out
    check_writable(out)  # before the graphs are made, which takes long
    export(
        load_checkpoint(options.model),
        out,
        format=options.format,
        head=options.head,
        int8=options.int8,
    )
    files = sorted(out.iterdir())
    names = [file.name for file in files]
    size = sum(file.stat().st_size for file in files)
    result = {
        "out": str(out),
        "format": options.format,
        "int8": options.int8,
        "files": names,
        "bytes": size,
    }
    written = f"{options.format}: {', '.join(names)}; {size / 1e6:,.1f} MB"
    finish(options, result, f"{written}\nExported: {out}")
    return 0


COMMAND = Command(
    name="export",
    summary="Write a model for ONNX Runtime, OpenVINO and sherpa-onnx.",
    details="CTC models and transducers (RNN-T, TDT) are written in the layout that sherpa-onnx "
    "reads for NeMo's models: encoder, decoder and joiner, or one model.onnx for CTC, with "
    "tokens.txt. See docs/export.md.",
    options=ExportOptions,
    run=_export,
    examples=[
        "asrkit export --model models/mine --format onnx --out exported/mine",
        "asrkit export --model parakeet.nemo --format openvino --out exported/parakeet",
        "asrkit export --model models/hybrid --format onnx --head ctc --int8 --out exported/ctc",
    ],
)
