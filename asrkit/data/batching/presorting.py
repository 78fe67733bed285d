"""Utterances of a step distributed so that ranks have equal work when they run in phases."""

from dataclasses import dataclass

import numpy as np

from asrkit.data.batching.lengths import Lengths
from asrkit.data.batching.padding import Cost
from asrkit.data.batching.strategies import Batches, Strategy


@dataclass(frozen=True)
class Presorted:
    """The batches of another strategy, with the utterances of each step redistributed over ranks.

    All utterances of a step are sorted, the shortest and the longest ones interleaved, and split
    over the ranks: the first rank gets the extremes, the last one the middle. An encoder that runs
    in two or more phases then has about equal work on every rank. For one that runs batches whole
    the work is *less* even than before, since the first rank pads its shortest utterances most.
    NVIDIA's rounds of MLPerf's RNN-T do this with two phases (training_results_v1.0, rnnt).

    Each rank keeps its number of utterances. Other limits, such as padded seconds, hold for the
    strategy's own batches but not for these: use it with `at_most_utterances`.

    Attributes:
        strategy: Random, Sorted, Bucketed, Balanced or your own.
    """

    strategy: Strategy

    @property
    def balance_by(self) -> Cost | None:
        """`balance_by` of the strategy."""
        return self.strategy.balance_by

    def batches(
        self, lengths: Lengths, ranks: int, random: np.random.Generator
    ) -> tuple[Batches, np.ndarray]:
        """See Strategy.batches for `lengths`, `ranks` and `random`."""
        return self.strategy.batches(lengths, ranks, random)

    def deal(self, step: Batches, lengths: Lengths) -> Batches:
        """Batches of the same sizes, from the extremes of length to the middle.

        Args:
            step: Row numbers of each rank's batch.
            lengths: Lengths of all utterances.
        """
        rows = np.concatenate(step)
        shortest_first = rows[np.argsort(lengths.seconds[rows], kind="stable")]
        half = -(-len(rows) // 2)
        interleaved = np.empty_like(rows)
        interleaved[0::2] = shortest_first[:half]
        interleaved[1::2] = shortest_first[half:][::-1]
        ends = np.cumsum([len(batch) for batch in step])
        return np.split(interleaved, ends[:-1])
