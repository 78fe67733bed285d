"""Training on many GPUs: time of an all-reduce, and time to train, fitted to published runs.

In the alpha-beta model a message of S bytes over a link takes alpha + S / beta: the link's latency
plus the bytes over its bandwidth. Additions are free, and ranks send and receive at the same time.
Sources: rings, Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations"; two trees that share the bytes, Sanders, Speck and Traeff 2009, "Two-tree algorithms
for full bandwidth broadcast, reduction and scan".

    time to train = epochs(batch) * steps of an epoch * seconds of a step(batch / GPUs)

Larger batches need more epochs: E0 (1 + batch / critical batch), the form of McCandlish et al. 2018
("An empirical model of large-batch training"), with epochs in place of steps. With more GPUs, each
has fewer utterances, but a step has parts that do not shrink with them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

import numpy as np
import pandas as pd

from asrkit import files
from asrkit.shapes import expect

EPOCH = 278_528  # utterances: 136 steps of 2048, as in the logs
GRADIENT_BYTES = 2 * 49_006_080  # the round's model, in half precision
GPUS_OF_MACHINE = 8  # a DGX; each GPU has its own network port


class Link(NamedTuple):
    """A link between two ranks: seconds until a first byte arrives, and bandwidth one way."""

    latency_s: float
    bytes_per_s: float


# NVLink 3 moves 300 GB/s each way, and each of the eight ports 200 Gbit/s (data sheet of the DGX
# A100). The latencies are assumed: no measurement of these machines was at hand.
NVLINK = Link(3e-6, 300e9)
NETWORK = Link(5e-6, 25e9)


def gradients_sum_s(gpus: int, *, size: float = GRADIENT_BYTES) -> float:
    """Seconds to sum the gradients over machines of eight GPUs, as distributed LAMB does.

    The sum is a reduce-scatter inside each machine, an all-reduce of each part across machines, and
    an all-gather inside each machine. The first and the last are half a ring each: together, N
    ranks send each byte almost twice and wait 2 (N - 1) times for the latency. Across machines, a
    pair of trees sends as many bytes and waits 2 log2 N times.

    Args:
        gpus: Number of GPUs: up to eight, or a multiple of eight.
        size: Bytes of the gradients on each GPU.
    """
    inside = min(gpus, GPUS_OF_MACHINE)
    machines = gpus // inside
    expect(machines * inside == gpus, "gpus", "up to 8, or a multiple of it", gpus)
    part_bytes = size / inside
    ring_s = 2 * (inside - 1) * (NVLINK.latency_s + part_bytes / NVLINK.bytes_per_s)
    if machines == 1:
        return ring_s
    sent_s = part_bytes / NETWORK.bytes_per_s
    return ring_s + 2 * ceil(log2(machines)) * NETWORK.latency_s + 2 * sent_s


def published_runs() -> pd.DataFrame:
    """A row for each run of RNN-T that NVIDIA submitted to MLPerf, rounds v1.0 to v3.0.

    Columns: gpu (such as "a100"); gpus; batch, the utterances of a step over all GPUs; buckets by
    length, where 1 means none; epochs until the word error rate was 0.058; reached, whether it was;
    step_s and minutes of training, both without evaluation.
    """
    logs = pd.read_csv(files.shipped("published") / "mlperf_rnnt_runs.csv")
    # dgxa100_n16_ngc21.05 is 16 machines of eight GPUs, 2xa30_ngc22.04 is two GPUs
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
    """Epochs to the target as a linear function of the batch.

    Attributes:
        least: Epochs with a batch near 0, E0.
        per_utterance: Additional epochs for each utterance in the batch.
    """

    least: float
    per_utterance: float

    @property
    def critical_batch(self) -> float:
        """The batch, in utterances, that needs twice the epochs of a small batch."""
        return self.least / self.per_utterance

    def epochs(self, batch: float) -> float:
        """Epochs to the target with `batch` utterances a step."""
        return self.least + self.per_utterance * batch


def fit_epochs(runs: pd.DataFrame) -> EpochFit:
    """The line through the epochs of `runs`, of at least two batch sizes, by least squares."""
    slope, least = np.polyfit(runs["batch"], runs["epochs"], deg=1)
    return EpochFit(float(least), float(slope))


def resampled(runs: pd.DataFrame, *, draws: int = 1000, seed: int = 0) -> Iterator[pd.DataFrame]:
    """Bootstrap samples: runs of each system and batch are drawn with replacement.

    Args:
        runs: Runs of one recipe.
        draws: Number of samples.
        seed: Seed of the random draws.
    """
    random = np.random.default_rng(seed)
    groups = [*runs.groupby(["gpu", "gpus", "batch"]).indices.values()]
    for _ in range(draws):
        yield runs.iloc[np.concatenate([random.choice(rows, len(rows)) for rows in groups])]


@dataclass(frozen=True)
class StepFit:
    """Seconds of a step, without the sum of gradients, as a linear function of a GPU's utterances.

    Attributes:
        fixed_s: Seconds that every step takes, independent of its utterances.
        per_utterance_s: Seconds for each utterance on a GPU.
    """

    fixed_s: float
    per_utterance_s: float

    def seconds(self, *, batch: int, gpus: int) -> float:
        """Seconds of a step of `batch` utterances on `gpus` GPUs, with trees across machines."""
        own_s = self.fixed_s + self.per_utterance_s * batch / gpus
        return own_s + gradients_sum_s(gpus)


def fit_steps(runs: pd.DataFrame) -> StepFit:
    """A step's fixed seconds and seconds per utterance, by least squares of relative errors.

    Args:
        runs: Runs on one kind of GPU, with at least two loads of a GPU.
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
    """The batch that trains in the fewest minutes on `gpus` GPUs, with at least one utterance each.

    If a step takes `fixed` seconds plus `work` seconds for each utterance, minutes are proportional
    to (1 / B + 1 / critical) * (fixed + work * B / gpus). The minimum is at the geometric mean of
    the critical batch and of the batch whose work takes as long as the fixed part.
    """
    balanced = gpus * step_fit.seconds(batch=0, gpus=gpus) / step_fit.per_utterance_s
    return max(gpus, round((epoch_fit.critical_batch * balanced) ** 0.5))
