"""Time to train as a function of the batch and of the number of GPUs, fitted to published runs.

    time to train = epochs(batch) * steps of an epoch * seconds of a step(batch / GPUs)

Larger batches need more epochs: E0 (1 + batch / critical batch), the form of McCandlish et al. 2018
("An empirical model of large-batch training") with the steps written as epochs. More GPUs leave
each fewer utterances, and a step has parts that do not shrink with them.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np

from asrkit.shapes import expect, whole
from asrkit.workbench.cost.collectives import DGX_A100, cluster_all_reduce_s
from asrkit.workbench.cost.csv_tables import Row, read_table
from asrkit.workbench.cost.ranges import Range

TABLE = "published/mlperf_rnnt_runs.csv"
EPOCH = 278_528  # utterances: 136 steps of 2048, as the logs count them
GRADIENT_BYTES = 2 * 49_006_080  # of the round's model in half precision


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run that was handed in to MLPerf.

    Args:
        round: As "v1.1".
        gpu: As "a100".
        gpus: How many.
        batch: Utterances of a step, over all GPUs.
        buckets: Buckets by length; 1 is none.
        epochs: Until the word error rate was 0.058.
        utterances_per_s: Of training, without evaluation.
        reached: Whether it got there.
    """

    round: str
    gpu: str
    gpus: int
    batch: int
    buckets: int
    epochs: float
    utterances_per_s: float
    reached: bool

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.batch / self.utterances_per_s

    @property
    def minutes(self) -> float:
        """Minutes of training, without evaluation."""
        return self.epochs * EPOCH / self.batch * self.step_s / 60


def published_runs() -> list[Run]:
    """The runs of RNN-T that NVIDIA handed in, rounds v1.0 to v3.0."""
    return read_table(TABLE, _parse)


def _parse(row: Row) -> Run:
    gpu, gpus = _system(PurePosixPath(row["file"]).parts[2])
    return Run(
        round=row["round"],
        gpu=gpu,
        gpus=gpus,
        batch=int(row["global_batch"]),
        buckets=int(row["buckets"]),
        epochs=float(row["epochs"]),
        utterances_per_s=float(row["utterances_per_second"]),
        reached=row["status"] == "success",
    )


def _system(folder: str) -> tuple[str, int]:
    """GPU and number of GPUs that a folder of results names: dgxa100_n16_ngc21.05, 2xa30_ngc22.04.

    A DGX machine has eight GPUs; n16 stands for 16 machines.
    """
    machines = re.match(r"dgx(?P<gpu>[a-z]\d+)(?:_n(?P<machines>\d+))?", folder)
    if machines:
        return machines["gpu"], 8 * int(machines["machines"] or 1)
    cards = re.match(r"(?P<gpus>\d+)x(?P<gpu>[a-z]\d+)", folder)
    expect(cards is not None, "file", "a folder such as dgxa100_n16 or 2xa30", repr(folder))
    assert cards is not None  # for mypy
    return cards["gpu"], int(cards["gpus"])


def without_buckets(runs: Iterable[Run]) -> list[Run]:
    """The runs that reached the target and drew their batches from all lengths: one recipe."""
    return [run for run in runs if run.reached and run.buckets == 1]


@dataclass(frozen=True)
class EpochFit:
    """Epochs to the target as a line over the batch, by least squares.

    Args:
        least: Epochs of a batch near 0, E0.
        per_utterance: More epochs for each utterance of the batch.
        deviation: Standard deviation of the runs around the line, in epochs.
    """

    least: float
    per_utterance: float
    deviation: float

    @property
    def critical_batch(self) -> float:
        """The batch that needs twice the epochs of a small one, in utterances."""
        return self.least / self.per_utterance

    def epochs(self, batch: float) -> float:
        """Epochs to the target with `batch` utterances a step."""
        return self.least + self.per_utterance * batch


def fit_epochs(runs: Sequence[Run]) -> EpochFit:
    """The line through the epochs of `runs`.

    Raises:
        ValueError: Fewer than two batch sizes.
    """
    batch = np.array([run.batch for run in runs], dtype=float)
    epochs = np.array([run.epochs for run in runs])
    expect(len(set(batch)) > 1, "runs", "two batch sizes at least", sorted(set(batch)))
    slope, least = np.polyfit(batch, epochs, deg=1)
    away = epochs - (least + slope * batch)
    return EpochFit(float(least), float(slope), float(away.std(ddof=2)))


