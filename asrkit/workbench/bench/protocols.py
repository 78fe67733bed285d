"""Jasper's latencies by the protocol that its tables were measured with, beside the statistics of
this workbench.

Published: 500 batches after warm-up, the first ones dropped, 495 kept; three percentiles and a
mean, which the tables call average. Ours: median and quartiles. Read in the inference script of
github.com/NVIDIA/DeepLearningExamples, PyTorch/SpeechRecognition/Jasper, commit 729963d.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asrkit.models import CTCModel
from asrkit.models.execution import EncoderForm, cast_copy, prepare, tf32
from asrkit.shapes import expect, whole
from asrkit.workbench.cost import LatencyCell, encoder_flops

SHARES = {"p90": 0.90, "p95": 0.95, "p99": 0.99}
FEWEST = 20  # latencies that the published script makes a table of
WARM_UP = 10  # batches before the clock
ITERATIONS = 501  # 0 to 500 of the published loop
DROPPED = 6  # of these: iteration 0, and the first five of the rest
FRAMES_PER_S = 100
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
PUBLISHED_NAMES = {"float32": "FP32", "tf32": "TF32", "float16": "FP16", "bfloat16": "BF16"}


def published_latency(samples_s: Sequence[float]) -> dict[str, float]:
    """Percentiles and mean by the rule of the published script, in seconds.

    The percentile of a share a is element int(n (1 - a)) of the descending list, computed in
    floats: of 495 latencies, elements 49, 24 and 4. There is no median; "avg" is the mean.

    Args:
        samples_s: Latencies that count. Which come first and are dropped is the caller's part.

    Returns:
        "p90", "p95", "p99" and "avg".

    Raises:
        ValueError: Fewer than 20 latencies, of which the script makes no table.
    """
    count = len(samples_s)
    remedy = "The published script prints no table of fewer."
    expect(count >= FEWEST, "samples_s", f"at least {FEWEST}", count, remedy)
    descending = sorted(samples_s, reverse=True)
    found = {name: descending[int(count * (1 - share))] for name, share in SHARES.items()}
    return found | {"avg": statistics.fmean(samples_s)}


def ours(samples_s: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of latencies, in their unit: "p25", "p50" and "p75".

    Raises:
        ValueError: Fewer than two.
    """
    expect(len(samples_s) >= 2, "samples_s", "at least 2", len(samples_s))
    low, middle, high = statistics.quantiles(samples_s, n=4, method="inclusive")
    return {"p25": low, "p50": middle, "p75": high}


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """Latencies of one batch size, duration and precision, measured as published.

    Attributes:
        batch: Utterances of a call, B.
        seconds: Of each utterance.
        precision: A name in PRECISIONS.
        form: How the model is executed.
        samples_s: Latencies that count.
        FLOP: Operations of a call.
    """

    batch: int
    seconds: float
    precision: str
    form: EncoderForm
    samples_s: tuple[float, ...]
    FLOP: int

    @property
    def published(self) -> dict[str, float]:
        """Percentiles and mean by the published rule, in seconds."""
        return published_latency(self.samples_s)

    @property
    def ours(self) -> dict[str, float]:
        """Median and quartiles, in seconds."""
        return ours(self.samples_s)

    def as_latency(self) -> LatencyCell:
        """The cell with its median as its latency, for `cost.two_numbers` and plots."""
        return LatencyCell(
            batch=self.batch,
            seconds=self.seconds,
            precision=PUBLISHED_NAMES[self.precision],
            latency_ms=1e3 * self.ours["p50"],
            FLOP=self.FLOP,
        )


