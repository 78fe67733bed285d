import itertools

import pytest
import torch

from asrkit.data import Utterances, batches, training_stream
from asrkit.text import CharTokenizer

TOKENIZER = CharTokenizer()


def same(first, second):
    """Whether two batches are equal bit for bit."""
    tensors = ("waveforms", "sample_lengths", "targets", "target_lengths")
    return (
        first.ids == second.ids
        and first.texts == second.texts
        and all(torch.equal(getattr(first, name), getattr(second, name)) for name in tensors)
    )


@pytest.mark.parametrize("order", ["shuffled", "sorted", "as_given"])
@pytest.mark.parametrize("batch_seconds", [0.01, 9.0, 40.0, 1e6])
def test_every_utterance_is_batched_once_and_no_batch_of_two_exceeds_the_budget(
    utterances, order, batch_seconds
):
    plan = list(batches(utterances, TOKENIZER, batch_seconds=batch_seconds, order=order))
    ids = [id_ for batch in plan for id_ in batch.ids]
    assert sorted(ids) == sorted(utterances.ids)
    assert order != "as_given" or ids == utterances.ids
    for batch in plan:
        assert batch.waveforms.numel() <= batch_seconds * 16_000 or len(batch.ids) == 1


def test_a_batch_holds_the_samples_and_tokens_of_its_utterances_and_zeros_after_them(utterances):
    for batch in batches(utterances, TOKENIZER, batch_seconds=60.0):
        assert batch.waveforms.dtype == torch.float32 and batch.targets.dtype == torch.int64
        for row, id_ in enumerate(batch.ids):
            number, size, labels = (
                int(id_[1:]),
                batch.sample_lengths[row],
                batch.target_lengths[row],
            )
            assert size == len(utterances.waveforms[number])
            assert (batch.waveforms[row, :size] == (number + 1) / 32768).all()
            assert (batch.waveforms[row, size:] == 0).all()
            assert batch.targets[row, :labels].tolist() == TOKENIZER.encode(
                utterances.texts[number]
            )
            assert (batch.targets[row, labels:] == 0).all()


def test_an_order_follows_from_seed_and_epoch_and_changes_with_either(utterances):
    def order(**which):
        return [batch.ids for batch in batches(utterances, TOKENIZER, batch_seconds=30.0, **which)]

    assert order(seed=1, epoch=2) == order(seed=1, epoch=2)
    assert len({str(order(seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_similar_lengths_meet_so_that_little_is_padding(utterances):
    def padding(order):
        plan = list(batches(utterances, TOKENIZER, batch_seconds=40.0, order=order))
        return 1 - sum(int(batch.sample_lengths.sum()) for batch in plan) / sum(
            batch.waveforms.numel() for batch in plan
        )

    assert padding("sorted") < padding("shuffled") < 0.2 < padding("as_given")


def test_only_utterances_beyond_max_seconds_are_left_out(utterances):
    kept = [
        id_
        for batch in batches(utterances, TOKENIZER, batch_seconds=30.0, max_seconds=3.0)
        for id_ in batch.ids
    ]
    short = [
        id_
        for id_, seconds in zip(utterances.ids, utterances.durations, strict=True)
        if seconds <= 3.0
    ]
    assert 0 < len(short) < 100
    assert sorted(kept) == sorted(short)


@pytest.mark.parametrize("start", [1, 7, 1000])
def test_a_resumed_stream_continues_bit_for_bit(utterances, start):
    options = {"batch_seconds": 30.0, "seed": 3, "max_seconds": lambda step: 1.0 + step / 4}
    whole = training_stream(utterances, TOKENIZER, **options)
    resumed = training_stream(utterances, TOKENIZER, start_step=start, **options)
    if start < 100:
        rest = itertools.islice(whole, start, start + 3)
        assert all(same(*pair) for pair in zip(rest, resumed, strict=False))
    again = training_stream(utterances, TOKENIZER, start_step=start + 1, **options)
    next(training := training_stream(utterances, TOKENIZER, start_step=start, **options))
    assert same(next(training), next(again))


@pytest.mark.parametrize("batch_seconds", [0.05, 12.0, 5000.0])
def test_a_stream_keeps_to_the_budget_and_to_the_curriculum(utterances, batch_seconds):
    stream = training_stream(
        utterances, TOKENIZER, batch_seconds=batch_seconds, max_seconds=lambda step: 2.0
    )
    for batch in itertools.islice(stream, 5 if batch_seconds > 100 else 30):
        assert batch.waveforms.numel() <= batch_seconds * 16_000 or len(batch.ids) == 1
        assert len(set(batch.ids)) == len(batch.ids)
        if batch_seconds < 5000:  # else one batch of the shortest is all there is
            assert batch.waveforms.shape[1] <= 2.0 * 16_000


def test_a_curriculum_that_admits_nothing_still_yields_the_shortest(utterances):
    stream = training_stream(utterances, TOKENIZER, batch_seconds=2.0, max_seconds=lambda step: 0.0)
    assert max(batch.waveforms.shape[1] for batch in itertools.islice(stream, 20)) < 16_000


def test_a_stream_visits_long_and_short_utterances_alike(utterances):
    visits = dict.fromkeys(utterances.ids, 0)
    for batch in itertools.islice(training_stream(utterances, TOKENIZER, batch_seconds=20.0), 500):
        for id_ in batch.ids:
            visits[id_] += 1
    by_length = [
        visits[id_] for _, id_ in sorted(zip(utterances.durations, utterances.ids, strict=True))
    ]
    parts = torch.tensor(by_length).float().reshape(4, 25).mean(1)
    assert min(by_length) > 0 and parts.max() < 1.6 * parts.min(), parts


def test_bad_arguments_are_refused_in_one_line(utterances):
    with pytest.raises(ValueError, match="batch_seconds: expected > 0, got 0"):
        next(batches(utterances, TOKENIZER, batch_seconds=0))
    with pytest.raises(
        ValueError, match="order: expected shuffled, sorted or as_given, got 'random'"
    ):
        next(batches(utterances, TOKENIZER, batch_seconds=1.0, order="random"))
    with pytest.raises(ValueError, match=r"seed, epoch: expected whole numbers .* got \(-1, 0\)"):
        next(batches(utterances, TOKENIZER, batch_seconds=1.0, seed=-1))
    with pytest.raises(ValueError, match=r"seed: expected a whole number from 0 up, got -1"):
        next(training_stream(utterances, TOKENIZER, batch_seconds=1.0, seed=-1))
    with pytest.raises(ValueError, match="equally many"):
        Utterances(waveforms=[], ids=["a"], texts=[], speakers=[])
    with pytest.raises(ValueError, match="ids: expected all different, got 1 among 2"):
        Utterances(
            waveforms=[torch.ones(1)] * 2, ids=["a"] * 2, texts=["a"] * 2, speakers=["s"] * 2
        )
    with pytest.raises(ValueError, match="utterances: expected at least one"):
        next(
            training_stream(
                Utterances(waveforms=[], ids=[], texts=[], speakers=[]),
                TOKENIZER,
                batch_seconds=1.0,
            )
        )


def test_silence_of_no_samples_is_refused_by_its_id():
    with pytest.raises(
        ValueError, match=r"waveforms: expected samples in each, got none in \['b'\]"
    ):
        Utterances(
            waveforms=[torch.ones(9), torch.ones(0)],
            ids=["a", "b"],
            texts=["x", "y"],
            speakers=["", ""],
        )
