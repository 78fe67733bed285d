"""Jasper and FastConformer in OpenVINO and ONNX Runtime, each in a process of its own, run by the
Python of `make peers`.

    python -P peer_engines.py openvino_bfloat16
    {"folder": "...", "frames": 200, "observe": true}
    {"wall_ms": ..., "cpu_ms": ..., "digest": [sketch, lengths], "version": "..."}

`folder` has a model and features by `write_model` and `write_features`. The first process that
needs an engine's file lets another process make it, which takes several times the weights and ends.
Models have no lengths and no masks: utterances are whole. A Jasper gives log-probabilities of one
utterance of any length, a FastConformer encoded frames of a batch, whose shape is the only one that
its folder is for. A process runs on one thread of the core that our arms run on. Protocol and
timing are those of asrkit.workbench.bench.peers.peer_worker. The exporter alone imports asrkit,
from this checkout.
"""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MODEL = "model.pt"
FILES = {
    "openvino": "model.xml",
    "openvino_int8": "model-int8.xml",
    "onnxruntime": "model.onnx",
    "onnxruntime_int8": "model-int8.onnx",
}
GROUP = 64  # activations of a row that share a scale, in OpenVINO's int8
CHECKOUT = Path(__file__).resolve().parents[4]


def write_model(folder: Path, model: Any) -> None:
    """Write what is exported; asrkit's side.

    Args:
        folder: to write into.
        model: our CTCModel with a Jasper or a FastConformer, float32, in eval mode.
    """
    from asrkit.models.checkpoints import config_to_dict

    parts = {"config": config_to_dict(model.config), "weights": model.state_dict()}
    torch.save(parts, folder / MODEL)


def write_features(folder: Path, features: Tensor) -> None:
    """Write features (B, T, F) for requests with `frames` T; asrkit's side.

    Args:
        folder: to write into.
        features: of whole utterances, one for a Jasper.
    """
    np.save(_features_path(folder, features.shape[1]), features.numpy())


def _features_path(folder: Path, frames: int) -> Path:
    return folder / f"features-{frames}.npy"


class WholeUtterances(nn.Module):
    """A CTC model with a Jasper for utterances without padding: features (B, T, F) in,
    log-probabilities (B, T', V) out.

    Args:
        model: ours, whose parts it calls.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensor) -> Tensor:
        """The model without lengths, so no masks stand in a graph traced from it."""
        encoder = self.model.encoder
        x = features.transpose(1, 2)
        sources: list[Tensor] = []
        for stage, sizes in zip(encoder.stages, encoder.config.stages, strict=True):
            has_branches = encoder.config.has_branches(sizes)
            if has_branches:
                sources.append(x)
            x = stage(x, sources if has_branches else [], None)
        return self.model.output(x.transpose(1, 2)).log_softmax(-1)


def export(folder: Path, engine: str, shape: tuple[int, ...]) -> None:
    """Write an engine's file.

    Args:
        folder: of `write_model`.
        engine: a key of FILES.
        shape: of the features (B, T, F); a Jasper's file is for any T.
    """
    sys.path += [str(CHECKOUT), str(Path(__file__).parent)]
    whole, example, dynamic_shapes = _whole(folder, shape)
    path = folder / FILES[engine]
    if engine == "openvino":
        import openvino

        converted = openvino.convert_model(whole, example_input=example)
        openvino.save_model(converted, path, compress_to_fp16=False)
        return
    if engine == "openvino_int8":
        _compress(exported(folder, "openvino", shape), path)
        return
    if engine == "onnxruntime_int8":
        _quantize(exported(folder, "onnxruntime", shape), path)
        return
    program = torch.onnx.export(
        whole, (example,), dynamo=True, dynamic_shapes=dynamic_shapes, verbose=False
    )
    assert program is not None
    program.save(path, external_data=True)  # a file of ONNX alone ends at 2 GB


def _quantize(path: Path, to: Path) -> None:
    """Write the ONNX model of `path` with linear layers in int8: weights by output channel,
    activations in every call.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(path, load_external_data=False).graph
    stacks = {weight.name for weight in graph.initializer if len(weight.dims) > 2}
    by_head = [node.name for node in graph.node if stacks & {*node.input}]  # it has no such kernel
    quantize_dynamic(
        path,
        to,
        weight_type=QuantType.QInt8,
        per_channel=True,
        op_types_to_quantize=["MatMul", "Gemm"],
        nodes_to_exclude=by_head,
        use_external_data_format=True,
    )


def _compress(path: Path, to: Path) -> None:
    """Write the OpenVINO model of `path` with weights of linear layers in int8, by output channel;
    it quantizes their activations in every call.
    """
    import openvino

    from asrkit.export.openvino_files import compress

    model = openvino.Core().read_model(path)
    compress(model)
    openvino.save_model(model, to, compress_to_fp16=False)


