import itertools
import json
import random
import subprocess
import sys

import numpy as np
import pytest
import soundfile
import torch
from lhotse import CutSet, Recording, SupervisionSegment
from lhotse.dataset import IterableDatasetWrapper, K2SpeechRecognitionDataset
from lhotse.dataset.input_strategies import AudioSamples
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
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:You are using DynamicBucketingSampler with an eagerly"
    ),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes"),
    pytest.mark.filterwarnings(
        "ignore:.*multi-threaded, use of fork:DeprecationWarning"
    ),
]


def made_cuts(count, seed=0):
    """Cuts of 1 to 20 s that all differ in length and say a word or several a second."""
    rng = random.Random(seed)
    sizes = rng.sample(range(1000, 20_000), count)
    return CutSet.from_cuts(
        dummy_cut(n, start=0.0, duration=ms / 1000,
                  supervisions=[SupervisionSegment(f"s{n}", f"r{n}", 0, ms / 1000, text="ab " * rng.randint(1, ms // 400))])
        for n, ms in enumerate(sizes)
    )  # fmt: skip


@pytest.fixture(scope="module")
def cuts():
    """Five hundred."""
    return made_cuts(500)


class Ids(Dataset):
    """What a dataset is asked for, and by whom."""

    def __getitem__(self, cuts):
        return [cut.id for cut in cuts]


class Own:
    """A user's own constraint, which has no repr worth its name."""

    def share(self, n, D, U):
        """See asrkit.data.batching.strategies.Constraint."""
        return np.maximum(n * D / 100, n / 9)


def ids(batches):
    """Ids of each batch."""
    return [[cut.id for cut in batch] for batch in batches]


def flat(batches):
    """Sorted ids of all batches."""
    return sorted(itertools.chain.from_iterable(batches))


def strategies(cuts):
    """One of each kind."""
    table = buckets_1d(Lengths.of_cuts(cuts), LIMIT, count=5)
    return {
        "balanced": Balanced(limit=LIMIT), "own": Balanced(limit=Own()), "random": Random(limit=LIMIT),
        "sorted": Sorted(limit=Own()), "bucketed": Bucketed(buckets=table), "dropping": Bucketed(buckets=table, tails="drop"),
    }  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 3, 64])
def test_ranks_share_all_cuts_and_have_equally_many_batches(cuts, world_size):
    ranks = [
        LengthSampler(cuts, Balanced(limit=LIMIT), world_size=world_size, rank=rank)
        for rank in range(world_size)
    ]
    batches = [ids(one) for one in ranks]
    assert flat(itertools.chain.from_iterable(batches)) == sorted(
        cut.id for cut in cuts
    )
    assert {len(own) for own in batches} == {len(one) for one in ranks} and len(
        batches[0]
    ) > 0
    assert len({one.fingerprint for one in ranks}) == 1
    report = sum((one.diagnostics for one in ranks[1:]), ranks[0].diagnostics)
    assert (report.kept_cuts, report.discarded_cuts) == (500, 0)


def test_a_sampler_is_one_of_lhotses_and_needs_lhotse_only_when_it_is_asked_for(cuts):
    sampler = LengthSampler(cuts, Balanced(limit=LIMIT))
    assert isinstance(sampler, CutSampler) and isinstance(next(iter(sampler)), CutSet)
    code = "import sys; sys.modules['lhotse'] = None; from asrkit.data import Balanced; import asrkit.data as d; d.LengthSampler"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        "d.LengthSampler" not in done.stdout
        and "import of lhotse halted" in done.stderr.splitlines()[-1]
    )


def test_epochs_and_seeds_vary_and_repeat(cuts):
    def epoch(seed, number):
        sampler = LengthSampler(cuts, Balanced(limit=LIMIT), seed=seed)
        sampler.set_epoch(number)
        return ids(sampler), sampler.fingerprint

    assert epoch(1, 2) == epoch(1, 2)
    several = [epoch(*which) for which in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert (
        len({str(one) for one, _ in several})
        == len({fingerprint for _, fingerprint in several})
        == 4
    )
    fives = LengthSampler(cuts, Random(limit=at_most_utterances(5)))
    before = fives.fingerprint
    fives.set_epoch(1)
    assert fives.fingerprint != before  # of the same sizes, but other cuts
    sampler = LengthSampler(cuts, Balanced(limit=LIMIT))
    assert ids(sampler) == ids(sampler) == several[0][0]  # iter() begins again


class Words:
    """A tokenizer, as far as lengths ask it."""

    def encode(self, text):
        """A token a word."""
        return text.split()


def test_lengths_that_are_known_are_not_read_again(cuts):
    words = Lengths.of_cuts(cuts, tokens=Words())
    known, read = (
        LengthSampler(cuts, Balanced(limit=LIMIT), **how)
        for how in ({"lengths": words}, {"tokens": Words()})
    )
    assert (
        known.fingerprint
        == read.fingerprint
        != LengthSampler(cuts, Balanced(limit=LIMIT)).fingerprint
    )


def test_lazy_cuts_are_read_once(cuts, tmp_path):
    cuts.to_file(tmp_path / "cuts.jsonl")
    lazy = CutSet.from_jsonl_lazy(tmp_path / "cuts.jsonl")
    sampler = LengthSampler(lazy, Balanced(limit=LIMIT))
    (tmp_path / "cuts.jsonl").unlink()
    assert ids(sampler) == ids(LengthSampler(cuts, Balanced(limit=LIMIT)))
    assert sampler.num_cuts == 500


def test_a_loader_gives_the_same_with_any_workers_and_in_worker_processes(cuts):
    sampler = LengthSampler(cuts, Balanced(limit=LIMIT))
    plain = list(DataLoader(Ids(), sampler=sampler, batch_size=None))
    assert (
        len(plain)
        == len(sampler)
        == len(DataLoader(Ids(), sampler=sampler, batch_size=None))
    )
    assert (
        list(DataLoader(Ids(), sampler=sampler, batch_size=None, num_workers=2))
        == plain
    )
    assert (
        list(DataLoader(IterableDatasetWrapper(Ids(), sampler), batch_size=None))
        == plain
    )
    for workers in (1, 3):  # lhotse's samplers would give everything `workers` times
        assert (
            list(
                DataLoader(
                    IterableDatasetWrapper(Ids(), sampler),
                    batch_size=None,
                    num_workers=workers,
                )
            )
            == plain
        )


@pytest.mark.filterwarnings(
    "ignore:We detected you're trying to use a CutSampler with rank"
)
def test_worker_processes_of_several_ranks_share_the_cuts_and_go_on_to_other_epochs(
    cuts,
):
    seen: list[list[str]] = [[], []]
    for rank in range(2):
        sampler = LengthSampler(cuts, Balanced(limit=LIMIT), world_size=2, rank=rank)
        wrapped = IterableDatasetWrapper(Ids(), sampler, auto_increment_epoch=True)
        loader = DataLoader(
            wrapped, batch_size=None, num_workers=2, persistent_workers=True
        )
        for epoch in range(2):
            sampler.set_epoch(epoch)
            batches = list(loader)
            assert batches == ids(
                sampler_at(epoch, cuts, Balanced(limit=LIMIT), world_size=2, rank=rank)
            )
            seen[epoch] += batches
    assert all(flat(one) == sorted(cut.id for cut in cuts) for one in seen)


def sampler_at(epoch, *args, **kwargs):
    """A sampler in an epoch."""
    sampler = LengthSampler(*args, **kwargs)
    sampler.set_epoch(epoch)
    return sampler


@pytest.mark.parametrize(
    "kind", ["balanced", "own", "random", "sorted", "bucketed", "dropping"]
)
@pytest.mark.parametrize("done", [0, 1, 7])
def test_a_resumed_epoch_goes_on_bit_for_bit_with_any_strategy(cuts, kind, done):
    def make():
        return LengthSampler(cuts, strategies(cuts)[kind], seed=3, world_size=2, rank=1)

    whole, stopped, resumed = make(), make(), make()
    for sampler in (whole, stopped):
        sampler.set_epoch(4)
    expected = ids(whole)
    iterator = iter(stopped)
    assert ids(itertools.islice(iterator, done)) == expected[:done]
    state = json.loads(json.dumps(stopped.state_dict()))
    before = json.dumps(state)
    resumed.load_state_dict(state)
    assert json.dumps(state) == before  # lhotse's empty the state that they are given
    assert resumed.epoch == 4
    assert ids(resumed) == expected[done:]
    assert resumed.get_report() == whole.get_report()
    resumed.set_epoch(5)
    whole.set_epoch(5)
    assert ids(resumed) == ids(whole)


def test_resuming_draws_nothing_again(cuts, monkeypatch):
    first = LengthSampler(cuts, Balanced(limit=LIMIT))
    for _ in itertools.islice(iter(first), 10):
        pass
    state = first.state_dict()
    resumed = LengthSampler(cuts, Balanced(limit=LIMIT))
    resumed._cuts = Counting(resumed._cuts)
    resumed.load_state_dict(state)
    assert resumed._cuts.asked == 0
    next(iter(resumed))
    assert 0 < resumed._cuts.asked < 100


class Counting(list):
    """A list that counts what it is asked for."""

    asked = 0

    def __getitem__(self, which):
        self.asked += 1
        return super().__getitem__(which)


def test_workers_draw_ahead_and_a_state_can_say_what_was_trained_on(cuts):
    sampler = LengthSampler(cuts, Balanced(limit=LIMIT))
    loader = iter(DataLoader(Ids(), sampler=sampler, batch_size=None, num_workers=2))
    trained = [next(loader) for _ in range(3)]
    assert sampler.state_dict()["position"] > 3
    state = sampler.state_dict(position=3)
    del loader
    for make in (lambda one: one, lambda one: IterableDatasetWrapper(Ids(), one)):
        resumed = LengthSampler(cuts, Balanced(limit=LIMIT))
        resumed.load_state_dict(state)
        assert (
            resumed.diagnostics.kept_batches == 3
            and resumed.diagnostics.kept_cuts == sum(map(len, trained))
        )
        if isinstance(made := make(resumed), IterableDatasetWrapper):
            rest = list(DataLoader(made, batch_size=None, num_workers=2))
        else:
            rest = list(DataLoader(Ids(), sampler=made, batch_size=None, num_workers=2))
        assert trained + rest == ids(LengthSampler(cuts, Balanced(limit=LIMIT)))
    with pytest.raises(ValueError, match="position: expected 0 to"):
        sampler.state_dict(position=len(sampler) + 1)


@pytest.mark.parametrize("other, said", [
    ({"seed": 1}, "seed: expected 0 as in the state, got 1"),
    ({"world_size": 2, "rank": 0}, "world_size: expected 1 as in the state, got 2"),
    ({"strategy": Random(limit=LIMIT)}, "strategy: expected 'Balanced' as in the state, got 'Random'"),
    ({"strategy": Balanced(limit=at_most_seconds(99))}, "plan: expected '[0-9a-f]+' as in the state, got '[0-9a-f]+'. Cuts, tokens, strategy"),
    ({"strategy": Balanced(limit=LIMIT, blur=(0, 0))}, "plan: expected"),
    ({"tokens": Words()}, "data: expected"),
    ({"cuts": made_cuts(500, seed=1)}, "data: expected"),
])  # fmt: skip
def test_a_state_of_something_else_is_refused_in_a_line_that_names_it(
    cuts, other, said
):
    first = LengthSampler(cuts, Balanced(limit=LIMIT))
    next(iter(first))
    resumed = LengthSampler(
        **({"cuts": cuts, "strategy": Balanced(limit=LIMIT)} | other)
    )
    before = resumed.state_dict()
    with pytest.raises(ValueError, match=said) as caught:
        resumed.load_state_dict(first.state_dict())
    assert "\n" not in str(caught.value)
    assert resumed.state_dict() == before and len(ids(resumed)) == len(
        resumed
    )  # as if nothing had been asked


def test_the_same_order_cut_into_other_batches_is_another_epoch(cuts):
    first, second = (
        LengthSampler(cuts, Sorted(limit=at_most_seconds(seconds)))
        for seconds in (120, 100)
    )
    orders = [[*itertools.chain.from_iterable(ids(one))] for one in (first, second)]
    assert orders[0] == orders[1]
    assert first.fingerprint != second.fingerprint
    with pytest.raises(ValueError, match="plan: expected"):
        second.load_state_dict(first.state_dict())


def test_a_filter_is_refused_in_one_line(cuts):
    with pytest.raises(ValueError, match=r"filter: .* Pass cuts.filter\(...\)"):
        LengthSampler(cuts, Balanced(limit=LIMIT)).filter(lambda cut: True)


@pytest.mark.parametrize("world_size", [3, 4, 7])
def test_what_a_strategy_drops_is_counted_once_over_the_ranks(cuts, world_size):
    strategy = strategies(cuts)["dropping"]
    ranks = [
        LengthSampler(cuts, strategy, world_size=world_size, rank=rank)
        for rank in range(world_size)
    ]
    kept = sum(len(own) for one in ranks for own in ids(one))
    assert 0 < 500 - kept == sum(one.diagnostics.discarded_cuts for one in ranks)


def test_mapped_batches_and_loading_info_are_as_lhotse_has_them(cuts):
    sampler = LengthSampler(cuts, Balanced(limit=LIMIT), world_size=2, rank=1).map(
        lambda batch: batch.subset(first=1)
    )
    for batch in sampler:
        assert len(batch) == 1 and batch[0].dataloading_info == {
            "rank": 1,
            "world_size": 2,
            "worker_id": None,
        }


def test_sorted_batches_are_those_of_lhotses_simple_sampler(cuts):
    ours = LengthSampler(cuts, Sorted(limit=LIMIT))
    assert ids(ours) == ids(SimpleCutSampler(cuts.sort_by_duration(), max_duration=120))


def test_speech_is_read_and_collated_by_lhotses_dataset(tiny_speech, tmp_path):
    cuts = []
    for number, (waveform, text) in enumerate(
        zip(tiny_speech.waveforms, tiny_speech.texts, strict=True)
    ):
        soundfile.write(tmp_path / f"{number}.wav", waveform.numpy(), 16_000)
        cut = Recording.from_file(
            tmp_path / f"{number}.wav", recording_id=str(number)
        ).to_cut()
        cut.supervisions = [
            SupervisionSegment(f"s{number}", str(number), 0, cut.duration, text=text)
        ]
        cuts.append(cut)
    dataset = K2SpeechRecognitionDataset(
        input_strategy=AudioSamples(), return_cuts=True
    )
    sampler = LengthSampler(cuts, Balanced(limit=at_most_seconds(12)))
    seen = []
    for batch in DataLoader(dataset, sampler=sampler, batch_size=None):
        assert batch["inputs"].numel() <= 12 * 16_000
        for row, (cut, text) in enumerate(
            zip(
                batch["supervisions"]["cut"], batch["supervisions"]["text"], strict=True
            )
        ):
            number = int(cut.recording.id)
            waveform = tiny_speech.waveforms[number] / 32768
            assert (
                torch.equal(batch["inputs"][row, : len(waveform)], waveform)
                and text == tiny_speech.texts[number]
            )
            seen.append(number)
    assert sorted(seen) == list(range(len(cuts)))


@pytest.mark.parametrize("options, said", [
    ({"seed": "randomized"}, r"seed, epoch: expected whole numbers from 0 up, got \('randomized', 0\)"),
    ({"lengths": Lengths([1.0], [1])}, "lengths: expected 500, one a cut, got 1"),
    ({"lengths": Lengths([1.0], [1]), "tokens": Words()}, "tokens: expected None beside lengths, which have them, got"),
    ({"strategy": None}, "strategy: expected Random, Sorted, .* got None"),
    ({"cuts": []}, "lengths: expected an utterance for each of 1 ranks, got 0"),
])  # fmt: skip
def test_bad_arguments_are_refused_in_one_line(cuts, options, said):
    how = {"cuts": cuts, "strategy": Balanced(limit=LIMIT)} | options
    with pytest.raises(ValueError, match=said):
        len(LengthSampler(**how))
