"""Programs that transcribe with a FastConformer (CTC or RNN-T), each called as its users call it.

A program imports only what it needs: sherpa-onnx and ONNX Runtime run without torch.
"""

import wave
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

MAX_SYMBOLS = 10  # most labels of an RNN-T on a frame, also in sherpa-onnx and NeMo
BATCH = 8  # files or windows at once, where a program takes several
RATE_HZ = 16_000
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


def sherpa_onnx(model: str, threads: int, head: str) -> Transcribe:
    """sherpa-onnx's offline recogniser, one file at a time."""
    import sherpa_onnx as package

    graphs = {path.name.partition(".")[0]: str(path) for path in Path(model).glob("*.onnx")}
    settings = {"tokens": f"{model}/tokens.txt", "num_threads": threads}
    if head == "ctc":
        recognizer = package.OfflineRecognizer.from_nemo_ctc(model=graphs["model"], **settings)
    else:
        recognizer = package.OfflineRecognizer.from_transducer(
            **graphs, model_type="nemo_transducer", **settings
        )

    def text(file: str) -> str:
        stream = recognizer.create_stream()
        stream.accept_waveform(RATE_HZ, samples_of(file))
        recognizer.decode_stream(stream)
        return stream.result.text

    return lambda files: [*map(text, files)]


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


def onnxruntime(model: str, threads: int, head: str) -> Transcribe:
    """A plain script with ONNX Runtime: features in NumPy, then argmax, or a loop over labels."""
    import onnxruntime as package

    options = package.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    graphs = {
        path.name.partition(".")[0]: package.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        for path in Path(model).glob("*.onnx")
    }
    lines = Path(model, "tokens.txt").read_text(encoding="utf-8").splitlines()
    pieces = [line.rpartition(" ")[0] for line in lines]
    features = Features(np.load(f"{model}/bands.npy"))
    labels_of = _ctc_labels if head == "ctc" else _transducer_labels

    def text(file: str) -> str:
        signal, length = features(samples_of(file))
        labels = labels_of(graphs, {"audio_signal": signal, "length": length}, len(pieces) - 1)
        return "".join(pieces[label] for label in labels).replace("▁", " ").strip()

    return lambda files: [*map(text, files)]


def _ctc_labels(graphs: dict[str, Any], inputs: dict[str, Any], blank: int) -> list[int]:
    """Greedy labels: repeats are merged, blanks removed."""
    scores, lengths = graphs["model"].run(None, inputs)
    best = scores[0, : lengths[0]].argmax(-1)
    kept = best[np.append(True, best[1:] != best[:-1])]
    return kept[kept != blank].tolist()


def _transducer_labels(graphs: dict[str, Any], inputs: dict[str, Any], blank: int) -> list[int]:
    """Greedy labels, frame by frame; the predictor runs once per label."""
    encoded, lengths = graphs["encoder"].run(None, inputs)
    decoder, joiner = graphs["decoder"], graphs["joiner"]
    names = [port.name for port in decoder.get_inputs()]
    layers, _, width = decoder.get_inputs()[2].shape
    zeros = np.zeros((layers, 1, width))
    state = [zeros.astype(np.float32)] * 2

    def predict(label: int, state: list[np.ndarray]) -> list[np.ndarray]:
        target = np.array([[label]], np.int32)
        feed = dict(zip(names, [target, np.ones(1, np.int32), *state], strict=True))
        predicted, _, *states = decoder.run(None, feed)
        return [predicted, *states]

    predicted, *state = predict(blank, state)
    labels: list[int] = []
    for t in range(lengths[0]):
        frame = np.ascontiguousarray(encoded[:, :, t : t + 1])
        for _ in range(MAX_SYMBOLS):
            feed = {"encoder_outputs": frame, "decoder_outputs": predicted}
            best = int(joiner.run(None, feed)[0].argmax())
            if best == blank:
                break
            labels.append(best)
            predicted, *state = predict(best, state)
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


def _onnx_programs(package: str, make: Any) -> dict[str, tuple[str, str, Any]]:
    """The programs of a package that reads ONNX: each head, in float32 and int8."""
    return {
        f"{make.__name__}_{head}_{precision}": (package, form, partial(make, head=head))
        for head in ("ctc", "rnnt")
        for precision, form in (("float32", "onnx"), ("int8", "onnx-int8"))
    }


# name: package, form of the model ("": the checkpoint itself), and a function that takes its path
# and a number of threads, and returns a function from files to texts
PROGRAMS: dict[str, tuple[str, str, Callable[[str, int], Transcribe]]] = {
    **{
        f"asrkit_{precision}": ("asrkit-workbench", "", partial(asrkit, precision=precision))
        for precision in ("float32", "bfloat16", "int8")
    },
    **_onnx_programs("sherpa-onnx", sherpa_onnx),
    **_onnx_programs("onnxruntime", onnxruntime),
    "transformers_ctc": ("transformers", "parakeet", transformers),
    "nemo": ("nemo_toolkit", "model.nemo", nemo),
}