def _whole(folder: Path, shape: tuple[int, ...]) -> tuple[nn.Module, Tensor, Any]:
    """The model of `write_model` without lengths, an input, and which of its sizes may change."""
    from whole_conformer import WholeConformer

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
    encoder: Any = model.encoder
    frames = -(-shape[1] // encoder.config.subsampling)
    return WholeConformer(encoder, frames).eval(), torch.zeros(shape), None


def exported(folder: Path, engine: str, shape: tuple[int, ...]) -> Path:
    """The file of an engine, exported by another process unless it is there.

    Raises:
        RuntimeError: the last line of what that process said.
    """
    path = folder / FILES[engine]
    if path.exists():
        return path
    sizes = "x".join(map(str, shape))
    command = [sys.executable, "-P", "-W", "ignore", __file__, "export", str(folder), engine, sizes]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["its export failed"]
        raise RuntimeError(lines[-1])
    return path


class OpenVINO:
    """A call that returns what the model makes of features, by OpenVINO on one thread.

    Args:
        folder: of `write_model`.
        features: (B, T, F).
        precision: "f32" or "bf16".
        int8: whether linear layers are quantized: weights by channel, activations in every call,
            in groups of GROUP.
    """

    def __init__(
        self, folder: Path, features: np.ndarray, precision: str, int8: bool = False
    ) -> None:
        import openvino

        core = openvino.Core()
        kind = "openvino_int8" if int8 else "openvino"
        model = core.read_model(exported(folder, kind, features.shape))
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
        self.features = features
        self.request = compiled.create_infer_request()

    def __call__(self) -> np.ndarray:
        return self.request.infer([self.features], share_inputs=True)[0]


class ONNXRuntime:
    """A call that returns what the model makes of features, by ONNX Runtime on one thread.

    Args:
        folder: of `write_model`.
        features: (B, T, F).
        kind: "onnxruntime", or "onnxruntime_int8" with linear layers quantised: weights by channel,
            activations in every call.
    """

    def __init__(self, folder: Path, features: np.ndarray, kind: str = "onnxruntime") -> None:
        import onnxruntime

        onnxruntime.disable_telemetry_events()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_free_dimension_override_by_name("T", features.shape[1])
        path = exported(folder, kind, features.shape)
        self.session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        self.inputs = {self.session.get_inputs()[0].name: features}

    def __call__(self) -> np.ndarray:
        return self.session.run(None, self.inputs)[0]


ENGINES: dict[str, tuple[str, Callable[..., Callable[[], np.ndarray]]]] = {
    "openvino_float32": ("openvino", functools.partial(OpenVINO, precision="f32")),
    "openvino_bfloat16": ("openvino", functools.partial(OpenVINO, precision="bf16")),
    "openvino_int8": ("openvino", functools.partial(OpenVINO, precision="f32", int8=True)),
    "onnxruntime_float32": ("onnxruntime", ONNXRuntime),
    "onnxruntime_int8": ("onnxruntime", functools.partial(ONNXRuntime, kind="onnxruntime_int8")),
}


class Server:
    """Answers requests to one engine; it holds one compiled model, of the frames asked last.

    Args:
        peer: a key of ENGINES.
    """

    def __init__(self, peer: str) -> None:
        self.package, self.make = ENGINES[peer]
        self.prepared: tuple[str, int] | None = None
        self.call: Callable[[], np.ndarray] | None = None

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request, as above."""
        call = self._call(request["folder"], request["frames"])
        wall_start = time.perf_counter_ns()
        cpu_start = time.process_time_ns()
        found = call()
        cpu_ns = time.process_time_ns() - cpu_start
        wall_ns = time.perf_counter_ns() - wall_start
        answer = {
            "wall_ms": wall_ns / 1e6,
            "cpu_ms": cpu_ns / 1e6,
            "version": f"{self.package} {version(self.package)}",
        }
        if request["observe"]:
            from peer_encoders import sketch

            lengths = torch.full((len(found),), found.shape[1])
            digest = sketch(torch.tensor(found), lengths)
            answer["digest"] = [digest.tolist(), lengths.tolist()]
        return answer

    def _call(self, folder: str, frames: int) -> Callable[[], np.ndarray]:
        if self.call is None or self.prepared != (folder, frames):
            self.call = None  # the memory of one at a time
            self.prepared = None
            features = np.load(_features_path(Path(folder), frames))
            self.call = self.make(Path(folder), features)
            self.prepared = (folder, frames)
        return self.call


def main(peer: str) -> None:
    """Answer until the requests end."""
    sys.path.append(str(Path(__file__).parent))
    from peer_worker import answer_requests

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    answer_requests(Server(peer))


if __name__ == "__main__":
    if sys.argv[1] == "export":
        export(Path(sys.argv[2]), sys.argv[3], tuple(map(int, sys.argv[4].split("x"))))
    else:
        main(sys.argv[1])
