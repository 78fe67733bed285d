"""Programs that transcribe with a Whisper, each called as its users call it.

All decode greedily, in English, without conditioning on previous text. Other settings are each
program's defaults; DECODING describes them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.programs.fastconformer_programs import BATCH, RATE_HZ, Transcribe, samples_of

WINDOW_S = 30  # length of Whisper's window


def faster_whisper(model: str, threads: int, precision: str, **batched: Any) -> Transcribe:
    """faster-whisper on CTranslate2: sequential, or in batches with these settings."""
    from faster_whisper import BatchedInferencePipeline, WhisperModel

    whisper = WhisperModel(model, device="cpu", compute_type=precision, cpu_threads=threads)
    options: dict[str, Any] = {
        "language": "en",
        "beam_size": 1,
        "condition_on_previous_text": False,
    }
    recognizer = whisper
    if batched:
        recognizer = BatchedInferencePipeline(whisper)
        options |= batched

    def text(file: str) -> str:
        segments, _ = recognizer.transcribe(file, **options)
        return "".join(segment.text for segment in segments).strip()

    return lambda files: [*map(text, files)]


def transformers(model: str, threads: int) -> Transcribe:
    """transformers' pipeline; it takes arrays, since it reads files by ffmpeg only. Recordings
    longer than a window are transcribed by its long-form algorithm.
    """
    import torch
    from transformers import pipeline

    torch.set_num_threads(threads)
    recognizer = pipeline("automatic-speech-recognition", model=model, batch_size=BATCH)

    def call(files: Sequence[str]) -> list[str]:
        sounds = [*map(samples_of, files)]
        long = max(map(len, sounds)) > WINDOW_S * RATE_HZ
        inputs = [{"raw": sound, "sampling_rate": RATE_HZ} for sound in sounds]
        results = recognizer(inputs, return_timestamps=long, generate_kwargs={"num_beams": 1})
        return [result["text"].strip() for result in results]

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


FASTER_WHISPER: dict[str, dict[str, Any]] = {  # part of the name: settings of batches
    "": {},
    "batched_": {"batch_size": BATCH},
    "batched_times_": {"batch_size": BATCH, "without_timestamps": False},
}
FALLBACK = "decoded again at temperatures up to 1 where a text is unlikely or repeats itself"
BETWEEN = f"batches of {BATCH} windows between pauses; temperature 0 alone"
# as in fastconformer_programs.py
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
DECODING = {  # prefix of a name: how it decodes by default; the first match counts
    "asrkit": f"batches of windows; {FALLBACK}",
    "faster_whisper_batched_times": f"{BETWEEN}; with timestamps",
    "faster_whisper_batched": BETWEEN,
    "faster_whisper": FALLBACK,
    "openvino_genai": "temperature 0 alone",
    "whisper_cpp": FALLBACK,
    "transformers_whisper": f"batches of {BATCH} files; temperature 0 alone",
}
