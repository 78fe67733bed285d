"""The suite of batching: every arm's batches are right before they are recorded, and lhotse's arms are lhotse's own batches."""

import contextlib
import io
import itertools

import numpy as np
import pytest

from asrkit import data
from asrkit.workbench import records
from asrkit.workbench.lessons.shared.repeated_pairs import repeated_pairs
from benchmarks.__main__ import main
from benchmarks.peers import samplers
from benchmarks.suites import batching

LIMIT = data.Limit(data.CANARY_MEMORY, 1.0)
OURS = ["random_safe_size", "random_seconds", "bucketed_2d", "balanced"]
THEIRS = ["lhotse_1d", "nemo_like_2d", "nemo_like_2d_drop_last"]
TIMED = {"lhotse_1d", "nemo_like_2d", "bucketed_2d", "balanced"}
pytestmark = pytest.mark.filterwarnings(
    "ignore:(You are using Dynamic|Your 'buffer_size'|We have exceeded):UserWarning"
)


def comparison(lengths, ranks=2, cuts=False):
    """The suite's comparison of a table, without shuffling."""
    return batching.BatchingComparison(
        "x", lengths, LIMIT, samplers.cuts_of(lengths) if cuts else None, ranks
    )


@pytest.fixture(scope="module")
def few():
    """Web-like lengths, some hundreds."""
    return data.web_like(700)


@pytest.fixture(scope="module")
def found(few, tmp_path_factory):
    """(records, stdout, stderr) of the user's own table, through the command line."""
    folder = tmp_path_factory.mktemp("batching")
    table = folder / "mine.csv.gz"
    file = folder / "records.jsonl"
    few.save(table)
    command = ["batching", "--lengths", str(table), "--ranks", "1", "8"]
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*command, "--out", str(file)])
    assert code == 0, err.getvalue()
    return records.read(file), out.getvalue(), err.getvalue()


def values(found, metric):
    """Values of a metric by (ranks, arm)."""
    return {
        (record["params"]["ranks"], record["impl"]): record["value"]
        for record in found[0]
        if record["metric"] == metric
    }


def test_each_arm_has_one_record_per_metric_with_all_params(found):
    measured, _, err = found
    keys = [
        (record["params"]["ranks"], record["impl"], record["metric"])
        for record in measured
    ]
    assert len({*keys}) == len(keys)
    assert {impl for _, impl, _ in keys} == {*OURS, *THEIRS}
    assert {impl for _, impl, metric in keys if metric == "sampler_time"} == TIMED
    for record in measured:
        params = record["params"]
        assert params["set"] == "mine"
        assert params["utterances"] == 700
        assert params["seed"] == 0
    title = "batching mine, 700 utterances, 1.7 h,"
    assert err.splitlines() == [f"{title} 1 ranks", f"{title} 8 ranks"]


def test_ours_keep_every_utterance_within_the_limit_and_losses_of_others_are_recorded(
    found,
):
    kept = values(found, "kept")
    most = values(found, "memory_max")
    for key in itertools.product((1, 8), OURS):
        assert kept[key] == 1
        assert most[key] <= 1
    dropping = (8, "nemo_like_2d_drop_last")
    assert kept[dropping] == 0  # 700 utterances fill no bucket for 8 ranks
    assert dropping not in values(found, "utilisation")


def test_a_wrong_arm_is_refused_with_the_reason(few):
    compared = comparison(few)
    good = data.plan(data.Random(limit=LIMIT), few, ranks=2).steps
    (first, second), *rest = good

    def share(steps, may_lose=False):
        arm = batching.BatchingArm("bad", lambda number: steps, may_lose=may_lose)
        return compared.check(arm, steps)

    less = [(first[1:], second), *rest]
    assert share(good) == 1
    assert share(less, may_lose=True) == 699 / 700
    once = [(first, np.append(second, first[0])), *rest]
    twice = [(first, np.append(second, first[:2])), *rest]
    empty = [*good, (first[:0], second[:0])]
    alone = [(np.concatenate([first, second]),), *rest]
    everything = [np.array_split(np.arange(700), 2)]
    for steps, may_lose, message in [
        (less, False, "bad was not recorded, because it has 99.857% of the utt"),
        (once, False, "has 1 utterances twice."),
        (twice, True, "has 2 utterances twice."),
        (empty, True, "has ranks without a batch."),
        (alone, True, "has ranks without a batch"),
        (everything, False, "has a batch above the limit."),
    ]:
        with pytest.raises(AssertionError, match=message):
            share(steps, may_lose)


