"""Inference engines that run the encoder of an exported folder: features in, frames out.

An engine computes; it does not spread work over machines.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from asrkit.cpu import expect_int8
from asrkit.export.folder import Exported
from asrkit.export.packages import require
from asrkit.shapes import expect

Arrays = tuple[np.ndarray, np.ndarray]
PRECISIONS = ("float32", "bfloat16")
# Which formats each engine reads.
READS = {"onnxruntime": ("onnx",), "openvino": ("onnx", "openvino")}
ENGINES = ("torch", *READS)


class Engine(Protocol):
    """A graph that takes features."""

    def __call__(self, signal: np.ndarray, lengths: np.ndarray) -> Arrays:
        """What the graph computes, and its lengths (B,) int64.

        Args:
            signal: Features (B, F, T) float32.
            lengths: Frames of each utterance (B,) int64.
        """


class ONNXRuntime:
    """ONNX Runtime on a CPU.

    Args:
        path: The .onnx file.
        threads: Threads that compute.
        precision: "float32".
    """

    def __init__(self, path: Path, threads: int, precision: str) -> None:
        require("onnxruntime", argument="engine", extra="onnx")
        import onnxruntime

        remedy = "Pass --engine openvino, or --dtype float32."
        expect(precision == "float32", "dtype", "float32 with onnxruntime", precision, remedy)
        onnxruntime.disable_telemetry_events()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(str(path), options, providers=providers)

    def __call__(self, signal: np.ndarray, lengths: np.ndarray) -> Arrays:
        """As `Engine`.

        Raises:
            RuntimeError: Too little memory, or features of another shape than the graph's.
        """
        try:
            return tuple(self.session.run(None, {"audio_signal": signal, "length": lengths}))
        except Exception as error:  # of classes of its own
            why = " ".join(str(error).split())
            raise RuntimeError(f"model: onnxruntime cannot run it ({why:.300}).") from None


class OpenVINO:
    """OpenVINO on a CPU.

    Args:
        path: An .xml file with its .bin, or an .onnx file.
        threads: Threads that compute.
        precision: "float32", or "bfloat16" where this CPU has products of it.
    """

    def __init__(self, path: Path, threads: int, precision: str) -> None:
        require("openvino", argument="engine", extra="openvino")
        import openvino

        hint = {"float32": "f32", "bfloat16": "bf16"}[precision]
        options = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": hint,
            "PERFORMANCE_HINT": "LATENCY",
        }
        core = openvino.Core()
        compiled = core.compile_model(core.read_model(path), "CPU", options)
        used = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        remedy = "Pass --dtype float32."
        expect(used == hint, "dtype", f"one that OpenVINO has on this CPU, {used}", hint, remedy)
        self.request = compiled.create_infer_request()

    def __call__(self, signal: np.ndarray, lengths: np.ndarray) -> Arrays:
        """As `Engine`."""
        found = self.request.infer({"audio_signal": signal, "length": lengths})
        return found[0].copy(), found[1].copy()


_MAKERS: dict[str, Callable[[Path, int, str], Engine]] = {
    "onnxruntime": ONNXRuntime,
    "openvino": OpenVINO,
}


def open_engine(
    exported: Exported, engine: str, *, threads: int | None = None, precision: str = "float32"
) -> Engine:
    """The graph of an exported folder that takes features, in an engine on this CPU.

    Args:
        exported: The folder, as `read_exported` found it.
        engine: "onnxruntime", which reads ONNX, or "openvino", which reads both formats.
        threads: Threads that compute; None: as many as torch has.
        precision: "float32", or "bfloat16" for OpenVINO.

    Raises:
        ValueError: The engine is not installed, cannot read the folder or its files, has not the
            precision; or weights are int8 and this CPU has no instructions for them.
    """
    wanted = "one of 'onnxruntime', 'openvino'"
    expect(engine in READS, "engine", wanted, repr(engine))
    formats = READS[engine]
    remedy = f"Export the model again: --format {formats[0]}, or pass --engine openvino."
    wanted = f"one that reads what {exported.path} holds, {exported.format}"
    expect(exported.format in formats, "engine", wanted, engine, remedy)
    known = f"one of {', '.join(map(repr, PRECISIONS))}"
    expect(precision in PRECISIONS, "dtype", known, repr(precision))
    if exported.int8:
        expect_int8(arm=True, remedy="Export without --int8.")
    path = exported.path / exported.graphs[exported.acoustic]
    try:
        return _MAKERS[engine](path, threads or torch.get_num_threads(), precision)
    except (ValueError, ImportError):
        raise
    except Exception as error:  # each engine has classes of its own
        why = " ".join(str(error).split())
        raise ValueError(
            f"model: {engine} cannot read {path.name} ({why:.300}). Export it again."
        ) from None
