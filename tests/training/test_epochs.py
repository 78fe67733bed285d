"""Batches of a run: each strategy, the length curriculum, sizes from memory, and a resumed run."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from asrkit.data import UNALTERED, Buckets, web_like
from asrkit.training import TrainConfig, epochs
from asrkit.training.epochs import Epochs, make_strategy
from asrkit.training.options import Batching

sys.path.insert(0, str(Path(__file__).parent))
from trainings import SHORT, losses, run, stop_after

LENGTHS = web_like(300, seed=1, most_s=20.0)
STRATEGIES = get_args(Batching)
SIZES = Buckets([5.0, 10.0, 20.0], [500, 500, 500], [7, 3, 2])


def of(batching="balanced", lengths=LENGTHS, ranks=1, sizes=None, begun=(), **settings):
    """Epochs of a strategy."""
    config = TrainConfig(batching=batching, **{"batch_seconds": 40.0} | settings)
    strategy = make_strategy(config, lengths, sizes)
    step_s = ranks * config.batch_seconds
    options = {"ranks": ranks, "seed": 3, "step_s": step_s, "begun": [*begun]}
    return Epochs(lengths, strategy, **options)


@pytest.mark.parametrize("sizes", [None, SIZES])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("batching", STRATEGIES)
def test_every_epoch_has_each_utterance_once_within_the_limit(batching, ranks, sizes):
    planned = of(batching, ranks=ranks, sizes=sizes)
    drawn = [planned.rows(step) for step in range(200)]
    assert len(planned.begun) > 1
    for (first, _), (end, _) in zip(planned.begun, planned.begun[1:], strict=False):
        rows = np.concatenate([part for step in drawn[first:end] for part in step])
        assert sorted(rows) == list(range(300))
    for step in drawn:
        assert len(step) == ranks
        for part in step:
            seconds, n = LENGTHS.seconds[part].max(), len(part)
            most = (
                40 / seconds
                if sizes is None
                else SIZES.sizes[SIZES.seconds >= seconds][0]
            )
            assert n <= max(1, most)
    assert not np.array_equal(drawn[planned.begun[1][0]][0], drawn[0][0])


@pytest.mark.parametrize("batching", STRATEGIES)
def test_a_resumed_run_repeats_the_batches(batching):
    longest = np.linspace(2, 30, 90)  # the curriculum opens
    planned = of(batching, ranks=2)
    drawn = [planned.rows(*step) for step in enumerate(longest)]
    for step in (1, 40, planned.begun[-1][0], 89):
        begun = [epoch for epoch in planned.begun if epoch[0] <= step]
        resumed = of(batching, ranks=2, begun=begun)
        for later in range(step, 90):
            again = resumed.rows(later, longest[later])
            assert all(map(np.array_equal, again, drawn[later]))


def test_the_curriculum_admits_longer_utterances_before_an_epoch_of_short_ones_ends():
    lengths = web_like(20_000)
    planned = of(lengths=lengths)
    for step, longest_s in enumerate([4.0] * 20 + [7.9] * 20 + [math.inf] * 20):
        (rows,) = planned.rows(step, longest_s)
        assert lengths.seconds[rows].max() <= longest_s
    assert planned.begun == [(0, 4.0), (40, lengths.seconds.max())]


def test_a_curriculum_that_admits_nothing_still_yields_the_shortest():
    (rows,) = of(batch_seconds=2.0).rows(0, 0.0)
    shortest = np.sort(LENGTHS.seconds)
    assert LENGTHS.seconds[rows].max() <= shortest[np.cumsum(shortest).searchsorted(2)]
    rows = of(ranks=3, batch_seconds=0.01).rows(0, 0.0)
    assert [len(part) for part in rows] == [1, 1, 1]


SEARCHED = replace(
    SHORT, steps=3, checkpoint_s=0.0, memory=0.01, buckets=1, augment=UNALTERED
)


@pytest.fixture
def searched(tiny_speech, tmp_path):
    """Losses of a run whose sizes were searched for, and its folder."""
    return losses(run(tiny_speech, tmp_path / "run", SEARCHED)), tmp_path / "run"


def test_sizes_found_by_a_search_limit_the_run_and_later_ones(
    searched, tiny_speech, tmp_path, monkeypatch
):
    wanted, folder = searched
    table = json.loads((folder / "buckets.json").read_text())
    assert min(table["sizes"]) > 1
    monkeypatch.delattr(epochs, "oom_search")
    file = str(folder / "buckets.json")
    again = replace(SEARCHED, memory=None, bucket_sizes=file)
    # the search changed neither weights, optimizer nor random numbers
    assert losses(run(tiny_speech, tmp_path / "again", again)) == wanted
    with pytest.raises(KeyboardInterrupt):
        run(tiny_speech, tmp_path / "again", again, resume=False, on_step=stop_after(2))
    (folder / "buckets.json").unlink()
    assert losses(run(tiny_speech, tmp_path / "again", again)) == wanted


def test_a_refused_fresh_start_leaves_the_sizes_of_the_run_in_the_folder(
    searched, tiny_speech, tmp_path
):
    wanted, folder = searched
    with pytest.raises(KeyboardInterrupt):
        run(tiny_speech, folder, SEARCHED, resume=False, on_step=stop_after(2))
    before = (folder / "buckets.json").read_text()
    file = tmp_path / "other.json"
    Buckets([99.0], [999], [1]).save(file)
    other = replace(SEARCHED, memory=None, bucket_sizes=str(file), accumulate=100)
    with pytest.raises(ValueError, match="^batches: expected from 1 to"):
        run(tiny_speech, folder, other, resume=False)
    assert (folder / "buckets.json").read_text() == before
    assert losses(run(tiny_speech, folder, SEARCHED)) == wanted


@pytest.mark.parametrize("batching", STRATEGIES)
def test_batches_of_one_utterance_need_not_fill_the_last_step(batching):
    planned = of(batching, web_like(7, seed=1), ranks=2, batch_seconds=0.1)
    for step in range(9):  # three in an epoch, of six of the seven utterances
        assert [len(rows) for rows in planned.rows(step)] == [1, 1]
    assert [first for first, _ in planned.begun] == [0, 3, 6]


def test_a_search_with_too_little_memory_is_refused_by_the_name_of_the_option(
    tiny_speech, tmp_path
):
    with pytest.raises(ValueError, match="^memory: expected room for one utterance"):
        run(tiny_speech, tmp_path, replace(SEARCHED, memory=1e-6))


def test_a_search_counts_the_longest_augmented_utterances(tiny_speech, tmp_path):
    sizes = []
    for augment in (UNALTERED, replace(UNALTERED, speed=(1.0, 1.5), rate=(1.0, 1.4))):
        run(tiny_speech, tmp_path, replace(SEARCHED, augment=augment), resume=False)
        sizes.append(json.loads((tmp_path / "buckets.json").read_text())["sizes"])
    assert np.all(np.array(sizes[0]) > 1.5 * np.array(sizes[1]))


@pytest.mark.parametrize("text, message", [
    ("", "bucket_sizes: expected JSON with seconds, tokens and sizes, got .*JSONDecodeError"),
    ("[]", "bucket_sizes: expected JSON with seconds, tokens and sizes, got "),
    ('{"seconds": [9.0], "tokens": [9]}', "bucket_sizes: expected JSON .*KeyError: 'sizes'"),
    ('{"seconds": [9.0], "tokens": [9], "sizes": [0]}', "bucket_sizes: expected JSON .*at least 1"),
    ('{"seconds": [0.1], "tokens": [9], "sizes": [5]}', "bucket_sizes: expected room for each utterance of the training speech, got 30 too large. Search"),
    (None, "bucket_sizes: expected JSON .*FileNotFoundError"),
])  # fmt: skip
def test_a_file_of_sizes_that_does_not_fit_is_refused(
    tiny_speech, tmp_path, text, message
):
    file = tmp_path / "sizes.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=f"^{message}"):
        run(tiny_speech, tmp_path / "run", replace(SHORT, bucket_sizes=str(file)))


def test_utterances_with_too_many_tokens_a_second_are_left_out_and_named(
    tiny_speech, tmp_path, capsys
):
    rates = [
        len(text) / s
        for text, s in zip(tiny_speech.texts, tiny_speech.durations, strict=True)
    ]
    most = sorted(rates)[-3] + 1e-6  # two are faster
    config = replace(SHORT, tokens_per_second=most)
    result = run(tiny_speech, tmp_path / "a", config)
    fast = [
        id_ for id_, rate in zip(tiny_speech.ids, rates, strict=True) if rate > most
    ]
    line = f"Left out for more than {most:g} tokens a second: 2 of 30 utterances, {', '.join(fast)}\n"
    assert capsys.readouterr().err == line
    slow = tiny_speech.select(row for row in range(30) if rates[row] <= most)
    assert losses(result) == losses(run(slow, tmp_path / "b"))
    with pytest.raises(
        ValueError,
        match="tokens_per_second: expected a rate that utt.*, got 0.1. The slowest",
    ):
        run(tiny_speech, tmp_path / "c", replace(SHORT, tokens_per_second=0.1))
