"""What notebook 10_mlperf_rnnt measures and draws beyond its cells: small trainings that show what
large ones consist of, a convolution that is shared out, and a batch that runs in phases.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.nn import functional as F

from asrkit.data import Utterances, batches
from asrkit.models import (
    Checkpoint,
    LSTMEncoderConfig,
    TransducerConfig,
    TransducerModel,
)
from asrkit.optim import Lamb
from asrkit.text import CharTokenizer
from asrkit.training import (
    Beside,
    Prepared,
    TrainConfig,
    prepare_batch,
    training_loss,
    update,
)
from asrkit.training.evaluation import score_weights
from asrkit.workbench.plots.canvas import LEGEND_BESIDE
from asrkit.workbench.plots.palette import colour

# Settings of MLPerf's RNN-T at a batch of 2048: hyperparameters_2048.sh of training_results_v1.1
BETAS = (0.9, 0.9985)
EPS = 1e-9
WEIGHT_DECAY = 1e-3
RATE = 0.02  # after the warm-up
WARM_UP = 10  # steps in which the rate rises linearly
CONFIG = TrainConfig(joint="full", precision="float32", ctc_weight=0.0)


def small_model(seed: int = 0) -> TransducerModel:
    """A transducer of the round's form, of a few hundred thousand weights, in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = LSTMEncoderConfig(width=96, before=1, after=1, dropout=0.0, phases=2)
        vocab_size = CharTokenizer().vocab_size
        return TransducerModel(TransducerConfig(vocab_size=vocab_size, encoder=encoder)).train()


def prepared_batches(
    speech: Utterances, *, batch_seconds: float, seed: int = 0
) -> Iterator[Prepared]:
    """Batches for training, without end; of at most so many seconds, padding included."""
    tokenizer = CharTokenizer()
    step = 0
    for epoch in count():
        for batch in batches(
            speech, tokenizer, batch_seconds=batch_seconds, seed=seed, epoch=epoch
        ):
            yield prepare_batch(batch, CONFIG, step)
            step += 1


def train_with_lamb(speech: Utterances, *, steps: int, seed: int = 0) -> dict[str, list[float]]:
    """LAMB's ratio ||p|| / ||u|| of each matrix in each step of training a small model."""
    model = small_model(seed)
    optimizer = Lamb(
        model.parameters(), RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, clip=1.0
    )
    ratios: dict[str, list[float]] = {}
    stream = prepared_batches(speech, batch_seconds=24.0, seed=seed)
    for step in range(steps):
        (group,) = optimizer.param_groups
        group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        loss = training_loss(model, next(stream), CONFIG).per_label
        update(model, optimizer, loss, CONFIG)
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and optimizer.state[weight]:
                ratio = trust_ratio(optimizer, weight, before[name])
                ratios.setdefault(name, []).append(ratio)
    return ratios


def trust_ratio(optimizer: Lamb, weight: Tensor, before: Tensor) -> float:
    """||p|| / ||u|| of the last step of a weight that was `before` until then."""
    (group,) = optimizer.param_groups
    state = optimizer.state[weight]
    steps = int(state["step"])
    beta1, beta2 = group["betas"]
    mean = state["exp_avg"] / (1 - beta1**steps)
    square = state["exp_avg_sq"] / (1 - beta2**steps)
    update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * before
    lengths = float(before.norm()), float(update.norm())
    return lengths[0] / lengths[1] if all(lengths) else 1.0


