"""`export`: a checkpoint as a folder that inference engines and their clients read."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import numpy as np
import torch

from asrkit.export.folder import DECODING, TOKENS, require, write_tokens
from asrkit.export.graphs import Graph, graphs, quiet, state_sizes, trace
from asrkit.features import FeatureConfig
from asrkit.files import new_folder
from asrkit.models import Checkpoint, CTCConfig, CTCModel, TransducerModel
from asrkit.models.checkpoints import own
from asrkit.models.common import without_memory
from asrkit.models.cpu.prepacked import Prepacked
from asrkit.shapes import expect, expect_choice

Format = Literal["onnx", "openvino"]
Head = Literal["ctc", "transducer"]
SUFFIX = {"onnx": ".onnx", "openvino": ".xml"}
PACKAGES = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("openvino", "onnx", "onnxscript"),
}
# Operators whose weights become int8. All others, such as embeddings, stay in float32.
QUANTISED = ("MatMul", "Gemm", "Conv")


def export(
    checkpoint: Checkpoint,
    path: Path | str,
    *,
    format: Format,
    head: Head | None = None,
    int8: bool = False,
) -> None:
    """Write a folder of a model's graphs, completely or not at all.

    The layout is the one that sherpa-onnx reads for NeMo's models; see `asrkit.export.folder` for
    the files and `asrkit.export.graphs` for their inputs and outputs. B and T are dynamic.

    Args:
        checkpoint: A CTC model or a transducer, in float32 on a CPU, not optimized.
        path: The folder, which does not exist yet or is empty.
        format: "onnx", or "openvino" for OpenVINO's IR (.xml and .bin).
        head: Exported part of a transducer with a CTC head: "transducer" (the default) or "ctc".
        int8: Whether weights have 8 bits. ONNX: weights of products and convolutions, and their
            activations are quantised in each call. OpenVINO: weights of products only, and
            activations stay in float32.

    Raises:
        ValueError: The model cannot be exported, a package is missing, or the folder is not empty.
    """
    expect_choice("format", format, get_args(Format))
    model = exported_part(checkpoint.model, head)
    metadata = _metadata(model, checkpoint.features)
    require(*PACKAGES[format])
    write = _write_onnx if format == "onnx" else _write_openvino
    suffix = ".int8" * int8 + SUFFIX[format]
    with new_folder(path) as folder:
        write_tokens(folder / TOKENS, checkpoint.tokenizer)
        for graph in graphs(model):
            write(graph, folder / f"{graph.name}{suffix}", metadata, int8)
        others = (checkpoint.tokenizer, checkpoint.features, checkpoint.notes)
        own.write(folder / DECODING, (model.config, _decoding(model), *others))


def exported_part(model: Any, head: Head | None) -> CTCModel | TransducerModel:
    """The model to export: this one, or the encoder and CTC head of a transducer."""
    is_ctc = isinstance(model, CTCModel)
    expect(
        is_ctc or isinstance(model, TransducerModel),
        "model",
        "a CTC model or a transducer",
        type(model).__name__,
        "No layout of these formats holds another kind.",
    )
    unfit = {str(weight.dtype) for weight in model.parameters()} - {"torch.float32"}
    unfit |= {type(part).__name__ for part in model.modules() if isinstance(part, Prepacked)}
    wanted = "float32 weights, not optimized"
    remedy = "Load it again: load_checkpoint(path)."
    expect(not unfit, "model", wanted, ", ".join(sorted(unfit)), remedy)
    recurrent = any(isinstance(part, torch.nn.LSTM) for part in model.encoder.modules())
    expect(
        not recurrent,
        "model",
        "an encoder without LSTMs",
        type(model.encoder).__name__,
        "torch exports LSTMs for one number of frames only.",
    )
    heads = ["ctc"] if is_ctc else ["transducer"]
    if not is_ctc and model.ctc_head is not None:
        heads.append("ctc")
    expect(head is None or head in heads, "head", f"{' or '.join(heads)} of this model", head)
    if is_ctc or head != "ctc":
        return model
    config = CTCConfig(vocab_size=model.config.vocab_size, encoder=model.config.encoder)
    with without_memory():
        ctc = CTCModel(config)
    ctc.encoder, ctc.output = model.encoder, model.ctc_head
    return ctc


def _decoding(model: CTCModel | TransducerModel) -> dict[str, torch.Tensor]:
    """Weights for asrkit's decoders: those of a transducer except encoder and CTC head."""
    if isinstance(model, CTCModel):
        return {}
    return {
        name: weight.detach().contiguous()
        for name, weight in model.state_dict().items()
        if not name.startswith(("encoder.", "ctc_head."))
    }


