"""What an all-reduce takes in the alpha-beta model: rings, trees, and sums in the switches.

A message of S bytes over a link takes alpha + S / beta: the link's latency, and the bytes over its
bandwidth. Additions are free, and every rank sends and receives at once.

Sources: rings, Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations"; two trees that share the bytes, Sanders, Speck and Traeff 2009, "Two-tree algorithms
for full bandwidth broadcast, reduction and scan"; sums in the switches (SHARP), Graham et al. 2016.
"""

from dataclasses import dataclass
from math import ceil, log2

from asrkit.shapes import expect, whole

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

    def __post_init__(self) -> None:
        expect(self.latency_s >= 0, "latency_s", "at least 0", self.latency_s)
        expect(self.bytes_per_s > 0, "bytes_per_s", "above 0", self.bytes_per_s)


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

    Raises:
        ValueError: An unknown algorithm, or no rank.
    """
    known = algorithm in ALGORITHMS
    expect(known, "algorithm", f"one of {', '.join(ALGORITHMS)}", repr(algorithm))
    expect(whole(ranks, 1), "ranks", "a whole number of at least 1", repr(ranks))
    if ranks == 1:
        return 0.0
    once_s = size / link.bytes_per_s
    if algorithm == "ring":
        return 2 * (ranks - 1) * link.latency_s + 2 * (ranks - 1) / ranks * once_s
    if algorithm == "tree":
        return 2 * ceil(log2(ranks)) * link.latency_s + 2 * once_s
    return 2 * link.latency_s + once_s


def scatter_s(*, size: float, ranks: int, link: Link) -> float:
    """Seconds of a reduce-scatter on a ring: each rank ends with its part of the sum.

    An all-gather of the parts takes as long.

    Args:
        size: Bytes of the vector on each rank.
        ranks: How many ranks.
        link: Between neighbours.
    """
    return (ranks - 1) * (link.latency_s + size / ranks / link.bytes_per_s)


def cluster_all_reduce_s(
    algorithm: str, *, size: float, gpus: int, cluster: Cluster = DGX_A100
) -> float:
    """Seconds of an all-reduce over several machines, as the sharded optimizer does it.

    A reduce-scatter inside each machine, an all-reduce of each part across machines, an all-gather
    inside each machine.

    Args:
        algorithm: What sums across machines: "ring", "tree" or "switches".
        size: Bytes of the vector on each GPU.
        gpus: GPUs in all: up to one machine's, or a multiple of it.
        cluster: The machines.

    Raises:
        ValueError: An unknown algorithm, or machines that are not filled.
    """
    filled = gpus <= cluster.gpus or gpus % cluster.gpus == 0
    wanted = f"up to {cluster.gpus}, or a multiple of it"
    expect(whole(gpus, 1) and filled, "gpus", wanted, repr(gpus))
    inside = min(gpus, cluster.gpus)
    machines = gpus // inside
    around_s = 2 * scatter_s(size=size, ranks=inside, link=cluster.inside)
    part = size / inside
    return around_s + all_reduce_s(algorithm, size=part, ranks=machines, link=cluster.outside)
