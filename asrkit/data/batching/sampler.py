"""A sampler of lhotse's cuts whose epoch is planned from lengths before it begins."""

import hashlib
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from lhotse import CutSet
from lhotse.dataset.sampling.base import CutSampler, attach_dataloading_info
from torch.utils.data import get_worker_info
from tqdm import tqdm

from asrkit.data.batching.lengths import Lengths
from asrkit.data.batching.strategies import Batches, Plan, Strategy, check_strategy, plan
from asrkit.shapes import expect, whole
from asrkit.text import Tokenizer

# What a saved state has to have in common with the sampler that resumes from it, with a remedy.
MUST_MATCH = {
    "world_size": "",
    "seed": "",
    "drop_last": "",
    "strategy": "",
    "data": "The cuts, their order, their tokens or what is filtered differ.",
    "plan": "Settings of the strategy differ, or the version of asrkit or numpy.",
}


class LengthSampler(CutSampler):
    """Batches of cuts as a strategy plans them, for a DataLoader in place of lhotse's samplers.

        sampler = LengthSampler(cuts, Balanced(limit=at_most_seconds(600)), tokens=tokenizer)
        loader = DataLoader(K2SpeechRecognitionDataset(), sampler=sampler, batch_size=None,
                            num_workers=4)

    Every rank makes the same plan and only its own batches, and all ranks have equally many: a
    step costs the same on 1 rank and on 1,024. If ranks read other data or ran another numpy,
    utterances would silently be trained on twice. Compare once an epoch:

        torch.distributed.all_gather_object(seen := [None] * sampler.world_size,
                                            sampler.fingerprint)
        assert len(set(seen)) == 1

    In an IterableDatasetWrapper each worker takes its part of the steps, in the order of one
    worker; rank and world_size are those of the run there too, and its warning about them, meant
    for lhotse's samplers, does not hold.

    Args:
        cuts: lhotse cuts. Read once, here, and kept: a lazy set, which has to end, takes the memory
            of an eager one (1.7 KB a cut that has a recording and a text, measured).
        strategy: Random, Sorted, Bucketed, Balanced, Presorted or one's own.
        lengths: Of the cuts, in their order, where they are known already, as for a Bucketed
            strategy. By default they are read from the cuts.
        tokens: A tokenizer or a function that counts tokens, as in Lengths.of_cuts; only without
            `lengths`.
        seconds: Shortest and longest cut to keep. What is left out is counted in `dropped`, as is
            what `filter` or the strategy leaves out.
        tokens_per_second: Lowest and highest rate of a cut to keep.
        drop_last: Leave the batches of an incomplete last step out. By default the largest batches
            are halved until every rank has one.
        world_size: Number of ranks; by default that of torch.distributed.
        rank: Of this process; by default that of torch.distributed.
        seed: Of the plans, the same on every rank.
        progress: Show a progress bar while cuts are read.
    """

    # Every argument but the first two is an option of one's data, run or strategy.
    def __init__(  # noqa: PLR0913
        self,
        cuts: Iterable[Any],
        strategy: Strategy,
        *,
        lengths: Lengths | None = None,
        tokens: Tokenizer | Callable[[str], int] | None = None,
        seconds: tuple[float, float] = (0, inf),
        tokens_per_second: tuple[float, float] = (0, inf),
        drop_last: bool = False,
        world_size: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        progress: bool = False,
    ) -> None:
        check_strategy(strategy)
        _check_run(seed, world_size, rank)
        super().__init__(
            shuffle=True, drop_last=drop_last, world_size=world_size, rank=rank, seed=seed
        )
        self.strategy = strategy
        self._cuts = list(tqdm(cuts, "cuts", unit="cut", disable=not progress))
        self._rows = np.arange(len(self._cuts))  # numbers of the cuts that are kept
        if lengths is None:
            lengths = Lengths.of_cuts(self._cuts, tokens=tokens, progress=progress)
        else:
            expect(tokens is None, "tokens", "None beside lengths, which have them", repr(tokens))
        count = len(self._cuts)
        expect(len(lengths) == count, "lengths", f"{count}, one a cut", len(lengths))
        self._lengths = lengths
        self._dropped: dict[str, int] = {}
        self._planned: _Epoch | None = None
        self._start = 0  # batch that the epoch begins with; above 0 when resumed
        self._position = 0  # the next batch
        self._stride = 1
        self._keep_range("seconds", seconds)
        self._keep_range("tokens_per_second", tokens_per_second)

    def _keep_range(self, name: str, bounds: tuple[float, float]) -> None:
        low, high = bounds
        expect(low <= high, name, "the least and the most", (low, high))
        values = getattr(self._lengths, name)
        self._keep((low <= values) & (values <= high), name)

    def _keep(self, mask: np.ndarray, reason: str) -> None:
        """Keep the cuts where `mask` is true and count the others under `reason`."""
        self._dropped[reason] = self._dropped.get(reason, 0) + int((~mask).sum())
        self._rows = self._rows[mask]
        self._lengths = self._lengths.take(mask)
        self._planned = None
        self._start = 0
        self._position = 0

    def filter(self, predicate: Callable[[Any], bool]) -> "LengthSampler":
        """Leave out the cuts for which `predicate` is false, and return this sampler.

        The predicate is asked here, once, and not in every epoch.
        """
        kept = [bool(predicate(self._cuts[row])) for row in self._rows]
        self._keep(np.array(kept, dtype=bool), "filter")
        return self

    def _plan(self, epoch: int) -> "_Epoch":
        if self._planned is None or self._planned.number != epoch:
            planned = plan(
                self.strategy,
                self._lengths,
                ranks=self.world_size,
                seed=self.seed,
                epoch=epoch,
                drop_last=self.drop_last,
            )
            self._planned = _Epoch.of(planned, epoch, self._lengths, self.rank)
        return self._planned

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing changes where `epoch` is the current one."""
        if epoch != self.epoch:
            self._start = 0
            self._position = 0
        super().set_epoch(epoch)

    def __len__(self) -> int:
        """Steps of this epoch, the same on every rank."""
        return len(self._plan(self.epoch).own)

    def __iter__(self) -> "LengthSampler":
        """This sampler, at the start of its epoch or where `load_state_dict` has put it."""
        worker = get_worker_info()
        if not self._just_restored_state:
            self._start = 0
            self.diagnostics.reset_current_epoch()
            # Each rank counts its part of the cuts left out, so that all of them add up.
            left_out = range(self.rank, sum(self.dropped.values()), self.world_size)
            self.diagnostics.current_epoch_stats.discarded_cuts = len(left_out)
        if worker is None:
            self._position = self._start
            self._stride = 1
        else:
            self._position = self._start + worker.id
            self._stride = worker.num_workers
        return self

    def __next__(self) -> CutSet:
        """The next batch of this rank."""
        self.allow_iter_to_reset_state()
        planned = self._plan(self.epoch)
        if self._position >= len(planned.own):
            raise StopIteration
        rows = self._rows[planned.own[self._position]]
        batch = CutSet.from_cuts([self._cuts[row] for row in rows])
        self._position += self._stride
        self._log_diagnostics(batch)
        for transform in self._transforms:
            batch = transform(batch)
        attach_dataloading_info(batch, rank=self.rank, world_size=self.world_size)
        return batch

    def state_dict(self, *, position: int | None = None) -> dict[str, Any]:
        """What a run needs to go on bit for bit, without drawing again what has been drawn.

        Args:
            position: Batches of this epoch that were trained on, where these are fewer than were
                drawn: a DataLoader's workers draw ahead.
        """
        steps = len(self)
        if position is None:
            position = min(self._position, steps)
        expect(whole(position, 0, steps), "position", f"0 to {steps} batches", repr(position))
        return self._settings(self.epoch) | {"position": position}

    def _settings(self, epoch: int) -> dict[str, Any]:
        """The state of lhotse's samplers, and hashes of what the plan of `epoch` depends on."""
        planned = self._plan(epoch)
        return deepcopy(super().state_dict()) | {
            "strategy": type(self.strategy).__name__,
            "data": planned.data,
            "plan": planned.digest,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; it is not changed.

        Raises:
            ValueError: The batches that follow would not be the same.
        """
        state = deepcopy(state_dict)
        complete = {*MUST_MATCH, "epoch", "position"} <= set(state)
        expect(complete, "state_dict", "that of a LengthSampler", sorted(state))
        planned = self._plan(state["epoch"])
        settings = self._settings(state["epoch"])
        for name, remedy in MUST_MATCH.items():
            here = settings[name]
            saved = state[name]
            expect(here == saved, name, f"{saved!r} as in the state", repr(here), remedy)
        for name in ("strategy", "data", "plan"):
            del state[name]
        position = state.pop("position")
        # The keys are numbers, but JSON has made text of them.
        epochs = state["diagnostics"]["stats_per_epoch"]
        numbered = {int(epoch): stats for epoch, stats in epochs.items()}
        state["diagnostics"]["stats_per_epoch"] = numbered
        super().load_state_dict(state)
        self._start = position
        self._position = position
        self.diagnostics.set_epoch(self.epoch)
        stats = self.diagnostics.current_epoch_stats
        stats.kept_batches = position
        stats.kept_cuts = sum(map(len, planned.own[:position]))

    @property
    def dropped(self) -> dict[str, int]:
        """Number of cuts that this epoch leaves out on all ranks, by reason."""
        return self._dropped | {"strategy": self._plan(self.epoch).dropped}

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digits that are equal on two ranks where their plans of the epoch are."""
        planned = self._plan(self.epoch)
        return planned.data + planned.digest

    @property
    def num_cuts(self) -> int:
        """Number of cuts that the sampler was made with."""
        return len(self._cuts)

    @property
    def remaining_cuts(self) -> int:
        """Number of cuts in the steps of this epoch that are still to come, on all ranks."""
        left = self._plan(self.epoch).left
        return int(left[min(self._position, len(left) - 1), 0])

    @property
    def remaining_duration(self) -> float:
        """Seconds of speech in the steps of this epoch that are still to come, on all ranks."""
        left = self._plan(self.epoch).left
        return float(left[min(self._position, len(left) - 1), 1])


def _check_run(seed: int, world_size: int | None, rank: int | None) -> None:
    wanted = "a whole number, 0 or more: the same on every rank"
    expect(whole(seed, 0), "seed", wanted, repr(seed))
    sized = world_size is None or whole(world_size, 1)
    expect(sized, "world_size", "at least 1", repr(world_size))
    ranked = rank is None or whole(rank, 0, (world_size or inf) - 1)
    expect(ranked, "rank", "0 or more, below world_size", repr(rank))


@dataclass(frozen=True, kw_only=True)
class _Epoch:
    """What a rank keeps of a plan."""

    number: int
    own: Batches  # of this rank
    left: np.ndarray  # (steps + 1, 2): cuts and seconds from each step on, of all ranks
    dropped: int
    data: str  # hash of the lengths
    digest: str  # hash of the batches of all ranks

    @classmethod
    def of(cls, planned: Plan, number: int, lengths: Lengths, rank: int) -> "_Epoch":
        """What `rank` keeps of `planned`, the plan of epoch `number` of these `lengths`."""
        steps = [np.concatenate(step) for step in planned.steps]
        sums = [(len(rows), lengths.seconds[rows].sum()) for rows in steps]
        sizes = [len(rows) for step in planned.steps for rows in step]
        return cls(
            number=number,
            own=[step[rank] for step in planned.steps],
            left=np.cumsum([(0, 0), *sums[::-1]], axis=0)[::-1],
            dropped=len(planned.dropped),
            data=_digest(lengths.seconds, lengths.tokens),
            digest=_digest(np.array(sizes), *steps),
        )


def _digest(*arrays: np.ndarray) -> str:
    """Hash of the bytes of arrays, as 16 hexadecimal digits."""
    content_hash = hashlib.blake2b(digest_size=8)
    for array in arrays:
        content_hash.update(np.ascontiguousarray(array).data)
    return content_hash.hexdigest()
