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
from asrkit.data.batching.strategies import Batches, Plan, Strategy, plan
from asrkit.shapes import expect, whole
from asrkit.text import Tokenizer


class LengthSampler(CutSampler):
    """Batches of cuts as `strategy` plans them, for a DataLoader in the place of any sampler of
    lhotse.

        sampler = LengthSampler(cuts, Balanced(limit=at_most_seconds(600)), tokens=tokenizer) loader
        = DataLoader(K2SpeechRecognitionDataset(), sampler=sampler, batch_size=None, num_workers=4)

    Every rank makes the same plan and only its own batches, all ranks equally many: a step costs
    the same on 1 rank and on 1,024. Should ranks read other data or run another numpy, utterances
    would be trained on twice, silently. Compare once an epoch:

        torch.distributed.all_gather_object(seen := [None] * sampler.world_size,
        sampler.fingerprint) assert len(set(seen)) == 1

    cuts: read once, here, and kept: a lazy set, which has to end, takes the memory of an eager one
    (1.7 KB a cut that has a recording and a text, measured). lengths: of the cuts, in their order,
    where they are known already, as for a Bucketed strategy; else they are read, with `tokens` as
    in Lengths.of_cuts. seconds, tokens_per_second: the least and the most of a cut that is kept;
    what is left out is counted in `dropped`, as is what `filter` or the strategy leaves out.
    drop_last: no batch of the last step is halved; one that has no batch for every rank is left
    out.

    In an IterableDatasetWrapper each worker takes its part of the steps, in the order of one
    worker; rank and world_size are those of the run there too, and its warning about them, meant
    for lhotse's samplers, does not hold.
    """

    def __init__(
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
        expect(
            whole(seed, 0), "seed", "a whole number, 0 or more: the same on every rank", repr(seed)
        )
        expect(
            world_size is None or whole(world_size, 1), "world_size", "at least 1", repr(world_size)
        )
        expect(
            rank is None or whole(rank, 0, (world_size or inf) - 1),
            "rank",
            "0 or more, below world_size",
            repr(rank),
        )
        super().__init__(
            shuffle=True, drop_last=drop_last, world_size=world_size, rank=rank, seed=seed
        )
        self.strategy = strategy
        self._cuts = list(tqdm(cuts, "cuts", unit="cut", disable=not progress))
        self._rows = np.arange(len(self._cuts))  # of the cuts that are planned with
        expect(
            lengths is None or tokens is None,
            "tokens",
            "None beside lengths, which have them",
            repr(tokens),
        )
        self._lengths = (
            Lengths.of_cuts(self._cuts, tokens=tokens, progress=progress)
            if lengths is None
            else lengths
        )
        expect(
            len(self._lengths) == len(self._cuts),
            "lengths",
            f"{len(self._cuts)}, one a cut",
            len(self._lengths),
        )
        self._dropped: dict[str, int] = {}
        self._planned: _Epoch | None = None
        self._start = self._position = (
            0  # where an epoch begins, above 0 when resumed; the next batch
        )
        self._stride = 1
        for name, low, high in (("seconds", *seconds), ("tokens_per_second", *tokens_per_second)):
            expect(low <= high, name, "the least and the most", (low, high))
            value = getattr(self._lengths, name)
            self._keep((low <= value) & (value <= high), name)

    def _keep(self, mask: np.ndarray, reason: str) -> None:
        self._dropped[reason] = self._dropped.get(reason, 0) + int((~mask).sum())
        self._rows, self._lengths, self._planned = self._rows[mask], self._lengths.take(mask), None
        self._start = self._position = 0

    def filter(self, predicate: Callable[[Any], bool]) -> "LengthSampler":
        """This sampler without the cuts for which `predicate` is false: asked here, once, and not
        in every epoch.
        """
        self._keep(
            np.array([bool(predicate(self._cuts[row])) for row in self._rows], dtype=bool), "filter"
        )
        return self

    def _plan(self, epoch: int) -> "_Epoch":
        if self._planned is None or self._planned.number != epoch:
            self._planned = _Epoch.of(
                plan(
                    self.strategy,
                    self._lengths,
                    ranks=self.world_size,
                    seed=self.seed,
                    epoch=epoch,
                    drop_last=self.drop_last,
                ),
                epoch,
                self._lengths,
                self.rank,
            )
        return self._planned

    def set_epoch(self, epoch: int) -> None:
        """The epoch to plan; what is left of another one is given up, also where it was resumed."""
        if epoch != self.epoch:
            self._start = self._position = 0
        super().set_epoch(epoch)

    def __len__(self) -> int:
        """Steps of this epoch, the same on every rank."""
        return len(self._plan(self.epoch).own)

    def __iter__(self) -> "LengthSampler":
        """This sampler, at the start of its epoch or where `load_state_dict` has put it."""
        worker = get_worker_info()
        self._start = self._start if self._just_restored_state else 0
        self._position, self._stride = (
            (self._start, 1) if worker is None else (self._start + worker.id, worker.num_workers)
        )
        if not self._just_restored_state:
            self.diagnostics.reset_current_epoch()
            left_out = sum(
                self.dropped.values()
            )  # of which each rank counts its part, so that all of them add up to it
            self.diagnostics.current_epoch_stats.discarded_cuts = len(
                range(self.rank, left_out, self.world_size)
            )
        return self

    def __next__(self) -> CutSet:
        """The next batch of this rank."""
        self.allow_iter_to_reset_state()
        planned = self._plan(self.epoch)
        if self._position >= len(planned.own):
            raise StopIteration
        batch = CutSet.from_cuts(
            [self._cuts[row] for row in self._rows[planned.own[self._position]]]
        )
        self._position += self._stride
        self._log_diagnostics(batch)
        for transform in self._transforms:
            batch = transform(batch)
        attach_dataloading_info(batch, rank=self.rank, world_size=self.world_size)
        return batch

    def state_dict(self, *, position: int | None = None) -> dict[str, Any]:
        """What a run needs to go on bit for bit, whatever the strategy, without drawing again what
        has been drawn.

        position: batches of this epoch trained on, where these are fewer than were drawn: a
        DataLoader's workers draw ahead.
        """
        position = min(self._position, len(self)) if position is None else position
        expect(
            whole(position, 0, len(self)), "position", f"0 to {len(self)} batches", repr(position)
        )
        planned = self._plan(self.epoch)
        mine = {
            "position": position,
            "strategy": type(self.strategy).__name__,
            "data": planned.data,
            "plan": planned.digest,
        }
        return deepcopy(super().state_dict()) | mine

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; it is left as it is. Refused where what follows would
        not be the same.
        """
        state = deepcopy(state_dict)
        expect(
            {*FOLLOWS_FROM, "epoch", "position"} <= set(state),
            "state_dict",
            "that of a LengthSampler",
            sorted(state),
        )
        planned = self._plan(state["epoch"])
        here = super().state_dict() | {
            "strategy": type(self.strategy).__name__,
            "data": planned.data,
            "plan": planned.digest,
        }
        for name, remedy in FOLLOWS_FROM.items():
            expect(
                here[name] == state[name],
                name,
                f"{state[name]!r} as in the state",
                repr(here[name]),
                remedy,
            )
        position, *_ = (state.pop(name) for name in ("position", "strategy", "data", "plan"))
        epochs = state["diagnostics"]["stats_per_epoch"]
        state["diagnostics"]["stats_per_epoch"] = {
            int(epoch): stats for epoch, stats in epochs.items()
        }  # text after JSON
        super().load_state_dict(state)
        self._start = self._position = position
        self.diagnostics.set_epoch(self.epoch)
        stats = self.diagnostics.current_epoch_stats
        stats.kept_batches, stats.kept_cuts = position, sum(map(len, planned.own[:position]))

    @property
    def dropped(self) -> dict[str, int]:
        """Cuts that this epoch leaves out on all ranks, by reason."""
        return self._dropped | {"strategy": self._plan(self.epoch).dropped}

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digits that are equal where the epoch of all ranks is."""
        planned = self._plan(self.epoch)
        return planned.data + planned.digest

    @property
    def num_cuts(self) -> int:
        """Cuts given to the sampler."""
        return len(self._cuts)

    @property
    def remaining_cuts(self) -> int:
        """Cuts in the steps of this epoch that are still to come, on all ranks."""
        left = self._plan(self.epoch).left
        return int(left[min(self._position, len(left) - 1), 0])

    @property
    def remaining_duration(self) -> float:
        """Seconds of speech in the steps of this epoch that are still to come, on all ranks."""
        left = self._plan(self.epoch).left
        return float(left[min(self._position, len(left) - 1), 1])


FOLLOWS_FROM = {
    "world_size": "",
    "seed": "",
    "drop_last": "",
    "strategy": "",
    "data": "The cuts, their order, their tokens or what is filtered differ.",
    "plan": "Settings of the strategy differ, or the version of asrkit or numpy.",
}


@dataclass(frozen=True, kw_only=True)
class _Epoch:
    """What a rank keeps of a plan."""

    number: int
    own: Batches
    left: np.ndarray  # (steps + 1, 2): cuts and seconds from each step on, of all ranks
    dropped: int
    data: str
    digest: str

    @classmethod
    def of(cls, whole_plan: Plan, number: int, lengths: Lengths, rank: int) -> "_Epoch":
        steps = [np.concatenate(step) for step in whole_plan.steps]
        sums = [(len(rows), lengths.seconds[rows].sum()) for rows in steps]
        sizes = [len(rows) for step in whole_plan.steps for rows in step]
        return cls(
            number=number,
            own=[step[rank] for step in whole_plan.steps],
            left=np.cumsum([(0, 0), *sums[::-1]], axis=0)[::-1],
            dropped=len(whole_plan.dropped),
            data=_digest(lengths.seconds, lengths.tokens),
            digest=_digest(np.array(sizes), *steps),
        )


def _digest(*arrays: np.ndarray) -> str:
    """16 hexadecimal digits of what the arrays hold."""
    whole_hash = hashlib.blake2b(digest_size=8)
    for array in arrays:
        whole_hash.update(np.ascontiguousarray(array).data)
    return whole_hash.hexdigest()
