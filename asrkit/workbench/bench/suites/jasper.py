"""Jasper with random weights, its latencies as published tables have them, and on a GPU the claims
about it.

Published: batches one after another with cuDNN's search for the fastest convolutions, after ten
and six that do not count, and the mean of 495 latencies. Read in the inference script of
github.com/NVIDIA/DeepLearningExamples, PyTorch/SpeechRecognition/Jasper, commit 729963d. The
published throughput is of train-clean-100; here every batch is as long as the longest utterance,
so it is a lower bound.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asrkit.models import CTCConfig, CTCModel
from asrkit.models.inference import cast_copy, tf32
from asrkit.optim import NovoGrad
from asrkit.workbench.bench.cases import Case
from asrkit.workbench.bench.studies import StudyRecords
from asrkit.workbench.bench.suites.ways import Encode, arm, speech, weights_dtype
from asrkit.workbench.measure import Timing, measure
from asrkit.workbench.records import Measurement

WARM_UP = 16  # calls before those that count
LATENCY = ("jasper-latency-a100", "jasper-fp16-a100", "jasper-fp16-fp32")
TRAINING = ("jasper-mixed-a100", "jasper-throughput-a100")
LARGEST = (16, 16.7)  # the cell of the claims: utterances, and seconds of each
REPEATS = 50  # of each precision, where the tables have 495
STEP = (64, 1670)  # utterances and feature frames of a training step
STEPS = 12  # that are timed, after as many that are not
LABELS_PER_FRAME = 0.12  # of features: 12 characters a second
RATE = 0.01  # of NovoGrad, as published
LOSS_TOLERANCE = 0.05  # of mixed precision beside TF32, in the first step


def random_jasper(config: CTCConfig, device: str) -> CTCModel:
    """A model in eval mode with seeded random weights, whose norms have the statistics of noise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CTCModel(config).requires_grad_(False)
        for part in model.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.momentum = None  # its statistics are those of the next batch
        noise = torch.randn(1, 100, config.encoder.bins)
        model.train()(noise, torch.tensor([100]))
    return model.eval().to(device)


def latencies(
    model: CTCModel,
    B: int,
    seconds: float,
    ways: Iterable[str],
    *,
    repeats: int,
    warmup: int = WARM_UP,
) -> dict[str, Timing]:
    """Times of calls that run a Jasper and take the best token of each frame, the ways in turns.

    Features are ready before, in float32.

    Args:
        model: in eval mode, float32, on its device.
        B: utterances of a call.
        seconds: of each utterance.
        ways: names of `bench.suites.ways`, such as "float32" and "optimized_bfloat16".
        repeats: calls that count.
        warmup: calls before those.
    """
    device = next(model.parameters()).device.type
    features, _ = speech(B, seconds, model.encoder.config.bins, device)
    inputs = (features, torch.full((B,), features.shape[1], device=device))
    calls = {}
    for way in ways:
        encode = arm(cast_copy(model, weights_dtype(way)), inputs, way)
        calls[way] = partial(best_tokens, encode)
    with fastest_convolutions():
        return measure(calls, repeats=repeats, warmup=warmup, device=device)


def best_tokens(encode: Encode) -> Tensor:
    """The best token of each frame (B, T) of the log-probabilities that a call computes."""
    return encode()[0].argmax(-1)


@contextmanager
def fastest_convolutions() -> Iterator[None]:
    """Let cuDNN try its convolutions on each new shape, as published."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


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
