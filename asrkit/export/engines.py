"""Exported folders as checkpoints whose encoder runs in an engine; the decoders are asrkit's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asrkit.devices import CPU_FLOAT
from asrkit.export.folder import DECODING, is_exported, require
from asrkit.models import Checkpoint, CTCModel, make_model
from asrkit.models.checkpoints import own
from asrkit.models.common import without_memory
from asrkit.shapes import expect, expect_choice, message

# Features (B, F, T) float32 and lengths (B,) int64 to the output of the graph and its lengths.
Engine = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


class EngineEncoder(nn.Module):
    """An encoder, perhaps with its CTC head, that an engine computes.

    Args:
        engine: Computes the graph.
        time_last: Whether its frames are (B, D, T').
    """

    def __init__(self, engine: Engine, *, time_last: bool) -> None:
        super().__init__()
        self.engine = engine
        self.time_last = time_last
        # A recogniser reads dtype and device from the parameters of a model.
        self.frames_like = nn.Parameter(torch.zeros(0, **CPU_FLOAT), requires_grad=False)

    def __deepcopy__(self, memo: Any) -> "EngineEncoder":
        """Itself: an engine cannot be copied, and does not change."""
        return self

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Frames (B, T', D) and their lengths (B,); NaN where features (B, T, F) are not finite.

        Raises:
            RuntimeError: The engine has too little memory, or the features have another shape.
        """
        signal = features.transpose(1, 2).contiguous()
        try:
            frames, frame_lengths = self.engine(signal.numpy(), lengths.numpy())
        except Exception as error:  # each engine has its own classes of errors
            raise RuntimeError(f"model: its engine cannot run it ({_line(error)}).") from None
        encoded = torch.from_numpy(frames)
        if self.time_last:
            encoded = encoded.transpose(1, 2)
        # An engine may turn NaN into numbers. torch keeps NaN, which makes the utterance an error.
        finite = features.isfinite().all(2).all(1)  # (B,)
        encoded = encoded.masked_fill(~finite[:, None, None], torch.nan)
        return encoded, torch.from_numpy(frame_lengths)


def load_exported(path: Path | str, engine: str, *, precision: str = "float32") -> Checkpoint:
    """The checkpoint of an exported folder, to transcribe with.

    The encoder, and the CTC head of a CTC model, run in the engine, on as many threads as torch
    has; predictor, joint and decoders are asrkit's. A transducer that was exported with head="ctc"
    is a CTC model.

    Args:
        path: A folder from `export`.
        engine: "onnxruntime", which reads ONNX, or "openvino", which reads both formats.
        precision: "float32", or "bfloat16" for OpenVINO on a CPU that multiplies it.

    Raises:
        ValueError: The folder is incomplete or damaged; or the engine is not installed, does not
            read the format, or does not support the precision.
    """
    path = Path(path)
    expect(
        is_exported(path),
        "model",
        "a folder of asrkit export",
        repr(str(path)),
        "Make one: asrkit export.",
    )
    expect_choice("engine", engine, [*_ENGINES])
    open_graph, precisions = _ENGINES[engine]
    expect(precision in precisions, "dtype", f"{' or '.join(precisions)} with {engine}", precision)
    try:
        config, weights, tokenizer, features, notes = own.read(path / DECODING)
        with without_memory():
            model: Any = make_model(config)
        model.encoder, model.ctc_head = nn.Identity(), None
        is_ctc = isinstance(model, CTCModel)
        if is_ctc:
            model.output = nn.Identity()  # log-softmax does not change log-probabilities
        model.load_state_dict(weights, assign=True)
        files = path.glob("model.*" if is_ctc else "encoder.*")  # a graph, perhaps weights too
        graph = next(file for file in files if file.suffix in (".onnx", ".xml"))
        run = open_graph(graph, torch.get_num_threads(), precision)
    except ValueError:
        raise
    except Exception as error:  # each engine has its own classes of errors
        raise ValueError(
            f"model: expected an export that {engine} reads, got {path} ({_line(error)}). "
            "Export it again: asrkit export --format onnx."
        ) from None
    model.encoder = EngineEncoder(run, time_last=not is_ctc)
    model.eval().requires_grad_(False)
    return Checkpoint(model, tokenizer, features, notes)


def _line(error: Exception) -> str:
    return message(error)[:300]


def _onnxruntime(path: Path, threads: int, _precision: str) -> Engine:
    """ONNX Runtime on a CPU."""
    require("onnxruntime")
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda signal, lengths: session.run(None, {"audio_signal": signal, "length": lengths})


def _openvino(path: Path, threads: int, precision: str) -> Engine:
    """OpenVINO on a CPU."""
    require("openvino")
    import openvino

    hint = {"float32": "f32", "bfloat16": "bf16"}[precision]
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": hint,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = openvino.Core().compile_model(path, "CPU", options)
    used = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    expect(
        used == hint,
        "dtype",
        f"one that OpenVINO has on this CPU, {used}",
        hint,
        "Pass --dtype float32.",
    )
    request = compiled.create_infer_request()

    def run(signal: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        outputs = request.infer({"audio_signal": signal, "length": lengths})
        return outputs[0].copy(), outputs[1].copy()

    return run


# The function that opens a graph in each engine, and the engine's precisions.
_ENGINES = {
    "onnxruntime": (_onnxruntime, ("float32",)),
    "openvino": (_openvino, ("float32", "bfloat16")),
}
