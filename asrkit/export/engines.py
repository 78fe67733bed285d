"""Exported folders as checkpoints whose encoder runs in an inference engine; decoders stay ours."""

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
from asrkit.shapes import expect, expect_choice, message

# Features (B, F, T) float32 and lengths (B,) int64 to what the graph computes, and its lengths.
Engine = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


class EngineEncoder(nn.Module):
    """An encoder that an engine computes, or an encoder with its CTC head.

    Args:
        engine: Takes features (B, F, T) and lengths.
        time_last: Whether frames come as (B, D, T').
    """

    def __init__(self, engine: Engine, *, time_last: bool) -> None:
        super().__init__()
        self.engine = engine
        self.time_last = time_last
        # A recogniser asks the parameters of a model for its dtype and device.
        self.frames_like = nn.Parameter(torch.zeros(0, **CPU_FLOAT), requires_grad=False)

    def __deepcopy__(self, memo: Any) -> "EngineEncoder":
        """Itself: an engine cannot be copied, and nothing changes it."""
        return self

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Frames (B, T', D) of features (B, T, F), NaN where these are not finite; lengths (B,).

        Raises:
            RuntimeError: The engine has too little memory, or features have another shape.
        """
        signal = features.transpose(1, 2).contiguous()
        try:
            frames, frame_lengths = self.engine(signal.numpy(), lengths.numpy())
        except Exception as error:  # each engine has classes of its own
            raise RuntimeError(f"model: its engine cannot run it ({_line(error)}).") from None
        encoded = torch.from_numpy(frames)
        if self.time_last:
            encoded = encoded.transpose(1, 2)
        # An engine may make numbers of NaN; torch keeps it, and so the utterance is an error.
        finite = features.isfinite().all(2).all(1)  # (B,)
        encoded = encoded.masked_fill(~finite[:, None, None], torch.nan)
        return encoded, torch.from_numpy(frame_lengths)


def load_exported(
    path: Path | str, engine: str, *, threads: int | None = None, precision: str = "float32"
) -> Checkpoint:
    """The checkpoint of an exported folder, to transcribe with.

    Its encoder, and the CTC head of a CTC model, run in the engine; predictor, joint and decoders
    are asrkit's. Of a transducer that left with its CTC head the checkpoint is a CTC model.

    Args:
        path: A folder of `export`.
        engine: "onnxruntime", which reads ONNX, or "openvino", which reads both formats.
        threads: Threads that compute; None: as many as torch has.
        precision: "float32", or "bfloat16" for OpenVINO, where this CPU has products of it.

    Raises:
        ValueError: The folder is incomplete or damaged; or the engine is not installed, does not
            read it, or has not the precision.
    """
    path = Path(path)
    there = is_exported(path)
    expect(there, "model", "a folder of asrkit export", repr(str(path)), "Make one: asrkit export.")
    expect_choice("engine", engine, [*_ENGINES])
    opens, precisions = _ENGINES[engine]
    expect(precision in precisions, "dtype", f"{' or '.join(precisions)} with {engine}", precision)
    try:
        config, weights, tokenizer, features, notes = own.read(path / DECODING)
        with torch.device("meta"):
            model: Any = make_model(config)
        model.encoder, model.ctc_head = nn.Identity(), None
        is_ctc = isinstance(model, CTCModel)
        if is_ctc:
            model.output = nn.Identity()  # of log-probabilities, which stay what they are
        model.load_state_dict(weights, assign=True)
        acoustic = "model" if is_ctc else "encoder"
        files = path.glob(f"{acoustic}.*")  # a graph, and perhaps weights beside it
        graph = next(file for file in files if file.suffix in (".onnx", ".xml"))
        runs = opens(graph, threads or torch.get_num_threads(), precision)
    except ValueError:
        raise
    except Exception as error:  # each engine has classes of its own
        wanted, got = f"an export that {engine} reads", f"{path} ({_line(error)})"
        remedy = "Export it again: asrkit export --format onnx."
        raise ValueError(f"model: expected {wanted}, got {got}. {remedy}") from None
    model.encoder = EngineEncoder(runs, time_last=not is_ctc)
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
    remedy = "Pass --dtype float32."
    expect(used == hint, "dtype", f"one that OpenVINO has on this CPU, {used}", hint, remedy)
    request = compiled.create_infer_request()

    def run(signal: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = request.infer({"audio_signal": signal, "length": lengths})
        return found[0].copy(), found[1].copy()

    return run


# What opens each engine, and its precisions.
_ENGINES = {
    "onnxruntime": (_onnxruntime, ("float32",)),
    "openvino": (_openvino, ("float32", "bfloat16")),
}