def grid(
    model: CTCModel,
    batches: Iterable[int],
    seconds: Iterable[float],
    precisions: Iterable[str] = ("float32",),
    *,
    form: EncoderForm = "eager",
    iterations: int = ITERATIONS,
    warm_up: int = WARM_UP,
) -> list[GridCell]:
    """Latencies of a Jasper by batch size, duration and precision, measured as published.

    A call casts float32 features of full length, runs the model, and takes the best token of each
    frame; it ends when the device has. Features are ready before. In half precision the weights
    are half too, as after `model.half()`.

    Args:
        model: A Jasper in eval mode, float32, on its device; it stays as it is.
        batches: Utterances of a call.
        seconds: Of each utterance, whole frames of 10 ms.
        precisions: Of PRECISIONS; "tf32" on CUDA only.
        form: How the model is executed, of `asrkit.models.execution.prepare`.
        iterations: Calls after the warm-up, of which the first six do not count.
        warm_up: Calls before.

    Returns:
        A cell for each combination, precisions outermost.

    Raises:
        ValueError: A duration that is no multiple of a frame; a precision that the device lacks;
            too few iterations for percentiles.
    """
    expect(not model.training, "model", "eval mode", "training mode", "Call model.eval() first.")
    least = FEWEST + DROPPED
    expect(whole(iterations, least), "iterations", f"at least {least}", iterations)
    frames = [frames_of(duration) for duration in seconds]
    device = next(model.parameters()).device
    cells = []
    for precision in precisions:
        ready = prepared(model, precision, form)
        for T in frames:
            for B in batches:
                call = inference(ready, precision, B, T, device)
                samples = protocol_samples(call, device, iterations, warm_up)
                cells.append(
                    GridCell(
                        batch=B,
                        seconds=T / FRAMES_PER_S,
                        precision=precision,
                        form=form,
                        samples_s=samples,
                        FLOP=_flops(model, B, T),
                    )
                )
    return cells


def frames_of(seconds: float) -> int:
    """Feature frames of so many seconds.

    Raises:
        ValueError: The seconds are no multiple of a frame.
    """
    frames = round(seconds * FRAMES_PER_S)
    fits = frames >= 1 and abs(frames / FRAMES_PER_S - seconds) < 1e-9
    expect(fits, "seconds", "a multiple of a frame of 10 ms", seconds)
    return frames


def prepared(model: CTCModel, precision: str, form: EncoderForm) -> CTCModel:
    """A copy of the model in a precision, ready for inference.

    Raises:
        ValueError: Unknown precision; TF32 on a CPU.
    """
    expect(precision in PRECISIONS, "precision", f"one of {PRECISIONS}", repr(precision))
    on_cuda = next(model.parameters()).is_cuda
    expect(precision != "tf32" or on_cuda, "precision", "'tf32' on CUDA only", repr(precision))
    copied = cast_copy(model, weights_dtype(precision)).eval().requires_grad_(False)
    return prepare(copied, form)


def weights_dtype(precision: str) -> torch.dtype:
    """The dtype of weights in a precision."""
    if precision == "tf32":
        return torch.float32
    return getattr(torch, precision)


def inference(
    model: CTCModel, precision: str, B: int, T: int, device: torch.device
) -> Callable[[], Tensor]:
    """A call that returns the best token of each frame (B, T').

    Args:
        model: Of `prepared`.
        precision: Of its weights.
        B: Utterances.
        T: Feature frames, all of them speech.
        device: Of the model.
    """
    bins = model.encoder.config.bins
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(B, T, bins, generator=draw).to(device)
    lengths = torch.full((B,), T, device=device)
    dtype = weights_dtype(precision)

    def call() -> Tensor:
        with torch.inference_mode(), tf32(precision == "tf32"):
            log_probs, _ = model(features.to(dtype), lengths)
            return log_probs.argmax(-1)

    return call


def protocol_samples(
    call: Callable[[], object],
    device: torch.device,
    iterations: int,
    warm_up: int,
    *,
    dropped: int = DROPPED,
) -> tuple[float, ...]:
    """Seconds of the calls that count.

    Args:
        call: Its work may go on behind it, on the device.
        device: That is waited for before and after each call.
        iterations: Calls after the warm-up.
        warm_up: Calls before.
        dropped: How many of the first iterations do not count.
    """
    autotune = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True  # as published
    try:
        for _ in range(warm_up):
            call()
        samples = []
        for _ in range(iterations):
            wait(device)
            start_s = time.perf_counter()
            call()
            wait(device)
            samples.append(time.perf_counter() - start_s)
    finally:
        torch.backends.cudnn.benchmark = autotune
    return tuple(samples[dropped:])


def wait(device: torch.device) -> None:
    """Wait for a GPU; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _flops(model: CTCModel, B: int, T: int) -> int:
    config: Any = model.encoder.config
    return encoder_flops(config, B=B, T=T)
