import itertools
import json
import random

import numpy as np
import pytest
from lhotse import CutSet, SupervisionSegment
from lhotse.dataset import IterableDatasetWrapper
from lhotse.dataset.sampling import SimpleCutSampler
from lhotse.dataset.sampling.base import CutSampler
from lhotse.testing.dummies import dummy_cut
from torch.utils.data import DataLoader, Dataset

from asrkit.data import (
    Balanced,
    Bucketed,
    Lengths,
    LengthSampler,
    Random,
    Sorted,
    at_most_seconds,
    at_most_utterances,
    buckets_1d,
)

LIMIT = at_most_seconds(120)
BALANCED = Balanced(limit=LIMIT)
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{warning}")
    for warning in (
        "You are using DynamicBucketingSampler with an eagerly",
        "This DataLoader will create 3 worker processes",
        ".*multi-threaded, use of fork:DeprecationWarning",
        "We detected you're trying to use a CutSampler with rank",
    )
]


def random_cuts(count, seed=0):
    """Cuts of 1 to 20 s, all of different lengths, with one or more words a second."""
    rng = random.Random(seed)
    cuts = []
    for n, ms in enumerate(rng.sample(range(1000, 20_000), count)):
        words = "ab " * rng.randint(1, ms // 400)
        supervision = SupervisionSegment(f"s{n}", f"r{n}", 0, ms / 1000, text=words)
        cuts.append(
            dummy_cut(n, start=0.0, duration=ms / 1000, supervisions=[supervision])
        )
    return CutSet.from_cuts(cuts)


CUTS = random_cuts(500)
ALL = sorted(cut.id for cut in CUTS)
TABLE = buckets_1d(Lengths.of_cuts(CUTS), LIMIT, count=5)


class Ids(Dataset):
    """A dataset that returns the ids of its cuts."""

    def __getitem__(self, cuts):
        return [cut.id for cut in cuts]


class Own:
    """A user's own constraint, without a useful repr."""

    def share(self, n, D, U):
        """See asrkit.data.batching.strategies.Constraint."""
        return np.maximum(n * D / 100, n / 9)


class Words:
    """The part of a tokenizer that lengths use."""

    def encode(self, text):
        """A token a word."""
        return text.split()


STRATEGIES = {
    "balanced": BALANCED,
    "own": Balanced(limit=Own()),
    "random": Random(limit=LIMIT),
    "sorted": Sorted(limit=Own()),
    "bucketed": Bucketed(buckets=TABLE),
    "dropping": Bucketed(buckets=TABLE, tails="drop"),
}


def sampler(strategy=BALANCED, cuts=CUTS, epoch=0, **options):
    """A sampler in an epoch."""
    planned = LengthSampler(cuts, strategy, **options)
    planned.set_epoch(epoch)
    return planned


def ids(batches):
    """Ids of each batch."""
    return [[cut.id for cut in batch] for batch in batches]


def flat(batches):
    """Sorted ids of all batches."""
    return sorted(itertools.chain.from_iterable(batches))


def loaded(planned, **options):
    """Batches that a loader yields from a sampler, or from a dataset that wraps one."""
    if isinstance(planned, LengthSampler):
        return list(DataLoader(Ids(), sampler=planned, batch_size=None, **options))
    return list(DataLoader(planned, batch_size=None, **options))


@pytest.mark.parametrize(
    "world_size, kind",
    [
        (1, "balanced"),
        (3, "balanced"),
        (64, "balanced"),
        (3, "dropping"),
        (4, "dropping"),
    ],
)
def test_ranks_share_all_cuts_and_have_equally_many_batches(world_size, kind):
    ranks = [
        sampler(STRATEGIES[kind], world_size=world_size, rank=rank)
        for rank in range(world_size)
    ]
    batches = [ids(one) for one in ranks]
    kept = flat(itertools.chain.from_iterable(batches))
    assert len(set(kept)) == len(kept)
    assert set(kept) <= set(ALL)
    assert {len(own) for own in batches} == {len(one) for one in ranks} != {0}
    assert len({one.fingerprint for one in ranks}) == 1
    report = sum((one.diagnostics for one in ranks[1:]), ranks[0].diagnostics)
    assert (report.kept_cuts, report.discarded_cuts) == (len(kept), 500 - len(kept))
    assert (kept == ALL) == (kind == "balanced")


def test_a_sampler_is_a_sampler_of_lhotse_and_sorts_like_theirs():
    ours = sampler(Sorted(limit=LIMIT))
    assert isinstance(ours, CutSampler)
    assert isinstance(next(iter(ours)), CutSet)
    assert ids(ours) == ids(SimpleCutSampler(CUTS.sort_by_duration(), max_duration=120))


FIVES = Random(limit=at_most_utterances(5))  # epochs of the same sizes


def test_epochs_and_seeds_vary_and_repeat():
    def epoch(seed, number):
        planned = sampler(FIVES, seed=seed, epoch=number)
        return str(ids(planned)), planned.fingerprint

    assert epoch(1, 2) == epoch(1, 2)
    several = [epoch(*which) for which in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert [len({*of}) for of in zip(*several, strict=True)] == [4, 4]
    again = sampler(FIVES)
    assert str(ids(again)) == str(ids(again)) == several[0][0]  # iter() starts over


def test_known_lengths_are_not_read_again():
    words = Lengths.of_cuts(CUTS, tokens=Words())
    known = sampler(lengths=words)
    read = sampler(tokens=Words())
    assert known.fingerprint == read.fingerprint != sampler().fingerprint


def test_a_loader_yields_the_same_with_any_number_of_workers():
    plain = ids(sampler())
    planned = sampler()
    assert loaded(planned) == loaded(planned, num_workers=2) == plain
    # lhotse's samplers would yield everything once for each worker
    for workers in (0, 1, 3):
        wrapped = IterableDatasetWrapper(Ids(), planned)
        assert loaded(wrapped, num_workers=workers) == plain


def test_worker_processes_of_several_ranks_share_the_cuts_in_each_epoch():
    seen: list[list[str]] = [[], []]
    for rank in range(2):
        of_rank = {"world_size": 2, "rank": rank}
        planned = sampler(**of_rank)
        wrapped = IterableDatasetWrapper(Ids(), planned, auto_increment_epoch=True)
        workers = {"num_workers": 2, "persistent_workers": True}
        loader = DataLoader(wrapped, batch_size=None, **workers)
        for epoch in range(2):
            planned.set_epoch(epoch)
            batches = list(loader)
            assert batches == ids(sampler(epoch=epoch, **of_rank))
            seen[epoch] += batches
    assert [flat(one) for one in seen] == [ALL, ALL]


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("done", [0, 7])
def test_an_epoch_resumes_bit_for_bit_with_any_strategy(kind, done):
    options = {"strategy": STRATEGIES[kind], "seed": 3, "world_size": 2, "rank": 1}
    whole, stopped = (sampler(epoch=4, **options) for _ in range(2))
    resumed = sampler(**options)
    expected = ids(whole)
    assert ids(itertools.islice(iter(stopped), done)) == expected[:done]
    state = json.loads(json.dumps(stopped.state_dict()))
    before = json.dumps(state)
    resumed.load_state_dict(state)
    assert json.dumps(state) == before  # lhotse's samplers empty their argument
    assert resumed.epoch == 4
    assert ids(resumed) == expected[done:]
    assert resumed.get_report() == whole.get_report()
    for one in (resumed, whole):
        one.set_epoch(5)
    assert ids(resumed) == ids(whole)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda one: one,
        lambda one: IterableDatasetWrapper(Ids(), one),
    ],
)
def test_workers_prefetch_and_a_state_can_count_what_was_trained_on(wrap):
    planned = sampler()
    loader = iter(DataLoader(Ids(), sampler=planned, batch_size=None, num_workers=2))
    trained = [next(loader) for _ in range(3)]
    assert planned.state_dict()["position"] > 3
    resumed = sampler()
    resumed.load_state_dict(planned.state_dict(position=3))
    kept = (resumed.diagnostics.kept_batches, resumed.diagnostics.kept_cuts)
    assert kept == (3, sum(map(len, trained)))
    assert trained + loaded(wrap(resumed), num_workers=2) == ids(sampler())
    with pytest.raises(ValueError, match="position: expected 0 to"):
        planned.state_dict(position=len(planned) + 1)
    with pytest.raises(ValueError, match="position: expected 0 to"):
        planned.load_state_dict(planned.state_dict() | {"position": -3})


