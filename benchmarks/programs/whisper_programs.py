"""Programs that transcribe by a Whisper, each as its users call it; see peer_programs.py.

All decode greedily, in English, and do not condition on the text before. What an unlikely text
leads to is left to each: DECODING says what it does by default.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

BATCH = 8  # windows or files at once, where a program takes several
WINDOW_S = 30  # what a Whisper reads at once
RATE_HZ = 16_000
Transcribe = Callable[[Sequence[str]], list[str]]


def samples_of(file: str) -> np.ndarray:
    """Samples (S,) float32 of a sound file."""
    import soundfile

    return soundfile.read(file, dtype="float32")[0]


def faster_whisper(model: str, threads: int, precision: str, **batched: Any) -> Transcribe:
    """faster-whisper on CTranslate2: window after window, or in batches with these settings."""
    from faster_whisper import BatchedInferencePipeline, WhisperModel

    whisper = WhisperModel(model, device="cpu", compute_type=precision, cpu_threads=threads)
    asked: dict[str, Any] = {"language": "en", "beam_size": 1, "condition_on_previous_text": False}
    recognizer = whisper
    if batched:
        recognizer = BatchedInferencePipeline(whisper)
        asked |= batched

    def text(file: str) -> str:
        segments, _ = recognizer.transcribe(file, **asked)
        return "".join(segment.text for segment in segments).strip()

    return lambda files: [*map(text, files)]


def transformers(model: str, threads: int) -> Transcribe:
    """transformers' pipeline, which takes arrays where there is no ffmpeg; longer recordings by its
    own algorithm of long form.
    """
    import torch
    from transformers import pipeline

    torch.set_num_threads(threads)
    recognizer = pipeline("automatic-speech-recognition", model=model, batch_size=BATCH)

    def call(files: Sequence[str]) -> list[str]:
        sounds = [*map(samples_of, files)]
        long = max(map(len, sounds)) > WINDOW_S * RATE_HZ
        given = [{"raw": sound, "sampling_rate": RATE_HZ} for sound in sounds]
        found = recognizer(given, return_timestamps=long, generate_kwargs={"num_beams": 1})
        return [one["text"].strip() for one in found]

    return call


def openvino(model: str, threads: int, precision: str) -> Transcribe:
    """OpenVINO GenAI's pipeline."""
    from openvino_genai import WhisperPipeline

    recognizer = WhisperPipeline(
        model, "CPU", INFERENCE_NUM_THREADS=threads, INFERENCE_PRECISION_HINT=precision
    )
    return lambda files: [recognizer.generate(samples_of(file)).texts[0].strip() for file in files]


def whisper_cpp(model: str, threads: int) -> Transcribe:
    """whisper.cpp by pywhispercpp."""
    from pywhispercpp.model import Model

    recognizer = Model(
        model, n_threads=threads, print_progress=False, redirect_whispercpp_logs_to=None
    )

    def text(file: str) -> str:
        return " ".join(segment.text for segment in recognizer.transcribe(samples_of(file)))

    return lambda files: [*map(text, files)]


FASTER_WHISPER: dict[str, dict[str, Any]] = {  # how it transcribes, and the settings of that
    "": {},
    "batched_": {"batch_size": BATCH},
    "batched_times_": {"batch_size": BATCH, "without_timestamps": False},
}
FALLBACK = "decoded again at temperatures up to 1 where a text is unlikely or repeats itself"
BETWEEN = f"batches of {BATCH} windows between pauses; temperature 0 alone"
# name: package, form of the model ("" as asrkit loads it), and what loads it
PROGRAMS: dict[str, tuple[str, str, Callable[[str, int], Transcribe]]] = {
    **{
        f"faster_whisper_{kind}{precision}": (
            "faster-whisper",
            "",
            partial(faster_whisper, precision=precision, **settings),
        )
        for kind, settings in FASTER_WHISPER.items()
        for precision in ("int8", "float32")
    },
    "openvino_genai_float32": ("openvino-genai", "openvino", partial(openvino, precision="f32")),
    "openvino_genai_bfloat16": ("openvino-genai", "openvino", partial(openvino, precision="bf16")),
    "whisper_cpp_float16": ("pywhispercpp", "ggml-f16.bin", whisper_cpp),
    "whisper_cpp_int8": ("pywhispercpp", "ggml-q8_0.bin", whisper_cpp),
    "transformers_whisper": ("transformers", "huggingface", transformers),
}
DECODING = {  # beginning of a name: how it decodes, beyond what all have in common
    "asrkit": f"batches of windows; {FALLBACK}",
    "faster_whisper_batched_times": f"{BETWEEN}; with timestamps",
    "faster_whisper_batched": BETWEEN,
    "faster_whisper": FALLBACK,
    "openvino_genai": "temperature 0 alone",
    "whisper_cpp": FALLBACK,
    "transformers_whisper": f"batches of {BATCH} files; temperature 0 alone",
}