def _metadata(model: CTCModel | TransducerModel, features: dict[str, Any]) -> dict[str, str]:
    """Settings that clients read from a graph before they run it."""
    settings = FeatureConfig(**features)
    is_ctc = isinstance(model, CTCModel)
    metadata = {
        "vocab_size": model.config.vocab_size,
        "normalize_type": settings.normalization.replace("none", ""),
        "subsampling_factor": model.config.encoder.subsampling,
        "model_type": "EncDecCTCModelBPE" if is_ctc else "EncDecRNNTBPEModel",
        "feat_dim": settings.bins,
    }
    if isinstance(model, TransducerModel):
        metadata["pred_rnn_layers"], metadata["pred_hidden"] = state_sizes(model)
        # "tdt" in the url tells a client that logits of durations follow; their index is the
        # duration.
        metadata["url"] = "asrkit/tdt" if model.durations else "asrkit/rnnt"
        expect(
            model.durations == tuple(range(len(model.durations))),
            "model",
            "durations 0, 1, 2, ... as clients count them",
            model.durations,
        )
    return {name: str(value) for name, value in metadata.items()}


def _write_onnx(graph: Graph, path: Path, metadata: dict[str, str], int8: bool) -> None:
    """Write one graph; weights above 2 GB go to a second file."""
    program = trace(graph)
    program.model.metadata_props.update(metadata)
    if not int8:
        program.save(path)
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # Unsigned weights, because onnxruntime has no other int8 convolutions on a CPU.
    with quiet():
        quantize_dynamic(
            program.model_proto,
            path,
            op_types_to_quantize=[*QUANTISED],
            weight_type=QuantType.QUInt8,
        )


def _write_openvino(graph: Graph, path: Path, _metadata: dict[str, str], int8: bool) -> None:
    """Write one graph as IR, by way of ONNX: operators in an .xml file, weights in a .bin file."""
    import openvino

    with TemporaryDirectory(dir=path.parent) as between:
        onnx = Path(between) / "graph.onnx"
        trace(graph).save(onnx)
        model = openvino.Core().read_model(onnx)
        if int8:
            compress(model)
        openvino.save_model(model, path, compress_to_fp16=False)
        del model  # it maps the weights from the temporary folder


def compress(model: Any) -> None:
    """Replace float32 weights of products by int8 weights with a scale for each output, in place.

    Args:
        model: An OpenVINO model.
    """
    from openvino import opset13 as op

    for product in model.get_ordered_ops():
        if product.get_type_name() != "MatMul":
            continue
        weight = product.input_value(1).get_node()
        if weight.get_type_name() != "Constant" or len(weight.shape) != 2:
            continue
        numbers = np.array(weight.data)
        input_axis = 1 if product.get_attributes()["transpose_b"] else 0
        largest = np.abs(numbers).max(axis=input_axis, keepdims=True)
        scale = np.maximum(largest, np.finfo(np.float32).tiny) / 127
        rounded = op.constant(np.rint(numbers / scale).astype(np.int8))
        in_8_bits = op.multiply(op.convert(rounded, "f32"), op.constant(scale))
        product.input(1).replace_source_output(in_8_bits.output(0))