def test_ranks_of_the_environment_are_checked(monkeypatch):
    monkeypatch.setenv("RANK", "-1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match="rank: expected 0 to below world_size=2, got -1"
    ):
        sampler()


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_with_persistent_workers_a_run_resumes_exactly_and_follows_its_epochs(kind):
    def loader_of(planned):
        options = {"batch_size": None, "num_workers": 2, "persistent_workers": True}
        if kind == "map":
            return DataLoader(Ids(), sampler=planned, **options)
        return DataLoader(IterableDatasetWrapper(Ids(), planned), **options)

    first = sampler(epoch=1)
    loader = iter(loader_of(first))
    trained = [next(loader) for _ in range(3)]
    again = sampler()
    again.load_state_dict(first.state_dict(position=3))
    loader = iter(loader_of(again))
    trained += [next(loader) for _ in range(4)]
    resumed = sampler()
    resumed.load_state_dict(again.state_dict(position=7))
    loader = loader_of(resumed)
    assert trained + list(loader) == ids(sampler(epoch=1))
    for epoch in (2, 3, 2):
        resumed.set_epoch(epoch)
        assert list(loader) == ids(sampler(epoch=epoch)), epoch


def test_a_wrapper_may_count_the_epochs_of_its_workers():
    planned = sampler()
    for _ in range(2):  # each time new workers, which begin where `planned` is
        wrapped = IterableDatasetWrapper(Ids(), planned, auto_increment_epoch=True)
        workers = {"num_workers": 2, "persistent_workers": True}
        loader = DataLoader(wrapped, batch_size=None, **workers)
        for epoch in range(2):
            assert list(loader) == ids(sampler(epoch=epoch)), epoch


