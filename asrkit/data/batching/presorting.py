"""Utterances of a step dealt to the ranks so that each has equally much to do in phases."""

from dataclasses import dataclass

import numpy as np

from asrkit.data.batching.lengths import Lengths
from asrkit.data.batching.padding import Cost
from asrkit.data.batching.strategies import Batches, Strategy


@dataclass(frozen=True)
class Presorted:
    """The batches of another strategy, the utterances of each step dealt out anew.

    All utterances of a step are sorted, the shortest and the longest ones interleaved, and cut into
    ranks: the first rank has the extremes, the last one the middle. An encoder that runs in two
    phases or more then has about as much to do on every rank. One that runs batches whole has
    *less* even work than before, since the first rank pads its shortest utterances most. NVIDIA's
    rounds of MLPerf's RNN-T do so, with two phases (training_results_v1.0, rnnt).

    Each rank keeps its number of utterances. A limit on anything else, as padded seconds, is that
    of the strategy's own batches and not of these: use it with `at_most_utterances`.

    Attributes:
        strategy: Random, Sorted, Bucketed, Balanced or one's own.
    """

    strategy: Strategy

    @property
    def balance_by(self) -> Cost | None:
        """That of the strategy."""
        return self.strategy.balance_by

    def batches(
        self, lengths: Lengths, ranks: int, random: np.random.Generator
    ) -> tuple[Batches, np.ndarray]:
        """See Strategy.batches for `lengths`, `ranks` and `random`."""
        return self.strategy.batches(lengths, ranks, random)

    def deal(self, step: Batches, lengths: Lengths) -> Batches:
        """The batches of a step, of the same sizes, from the extremes to the middle.

        Args:
            step: Row numbers of each rank's batch.
            lengths: Of all utterances.
        """
        rows = np.concatenate(step)
        shortest_first = rows[np.argsort(lengths.seconds[rows], kind="stable")]
        half = -(-len(rows) // 2)
        interleaved = np.empty_like(rows)
        interleaved[0::2] = shortest_first[:half]
        interleaved[1::2] = shortest_first[half:][::-1]
        ends = np.cumsum([len(batch) for batch in step])
        return np.split(interleaved, ends[:-1])
