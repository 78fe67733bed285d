"""Graphs as ONNX files, in float32 or with int8 weights.

The packages onnx and onnxscript write them; onnxruntime quantises them.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from asrkit.export.graphs import Graph
from asrkit.export.packages import require
from asrkit.shapes import expect, whole

# opset_version of the operators; onnxruntime of 2023 (1.14) reads it.
OPSET = 18
OPSETS = (18, 23)  # the lowest that torch's exporter writes, and the highest known here
# A file of ONNX alone ends at 2 GB; larger weights go into a file beside it.
INLINE_BYTES = 1_800_000_000
# What int8 is for. Embeddings and the rest stay in float32.
QUANTISED = ("MatMul", "Gemm", "Conv")


def check(opset: int, *, int8: bool) -> None:
    """ValueError unless the packages that write ONNX are there and `opset` is one they write.

    Args:
        opset: Version of the operators.
        int8: Whether weights are to be quantised, which needs one package more.
    """
    require("onnx", "onnxscript", argument="format", extra="onnx")
    if int8:
        require("onnxruntime", argument="int8", extra="onnx")
    low, high = OPSETS
    expect(whole(opset, low, high), "opset", f"{low} to {high}", repr(opset))


def write(
    graph: Graph, path: Path, metadata: Mapping[str, str], *, opset: int = OPSET, int8: bool = False
) -> None:
    """Write one graph; weights above 1.8 GB lie in a file beside it.

    Args:
        graph: What is written.
        path: The file, in a folder that exists.
        metadata: Of the file, text by name.
        opset: Version of the operators.
        int8: Quantise weights to 8 bits; activations are quantised as they come.
    """
    import onnx

    plain = path.with_name(f".{path.stem}-float32.onnx") if int8 else path
    _trace(graph, plain, opset)
    if int8:
        _quantise(plain, path)
        for part in (plain, _data(plain)):
            part.unlink(missing_ok=True)
    model = onnx.load(str(path), load_external_data=False)
    onnx.helper.set_model_props(model, dict(metadata))
    path.write_bytes(model.SerializeToString())


def _trace(graph: Graph, path: Path, opset: int) -> None:
    """The float32 graph, by torch's exporter."""
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                graph.module,
                tuple(graph.inputs.values()),
                dynamo=True,
                input_names=[*graph.inputs],
                output_names=[*graph.outputs],
                opset_version=opset,
                dynamic_shapes=_dynamic_shapes(graph),
                verbose=False,
            )
    except Exception as error:  # of many classes, and pages long
        why = " ".join(str(error).split())
        raise ValueError(
            f"model: torch's exporter cannot write its {graph.name} ({why:.300}). "
            "Versions that are known to work are in requirements-peers.txt."
        ) from error
    assert program is not None
    program.save(str(path), external_data=_bytes(graph) > INLINE_BYTES)


def _bytes(graph: Graph) -> int:
    """Of the weights."""
    return sum(weight.numel() * weight.element_size() for weight in graph.module.parameters())


def _dynamic_shapes(graph: Graph) -> tuple[dict[int, Any], ...]:
    """For each input, the dimensions that vary."""
    shapes = []
    for name in graph.inputs:
        varying = graph.dynamic[name]
        shapes.append(dict.fromkeys(varying, torch.export.Dim.DYNAMIC))
    return tuple(shapes)


def _quantise(source: Path, target: Path) -> None:
    """Weights of products and convolutions in int8, by onnxruntime's dynamic quantisation.

    Weights are unsigned: onnxruntime has no other convolutions on a CPU.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet():
        quantize_dynamic(
            source,
            target,
            op_types_to_quantize=[*QUANTISED],
            weight_type=QuantType.QUInt8,
            per_channel=False,
            use_external_data_format=_data(source).exists(),
        )


def _data(path: Path) -> Path:
    """The file of weights beside an ONNX file."""
    return path.with_name(path.name + ".data")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence exporters, which log and print what is of use to their authors."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