SORTED = Sorted(limit=LIMIT)


@pytest.mark.parametrize(
    "first, other, message",
    [
        ({}, {"seed": 1}, "seed: expected 0 as in the state, got 1"),
        (
            {},
            {"strategy": Random(limit=LIMIT)},
            "strategy: expected 'Balanced' as in the state, got 'Random'",
        ),
        (
            {},
            {"strategy": Balanced(limit=LIMIT, blur=(0, 0))},
            "plan: expected '[0-9a-f]+' as in the state, got '[0-9a-f]+'. Cuts, tokens, strategy",
        ),
        # the same order, cut into other batches
        (
            {"strategy": SORTED},
            {"strategy": Sorted(limit=at_most_seconds(100))},
            "plan: expected",
        ),
        ({}, {"tokens": Words()}, "data: expected"),
        ({}, {"cuts": random_cuts(500, seed=1)}, "data: expected"),
    ],
)
def test_a_state_of_other_settings_is_refused_in_one_line(first, other, message):
    saved = sampler(**first)
    next(iter(saved))
    resumed = sampler(**(first | other))
    before = resumed.state_dict()
    with pytest.raises(ValueError, match=message) as caught:
        resumed.load_state_dict(saved.state_dict())
    assert "\n" not in str(caught.value)
    assert resumed.state_dict() == before  # unchanged
    assert len(ids(resumed)) == len(resumed)


def test_mapped_batches_and_loading_info_equal_lhotses():
    of_rank = {"world_size": 2, "rank": 1}
    for batch in sampler(**of_rank).map(lambda batch: batch.subset(first=1)):
        assert len(batch) == 1
        assert batch[0].dataloading_info == of_rank | {"worker_id": None}


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: sampler(seed="randomized"),
            r"seed, epoch: expected whole numbers from 0 up, got \('randomized', 0\)",
        ),
        (
            lambda: sampler(lengths=Lengths([1.0], [1])),
            "lengths: expected 500, one for each cut, got 1",
        ),
        (
            lambda: sampler(lengths=Lengths([1.0], [1]), tokens=Words()),
            "tokens: expected None with lengths, which include tokens, got",
        ),
        (lambda: sampler(rank=2, world_size=2), "rank: expected 0 to below world_size"),
        (lambda: sampler().set_epoch(1.5), "epoch: expected a whole number from 0 up"),
        (lambda: sampler(None), "strategy: expected Random, Sorted, .* got None"),
        (lambda: sampler().filter(bool), r"filter: .* Pass cuts.filter\(...\)"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message):
        len(call())