def train_in_processes(
    folder: Path, *, processes: int, accumulate: int, steps: int, seed: int = 0
) -> list[dict[str, float]]:
    """The log of `asrkit train` on the spoken digits, a line a step.

    Args:
        folder: Of the run; a run in it is replaced.
        processes: Of this machine, started by torchrun.
        accumulate: Batches that each takes in a step.
        steps: Optimizer steps.
        seed: Of weights, batches and augmentation.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "-m", "asrkit", "train", "--fresh"]
    command += ["--kinds", "digits", "--no-progress", "--out", str(folder), "--seed", str(seed)]
    command += ["--steps", str(steps), "--seconds", "inf", "--accumulate", str(accumulate)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"torchrun ended with {done.returncode}:\n{done.stderr}")
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def mean_of_means_error(parts: list[Prepared], seed: int = 0) -> float:
    """How far the mean of the processes' mean losses is from the mean over all labels.

    Args:
        parts: A batch for each process.
        seed: Of the model's weights.

    Returns:
        ||g' - g|| / ||g||, with g the gradient of the loss per label of all labels, and g' the mean
        of the gradients of each part's loss per label.
    """
    model = small_model(seed)
    labels = torch.tensor([float(part.target_lengths.sum()) for part in parts])
    gradients = []
    for part in parts:
        loss = training_loss(model, part, CONFIG).per_label
        pieces = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        gradients.append(torch.cat([piece.flatten() for piece in pieces if piece is not None]))
    stacked = torch.stack(gradients)
    wanted = (labels / labels.sum()) @ stacked
    averaged = stacked.mean(dim=0)
    return float((averaged - wanted).norm() / wanted.norm())


Spans = list[tuple[str, float]]  # what was done, and for how many ms, in its order


def train_in_turn(
    checkpoint: Checkpoint, batches: Sequence[Prepared], dev: Utterances, *, every: int
) -> tuple[dict[str, Spans], dict[int, float]]:
    """Train a copy of a model, and wait for each evaluation.

    Args:
        checkpoint: Whose model is trained on.
        batches: One for each step.
        dev: Speech that is evaluated.
        every: Steps between two evaluations.

    Returns:
        Name of a process -> what it did; and word error rates by step.
    """
    score = partial(score_weights, checkpoint.tokenizer, checkpoint.features, dev)
    model: Any = deepcopy(checkpoint.model)
    score(model.eval())  # compiles, as the process beside does before its clock
    step = _stepping(model)
    spans: Spans = []
    scores = {}
    for number, batch in enumerate(batches, start=1):
        spans.append(("step", step(batch)))
        if number % every == 0:
            start_s = time.perf_counter()
            scores[number] = score(model.eval()).rate
            spans.append(("evaluation", _ms_since(start_s)))
    return {"in turn": spans}, scores


def train_beside(
    checkpoint: Checkpoint, batches: Sequence[Prepared], dev: Utterances, *, every: int
) -> tuple[dict[str, Spans], dict[int, float]]:
    """As `train_in_turn`, with each evaluation made by another process meanwhile.

    The last evaluation is not waited for in the time of training.
    """
    score = partial(score_weights, checkpoint.tokenizer, checkpoint.features, dev)
    model: Any = deepcopy(checkpoint.model)
    step = _stepping(model)
    spans: Spans = []
    with Beside(score, model, every=every, threads=1) as beside:
        beside.submit(0, model)  # the process starts, imports and compiles
        beside.collect()
        moments_s = [time.perf_counter()]  # then of each evaluation: asked for, and seen to end

        def look(scored: Collection[int]) -> None:
            running = len(moments_s) % 2 == 0
            if running and len(scored) > len(moments_s) // 2:
                moments_s.append(time.perf_counter())

        for number, batch in enumerate(batches, start=1):
            spans.append(("step", step(batch)))
            look(beside.poll())
            if number % every == 0:
                due_s = time.perf_counter()
                look(beside.collect())  # the next one waits for it
                spans.append(("wait", _ms_since(due_s)))
                asked_s = time.perf_counter()
                beside.submit(number, model)
                spans.append(("copy", _ms_since(asked_s)))
                moments_s.append(asked_s)
        look(beside.collect())
        scores = {number: score.rate for number, score in beside.scores.items() if number}
    lasting_ms = 1e3 * np.diff(moments_s)
    evaluation = [*zip(cycle(("idle", "evaluation")), lasting_ms.tolist(), strict=False)]
    return {"training": spans, "evaluation": evaluation}, scores


def _stepping(model: Any) -> Callable[[Prepared], float]:
    """step(batch): one optimizer step of `model`; returns its milliseconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    numbers = count()

    def step(batch: Prepared) -> float:
        model.train()
        start_s = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(next(numbers))  # of dropout: the same in every run
            loss = training_loss(model, batch, CONFIG).per_label
            update(model, optimizer, loss, CONFIG)
        return _ms_since(start_s)

    return step


def _ms_since(start_s: float) -> float:
    return 1e3 * (time.perf_counter() - start_s)


def split_convolution(x: Tensor, weight: Tensor, parts: int, *, halo: bool = True) -> Tensor:
    """The convolution of x (B, C, T) with `weight`, zeros around it, part by part: (B, D, T).

    A part convolves its own frames without waiting. Its halo, the K // 2 frames beside it that its
    neighbours hold, may arrive meanwhile; what it adds to the outputs at the edges is computed by
    itself and added (MLPerf v1.0's account of 3D U-Net).

    Args:
        x: Frames (B, C, T).
        weight: (D, C, K), K odd.
        parts: How many share the frames; each holds K // 2 of them at least.
        halo: False leaves out what the neighbours add.
    """
    reach = weight.shape[2] // 2
    held = x.tensor_split(parts, 2)
    outputs = []
    for place, own in enumerate(held):
        out = F.conv1d(own, weight, padding=reach)
        rest = own.shape[2] - reach  # outputs that one neighbour's frames do not reach
        if halo and reach and place > 0:
            before = F.pad(held[place - 1][..., -reach:], (0, 2 * reach))
            out = out + F.pad(F.conv1d(before, weight), (0, rest))
        if halo and reach and place < parts - 1:
            behind = F.pad(held[place + 1][..., :reach], (2 * reach, 0))
            out = out + F.pad(F.conv1d(behind, weight), (rest, 0))
        outputs.append(out)
    return torch.cat(outputs, 2)


def phased_batch(seconds: np.ndarray, phases: Sequence[tuple[float, int]], ax: Axes) -> None:
    """Utterances as bars, the longest first, in front of the cells that each phase computes.

    Args:
        seconds: Of each utterance (B,), in any order.
        phases: (end in seconds, rows) of each phase.
        ax: Axes to draw on.
    """
    start = 0.0
    shades = cycle((0.45, 0.25))  # so that phases can be told apart
    for end, rows in phases:
        label = "" if start else "padding"  # in the legend once
        shade: dict[str, Any] = {"color": colour("padding"), "alpha": next(shades), "label": label}
        ax.bar(0, end - start, width=rows, bottom=start, align="edge", lw=0, **shade)
        start = end
    longest_first = np.sort(seconds)[::-1]
    places = np.arange(len(seconds))
    ax.bar(places, longest_first, 1.0, align="edge", color=colour("useful"), lw=0, label="useful")
    ax.set(xlabel="utterances, the longest first", ylabel="length, s", xlim=(0, len(seconds)))
    ax.legend(**LEGEND_BESIDE)
