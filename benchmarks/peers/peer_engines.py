"""Jasper and FastConformer in OpenVINO and ONNX Runtime; see peer_worker.py.

A request names a folder with the files of `write_model` and `write_features`, and the number of
frames. The first process that needs an engine's file has it written by a child process, which takes
several times the memory of the weights and ends. Models have no lengths, so utterances are whole. A
Jasper returns log-probabilities of one utterance of any length; a FastConformer returns encoded
frames of a batch, and its folder is for one shape. A process runs on one thread, on the same core
as our arms.
"""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers import peer_encoders

MODEL = "model.pt"
GROUP = 64  # activations of a row that share a scale, in OpenVINO's int8
Shape = tuple[int, ...]
Run = Callable[[], np.ndarray]


def write_model(folder: Path, model: Any) -> None:
    """Write the model to export; called by asrkit's side.

    Args:
        folder: folder to write into.
        model: a CTCModel with a Jasper or a FastConformer, float32, in eval mode.
    """
    from asrkit.models.checkpoints import config_to_dict

    parts = {"config": config_to_dict(model.config), "weights": model.state_dict()}
    torch.save(parts, folder / MODEL)


def write_features(folder: Path, features: Tensor) -> None:
    """Write features (B, T, F) for requests with `frames` T; called by asrkit's side.

    Args:
        folder: folder to write into.
        features: features of whole utterances; of one utterance for a Jasper.
    """
    np.save(_features_path(folder, features.shape[1]), features.numpy())


def _features_path(folder: Path, frames: int) -> Path:
    return folder / f"features-{frames}.npy"


class WholeUtterances(nn.Module):
    """A model for utterances without padding: features (B, T, F) in, frames (B, T', D) out.

    Args:
        model: asrkit's model in eval mode; its subsampling is replaced by `Convolutions`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        if hasattr(model, "subsampling"):
            model.subsampling = Convolutions(model.subsampling)
        self.model = model

    def forward(self, features: Tensor) -> Tensor:
        """The model's first result, with constant lengths and masks."""
        B, T, _ = features.shape
        return self.model(features, torch.full((B,), T))[0]


