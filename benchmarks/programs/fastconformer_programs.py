"""Programs that transcribe with a FastConformer (CTC, RNN-T or TDT), each called as its users call
it.

A program imports only what it needs: sherpa-onnx, onnx-asr, ONNX Runtime and OpenVINO run without
torch.
"""

import json
import wave
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

MAX_SYMBOLS = 10  # most labels of an RNN-T on a frame, also in sherpa-onnx and NeMo
BATCH = 8  # files or windows at once, where a program takes several
RATE_HZ = 16_000
GROUP = 64  # activations of a row that share a scale, in OpenVINO's int8
ONNX = {"float32": "onnx", "int8": "onnx-int8"}  # precision: form that export writes
IR = {"float32": "ir", "bfloat16": "ir", "int8": "ir-int8"}
GRAPHS = ("model", "encoder", "decoder", "joiner")
STATES = ("targets", "target_length", "states.1", "onnx::Slice_3")  # inputs of a decoder
Inputs = dict[str, np.ndarray]  # of a graph, by name
Run = Callable[[Inputs], list[np.ndarray]]  # computes the outputs of a graph
Texts = list[str]
Transcribe = Callable[[Sequence[str]], Texts]


def samples_of(file: str) -> np.ndarray:
    """Samples (S,) float32 of a WAV file."""
    with wave.open(file) as sound:
        return np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(np.float32) / 32768


def asrkit(model: str, threads: int, precision: str) -> Transcribe:
    """asrkit's recogniser by its public function `transcribe`."""
    import torch

    from asrkit.memory import share_memory_pool
    from asrkit.models import load_checkpoint
    from asrkit.transcribe import PipelineConfig, Recognizer, transcribe

    torch.set_num_threads(threads)
    share_memory_pool()  # as the command does
    checkpoint = load_checkpoint(model, dtype=None)  # the recogniser reads and casts the weights
    config = PipelineConfig(precision=precision)  # type: ignore[arg-type]
    recognizer = Recognizer.from_checkpoint(checkpoint, config, in_place=True)

    def call(files: Sequence[str]) -> Texts:
        results = [*transcribe(checkpoint, [*map(Path, files)], recognizer=recognizer)]
        errors = [result.error for result in results if result.error]
        assert not errors, errors[0]
        return [result.text for result in results]

    return call


def sherpa_onnx(model: str, threads: int, precision: str) -> Transcribe:
    """sherpa-onnx's offline recogniser, one file at a time."""
    import sherpa_onnx as package

    paths = {name: str(path) for name, path in graph_files(model).items()}
    settings = {"tokens": f"{model}/tokens.txt", "num_threads": threads}
    if "model" in paths:
        recognizer = package.OfflineRecognizer.from_nemo_ctc(**paths, **settings)
    else:
        recognizer = package.OfflineRecognizer.from_transducer(
            **paths, model_type="nemo_transducer", **settings
        )

    def text(file: str) -> str:
        stream = recognizer.create_stream()
        stream.accept_waveform(RATE_HZ, samples_of(file))
        recognizer.decode_stream(stream)
        return stream.result.text

    return lambda files: [*map(text, files)]


def onnx_asr(model: str, threads: int, precision: str) -> Transcribe:
    """onnx-asr's recogniser, one file at a time."""
    import onnx_asr as package
    from onnxruntime import SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = threads
    kind = json.loads(Path(model, "config.json").read_text())["model_type"]
    quantization = "int8" if precision == "int8" else None
    recognizer = package.load_model(kind, model, quantization=quantization, sess_options=options)
    return lambda files: [*map(recognizer.recognize, files)]


def graph_files(model: str) -> dict[str, Path]:
    """The graphs of an exported folder by name: `model`, or `encoder`, `decoder` and `joiner`."""
    files = [path for path in Path(model).iterdir() if path.suffix in (".onnx", ".xml")]
    by_name = {path.name.partition(".")[0]: path for path in files}
    return {name: by_name[name] for name in GRAPHS if name in by_name}


