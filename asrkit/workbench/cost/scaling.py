"""Training on many GPUs: what an all-reduce takes, and time to train, fitted to published runs.

In the alpha-beta model a message of S bytes over a link takes alpha + S / beta: the link's latency,
and the bytes over its bandwidth. Additions are free, and every rank sends and receives at once.
Sources: rings, Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations"; two trees that share the bytes, Sanders, Speck and Traeff 2009, "Two-tree algorithms
for full bandwidth broadcast, reduction and scan"; sums in the switches (SHARP), Graham et al. 2016.

    time to train = epochs(batch) * steps of an epoch * seconds of a step(batch / GPUs)

Larger batches need more epochs: E0 (1 + batch / critical batch), the form of McCandlish et al. 2018
("An empirical model of large-batch training") with the steps written as epochs. More GPUs leave
each fewer utterances, and a step has parts that do not shrink with them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from pathlib import PurePosixPath

import numpy as np

from asrkit.shapes import expect
from asrkit.workbench.cost.csv_tables import Row, read_table
from asrkit.workbench.cost.ranges import Range

EPOCH = 278_528  # utterances: 136 steps of 2048, as the logs count them
GRADIENT_BYTES = 2 * 49_006_080  # of the round's model in half precision
ALGORITHMS = ("ring", "tree", "switches")


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins two ranks.

    Args:
        latency_s: Seconds until the first byte arrives, alpha.
        bytes_per_s: Bandwidth in one direction, beta.
    """

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines of several GPUs each, every GPU with a network port of its own.

    Args:
        gpus: GPUs of a machine.
        inside: The link between two GPUs of a machine.
        outside: The link of one GPU to the network.
    """

    gpus: int
    inside: Link
    outside: Link


# NVLink 3 moves 300 GB/s each way, and each of the eight ports 200 Gbit/s (data sheet of the DGX
# A100). The latencies are assumed: no measurement of these machines was at hand.
DGX_A100 = Cluster(
    gpus=8,
    inside=Link(latency_s=3e-6, bytes_per_s=300e9),
    outside=Link(latency_s=5e-6, bytes_per_s=25e9),
)


def all_reduce_s(algorithm: str, *, size: float, ranks: int, link: Link) -> float:
    """Seconds until every rank has the sum of all ranks' vectors.

    A ring sends each byte almost twice over every link and waits 2 (N - 1) times for the latency; a
    pair of trees sends as many bytes and waits 2 log2 N times. Switches that add need each byte
    once up, and once down at the same time: half of the time where bandwidth is the limit.

    Args:
        algorithm: "ring", "tree" or "switches".
        size: Bytes of the vector on each rank.
        ranks: How many ranks, N.
        link: Between any two ranks, or between a rank and its switch.
    """
    known = algorithm in ALGORITHMS
    expect(known, "algorithm", f"one of {', '.join(ALGORITHMS)}", repr(algorithm))
    if ranks == 1:
        return 0.0
    once_s = size / link.bytes_per_s
    if algorithm == "ring":
        return 2 * (ranks - 1) * link.latency_s + 2 * (ranks - 1) / ranks * once_s
    if algorithm == "tree":
        return 2 * ceil(log2(ranks)) * link.latency_s + 2 * once_s
    return 2 * link.latency_s + once_s


def cluster_all_reduce_s(
    algorithm: str, *, size: float, gpus: int, cluster: Cluster = DGX_A100
) -> float:
    """Seconds of an all-reduce over several machines, as distributed LAMB does it.

    A reduce-scatter inside each machine, an all-reduce of each part across machines, an all-gather
    inside each machine. The first and the last are half a ring each.

    Args:
        algorithm: What sums across machines: "ring", "tree" or "switches".
        size: Bytes of the vector on each GPU.
        gpus: GPUs in all: up to one machine's, or a multiple of it.
        cluster: The machines.
    """
    inside = min(gpus, cluster.gpus)
    filled = gpus % inside == 0
    expect(filled, "gpus", f"up to {cluster.gpus}, or a multiple of it", repr(gpus))
    around_s = all_reduce_s("ring", size=size, ranks=inside, link=cluster.inside)
    across_s = all_reduce_s(
        algorithm, size=size / inside, ranks=gpus // inside, link=cluster.outside
    )
    return around_s + across_s


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
        return _minutes(self.epochs, self.batch, self.step_s)


def _minutes(epochs: float, batch: int, step_s: float) -> float:
    return epochs * EPOCH / batch * step_s / 60


def published_runs() -> list[Run]:
    """The runs of RNN-T that NVIDIA handed in, rounds v1.0 to v3.0."""
    return [_run(row) for row in read_table("published/mlperf_rnnt_runs.csv")]


def _run(row: Row) -> Run:
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
    gpus, gpu = re.findall(r"^(\d+)x([a-z]\d+)", folder)[0]
    return gpu, int(gpus)


def without_buckets(runs: Sequence[Run]) -> list[Run]:
    """The runs that reached the target and drew their batches from all lengths: one recipe."""
    return [run for run in runs if run.reached and run.buckets == 1]


@dataclass(frozen=True)
class EpochFit:
    """Epochs to the target as a line over the batch, by least squares.

    Args:
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


def fit_epochs(runs: Sequence[Run]) -> EpochFit:
    """The line through the epochs of `runs`, of at least two batch sizes."""
    batch = [run.batch for run in runs]
    expect(len(set(batch)) > 1, "runs", "two batch sizes at least", sorted(set(batch)))
    slope, least = np.polyfit(batch, [run.epochs for run in runs], deg=1)
    return EpochFit(float(least), float(slope))


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
    """

    fixed_s: float
    per_utterance_s: float

    def seconds(self, *, batch: int, gpus: int) -> float:
        """Seconds of a step of `batch` utterances on `gpus` GPUs."""
        return self.fixed_s + self.per_utterance_s * batch / gpus + _sum_s(gpus)


def _sum_s(gpus: int) -> float:
    """Seconds until the gradients are summed, with trees across machines."""
    return cluster_all_reduce_s("tree", size=GRADIENT_BYTES, gpus=gpus)


def fit_steps(runs: Sequence[Run]) -> StepFit:
    """The step's fixed part and its seconds an utterance, by least squares of relative errors.

    Args:
        runs: Runs on one kind of GPU, with two loads of a GPU at least.
    """
    kinds = sorted({run.gpu for run in runs})
    expect(len(kinds) == 1, "runs", "runs on one kind of GPU", kinds)
    measured_s = np.array([run.step_s for run in runs])
    others_s = measured_s - [_sum_s(run.gpus) for run in runs]
    columns = np.array([[1.0, run.batch / run.gpus] for run in runs])
    weighted = columns / measured_s[:, None]
    (fixed_s, per_utterance_s), *_ = np.linalg.lstsq(weighted, others_s / measured_s, rcond=None)
    return StepFit(float(fixed_s), float(per_utterance_s))


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
        return _minutes(self.epochs, self.batch, self.step_s)


def predict(gpus: int, batch: int, epoch_fit: EpochFit, step_fit: StepFit) -> Prediction:
    """Minutes to train on `gpus` GPUs with `batch` utterances a step, at least one a GPU.

    Args:
        gpus: How many.
        batch: Utterances of a step, over all GPUs.
        epoch_fit: Of `fit_epochs`.
        step_fit: Of `fit_steps`.
    """
    expect(batch >= gpus, "batch", f"an utterance for each of {gpus} GPUs at least", batch)
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
