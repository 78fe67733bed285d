"""The published tables of Jasper 10x5 DR, measured on this machine with random weights: the suites
`jasper-inference` and `jasper-training`, and the claims about single cells of these tables.

The published latencies are means of 495 batches, one after another, after 16 untimed ones, with
cuDNN's search for the fastest convolutions (inference script of
github.com/NVIDIA/DeepLearningExamples, PyTorch/SpeechRecognition/Jasper, commit 729963d). The
published throughput is for train-clean-100. Here every utterance of a batch is as long as the
longest, so the measured throughput is a lower bound.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from asrkit.cli.command import progress
from asrkit.models import CTCModel, presets
from asrkit.models.inference import tf32
from asrkit.optim import NovoGrad
from asrkit.shapes import expect
from asrkit.threads import usable_cores
from asrkit.workbench.lessons.shared.jasper import (
    WARM_UP,
    fastest_convolutions,
    latencies,
    random_jasper,
)
from asrkit.workbench.lessons.shared.variants import random_features
from asrkit.workbench.measure import Timing, measure
from asrkit.workbench.measure.publishing import latency, of_samples, time_ratio
from asrkit.workbench.records import Measurement, Record
from benchmarks.harness.cases import Case, Suite, study_params
from benchmarks.harness.table import pivot

Params = dict[str, Any]
LATENCY = ("jasper-latency-a100", "jasper-fp16-a100", "jasper-fp16-fp32")
LATENCY_RATIOS = {"tf32": ("jasper-fp16-a100", "tf32"), "float32": ("jasper-fp16-fp32", "fp32")}
TRAINING = ("jasper-mixed-a100", "jasper-throughput-a100")
LARGEST = (16, 16.7)  # the claims' cell of the table: utterances, and seconds of each
STEP = (64, 16.7)  # the same for a training step of one process
QUICK = (2, 0.6)  # both in a rehearsal
REPEATS = 50  # per precision, for the claims; the published ones have 495
STEPS = 12  # timed steps, after as many untimed ones

BATCHES = {"jasper-inference": (1, 2, 4, 8, 16), "jasper-training": (32,)}
SECONDS = {"jasper-inference": (2.0, 7.0, 16.7), "jasper-training": (16.7,)}
PRECISIONS = {"cpu": ("float32", "bfloat16"), "cuda": ("tf32", "float16")}
ITERATIONS = 500
MOST_SECONDS = 3600  # of an utterance
PROCESSES = (1, 4, 8)
SHARES = (90, 95, 99)  # percentiles

LABELS_PER_FRAME = 0.12  # per feature frame: 12 characters a second
LEARNING_RATE = 0.01  # published for NovoGrad
LOSS_TOLERANCE = 0.05  # relative, of mixed precision to TF32 in the first step
ROOT = Path(__file__).resolve().parents[2]


def claims(model: CTCModel, device: str, quick: bool) -> Iterator[Case]:
    """Claims about latencies and about training steps.

    Args:
        model: model in float32, on `device`.
        device: "cuda"; "cpu" for a rehearsal.
        quick: toy sizes, which settle nothing.
    """
    shared = study_params(device, quick, suite="encoders")
    B, seconds = QUICK if quick else LARGEST
    params = shared | {"batch": B, "duration_s": seconds, "iterations": 3 if quick else REPEATS}
    precisions = ("float32", "tf32", "float16")
    yield Case(
        what=f"claims: {', '.join(LATENCY)}", measure=lambda: cell(model, params, precisions)
    )
    B, seconds = QUICK if quick else STEP
    steps = 3 if quick else STEPS
    trained = shared | {"batch": B, "duration_s": seconds, "gpus": 1, "steps": steps}
    yield Case(
        what=f"claims: {', '.join(TRAINING)}",
        measure=lambda: throughputs({1: step_times(model, trained)}, trained),
    )


def sizes(
    suite: str, quick: bool, batch: Sequence[int], seconds: Sequence[float]
) -> list[tuple[float, int]]:
    """Seconds and utterances of the cells of a table."""
    batch = batch or (QUICK[:1] if quick else BATCHES[suite])
    seconds = seconds or (QUICK[1:] if quick else SECONDS[suite])
    expect(min(batch) >= 1, "batch", "at least 1 utterance", min(batch))
    fits = all(0.1 <= length <= MOST_SECONDS for length in seconds)
    expect(fits, "seconds", f"0.1 to {MOST_SECONDS:,}", [*seconds])
    return [*product(seconds, batch)]


# Inference


def inference(
    device: str,
    quick: bool,
    *,
    batch: Sequence[int] = (),
    seconds: Sequence[float] = (),
    iterations: int | None = None,
    precisions: Sequence[str] = (),
) -> Iterator[Case]:
    """Yield the cells of the inference table.

    Args:
        device: "cpu" or "cuda".
        quick: a small Jasper, one cell and few calls.
        batch: numbers of utterances of a call.
        seconds: lengths of the utterances.
        iterations: timed calls of each cell and precision; None: 500, or 5 if quick.
        precisions: names as in variants.py; the first is the baseline of the others.
    """
    preset = "mini_jasper" if quick else "jasper_10x5dr"
    precisions = precisions or PRECISIONS[device]
    if iterations is None:
        iterations = 5 if quick else ITERATIONS
    expect(iterations >= 1, "iterations", "at least 1", iterations)
    params = study_params(device, quick, suite="jasper-inference", preset=preset)
    params |= {"iterations": iterations, "precisions": [*precisions]}
    config: Any = presets.PRESETS[preset]()
    model = random_jasper(config, device)
    for length, B in sizes("jasper-inference", quick, batch, seconds):
        size = params | {"batch": B, "duration_s": length}
        yield Case(
            what=f"jasper-inference: {B} x {length:g} s",
            params=size,
            measure=partial(cell, model, size, precisions),
        )


def cell(model: CTCModel, params: Params, precisions: Sequence[str]) -> Iterator[Measurement]:
    """Latencies of a cell by precision, and the claims about the cell.

    The time that the cell will take is estimated from its first calls, and printed.
    """
    size = (params["batch"], params["duration_s"])
    first = latencies(model, *size, precisions, repeats=1, warmup=1)
    each_ms = sum(timing.median_ms for timing in first.values())
    progress(f"about {(params['iterations'] + WARM_UP) * each_ms / 60e3:.1f} minutes")
    times = latencies(model, *size, precisions, repeats=params["iterations"])
    params = params | {"baseline_ms": fmean(times[precisions[0]].samples_ms)}
    for name, timing in times.items():
        yield latency("jasper-latency", timing, impl=name, params=params | {"dtype": name})
    half = times.get("float16")
    if half and size == (QUICK if "quick" in params else LARGEST):
        statistic = {"dtype": "float16", "mean_ms": fmean(half.samples_ms)}
        yield latency("jasper-latency-a100", half, impl="float16", params=params | statistic)
        for slow in LATENCY_RATIOS.keys() & times:
            what, name = LATENCY_RATIOS[slow]
            arms = params | {"arms": [name, "fp16"]}
            yield time_ratio(what, times, slow, "float16", impl="fp16", params=arms)


def inference_columns(record: Record) -> dict[str, float]:
    """Columns of a record: percentiles and mean by the published rule in ms, and the mean of the
    first precision over this one.

    The rule takes element floor(n (1 - a)) of n latencies in descending order for the share a.
    """
    name, samples = record["impl"], sorted(record["samples"], reverse=True)
    n, mean = len(samples), fmean(samples)
    columns = {f"{name}: {share} %, ms": samples[int(n * (1 - share / 100))] for share in SHARES}
    columns[f"{name}: mean, ms"] = mean
    first = record["params"]["precisions"][0]
    if name != first:
        columns[f"{name}: speed-up over {first}"] = record["params"]["baseline_ms"] / mean
    return columns


# Training


def training(
    device: str,
    quick: bool,
    *,
    batch: Sequence[int] = (),
    seconds: Sequence[float] = (),
    processes: Sequence[int] = (),
) -> Iterator[Case]:
    """Yield the batches of the training table.

    Args:
        device: "cpu" or "cuda".
        quick: a small Jasper, and few steps.
        batch: numbers of utterances of a step, in each process.
        seconds: lengths of the utterances.
        processes: numbers of processes. Each has a GPU, or on a CPU as many threads as this one.
    """
    threads = torch.get_num_threads()
    cores = usable_cores()
    fits = device == "cuda" or threads <= cores
    expect(fits, "threads", f"at most {cores}, the cores here", threads)
    most = torch.cuda.device_count() if device == "cuda" else cores // threads
    processes = processes or [n for n in ((1, 2) if quick else PROCESSES) if n <= most]
    wanted = f"1 to {most}: a GPU each, or {threads} of the cores here (--threads)"
    fits = all(1 <= n <= most for n in processes)
    expect(fits and len(processes) > 0, "processes", wanted, [*processes])
    params = study_params(device, quick, suite="jasper-training", steps=3 if quick else STEPS)
    params |= {"preset": "mini_jasper" if quick else "jasper_10x5dr"}
    for length, B in sizes("jasper-training", quick, batch, seconds):
        size = params | {"batch": B, "duration_s": length, "counts": [*processes]}
        yield Case(
            what=f"jasper-training: {B} x {length:g} s",
            params=size,
            measure=partial(batch_of_processes, size),
        )


def batch_of_processes(params: Params) -> Iterator[Measurement]:
    """Throughputs of a batch by several numbers of processes."""
    return throughputs({n: by_torchrun(n, params) for n in params["counts"]}, params)


def by_torchrun(processes: int, params: Params) -> dict[str, Timing]:
    """Times of training steps by precision, in the first of several processes.

    Raises:
        RuntimeError: a process failed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "-m", "benchmarks.programs.jasper_steps"]
    done = subprocess.run([*command, json.dumps(params)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"torchrun ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return {name: Timing(**timing) for name, timing in json.loads(done.stdout).items()}


def step_times(model: CTCModel, params: Params) -> dict[str, Timing]:
    """Times of training steps in TF32 (float32 on a CPU) and in mixed precision.

    Args:
        model: model in float32.
        params: utterances (batch), their length (duration_s), and the number of timed steps, after
            as many untimed ones.
    """
    B, T, count = params["batch"], round(100 * params["duration_s"]), params["steps"]
    steps = {name: training_step(model, B, T, name == "mixed") for name in ("tf32", "mixed")}
    with fastest_convolutions():
        losses = {name: step().item() for name, step in steps.items()}
        error = abs(losses["mixed"] / losses["tf32"] - 1)
        assert error <= LOSS_TOLERANCE, f"mixed precision has another loss: {losses}"
        return measure(steps, repeats=count, warmup=count, device=params["device"])


def throughputs(times: Mapping[int, Mapping[str, Timing]], params: Params) -> Iterator[Measurement]:
    """Utterances a second of all processes, their ratios to one process, the speed-up by mixed
    precision, and the claims about the cell.

    Args:
        times: times of steps by number of processes and by precision.
        params: params of the records.
    """
    B = params["batch"]
    claimed = QUICK if "quick" in params else STEP
    names = {"tf32": "float32"} if params["device"] == "cpu" else {}
    for n, arms in times.items():
        own = params | {"processes": n}
        pair = own | {"arms": ["tf32", "mixed"]}
        for name, timing in arms.items():
            rates = [1e3 * n * B / ms for ms in timing.samples_ms]
            rate = partial(of_samples, unit="utterances/s", samples=rates, timing=timing)
            impl = names.get(name, name)
            yield rate("jasper-training", "throughput", impl=impl, params=own)
            if 1 in times:
                scaling = n * times[1][name].median_ms / timing.median_ms
                yield Measurement("jasper-training", "scaling", "1", scaling, impl=impl, params=own)
        gain = arms["tf32"].median_ms / arms["mixed"].median_ms
        yield Measurement("jasper-training", "ratio", "1", gain, impl="mixed", params=pair)
        if n == 1 and (B, params["duration_s"]) == claimed:
            yield time_ratio("jasper-mixed-a100", arms, "tf32", "mixed", impl="mixed", params=pair)
            yield rate("jasper-throughput-a100", "throughput", impl="mixed", params=own)


def training_columns(record: Record) -> dict[str, float]:
    """The column of a record."""
    name = record["impl"]
    first = "float32" if record["params"]["device"] == "cpu" else "tf32"
    column = {"throughput": "utterances/s", "ratio": f"speed-up over {first}"}
    return {f"{name}: {column.get(record['metric'], 'weak scaling')}": record["value"]}


def training_step(model: CTCModel, B: int, T: int, mixed: bool) -> Callable[[], Tensor]:
    """A call that takes one step on a batch without padding and returns the mean loss in nats.

    In a process group, the gradients are averaged over its processes.

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
    trained: nn.Module = deepcopy(model).requires_grad_(True).train()
    if distributed.is_initialized():
        trained = DistributedDataParallel(
            trained, broadcast_buffers=False, gradient_as_bucket_view=True
        )
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
                blank=model.blank,
                reduction="none",
            ).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return step


INFERENCE_SUITE = Suite(
    name="jasper-inference",
    cases=inference,
    rows=partial(pivot, "jasper-latency", ("duration_s", "batch"), inference_columns),
)
TRAINING_SUITE = Suite(
    name="jasper-training",
    cases=training,
    rows=partial(pivot, "jasper-training", ("duration_s", "batch", "processes"), training_columns),
)
