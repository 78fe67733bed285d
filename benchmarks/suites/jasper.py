"""Jasper with random weights, its latencies as published tables have them, and on a GPU the claims
about it.

Published: batches one after another with cuDNN's search for the fastest convolutions, after ten
and six that do not count, and the mean of 495 latencies. Read in the inference script of
github.com/NVIDIA/DeepLearningExamples, PyTorch/SpeechRecognition/Jasper, commit 729963d. The
published throughput is of train-clean-100; here every batch is as long as the longest utterance,
so it is a lower bound.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asrkit.models import CTCModel
from asrkit.models.inference import tf32
from asrkit.optim import NovoGrad
from asrkit.workbench.lessons.shared.jasper import fastest_convolutions, latencies
from asrkit.workbench.lessons.shared.variants import speech
from asrkit.workbench.measure import measure
from asrkit.workbench.records import Measurement
from benchmarks.harness.cases import Case
from benchmarks.harness.studies import StudyRecords

LATENCY = ("jasper-latency-a100", "jasper-fp16-a100", "jasper-fp16-fp32")
TRAINING = ("jasper-mixed-a100", "jasper-throughput-a100")
LARGEST = (16, 16.7)  # the cell of the claims: utterances, and seconds of each
REPEATS = 50  # of each precision, where the tables have 495
STEP = (64, 1670)  # utterances and feature frames of a training step
STEPS = 12  # that are timed, after as many that are not
LABELS_PER_FRAME = 0.12  # of features: 12 characters a second
RATE = 0.01  # of NovoGrad, as published
LOSS_TOLERANCE = 0.05  # of mixed precision beside TF32, in the first step


def claims(model: CTCModel, device: str, quick: bool) -> Iterator[Case]:
    """Claims about latencies and about training steps.

    Args:
        model: float32, on `device`.
        device: "cuda"; on a CPU the same runs as a rehearsal.
        quick: toy sizes, which settle nothing.
    """
    for ids, study in ((LATENCY, latency_claims), (TRAINING, training_claims)):
        yield Case(what=f"claims: {', '.join(ids)}", measure=partial(study, model, device, quick))


def latency_claims(model: CTCModel, device: str, quick: bool) -> Iterator[Measurement]:
    """The largest cell of the published grid in three precisions."""
    B, seconds = (2, 0.5) if quick else LARGEST
    precisions = ("float32", "tf32", "float16")
    times = latencies(model, B, seconds, precisions, repeats=3 if quick else REPEATS)
    records = StudyRecords(device, quick, batch=B, duration_s=seconds, suite="encoders")
    half = times["float16"]
    statistic: dict[str, Any] = {"dtype": "float16", "mean_ms": fmean(half.samples_ms)}
    yield records.value("jasper-latency-a100", half.samples_ms, half, "float16", **statistic)
    yield records.ratio("jasper-fp16-a100", times, "tf32", "float16", arms=("tf32", "fp16"))
    yield records.ratio("jasper-fp16-fp32", times, "float32", "float16", arms=("fp32", "fp16"))


def training_claims(model: CTCModel, device: str, quick: bool) -> Iterator[Measurement]:
    """Steps in TF32 and in mixed precision, and utterances a second of the latter."""
    B, T = (2, 60) if quick else STEP
    count = 3 if quick else STEPS
    steps = {name: training_step(model, B, T, name == "mixed") for name in ("tf32", "mixed")}
    with fastest_convolutions():
        losses = {name: step().item() for name, step in steps.items()}
        off = abs(losses["mixed"] / losses["tf32"] - 1)
        assert off <= LOSS_TOLERANCE, f"mixed precision has another loss: {losses}"
        times = measure(steps, repeats=count, warmup=count, device=device)
    records = StudyRecords(device, quick, shape=[B, T], steps=count, gpus=1, suite="encoders")
    yield records.ratio("jasper-mixed-a100", times, "tf32", "mixed")
    yield records.value(
        "jasper-throughput-a100",
        [1e3 * B / ms for ms in times["mixed"].samples_ms],
        times["mixed"],
        "mixed",
        metric="throughput",
        unit="utterances/s",
    )


def training_step(model: CTCModel, B: int, T: int, mixed: bool) -> Callable[[], Tensor]:
    """A call that makes one step on a batch of full length, and returns the mean loss in nats.

    Args:
        model: float32; it is copied.
        B: utterances.
        T: feature frames of each.
        mixed: autocast with a scaled loss, on a CPU in bfloat16; else TF32.
    """
    device = next(model.parameters()).device.type
    features, _ = speech(B, T / 100, model.encoder.config.bins, device)
    lengths = torch.full((B,), T)
    U = max(1, int(LABELS_PER_FRAME * T))
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(model.blank, (B, U), generator=draw).to(device)
    trained = deepcopy(model).requires_grad_(True).train()
    optimizer = NovoGrad(trained.parameters(), RATE)
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device, enabled=mixed and device == "cuda")

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(0)  # of dropout
        with tf32(True):
            with torch.autocast(device, dtype, enabled=mixed):
                log_probs, ends = trained(features, lengths)
            loss = F.ctc_loss(
                log_probs.float().transpose(0, 1),
                targets,
                ends,
                torch.full((B,), U),
                blank=trained.blank,
                reduction="none",
            ).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return step
