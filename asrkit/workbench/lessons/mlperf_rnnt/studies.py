"""Small trainings that show what large ones consist of: LAMB's ratios, processes, evaluation."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrkit.data import Utterances, batches
from asrkit.models import (
    Checkpoint,
    LSTMEncoderConfig,
    TransducerConfig,
    TransducerModel,
)
from asrkit.optim import Lamb
from asrkit.optim.reference import direction
from asrkit.optim.step import bias_correction
from asrkit.optim.step import trust_ratio as ratio_of_norms
from asrkit.shapes import expect
from asrkit.text import CharTokenizer, ErrorRate
from asrkit.training import (
    Beside,
    Prepared,
    TrainConfig,
    prepare_batch,
    training_loss,
    update,
)
from asrkit.training.evaluation import score_weights

# Settings of MLPerf's RNN-T at a batch of 2048: hyperparameters_2048.sh of training_results_v1.1
BETAS = (0.9, 0.9985)
EPS = 1e-9
WEIGHT_DECAY = 1e-3
RATE = 0.02  # after the warm-up
WARM_UP = 10  # steps in which the rate rises linearly
CONFIG = TrainConfig(joint="full", precision="float32", ctc_weight=0.0)


def small_model(seed: int = 0) -> TransducerModel:
    """A transducer of the round's form, of a few hundred thousand weights, in training mode.

    Args:
        seed: Of its weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = LSTMEncoderConfig(width=96, before=1, after=1, dropout=0.0, phases=2)
        vocab_size = CharTokenizer().vocab_size
        return TransducerModel(TransducerConfig(vocab_size=vocab_size, encoder=encoder)).train()


def prepared_batches(
    speech: Utterances, *, batch_seconds: float, seed: int = 0
) -> Iterator[Prepared]:
    """Batches for training, without end.

    Args:
        speech: To train on.
        batch_seconds: Most seconds of a batch, padding included.
        seed: Of their order and of augmentation.
    """
    tokenizer = CharTokenizer()
    step = 0
    for epoch in count():
        for batch in batches(
            speech, tokenizer, batch_seconds=batch_seconds, seed=seed, epoch=epoch
        ):
            yield prepare_batch(batch, CONFIG, step)
            step += 1


def train_with_lamb(speech: Utterances, *, steps: int, seed: int = 0) -> dict[str, list[float]]:
    """Train a small model; returns LAMB's ratio ||p|| / ||u|| of each of its matrices in each step.

    Args:
        speech: To train on.
        steps: Optimizer steps.
        seed: Of weights, batches and augmentation.
    """
    model = small_model(seed)
    optimizer = Lamb(
        model.parameters(), RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, clip=1.0
    )
    ratios: dict[str, list[float]] = {}
    stream = prepared_batches(speech, batch_seconds=24.0, seed=seed)
    for step in range(steps):
        (group,) = optimizer.param_groups
        group["lr"].fill_(RATE * min(1.0, (step + 1) / WARM_UP))
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        loss = training_loss(model, next(stream), CONFIG).per_label
        update(model, optimizer, loss, CONFIG)
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and optimizer.state[weight]:
                ratio = trust_ratio(optimizer, weight, before[name])
                ratios.setdefault(name, []).append(ratio)
    return ratios


def trust_ratio(optimizer: Lamb, weight: Tensor, before: Tensor) -> float:
    """||p|| / ||u|| of the last step of a parameter, from its state in the optimizer.

    Args:
        optimizer: After the step.
        weight: A parameter of its only group.
        before: The value of `weight` before the step.
    """
    (group,) = optimizer.param_groups
    state = optimizer.state[weight]
    first, second = (bias_correction(beta, state["step"]) for beta in group["betas"])
    update = direction(
        before,
        state["exp_avg"],
        state["exp_avg_sq"],
        corrections=(first, second),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
    )
    return float(ratio_of_norms(before.square().sum(), update.square().sum()))


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

    Raises:
        RuntimeError: Training failed; the message has what it said.
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
    expect(len(parts) > 1, "parts", "batches of two processes at least", len(parts))
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


