"""How often the same utterances share a batch in two epochs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

Steps = Sequence[Sequence[np.ndarray]]  # steps[k][rank]: a batch, as row numbers of the lengths


def repeated_pairs(steps: Steps, next_steps: Steps) -> float:
    """The share of the pairs of utterances in one batch that are in one batch again next epoch."""
    batch = _batch_of_row(steps)
    next_batch = _batch_of_row(next_steps)
    pairs = Counter(batch.values())
    repeated = Counter((batch[row], next_batch[row]) for row in batch.keys() & next_batch.keys())
    return _pairs(repeated) / max(1, _pairs(pairs))


def _batch_of_row(steps: Steps) -> dict[int, int]:
    batches = [rows for step in steps for rows in step]
    return {row: number for number, rows in enumerate(batches) for row in rows.tolist()}


def _pairs(groups: Counter[Any]) -> int:
    return sum(n * (n - 1) for n in groups.values())
