"""Training on many GPUs: what an all-reduce takes, and time to train, fitted to published runs.

In the alpha-beta model a message of S bytes over a link takes alpha + S / beta: the link's latency,
and the bytes over its bandwidth. Additions are free, and every rank sends and receives at once.
Sources: rings, Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations"; two trees that share the bytes, Sanders, Speck and Traeff 2009, "Two-tree algorithms
for full bandwidth broadcast, reduction and scan".

    time to train = epochs(batch) * steps of an epoch * seconds of a step(batch / GPUs)

Larger batches need more epochs: E0 (1 + batch / critical batch), the form of McCandlish et al. 2018
("An empirical model of large-batch training") with the steps written as epochs. More GPUs leave
each fewer utterances, and a step has parts that do not shrink with them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

import numpy as np
import pandas as pd

from asrkit import files
from asrkit.shapes import expect

EPOCH = 278_528  # utterances: 136 steps of 2048, as the logs count them
GRADIENT_BYTES = 2 * 49_006_080  # of the round's model in half precision
GPUS_OF_MACHINE = 8  # of a DGX, each with a network port of its own


class Link(NamedTuple):
    """What joins two ranks: seconds until a first byte arrives, and bandwidth in one direction."""

    latency_s: float
    bytes_per_s: float


# NVLink 3 moves 300 GB/s each way, and each of the eight ports 200 Gbit/s (data sheet of the DGX
# A100). The latencies are assumed: no measurement of these machines was at hand.
NVLINK = Link(3e-6, 300e9)
NETWORK = Link(5e-6, 25e9)


def gradients_sum_s(gpus: int, *, size: float = GRADIENT_BYTES) -> float:
    """Seconds until the gradients are summed over machines of eight GPUs, as distributed LAMB does.

    A reduce-scatter inside each machine, an all-reduce of each part across machines, an all-gather
    inside each machine. The first and the last are half a ring each: N ranks send each byte almost
    twice and wait 2 (N - 1) times for the latency. Across machines a pair of trees sends as many
    bytes and waits 2 log2 N times.

    Args:
        gpus: GPUs in all: up to eight, or a multiple of it.
        size: Bytes of the gradients on each GPU.
    """
    inside = min(gpus, GPUS_OF_MACHINE)
    machines = gpus // inside
    expect(machines * inside == gpus, "gpus", "up to 8, or a multiple of it", gpus)
    ring_s = 2 * (inside - 1) * (NVLINK.latency_s + size / inside / NVLINK.bytes_per_s)
    if machines == 1:
        return ring_s
    sent_s = size / inside / NETWORK.bytes_per_s
    return ring_s + 2 * ceil(log2(machines)) * NETWORK.latency_s + 2 * sent_s


def published_runs() -> pd.DataFrame:
    """A row for each run of RNN-T that NVIDIA submitted to MLPerf, rounds v1.0 to v3.0.

    Columns: gpu (as "a100"), gpus; batch, utterances of a step over all GPUs; buckets by length, 1
    is none; epochs until the word error rate was 0.058, and whether it was reached; step_s, and
    minutes of training, both without evaluation.
    """
    logs = pd.read_csv(files.shipped("published") / "mlperf_rnnt_runs.csv")
    # a DGX machine has eight GPUs: dgxa100_n16_ngc21.05 are 16 machines, 2xa30_ngc22.04 two GPUs
    system = r"/(?:dgx|(?P<gpus>\d+)x)(?P<gpu>[a-z]\d+)(?:_n(?P<machines>\d+))?[^/]*/"
    runs = logs["file"].str.extract(system)
    machines = runs.pop("machines").astype(float).fillna(1)
    runs["gpus"] = runs["gpus"].astype(float).fillna(GPUS_OF_MACHINE) * machines
    runs = runs.astype({"gpus": int})
    runs["batch"] = logs["global_batch"]
    runs["buckets"] = logs["buckets"]
    runs["epochs"] = logs["epochs"]
    runs["reached"] = logs["status"] == "success"
    runs["step_s"] = logs["global_batch"] / logs["utterances_per_second"]
    runs["minutes"] = _minutes(runs["epochs"], runs["batch"], runs["step_s"])
    return runs


def _minutes(epochs: float, batch: int, step_s: float) -> float:
    return epochs * EPOCH / batch * step_s / 60


@dataclass(frozen=True)
class EpochFit:
    """Epochs to the target as a line over the batch.

    Attributes:
        least: Epochs of a batch near 0, E0.
        per_utterance: More epochs for each utterance of the batch.
    """

    least: float
    per_utterance: float

    @property
    def critical_batch(self) -> float:
        """The batch that needs twice the epochs of a small one, in utterances."""
        return self.least / self.per_utterance

    def epochs(self, batch: float) -> float:
        """Epochs to the target with `batch` utterances a step."""
        return self.least + self.per_utterance * batch


def fit_epochs(runs: pd.DataFrame) -> EpochFit:
    """The line through the epochs of `runs`, of at least two batch sizes, by least squares."""
    slope, least = np.polyfit(runs["batch"], runs["epochs"], deg=1)
    return EpochFit(float(least), float(slope))


def resampled(runs: pd.DataFrame, *, draws: int = 1000, seed: int = 0) -> Iterator[pd.DataFrame]:
    """Bootstrap samples: as many runs of each system and batch as there are, with replacement.

    Args:
        runs: Runs of one recipe.
        draws: Samples.
        seed: Of the samples.
    """
    random = np.random.default_rng(seed)
    alike = [*runs.groupby(["gpu", "gpus", "batch"]).indices.values()]
    for _ in range(draws):
        yield runs.iloc[np.concatenate([random.choice(rows, len(rows)) for rows in alike])]


@dataclass(frozen=True)
class StepFit:
    """Seconds of a step as a line over a GPU's utterances, beside the sum of the gradients.

    Attributes:
        fixed_s: Seconds that every step takes, however few its utterances.
        per_utterance_s: Seconds of an utterance on a GPU.
    """

    fixed_s: float
    per_utterance_s: float

    def seconds(self, *, batch: int, gpus: int) -> float:
        """Seconds of a step of `batch` utterances on `gpus` GPUs, with trees across machines."""
        own_s = self.fixed_s + self.per_utterance_s * batch / gpus
        return own_s + gradients_sum_s(gpus)


def fit_steps(runs: pd.DataFrame) -> StepFit:
    """The step's fixed part and its seconds an utterance, by least squares of relative errors.

    Args:
        runs: Runs on one kind of GPU, with two loads of a GPU at least.
    """
    measured_s = runs["step_s"].to_numpy()
    others_s = measured_s - [gradients_sum_s(gpus) for gpus in runs["gpus"]]
    columns = np.stack([np.ones(len(runs)), runs["batch"] / runs["gpus"]], axis=1)
    weighted = columns / measured_s[:, None]
    (fixed_s, per_utterance_s), *_ = np.linalg.lstsq(weighted, others_s / measured_s, rcond=None)
    return StepFit(float(fixed_s), float(per_utterance_s))


def minutes_to_train(gpus: int, batch: int, epoch_fit: EpochFit, step_fit: StepFit) -> float:
    """Minutes to train on `gpus` GPUs with `batch` utterances a step, without evaluation."""
    return _minutes(epoch_fit.epochs(batch), batch, step_fit.seconds(batch=batch, gpus=gpus))


def fastest_batch(gpus: int, epoch_fit: EpochFit, step_fit: StepFit) -> int:
    """The batch that trains in the fewest minutes on `gpus` GPUs, at least an utterance on each.

    With a step of `fixed` seconds and `work` seconds an utterance, minutes are proportional to
    (1 / B + 1 / critical) * (fixed + work * B / gpus), which is least at the geometric mean of the
    critical batch and of the batch whose work takes as long as the fixed part.
    """
    as_long = gpus * step_fit.seconds(batch=0, gpus=gpus) / step_fit.per_utterance_s
    return max(gpus, round((epoch_fit.critical_batch * as_long) ** 0.5))