def critical_batch(runs: Sequence[Run], *, draws: int = 2000, seed: int = 0) -> Range:
    """The critical batch of `runs` in utterances, with its 90 % bootstrap interval.

    Args:
        runs: Runs of one recipe.
        draws: Samples with replacement, each of as many runs for every batch size as there are.
        seed: Of the samples.
    """
    random = np.random.default_rng(seed)
    groups: dict[int, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.batch, []).append(run)
    values = []
    for _ in range(draws):
        sample = []
        for group in groups.values():
            chosen = random.integers(len(group), size=len(group))
            sample += [group[number] for number in chosen]
        values.append(fit_epochs(sample).critical_batch)
    low, high = np.quantile(values, [0.05, 0.95])
    return Range(float(low), fit_epochs(runs).critical_batch, float(high))


@dataclass(frozen=True)
class StepFit:
    """Seconds of a step as a line over a GPU's utterances, beside the sum of the gradients.

    Args:
        fixed_s: Seconds that every step takes, however few its utterances.
        per_utterance_s: Seconds of an utterance on a GPU.
        algorithm: What sums gradients across machines; see `cluster_all_reduce_s`.
    """

    fixed_s: float
    per_utterance_s: float
    algorithm: str = "tree"

    def seconds(self, *, batch: int, gpus: int) -> float:
        """Seconds of a step of `batch` utterances on `gpus` GPUs."""
        sum_s = _sum_s(self.algorithm, gpus)
        return self.fixed_s + self.per_utterance_s * batch / gpus + sum_s


def _sum_s(algorithm: str, gpus: int) -> float:
    return cluster_all_reduce_s(algorithm, size=GRADIENT_BYTES, gpus=gpus, cluster=DGX_A100)


def fit_steps(runs: Sequence[Run], algorithm: str = "tree") -> StepFit:
    """The step's fixed part and its seconds an utterance, by least squares of relative errors.

    Args:
        runs: Runs on one kind of GPU.
        algorithm: What sums gradients across machines.

    Raises:
        ValueError: Several kinds of GPU, or one load of a GPU only.
    """
    kinds = sorted({run.gpu for run in runs})
    expect(len(kinds) == 1, "runs", "runs on one kind of GPU", kinds)
    load = np.array([run.batch / run.gpus for run in runs])
    expect(len(set(load)) > 1, "runs", "two loads of a GPU at least", sorted(set(load)))
    measured_s = np.array([run.step_s for run in runs])
    others_s = measured_s - [_sum_s(algorithm, run.gpus) for run in runs]
    columns = np.stack([np.ones_like(load), load], axis=1)
    weighted = columns / measured_s[:, None]
    (fixed_s, per_utterance_s), *_ = np.linalg.lstsq(weighted, others_s / measured_s, rcond=None)
    return StepFit(float(fixed_s), float(per_utterance_s), algorithm)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Minutes to train, and what makes them up.

    Args:
        gpus: How many.
        batch: Utterances of a step, over all GPUs.
        epochs: To the target.
        step_s: Seconds of a step.
    """

    gpus: int
    batch: int
    epochs: float
    step_s: float

    @property
    def minutes(self) -> float:
        """Minutes to train, without evaluation."""
        return self.epochs * EPOCH / self.batch * self.step_s / 60


def predict(gpus: int, batch: int, epoch_fit: EpochFit, step_fit: StepFit) -> Prediction:
    """Minutes to train on `gpus` GPUs with `batch` utterances a step.

    Args:
        gpus: How many.
        batch: Utterances of a step, over all GPUs; at least one a GPU.
        epoch_fit: Of `fit_epochs`.
        step_fit: Of `fit_steps`.

    Raises:
        ValueError: A batch that leaves a GPU without an utterance.
    """
    shared = whole(batch, 1) and batch >= gpus
    expect(shared, "batch", f"an utterance for each of {gpus} GPUs at least", repr(batch))
    return Prediction(
        gpus=gpus,
        batch=batch,
        epochs=epoch_fit.epochs(batch),
        step_s=step_fit.seconds(batch=batch, gpus=gpus),
    )


def fastest(gpus: int, epoch_fit: EpochFit, step_fit: StepFit) -> Prediction:
    """The batch that trains in the fewest minutes on `gpus` GPUs, and these minutes.

    With a step of `fixed` seconds and `work` seconds an utterance, minutes are proportional to
    (1 / B + 1 / critical) * (fixed + work * B / gpus), which is least at the geometric mean of the
    critical batch and of the batch whose work takes as long as the fixed part.

    Args:
        gpus: How many.
        epoch_fit: Of `fit_epochs`.
        step_fit: Of `fit_steps`.
    """
    fixed_s = step_fit.seconds(batch=0, gpus=gpus)
    as_long = gpus * fixed_s / step_fit.per_utterance_s
    batch = round((epoch_fit.critical_batch * as_long) ** 0.5)
    return predict(gpus, max(batch, gpus), epoch_fit, step_fit)
