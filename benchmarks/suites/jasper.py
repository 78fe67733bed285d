"""Claims about Jasper: latencies and training steps of the published tables, with random weights.

The published latencies are means of 495 batches, one after another, after 16 untimed ones, with
cuDNN's search for the fastest convolutions (inference script of
github.com/NVIDIA/DeepLearningExamples, PyTorch/SpeechRecognition/Jasper, commit 729963d). The
published throughput is for train-clean-100. Here every batch is as long as its longest utterance,
so the measured throughput is a lower bound.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional as F

from asrkit.models import CTCModel
from asrkit.models.inference import tf32
from asrkit.optim import NovoGrad
from asrkit.workbench.lessons.shared.jasper import fastest_convolutions, latencies
from asrkit.workbench.lessons.shared.variants import random_features
from asrkit.workbench.measure import measure
from asrkit.workbench.measure.publishing import latency, of_samples, time_ratio
from asrkit.workbench.records import Measurement
from benchmarks.harness.cases import Case, study_params

LATENCY = ("jasper-latency-a100", "jasper-fp16-a100", "jasper-fp16-fp32")
LATENCY_RATIOS = (  # claim, slow arm, its name in the claim
    ("jasper-fp16-a100", "tf32", "tf32"),
    ("jasper-fp16-fp32", "float32", "fp32"),
)
TRAINING = ("jasper-mixed-a100", "jasper-throughput-a100")
LARGEST = (16, 16.7)  # the claims' cell of the table: utterances, and seconds of each
REPEATS = 50  # per precision; the tables have 495
STEP = (64, 1670)  # utterances and feature frames of a training step
STEPS = 12  # timed steps, after as many untimed ones
LABELS_PER_FRAME = 0.12  # per feature frame: 12 characters a second
LEARNING_RATE = 0.01  # published for NovoGrad
LOSS_TOLERANCE = 0.05  # relative, of mixed precision to TF32 in the first step


def claims(model: CTCModel, device: str, quick: bool) -> Iterator[Case]:
    """Claims about latencies and about training steps.

    Args:
        model: model in float32, on `device`.
        device: "cuda"; "cpu" for a rehearsal.
        quick: toy sizes, which settle nothing.
    """
    for ids, study in ((LATENCY, latency_claims), (TRAINING, training_claims)):
        yield Case(what=f"claims: {', '.join(ids)}", measure=partial(study, model, device, quick))


def latency_claims(model: CTCModel, device: str, quick: bool) -> Iterator[Measurement]:
    """The largest cell of the published table in three precisions."""
    B, seconds = (2, 0.5) if quick else LARGEST
    precisions = ("float32", "tf32", "float16")
    times = latencies(model, B, seconds, precisions, repeats=3 if quick else REPEATS)
    params = study_params(device, quick, batch=B, duration_s=seconds, suite="encoders")
    half = times["float16"]
    statistic = {"dtype": "float16", "mean_ms": fmean(half.samples_ms)}
    yield latency("jasper-latency-a100", half, impl="float16", params=params | statistic)
    for what, slow, name in LATENCY_RATIOS:
        arms = {"arms": [name, "fp16"]}
        yield time_ratio(what, times, slow, "float16", impl="fp16", params=params | arms)


def training_claims(model: CTCModel, device: str, quick: bool) -> Iterator[Measurement]:
    """Steps in TF32 and in mixed precision, and the throughput of mixed precision."""
    B, T = (2, 60) if quick else STEP
    count = 3 if quick else STEPS
    steps = {name: training_step(model, B, T, name == "mixed") for name in ("tf32", "mixed")}
    with fastest_convolutions():
        losses = {name: step().item() for name, step in steps.items()}
        error = abs(losses["mixed"] / losses["tf32"] - 1)
        assert error <= LOSS_TOLERANCE, f"mixed precision has another loss: {losses}"
        times = measure(steps, repeats=count, warmup=count, device=device)
    params = study_params(device, quick, shape=[B, T], steps=count, gpus=1, suite="encoders")
    arms = {"arms": ["tf32", "mixed"]}
    yield time_ratio(
        "jasper-mixed-a100", times, "tf32", "mixed", impl="mixed", params=params | arms
    )
    yield of_samples(
        "jasper-throughput-a100",
        "throughput",
        "utterances/s",
        [1e3 * B / ms for ms in times["mixed"].samples_ms],
        times["mixed"],
        impl="mixed",
        params=params,
    )


def training_step(model: CTCModel, B: int, T: int, mixed: bool) -> Callable[[], Tensor]:
    """A call that takes one step on a batch without padding and returns the mean loss in nats.

    Args:
        model: model in float32; it is copied.
        B: number of utterances.
        T: feature frames of each.
        mixed: True: autocast to float16 with a scaled loss (on a CPU to bfloat16). False: TF32.
    """
    device = next(model.parameters()).device.type
    features, _ = random_features(B, T / 100, model.encoder.config.bins, device)
    lengths = torch.full((B,), T)
    U = max(1, int(LABELS_PER_FRAME * T))
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(model.blank, (B, U), generator=draw).to(device)
    trained = deepcopy(model).requires_grad_(True).train()
    optimizer = NovoGrad(trained.parameters(), LEARNING_RATE)
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device, enabled=mixed and device == "cuda")

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(0)  # for dropout
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
