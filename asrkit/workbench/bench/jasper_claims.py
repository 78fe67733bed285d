"""Claims about Jasper on a GPU: latency by the published protocol, and training steps by precision.

Records carry the ids of claims. The published throughput is of train-clean-100; here every batch is
as long as the longest utterance, so it is a lower bound.
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asrkit.models import CTCModel
from asrkit.models.execution import tf32
from asrkit.optim import NovoGrad
from asrkit.workbench.bench import protocols
from asrkit.workbench.bench.cases import Case
from asrkit.workbench.bench.studies import StudyRecords
from asrkit.workbench.measure import Timing
from asrkit.workbench.records import Measurement

LATENCY = ("jasper-latency-a100", "jasper-fp16-a100", "jasper-fp16-fp32")
TRAINING = ("jasper-mixed-a100", "jasper-throughput-a100")
LARGEST = (16, 16.7)  # the cell of the claims: utterances, and seconds of each
REPEATS = 50  # of each precision, where the tables have 500
STEP = (64, 1670)  # utterances and feature frames of a training step
QUICK_STEP = (2, 60)
LABELS_PER_FRAME = 0.12  # of features: 12 characters a second
RATE = 0.01  # of NovoGrad, as published
STEPS = 12  # that are timed, after as many that are not
LOSS_TOLERANCE = 0.05  # of mixed precision beside TF32, in the first step


def cases(model: CTCModel, device: str, quick: bool) -> Iterator[Case]:
    """The two studies.

    Args:
        model: float32, on `device`.
        device: "cuda"; on a CPU the same runs as a rehearsal, without TF32.
        quick: toy sizes, which settle nothing.
    """
    for ids, study in ((LATENCY, latencies), (TRAINING, training)):
        what = f"claims: {', '.join(ids)}"
        yield Case(what=what, measure=partial(study, model, device, quick))


def latencies(model: CTCModel, device: str, quick: bool) -> Iterable[Measurement]:
    """The largest cell of the published grid in three precisions."""
    batch, seconds = LARGEST
    iterations = REPEATS + protocols.DROPPED
    if quick:
        batch, seconds = (2, 0.5)
        iterations = protocols.FEWEST + protocols.DROPPED
    single = "tf32"
    half = "float16"
    if not device.startswith("cuda"):
        single, half = "float32", "bfloat16"
    precisions = list(dict.fromkeys(["float32", single, half]))
    cells = protocols.grid(model, [batch], [seconds], precisions, iterations=iterations)
    times = {cell.precision: _timing(cell.samples_s) for cell in cells}
    params: dict[str, Any] = {"batch": batch, "duration_s": seconds, "suite": "jasper"}
    records = StudyRecords(device, quick, iterations=iterations, **params)
    mean_ms = {cell.precision: 1e3 * cell.published["avg"] for cell in cells}
    statistic: dict[str, Any] = {"dtype": half, "mean_ms": mean_ms[half]}
    timing = times[half]
    yield records.value("jasper-latency-a100", timing.samples_ms, timing, half, **statistic)
    yield records.ratio("jasper-fp16-a100", times, single, half, arms=("tf32", "fp16"))
    yield records.ratio("jasper-fp16-fp32", times, "float32", half, arms=("fp32", "fp16"))


def _timing(samples_s: tuple[float, ...]) -> Timing:
    samples_ms = tuple(1e3 * sample for sample in samples_s)
    warmup = protocols.WARM_UP + protocols.DROPPED
    return Timing(samples_ms=samples_ms, warmup=warmup, timer="time.perf_counter")


def training(model: CTCModel, device: str, quick: bool) -> Iterable[Measurement]:
    """Steps in TF32 and in mixed precision, and utterances a second of the latter."""
    B, T = STEP
    steps = STEPS
    if quick:
        B, T = QUICK_STEP
        steps = 3
    times = {}
    first_losses = {}
    for precision in ("tf32", "mixed"):
        step = TrainingStep(model, B, T, precision)
        first_losses[precision] = step().item()
        samples = protocols.protocol_samples(step, step.device, steps, steps, dropped=0)
        times[precision] = _timing(samples)
        del step
    off = abs(first_losses["mixed"] / first_losses["tf32"] - 1)
    assert off <= LOSS_TOLERANCE, f"mixed precision has another loss: {first_losses}"
    records = StudyRecords(device, quick, shape=[B, T], steps=steps, gpus=1, suite="jasper")
    yield records.ratio("jasper-mixed-a100", times, "tf32", "mixed")
    yield records.value(
        "jasper-throughput-a100",
        [1e3 * B / ms for ms in times["mixed"].samples_ms],
        times["mixed"],
        "mixed",
        metric="throughput",
        unit="utterances/s",
    )


class TrainingStep:
    """Calls make one step on a batch of full length, and return the mean loss in nats.

    Args:
        model: float32; it is copied.
        B: utterances.
        T: feature frames of each.
        precision: "tf32", or "mixed": autocast with a scaled loss; on a CPU in bfloat16.
    """

    def __init__(self, model: CTCModel, B: int, T: int, precision: str) -> None:
        draw = torch.Generator().manual_seed(0)
        self.model: nn.Module = deepcopy(model).requires_grad_(True).train()
        self.blank = model.blank
        self.device = next(model.parameters()).device
        self.B = B
        self.mixed = precision == "mixed"
        self.features = torch.randn(B, T, model.encoder.config.bins, generator=draw)
        self.features = self.features.to(self.device)
        U = max(1, int(LABELS_PER_FRAME * T))
        self.targets = torch.randint(model.blank, (B, U), generator=draw).to(self.device)
        self.lengths = torch.full((B,), T)
        self.target_lengths = torch.full((B,), U)
        self.optimizer = NovoGrad(self.model.parameters(), RATE)
        on_cuda = self.device.type == "cuda"
        self.dtype = torch.float16 if on_cuda else torch.bfloat16
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.mixed and on_cuda)

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        autocast: Any = torch.autocast(self.device.type, self.dtype, enabled=self.mixed)
        torch.manual_seed(0)  # of dropout
        with tf32(True):
            with autocast:
                log_probs, lengths = self.model(self.features, self.lengths)
            losses = F.ctc_loss(
                log_probs.float().transpose(0, 1),
                self.targets,
                lengths,
                self.target_lengths,
                blank=self.blank,
                reduction="none",
            )
            loss = losses.mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach()