class Convolutions(nn.Module):
    """The subsampling of a FastConformer in the layout (B, C, T, F), which is faster in ONNX
    Runtime.

    Args:
        subsampling: the subsampling of asrkit's encoder.
    """

    def __init__(self, subsampling: Any) -> None:
        super().__init__()
        self.subsampling = subsampling

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Frames (B, T', D) of whole utterances (B, T, F), and their lengths (B,)."""
        x = features[:, None]
        for conv in self.subsampling.convs:
            x = conv(x).relu()
        frames = self.subsampling.out(x.transpose(1, 2).flatten(2))
        return frames, torch.full_like(lengths, x.shape[2])


def _whole(folder: Path, shape: Shape) -> tuple[nn.Module, Tensor, Any]:
    """The model of `write_model` without lengths, an example input, and its dynamic sizes."""
    from asrkit.models import CTCModel, Jasper
    from asrkit.models.checkpoints import config_from_dict

    parts = torch.load(folder / MODEL, mmap=True)
    with torch.device("meta"):
        model = CTCModel(config_from_dict(parts["config"]))
    model.load_state_dict(parts["weights"], assign=True)
    model.eval().requires_grad_(False)
    if isinstance(model.encoder, Jasper):
        any_length = {"features": {1: torch.export.Dim("T", min=2)}}
        return WholeUtterances(model).eval(), torch.zeros(1, 64, shape[2]), any_length
    return WholeUtterances(model.encoder).eval(), torch.zeros(shape), None


def export(path: Path, shape: Shape) -> None:
    """Write an engine's file into the folder of `write_model`.

    Args:
        path: file to write; its suffix is .xml or .onnx.
        shape: (B, T, F) of the features; a Jasper's file is for any T.
    """
    whole, example, dynamic_shapes = _whole(path.parent, shape)
    if path.suffix == ".xml":
        import openvino

        converted = openvino.convert_model(whole, example_input=example)
        openvino.save_model(converted, path, compress_to_fp16=False)
        return
    program = torch.onnx.export(
        whole, (example,), dynamo=True, dynamic_shapes=dynamic_shapes, verbose=False
    )
    assert program is not None
    program.save(path, external_data=True)  # a single ONNX file is limited to 2 GB


def quantize(path: Path, shape: Shape) -> None:
    """Write an ONNX model with linear layers in int8: weights quantised by output channel,
    activations in every call.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    plain = _written(path.with_name("model.onnx"), export, shape)
    graph = onnx.load(plain, load_external_data=False).graph
    stacks = {weight.name for weight in graph.initializer if len(weight.dims) > 2}
    by_head = [node.name for node in graph.node if stacks & {*node.input}]  # no int8 kernel
    quantize_dynamic(
        plain,
        path,
        weight_type=QuantType.QInt8,
        per_channel=True,
        op_types_to_quantize=["MatMul", "Gemm"],
        nodes_to_exclude=by_head,
        use_external_data_format=True,
    )


def compress(path: Path, shape: Shape) -> None:
    """Write an OpenVINO model with int8 weights of linear layers, by output channel; OpenVINO
    quantises the activations in every call.
    """
    import openvino
    from openvino.passes import ConstantFolding, Manager

    from asrkit.export.writing import compress

    model = openvino.Core().read_model(_written(path.with_name("model.xml"), export, shape))
    model.reshape([*shape])
    folding = Manager()
    folding.register_pass(ConstantFolding())  # computes products of positions once
    folding.run_passes(model)
    compress(model)
    openvino.save_model(model, path, compress_to_fp16=False)


def _written(path: Path, write: Callable[[Path, Shape], None], shape: Shape) -> Path:
    """The path, once a child process has written its file."""
    if not path.exists():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            process.submit(write, path, shape).result()
    return path


def openvino(folder: Path, features: np.ndarray, precision: str, int8: bool = False) -> Run:
    """A call that runs the model by OpenVINO on one thread.

    Args:
        folder: folder of `write_model`.
        features: (B, T, F).
        precision: "f32" or "bf16".
        int8: whether linear layers are quantised: weights by channel, activations in groups of
            GROUP in every call.
    """
    import openvino

    core = openvino.Core()
    if int8:
        path = _written(folder / "model-int8.xml", compress, features.shape)
    else:
        path = _written(folder / "model.xml", export, features.shape)
    model = core.read_model(path)
    model.reshape([*features.shape])
    options = {
        "INFERENCE_NUM_THREADS": 1,
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
    }
    if int8:
        options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = GROUP
    compiled = core.compile_model(model, "CPU", options)
    used = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    if used != precision:
        raise RuntimeError(f"it computes in {used} on this CPU, not in {precision}")
    request = compiled.create_infer_request()
    return lambda: request.infer([features], share_inputs=True)[0]


def onnxruntime(folder: Path, features: np.ndarray, int8: bool = False) -> Run:
    """A call that runs the model by ONNX Runtime on one thread.

    Args:
        folder: folder of `write_model`.
        features: (B, T, F).
        int8: whether linear layers are quantised, as by `quantize`.
    """
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_free_dimension_override_by_name("T", features.shape[1])
    if int8:
        path = _written(folder / "model-int8.onnx", quantize, features.shape)
    else:
        path = _written(folder / "model.onnx", export, features.shape)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: features}
    return lambda: session.run(None, inputs)[0]


def prepare(
    make: Callable[..., Run], folder: str, frames: int, **options: Any
) -> tuple[Run, Callable[[np.ndarray], dict[str, Any]]]:
    """The call of an engine on one core, and the function that makes an answer of its frames.

    Args:
        make: `openvino` or `onnxruntime`.
        folder: folder of `write_model` and `write_features`.
        frames: T of the features.
        **options: precision and int8 of `make`.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    features = np.load(_features_path(Path(folder), frames))
    return make(Path(folder), features, **options), answer


def answer(frames: np.ndarray) -> dict[str, Any]:
    """A sketch of the frames, and their lengths."""
    lengths = torch.full((len(frames),), frames.shape[1])
    return peer_encoders.answer((torch.tensor(frames), lengths))


PEERS = {
    "openvino_float32": ("openvino", partial(prepare, openvino, precision="f32")),
    "openvino_bfloat16": ("openvino", partial(prepare, openvino, precision="bf16")),
    "openvino_int8": ("openvino", partial(prepare, openvino, precision="f32", int8=True)),
    "onnxruntime_float32": ("onnxruntime", partial(prepare, onnxruntime)),
    "onnxruntime_int8": ("onnxruntime", partial(prepare, onnxruntime, int8=True)),
}