class Features:
    """Log-mel features in NumPy, as NeMo defines them: (1, F, T) and their length (1,).

    Args:
        bands: mel filters (257, F).
    """

    def __init__(self, bands: np.ndarray) -> None:
        self.bands = bands
        self.window = np.pad(np.hanning(400), 56).astype(np.float32)

    def __call__(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features of samples (S,)."""
        T = len(samples) // 160
        emphasized = np.append(samples[:1], samples[1:] - 0.97 * samples[:-1])
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(emphasized, 256), 512)
        framed = windows[::160][:T]
        power = np.abs(np.fft.rfft(framed * self.window)) ** 2
        mel = np.log(power.astype(np.float32) @ self.bands + 2.0**-24)
        normal = (mel - mel.mean(0)) / (mel.std(0, ddof=1) + 1e-5)
        return normal.T[None].astype(np.float32), np.array([T])


def onnxruntime(path: Path, threads: int, precision: str) -> Run:
    """A graph in ONNX Runtime."""
    import onnxruntime as package

    options = package.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = package.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)


def openvino(path: Path, threads: int, precision: str) -> Run:
    """A graph in OpenVINO. Where weights have 8 bits, activations are quantised in groups."""
    from openvino import Core

    options: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "bf16" if precision == "bfloat16" else "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP,
    }
    request = Core().compile_model(path, "CPU", options).create_infer_request()
    return lambda inputs: [*request.infer(inputs).to_tuple()]


def script(model: str, threads: int, engine: Callable[..., Run], precision: str) -> Transcribe:
    """A plain script with an engine: features in NumPy, then argmax, or a loop over labels."""
    paths = graph_files(model)
    graphs = {name: engine(path, threads, precision) for name, path in paths.items()}
    lines = Path(model, "tokens.txt").read_text(encoding="utf-8").splitlines()
    pieces = [line.rpartition(" ")[0] for line in lines]
    features = Features(np.load(f"{model}/bands.npy"))
    states = json.loads(Path(model, "config.json").read_text())["states"]
    decode = partial(_transducer_labels, states=states) if states else _ctc_labels

    def text(file: str) -> str:
        signal, length = features(samples_of(file))
        labels = decode(graphs, {"audio_signal": signal, "length": length}, len(pieces) - 1)
        return "".join(pieces[label] for label in labels).replace("▁", " ").strip()

    return lambda files: [*map(text, files)]


def _ctc_labels(graphs: dict[str, Run], inputs: Inputs, blank: int) -> list[int]:
    """Greedy labels: repeats are merged, blanks removed."""
    scores, lengths = graphs["model"](inputs)
    best = scores[0, : lengths[0]].argmax(-1)
    kept = best[np.append(True, best[1:] != best[:-1])]
    return kept[kept != blank].tolist()


def _transducer_labels(
    graphs: dict[str, Run], inputs: Inputs, blank: int, states: Sequence[int]
) -> list[int]:
    """Greedy labels of an RNN-T or a TDT; the predictor runs once per label."""
    encoded, lengths = graphs["encoder"](inputs)

    def predict(label: int, state: list[np.ndarray]) -> list[np.ndarray]:
        values = [np.array([[label]], np.int32), np.ones(1, np.int32), *state]
        return graphs["decoder"](dict(zip(STATES, values, strict=True)))

    predicted, _, *state = predict(blank, [np.zeros(states, np.float32)] * 2)
    labels: list[int] = []
    t = on_frame = 0
    while t < lengths[0]:
        frame = np.ascontiguousarray(encoded[:, :, t : t + 1])
        feed = {"encoder_outputs": frame, "decoder_outputs": predicted}
        logits, durations = np.split(graphs["joiner"](feed)[0].ravel(), [blank + 1])
        skip = int(durations.argmax()) if durations.size else 0
        best = int(logits.argmax())
        if best != blank:
            labels.append(best)
            predicted, _, *state = predict(best, state)
            on_frame += 1
        if best == blank or on_frame == MAX_SYMBOLS:
            skip = max(skip, 1)
        t, on_frame = t + skip, 0 if skip else on_frame
    return labels


def transformers(model: str, threads: int) -> Transcribe:
    """transformers' pipeline; it takes arrays, since it reads files by ffmpeg only."""
    import torch
    from transformers import pipeline

    torch.set_num_threads(threads)
    recognizer = pipeline("automatic-speech-recognition", model=model, batch_size=BATCH)

    def call(files: Sequence[str]) -> Texts:
        sounds = [{"raw": samples_of(file), "sampling_rate": RATE_HZ} for file in files]
        return [" ".join(result["text"].split()) for result in recognizer(sounds)]

    return call


def nemo(model: str, threads: int) -> Transcribe:
    """NeMo's `transcribe`."""
    import torch
    from nemo.collections.asr.models import ASRModel
    from nemo.utils import logging

    torch.set_num_threads(threads)
    logging.setLevel(logging.ERROR)
    recognizer = ASRModel.restore_from(model, map_location="cpu").eval()

    def call(files: Sequence[str]) -> Texts:
        results = recognizer.transcribe([*files], batch_size=BATCH, num_workers=0, verbose=False)
        return [result.text for result in results]

    return call


ENGINES: dict[str, tuple[str, dict[str, str], Any]] = {  # package, forms by precision, function
    "sherpa_onnx": ("sherpa-onnx", ONNX, sherpa_onnx),
    "onnx_asr": ("onnx-asr", ONNX, onnx_asr),
    "onnxruntime": ("onnxruntime", ONNX, partial(script, engine=onnxruntime)),
    "openvino": ("openvino", IR, partial(script, engine=openvino)),
}
# name: package, form of the model ("": the checkpoint itself), and a function that takes its path
# and a number of threads, and returns a function from files to texts
PROGRAMS: dict[str, tuple[str, str, Callable[[str, int], Transcribe]]] = {
    **{
        f"asrkit_{precision}": ("asrkit-workbench", "", partial(asrkit, precision=precision))
        for precision in ("float32", "bfloat16", "int8")
    },
    **{
        f"{name}_{head}_{precision}": (package, form, partial(call, precision=precision))
        for name, (package, forms, call) in ENGINES.items()
        for head in ("ctc", "rnnt", "tdt")
        for precision, form in forms.items()
    },
    "transformers_ctc": ("transformers", "parakeet", transformers),
    "nemo": ("nemo_toolkit", "model.nemo", nemo),
}
