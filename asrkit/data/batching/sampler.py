"""A sampler of lhotse's cuts that plans each epoch from lengths before it begins."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import torch
from lhotse import CutSet
from lhotse.dataset.sampling.base import CutSampler, attach_dataloading_info
from torch.utils.data import get_worker_info

from asrkit.data.batching.lengths import Lengths
from asrkit.data.batching.strategies import Plan, Strategy, plan
from asrkit.shapes import expect, whole
from asrkit.text import Tokenizer


class LengthSampler(CutSampler):
    """Batches of cuts by a strategy, for a DataLoader, in place of lhotse's samplers.

        sampler = LengthSampler(cuts, Balanced(limit=at_most_seconds(600)), tokens=tokenizer)
        loader = DataLoader(K2SpeechRecognitionDataset(), sampler=sampler, batch_size=None,
                            num_workers=4)

    Every rank computes the same plan and yields only its own batches. All ranks have equally many:
    a step costs the same on 1 rank and on 1,024. If ranks read different data or run different
    versions of numpy, utterances are silently trained on twice. Compare once an epoch:

        torch.distributed.all_gather_object(seen := [None] * sampler.world_size,
                                            sampler.fingerprint)
        assert len(set(seen)) == 1

    A run resumes exactly if its state counts the batches trained on: take `state_dict(position=n)`
    after n batches of the epoch, those before a resume included. A DataLoader's workers prefetch,
    so a plain `state_dict()` would skip some batches; it is exact only without workers.

    In an IterableDatasetWrapper each worker takes its part of the steps, in the order of one
    worker. rank and world_size are those of the run there too; the wrapper's warning about them is
    meant for lhotse's samplers. The workers have copies of this sampler. They follow its
    `set_epoch`, even persistent ones, but its `load_state_dict` only before they start, and its
    `get_report()` counts nothing. After an incomplete epoch persistent workers first finish it,
    unless the wrapper has `reset_on_iter=True`: that is lhotse's behaviour.

    lhotse's report, `get_report()`, counts the cuts that the strategy drops.

    Args:
        cuts: lhotse cuts, read once, here, and kept. A lazy set, which must be finite, takes the
            memory of an eager one (1.7 KB a cut with a recording and a text, measured).
        strategy: Random, Sorted, Bucketed, Balanced, Presorted or your own.
        lengths: Lengths of the cuts, in their order, if known, as for a Bucketed strategy. By
            default they are read from the cuts.
        tokens: A tokenizer, as in Lengths.of_cuts; only without `lengths`.
        world_size: Number of ranks; by default that of torch.distributed.
        rank: Rank of this process; by default that of torch.distributed.
        seed: Seed of the plans, the same on every rank.
    """

    def __init__(
        self,
        cuts: Iterable[Any],
        strategy: Strategy,
        *,
        lengths: Lengths | None = None,
        tokens: Tokenizer | None = None,
        world_size: int | None = None,
        rank: int | None = None,
        seed: int = 0,
    ) -> None:
        redundant = lengths is not None and tokens is not None
        expect(not redundant, "tokens", "None with lengths, which include tokens", repr(tokens))
        try:
            super().__init__(shuffle=True, world_size=world_size, rank=rank, seed=seed)
        except AssertionError as error:  # lhotse's has no text
            got = f"rank={rank} and world_size={world_size}; None takes those of the environment"
            raise ValueError(f"rank: expected 0 to below world_size, got {got}.") from error
        is_rank = whole(self.rank, 0, self.world_size - 1)
        expect(is_rank, "rank", f"0 to below world_size={self.world_size}", repr(self.rank))
        self.strategy = strategy
        self._cuts = list(cuts)
        if lengths is None:
            lengths = Lengths.of_cuts(self._cuts, tokens=tokens)
        count = len(self._cuts)
        expect(len(lengths) == count, "lengths", f"{count}, one for each cut", len(lengths))
        self._lengths = lengths
        self._planned: tuple[int, Plan] | None = None  # an epoch and its plan
        self._start = 0  # first batch of the epoch; above 0 after a resume
        self._position = 0  # the next batch
        self._stride = 1
        # shared with persistent workers, whose copies of everything else no longer change
        self._shared_epoch = torch.tensor([0], device="cpu").share_memory_()
        self._followed_epoch = 0

    def filter(self, predicate: Callable[[Any], bool]) -> NoReturn:
        """Raises ValueError: filter the cuts before a sampler reads them."""
        raise ValueError("filter: expected cuts that are filtered already. Pass cuts.filter(...).")

    def _plan(self, epoch: int) -> Plan:
        if self._planned is None or self._planned[0] != epoch:
            planned = plan(
                self.strategy, self._lengths, ranks=self.world_size, seed=self.seed, epoch=epoch
            )
            self._planned = (epoch, planned)
        return self._planned[1]

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; without effect if `epoch` is the current one."""
        expect(whole(epoch, 0), "epoch", "a whole number from 0 up", repr(epoch))
        if epoch != self.epoch:
            self._start = self._position = 0
        super().set_epoch(epoch)
        if get_worker_info() is None:
            self._shared_epoch.fill_(self.epoch)

    def __len__(self) -> int:
        """Steps of this epoch, the same on every rank."""
        return len(self._plan(self.epoch).steps)

    def __iter__(self) -> "LengthSampler":
        """This sampler, at the start of its epoch or at the position of `load_state_dict`."""
        worker = get_worker_info()
        shared = int(self._shared_epoch)
        if worker and shared != self._followed_epoch:  # else a wrapper may count epochs itself
            self._followed_epoch = shared
            self.set_epoch(shared)
        if not self._just_restored_state:
            self._start = 0
            self.diagnostics.reset_current_epoch()
        # each rank counts its part of the dropped cuts, so that the ranks add up to all of them
        own = self._plan(self.epoch).dropped[self.rank :: self.world_size]
        self.diagnostics.current_epoch_stats.discarded_cuts = len(own)
        self._position = self._start + (worker.id if worker else 0)
        self._stride = worker.num_workers if worker else 1
        return self

    def __next__(self) -> CutSet:
        """The next batch of this rank."""
        self.allow_iter_to_reset_state()
        steps = self._plan(self.epoch).steps
        if self._position >= len(steps):
            raise StopIteration
        rows = steps[self._position][self.rank]
        batch = CutSet.from_cuts([self._cuts[row] for row in rows])
        self._position += self._stride
        self._log_diagnostics(batch)
        for transform in self._transforms:
            batch = transform(batch)
        attach_dataloading_info(batch, rank=self.rank, world_size=self.world_size)
        return batch

    def state_dict(self, *, position: int | None = None) -> dict[str, Any]:
        """State to resume from, bit for bit and without drawing earlier batches again.

        Args:
            position: Number of batches of this epoch that were trained on. None takes all that this
                sampler has drawn: too many with a DataLoader's workers, none in a wrapper's.
        """
        if position is None:
            position = min(self._position, len(self))
        self._expect_position(position, self.epoch)
        return self._settings(self.epoch) | {"epoch": self.epoch, "position": position}

    def _expect_position(self, position: object, epoch: int) -> None:
        steps = len(self._plan(epoch).steps)
        expect(whole(position, 0, steps), "position", f"0 to {steps} batches", repr(position))

    def _settings(self, epoch: int) -> dict[str, Any]:
        """Everything that determines the batches of an epoch; lengths and plan as hashes."""
        steps = self._plan(epoch).steps
        sizes = [len(rows) for step in steps for rows in step]
        return {
            "world_size": self.world_size,
            "seed": self.seed,
            "strategy": type(self.strategy).__name__,
            "data": _digest(self._lengths.seconds, self._lengths.tokens),
            "plan": _digest(np.array(sizes), *map(np.concatenate, steps)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where `state_dict` was taken.

        Raises:
            ValueError: The following batches would differ.
        """
        epoch = state_dict.get("epoch", 0)
        for name, here in self._settings(epoch).items():
            saved = state_dict.get(name)
            remedy = "Cuts, tokens, strategy and versions must be those of the state."
            expect(here == saved, name, f"{saved!r} as in the state", repr(here), remedy)
        self._expect_position(state_dict.get("position"), epoch)
        self.set_epoch(epoch)
        self._start = self._position = state_dict["position"]
        self._just_restored_state = True
        own = [step[self.rank] for step in self._plan(epoch).steps[: self._start]]
        stats = self.diagnostics.current_epoch_stats
        stats.kept_batches = len(own)
        stats.kept_cuts = sum(map(len, own))

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digits that are equal on two ranks if their plans of the epoch are."""
        settings = self._settings(self.epoch)
        return settings["data"] + settings["plan"]

    @property
    def num_cuts(self) -> int:
        """Number of cuts in each epoch, including those that the strategy drops."""
        return len(self._cuts)


def _digest(*arrays: np.ndarray) -> str:
    """Hash of the bytes of arrays, as 16 hexadecimal digits."""
    content_hash = hashlib.blake2b(digest_size=8)
    for array in arrays:
        content_hash.update(np.ascontiguousarray(array).data)
    return content_hash.hexdigest()