def test_the_batches_of_all_ranks_are_those_that_lhotse_gives_to_each():
    lengths = data.Lengths(np.linspace(11, 20, 101), np.full(101, 60))
    cuts = samplers.cuts_of(lengths)
    options = {"ranks": 8, "max_duration": 20.0, "num_buckets": 2}
    steps = samplers.every_rank(samplers.bucketing(cuts, **options), 1)
    for rank in range(8):
        sampler = samplers.bucketing(cuts, **options)
        sampler.rank = rank
        sampler.set_epoch(1)
        seen = [samplers.rows_of(batch) for batch in sampler]
        assert len(seen) == len(steps)
        assert all(map(np.array_equal, seen, [step[rank] for step in steps]))
    rows = np.concatenate(samplers.batches_of(steps))
    assert len(rows) == 104  # lhotse repeats cuts to complete a step, which is allowed
    assert {*rows} == {*range(101)}
    arm = batching.BatchingArm("lhotse", lambda number: steps, may_lose=True)
    assert comparison(lengths, ranks=8).check(arm, steps) == 1


def plainly(cells, seconds, tokens):
    """Strict selection as a loop: the first duration that is long enough, of its cells the first with room for the tokens."""
    for number, (longest, most) in enumerate(cells):
        if seconds <= longest:
            if tokens <= most:
                return number
            if number + 1 == len(cells) or cells[number + 1][0] != longest:
                return None
    return None


def test_nemo_like_batches_hold_one_bucket_each_and_leave_out_what_has_none(few):
    seconds = np.append(few.seconds, [2.0, 30.0])
    tokens = np.append(few.tokens, [400, 500])
    lengths = data.Lengths(seconds, tokens)
    buckets = batching.nemo_buckets(lengths, LIMIT)
    assert 100 < len(buckets) <= 150
    cells = [*zip(buckets.seconds, buckets.tokens, strict=True)]
    of = [plainly(cells, *pair) for pair in zip(seconds, tokens, strict=True)]
    assert of[700] is None
    assert of.count(None) < 10
    sampler = samplers.nemo_like(samplers.cuts_of(lengths), buckets, ranks=1)
    batches = samplers.batches_of(samplers.every_rank(sampler, 0))
    kept = [row for row, cell in enumerate(of) if cell is not None]
    assert sorted(np.concatenate(batches)) == kept
    for rows in batches:
        (cell,) = {of[row] for row in rows}
        assert len(rows) <= buckets.sizes[cell]


def test_the_limit_in_seconds_is_the_largest_that_fits_in_every_epoch():
    same = data.Lengths(np.full(500, 10.0), np.zeros(500))
    compared = comparison(same, ranks=1)

    def grows(seconds):
        """An arm whose last epoch has the largest batch."""
        most = int(seconds / 10)
        return batching.BatchingArm("x", lambda n: [[np.arange(most + 20 * n)]])

    arm = compared.with_largest_seconds(grows)
    assert 0.98 < compared.largest_share(arm.epoch(batching.EPOCHS - 1)) <= 1
    most = arm.params["max_seconds"]
    assert compared.largest_share(grows(1.03 * most).epoch(batching.EPOCHS - 1)) > 1


def test_pairs_that_share_a_batch_again_are_counted():
    def epoch(*batches):
        return [[np.array(rows)] for rows in batches]

    first = epoch([0, 1, 2], [3, 4])
    second = epoch([0, 1, 3], [2, 4])
    shared = repeated_pairs(first, second)
    assert shared == 1 / 4  # 0 and 1, of four pairs
    assert repeated_pairs(first, first) == 1
    assert repeated_pairs(epoch([0]), epoch([0])) == 0


def test_a_sampler_that_draws_other_batches_than_accounted_for_is_not_timed(few):
    balanced = data.Balanced(limit=LIMIT)
    arm = comparison(few, cuts=True).ours("balanced", balanced, timed=True)
    epochs = [arm.epoch(0), arm.epoch(1)]
    assert len(samplers.pace(arm.sampler(), epochs)) == 2
    with pytest.raises(AssertionError, match="LengthSampler draws other batches"):
        samplers.pace(arm.sampler(), epochs[::-1])


HEAD = "seconds,tokens\n"
REFUSED = [  # rows of a table, options, message
    ("a,b\n1,2\n", "", "--lengths: expected CSV with the columns seconds and tokens"),
    (HEAD + "1.5,3\n" * 99, "", "--lengths: expected at least 100 utterances, got 99."),
    (HEAD + "400,3\n" * 100, "", "--lengths: expected utterances that fit the"),
    (HEAD + "4,3\n" * 100, "--ranks 101", "--ranks: expected at most 100, the number"),
]


@pytest.mark.parametrize("text, options, message", REFUSED)
def test_a_bad_table_is_one_line_and_nothing_is_written(
    text, options, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none.csv").write_text(text)
    command = ["batching", "--lengths", "none.csv", *options.split()]
    assert main(command) == 2
    *_, err = capsys.readouterr().err.strip().splitlines()
    assert err.startswith("python -m benchmarks: " + message)
    assert [path.name for path in tmp_path.iterdir()] == ["none.csv"]