@dataclass(frozen=True)
class EvaluatedRun:
    """Steps with evaluations between them, or beside them.

    Attributes:
        seconds: Of the steps and of what they waited for; the last evaluation is not waited for.
        rows: Name of a process -> what it did.
        scores: Word error rate by step.
    """

    seconds: float
    rows: dict[str, Spans]
    scores: dict[int, float]


@dataclass(frozen=True)
class EvaluatedTraining:
    """Makes the same steps twice: with evaluations in turn, and in a process beside.

    Args:
        checkpoint: Whose model is trained on; it stays as it is.
        batches: One for each step.
        dev: Speech that is evaluated.
        every: Steps between two evaluations.
    """

    checkpoint: Checkpoint
    batches: list[Prepared]
    dev: Utterances
    every: int

    def in_turn(self) -> EvaluatedRun:
        """Train, and wait for each evaluation."""
        score = self._score()
        model = deepcopy(self.checkpoint.model)
        score(model.eval())  # compiles, as the process beside does before its clock
        model.train()
        step = _stepping(model)
        spans: Spans = []
        scores = {}
        for number, batch in enumerate(self.batches, start=1):
            spans.append(("step", step(batch)))
            if number % self.every == 0:
                start_s = time.perf_counter()
                scores[number] = score(model.eval()).rate
                model.train()
                spans.append(("evaluation", _ms_since(start_s)))
        return EvaluatedRun(_total_s(spans), {"in turn": spans}, scores)

    def beside(self) -> EvaluatedRun:
        """Train, and have each evaluation made by another process meanwhile."""
        model = deepcopy(self.checkpoint.model).train()
        step = _stepping(model)
        spans: Spans = []
        with Beside(self._score(), model, every=self.every, threads=1) as beside:
            beside.submit(0, model)  # the process starts, imports and compiles
            beside.collect()
            watch = _Watch(len(beside.scores), time.perf_counter())
            for number, batch in enumerate(self.batches, start=1):
                spans.append(("step", step(batch)))
                watch.look(len(beside.poll()))
                if number % self.every == 0:
                    due_s = time.perf_counter()
                    watch.look(len(beside.collect()))  # the next one waits for it
                    spans.append(("wait", _ms_since(due_s)))
                    asked_s = time.perf_counter()
                    beside.after_step(number, model)
                    spans.append(("copy", _ms_since(asked_s)))
                    watch.asked_s = asked_s
            watch.look(len(beside.collect()))
            scores = {number: score.rate for number, score in beside.scores.items() if number}
        rows = {"training": spans, "evaluation": watch.spans}
        return EvaluatedRun(_total_s(spans), rows, scores)

    def _score(self) -> partial[ErrorRate]:
        return partial(score_weights, self.checkpoint.tokenizer, self.checkpoint.features, self.dev)


@dataclass
class _Watch:
    """What the evaluating process does, seen from the training one.

    Attributes:
        scored: Evaluations so far.
        free_s: When the last of them was seen to end.
        asked_s: When the next one was asked for.
        spans: What it did.
    """

    scored: int
    free_s: float
    asked_s: float = 0.0
    spans: Spans = field(default_factory=list)

    def look(self, scored: int) -> None:
        """Note an evaluation that has ended since the last look."""
        if scored > self.scored:
            self.scored = scored
            self.spans.append(("idle", 1e3 * (self.asked_s - self.free_s)))
            self.spans.append(("evaluation", _ms_since(self.asked_s)))
            self.free_s = time.perf_counter()


def _stepping(model: Any) -> Callable[[Prepared], float]:
    """step(batch): one optimizer step of `model`; returns its milliseconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    numbers = count()

    def step(batch: Prepared) -> float:
        start_s = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(next(numbers))  # of dropout: the same in every run
            loss = training_loss(model, batch, CONFIG).per_label
            update(model, optimizer, loss, CONFIG)
        return _ms_since(start_s)

    return step


def _ms_since(start_s: float) -> float:
    return 1e3 * (time.perf_counter() - start_s)


def _total_s(spans: Spans) -> float:
    return sum(ms for _, ms in spans) / 1e3
