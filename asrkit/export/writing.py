"""`export`: a checkpoint as a folder of files that inference engines and their clients read."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from asrkit.export import onnx_files, openvino_files
from asrkit.export.folder import (
    DECODING,
    FORMATS,
    HEADS,
    TOKENS,
    Exported,
    read_exported,
    write_manifest,
    write_tokens,
)
from asrkit.export.graphs import ctc_graphs, state_sizes, transducer_graphs
from asrkit.features import FeatureConfig
from asrkit.files import new_folder
from asrkit.models import Checkpoint, CTCModel, TransducerModel
from asrkit.shapes import expect

Format = Literal["onnx", "openvino"]
Head = Literal["ctc", "transducer"]
# What clients call the kind of a model.
MODEL_TYPES = {
    (CTCModel, "ctc"): "EncDecCTCModelBPE",
    (TransducerModel, "ctc"): "EncDecHybridRNNTCTCBPEModel",
    (TransducerModel, "transducer"): "EncDecRNNTBPEModel",
}


def export(
    checkpoint: Checkpoint,
    path: Path | str,
    *,
    format: Format,
    head: Head | None = None,
    int8: bool = False,
    opset: int = onnx_files.OPSET,
) -> Exported:
    """The folder of a model's graphs, written whole or not at all.

    The layout is the one that sherpa-onnx reads for NeMo's models; see `asrkit.export.folder` for
    the files and `asrkit.export.graphs` for their inputs and outputs. B and T are dynamic.

    Args:
        checkpoint: A CTC model or a transducer, in eval mode in float32 on a CPU, not optimized.
        path: The folder, which is not there yet, or is empty.
        format: "onnx", or "openvino" for OpenVINO's IR (.xml and .bin).
        head: Which part of a transducer with a CTC head leaves: "transducer" (as None), or "ctc".
        int8: Weights in 8 bits. ONNX: of products and convolutions, with activations
            quantised as they come. OpenVINO: weights of products only, activations stay float32.
        opset: Version of ONNX's operators.

    Raises:
        ValueError: The model has no such form, a package is missing, or the folder is taken.
    """
    expect(format in FORMATS, "format", "one of 'onnx', 'openvino'", repr(format))
    head = _head(checkpoint.model, head)
    _check_model(checkpoint.model)
    if format == "openvino":  # first, because its extra brings what ONNX needs
        openvino_files.check()
    onnx_files.check(opset, int8=int8 and format == "onnx")
    model: Any = checkpoint.model
    graphs = ctc_graphs(model) if head == "ctc" else transducer_graphs(model)
    metadata = _metadata(checkpoint, head)
    writer: Any = onnx_files if format == "onnx" else openvino_files
    suffix = ".onnx" if format == "onnx" else ".xml"
    if int8:
        suffix = ".int8" + suffix
    with new_folder(path) as folder:
        write_tokens(folder / TOKENS, checkpoint.tokenizer)
        names = {}
        for graph in graphs:
            names[graph.name] = graph.name + suffix
            writer.write(graph, folder / names[graph.name], metadata, opset=opset, int8=int8)
        if head == "transducer":
            _write_decoding(folder / DECODING, model)
        exported = Exported(
            path=folder,
            format=format,
            int8=int8,
            head=head,
            config=model.config,
            tokenizer=checkpoint.tokenizer,
            features=checkpoint.features,
            notes=checkpoint.notes,
            graphs=names,
            files={},
        )
        write_manifest(exported)
    return read_exported(path)


def _head(model: Any, head: Head | None) -> Head:
    """The part of the model that leaves; ValueError where it has none such."""
    kinds = isinstance(model, CTCModel | TransducerModel)
    name = type(model).__name__
    remedy = "No layout of these formats holds another kind."
    expect(kinds, "model", "a CTC model or a transducer", name, remedy)
    expect(head is None or head in HEADS, "head", "one of 'ctc', 'transducer'", repr(head))
    if isinstance(model, CTCModel):
        expect(head != "transducer", "head", "'ctc' of a CTC model", repr(head))
        return "ctc"
    if head == "ctc":
        has = model.ctc_head is not None
        expect(has, "head", "'transducer' of a model without a CTC head", repr(head))
    return head or "transducer"


def _check_model(model: Any) -> None:
    """ValueError unless the model is as it was loaded, in float32 on a CPU, and can leave."""
    expect(not model.training, "model", "eval mode", "training mode", "Call model.eval() first.")
    kinds = {(weight.device.type, weight.dtype) for weight in model.parameters()}
    plain = kinds == {("cpu", torch.float32)}
    expect(plain, "model", "float32 weights on a CPU", kinds, "Load it again.")
    encoder = model.encoder
    recurrent = any(isinstance(part, torch.nn.LSTM) for part in encoder.modules())
    remedy = "torch exports LSTMs for one number of frames only."
    expect(not recurrent, "model", "an encoder without LSTMs", type(encoder).__name__, remedy)


def _metadata(checkpoint: Checkpoint, head: Head) -> dict[str, str]:
    """What clients read of a model before they run it."""
    model: Any = checkpoint.model
    features = FeatureConfig(**checkpoint.features)
    durations = tuple(getattr(model, "durations", ()))
    kind: str = head
    if head == "transducer":
        kind = "tdt" if durations else "rnnt"
    normalization = features.normalization
    metadata: dict[str, Any] = {
        "vocab_size": model.config.vocab_size,
        "normalize_type": "" if normalization == "none" else normalization,
        "subsampling_factor": model.config.encoder.subsampling,
        "model_type": MODEL_TYPES[type(model), head],
        "version": 1,
        "model_author": "asrkit",
        "url": f"asrkit/{kind}",  # a client takes a transducer for a TDT by these letters
        "feat_dim": features.bins,
    }
    if head == "transducer":
        metadata["pred_rnn_layers"], metadata["pred_hidden"] = state_sizes(model)
        metadata["durations"] = ",".join(map(str, durations))
    metadata |= {f"features_{name}": value for name, value in asdict(features).items()}
    return {name: str(value) for name, value in metadata.items()}


def _write_decoding(path: Path, model: TransducerModel) -> None:
    """Weights of all but the encoder and its CTC head, for asrkit's own decoders."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    weights: Mapping[str, Any] = {
        name: weight.detach().contiguous()
        for name, weight in model.state_dict().items()
        if not name.startswith(("encoder.", "ctc_head."))
    }
    path.touch()
    mode = path.stat().st_mode  # what this account gives its files
    try:
        save_file(dict(weights), str(path))
    except SafetensorError as error:  # of a full disk, for one
        raise OSError(f"{path.name} cannot be written: {error}.") from None
    path.chmod(mode)
