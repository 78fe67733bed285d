"""Graphs as OpenVINO's IR, an .xml of operators beside a .bin of weights, by way of ONNX."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asrkit.export import onnx_files
from asrkit.export.graphs import Graph
from asrkit.export.packages import require

# Weights of products with fewer numbers stay in float32.
LEAST_NUMBERS = 1024


def check() -> None:
    """ValueError unless OpenVINO is installed."""
    require("openvino", argument="format", extra="openvino")


def write(
    graph: Graph,
    path: Path,
    metadata: Mapping[str, str],
    *,
    opset: int = onnx_files.OPSET,
    int8: bool = False,
) -> None:
    """Write one graph as IR; its metadata is the runtime information "asrkit" of the model.

    Args:
        graph: What is written.
        path: The .xml file, in a folder that exists.
        metadata: Text by name.
        opset: Of the ONNX file in between.
        int8: Keep weights of products in 8 bits, with a scale for each output.
    """
    import openvino

    between = path.with_name(f".{path.stem}.onnx")
    onnx_files.write(graph, between, {}, opset=opset)
    model = openvino.Core().read_model(between)
    if int8:
        compress(model)
    for name, text in metadata.items():
        model.set_rt_info(text, ["asrkit", name])
    openvino.save_model(model, path, compress_to_fp16=False)
    del model  # it maps the file of weights
    for part in path.parent.glob(f"{between.name}*"):
        part.unlink()


def compress(model: Any) -> None:
    """Replace float32 weights of products by int8 ones and their scales.

    Args:
        model: Of OpenVINO; changed in place.
    """
    for op in model.get_ordered_ops():
        if op.get_type_name() != "MatMul":
            continue
        weight = op.input_value(1).get_node()
        if _is_large_weight(weight):
            output_axis = 0 if op.get_attributes()["transpose_b"] else 1
            replacement = _in_8_bits(weight, output_axis)
            op.input(1).replace_source_output(replacement.output(0))


def _is_large_weight(node: Any) -> bool:
    """Whether a node is a matrix of float32 numbers worth 8 bits."""
    if node.get_type_name() != "Constant" or node.get_element_type().to_string() != "f32":
        return False
    shape = [*node.shape]
    return len(shape) == 2 and math.prod(shape) >= LEAST_NUMBERS


def _in_8_bits(weight: Any, output_axis: int) -> Any:
    """Nodes that compute a weight from int8 numbers times the scale of each output.

    Symmetric: the largest number of an output becomes 127 or -127.
    """
    from openvino import opset13 as op

    numbers = np.array(weight.data, dtype=np.float32)
    largest = np.abs(numbers).max(axis=1 - output_axis, keepdims=True)
    scale = np.maximum(largest, np.finfo(np.float32).tiny) / 127
    rounded = np.clip(np.rint(numbers / scale), -127, 127).astype(np.int8)
    plain = op.convert(op.constant(rounded), "f32")
    return op.multiply(plain, op.constant(scale.astype(np.float32)))
