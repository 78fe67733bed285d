"""The suite of batching: every arm's batches are right before they are recorded, and lhotse's arms are lhotse's own batches."""

import contextlib
import io
import itertools

import numpy as np
import pytest

from asrkit import data
from asrkit.cli import main
from asrkit.workbench import records
from asrkit.workbench.bench.peers import samplers
from asrkit.workbench.bench.suites import batching

LIMIT = data.Limit(data.CANARY_MEMORY, 1.0)
OURS = ["random_safe_size", "random_seconds", "bucketed_2d", "balanced"]
THEIRS = ["lhotse_1d", "nemo_like_2d", "nemo_like_2d_drop_last"]
TIMED = {"lhotse_1d", "nemo_like_2d", "bucketed_2d", "balanced"}
pytestmark = pytest.mark.filterwarnings(
    "ignore:(You are using Dynamic|Your 'buffer_size'|We have exceeded):UserWarning"
)


def comparison(lengths, ranks=2, cuts=False):
    """What the suite makes of a table, without the shuffling."""
    return batching.BatchingComparison(
        "x", lengths, LIMIT, samplers.cuts_of(lengths) if cuts else None, ranks
    )


@pytest.fixture(scope="module")
def few():
    """Web-like lengths, some hundreds."""
    return data.web_like(700)


@pytest.fixture(scope="module")
def found(few, tmp_path_factory):
    """(records, stdout, stderr) of a table of one's own, through the command line."""
    folder = tmp_path_factory.mktemp("batching")
    few.save(folder / "mine.csv.gz")
    out, err, file = io.StringIO(), io.StringIO(), folder / "records.jsonl"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(
            [
                "bench",
                "batching",
                "--lengths",
                str(folder / "mine.csv.gz"),
                "--ranks",
                "1",
                "8",
                "--out",
                str(file),
            ]
        )
    assert code == 0, err.getvalue()
    return records.read(file), out.getvalue(), err.getvalue()


def test_each_arm_is_recorded_once_a_metric_and_says_all_about_itself(found):
    made, out, err = found
    assert out.splitlines()[-1].startswith(f"{len(made):,} records appended to ")
    keys = [
        (record["params"]["ranks"], record["impl"], record["metric"]) for record in made
    ]
    assert len(set(keys)) == len(keys)
    assert {impl for _, impl, _ in keys} == {*OURS, *THEIRS}
    for record in made:
        params = record["params"]
        assert (params["set"], params["utterances"], params["seed"]) == ("mine", 700, 0)
        assert (
            params["limit"]
            == "n (0.0004667 D + 2.896e-05 U + 7.721e-06 D²) of a GPU <= 1"
        )
        assert params["compute"] == "n (7.5 D + 0.4 U) GMAC"
    assert {impl for _, impl, metric in keys if metric == "sampler_time"} == TIMED
    shown = [
        line.split()[0]
        for line in out.splitlines()[:-1]
        if line and not line.startswith(" ")
    ]
    arms = ["batching", *OURS[:2], *THEIRS, *OURS[2:]]
    assert shown == 2 * arms
    assert err.splitlines() == [
        f"batching mine, 700 utterances, 1.7 h, {ranks} ranks" for ranks in (1, 8)
    ]


def test_a_record_is_the_account_of_the_plan_that_it_names(found, few):
    (record,) = [
        one
        for one in found[0]
        if (one["impl"], one["metric"], one["params"]["ranks"])
        == ("balanced", "utilisation", 8)
    ]
    shuffled = few.take(np.random.default_rng(0).permutation(len(few)))
    accounts = []
    for epoch in range(3):
        steps = data.plan(
            data.Balanced(limit=LIMIT, work=data.CANARY_COMPUTE),
            shuffled,
            ranks=8,
            epoch=epoch,
        ).steps
        pairs = [
            (shuffled.seconds[rows], shuffled.tokens[rows])
            for step in steps
            for rows in step
        ]
        accounts.append(
            data.padding_account(pairs, cost=data.CANARY_COMPUTE, limit=LIMIT, ranks=8)
        )
    assert record["samples"] == [account.utilisation for account in accounts]
    assert record["stats"]["n"] == 3


def test_ours_keep_every_utterance_within_the_limit_and_what_theirs_lose_is_told(found):
    kept = {
        (one["params"]["ranks"], one["impl"]): one["value"]
        for one in found[0]
        if one["metric"] == "kept"
    }
    most = {
        one["impl"]: one["value"] for one in found[0] if one["metric"] == "memory_max"
    }
    assert all(kept[ranks, arm] == 1 for ranks in (1, 8) for arm in OURS)
    assert all(most[arm] <= 1 for arm in OURS)
    assert (
        kept[8, "nemo_like_2d_drop_last"] == 0
    )  # 700 utterances fill no bucket for 8 ranks
    assert "utilisation" not in {
        one["metric"] for one in found[0] if one["impl"] == "nemo_like_2d_drop_last"
    }


def test_a_wrong_arm_is_refused_and_says_why(few):
    good = data.plan(data.Random(limit=LIMIT), few, ranks=2).steps
    made = comparison(few)
    (first, second), *rest = good

    def refused(*steps, theirs=False):
        arm = batching.BatchingArm("bad", lambda number: steps, theirs=theirs)
        return made.check(arm, steps)

    assert refused(*good) == 1
    assert refused((first[1:], second), *rest, theirs=True) == 699 / 700
    lost = "bad, of which nothing was recorded, has 99.857% of the utterances."
    twice = "has 1 utterances twice."
    for steps, theirs, why in [
        ([(first[1:], second), *rest], False, lost),
        ([(first, np.append(second, first[0])), *rest], False, twice),
        ([(first, np.append(second, first[:2])), *rest], True, "2 utterances twice."),
        ([*good, (first[:0], second[:0])], True, "has ranks without a batch."),
        (
            [(np.concatenate([first, second]),), *rest],
            True,
            "has ranks without a batch",
        ),
        ([np.array_split(np.arange(700), 2)], False, "has a batch above the limit."),
    ]:
        with pytest.raises(AssertionError, match=why):
            refused(*steps, theirs=theirs)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_batches_of_all_ranks_are_those_that_lhotse_gives_to_each(few, ranks):
    cuts = samplers.cuts_of(few)
    for limits in ({"max_duration": 60.0}, {"max_duration": 300.0}):
        steps = samplers.every_rank(samplers.bucketing(cuts, ranks=ranks, **limits), 1)
        for rank in range(ranks):
            sampler = samplers.bucketing(cuts, ranks=ranks, **limits)
            sampler.rank = rank
            sampler.set_epoch(1)
            seen = [samplers.rows_of(batch) for batch in sampler]
            assert len(seen) == len(steps)
            assert all(map(np.array_equal, seen, [step[rank] for step in steps]))
        assert {*np.concatenate(samplers.batches_of(steps))} == {*range(len(few))}


def test_a_cut_that_lhotse_repeats_to_complete_a_step_is_let_pass():
    tiny = data.Lengths(np.full(101, 20.0), np.full(101, 60))
    sampler = samplers.bucketing(
        samplers.cuts_of(tiny), ranks=8, max_duration=20.0, num_buckets=2
    )
    steps = samplers.every_rank(sampler, 0)
    rows = np.concatenate(samplers.batches_of(steps))
    assert len(rows) == 104 and set(rows) == {*range(101)}
    arm = batching.BatchingArm("lhotse", lambda number: steps, theirs=True)
    assert comparison(tiny, ranks=8).check(arm, steps) == 1


def plainly(cells, seconds, tokens):
    """Strict selection as a loop: the first duration that is long enough, of its cells the first with room for the tokens."""
    for number, (longest, most) in enumerate(cells):
        if seconds <= longest:
            if tokens <= most:
                return number
            if number + 1 == len(cells) or cells[number + 1][0] != longest:
                return None
    return None


def test_strict_selection_is_that_of_a_plain_loop():
    random = np.random.default_rng(0)
    for _ in range(50):
        cells = sorted(
            {
                (float(random.integers(1, 6)), int(random.integers(0, 9)))
                for _ in range(random.integers(1, 12))
            }
        )
        fixed = samplers.strict()(cells, [1] * len(cells))
        for D, U in itertools.product(np.arange(0.5, 7, 0.5), range(11)):
            assert fixed.select_bucket(None, example_len=(D, U)) == plainly(
                cells, D, U
            ), (
                cells,
                D,
                U,
            )


def test_nemo_like_batches_hold_one_bucket_each_and_leave_out_what_has_none(few):
    wordy = np.append(few.tokens, [400, 500])
    lengths = data.Lengths(np.append(few.seconds, [2.0, 30.0]), wordy)
    buckets = batching.nemo_buckets(lengths, LIMIT)
    assert 100 < len(buckets) <= 150
    cells = [*zip(buckets.seconds, buckets.tokens, strict=True)]
    of = [
        plainly(cells, *pair)
        for pair in zip(lengths.seconds, lengths.tokens, strict=True)
    ]
    assert of[700] is None and of.count(None) < 10
    steps = samplers.every_rank(
        samplers.nemo_like(samplers.cuts_of(lengths), buckets, ranks=1), 0
    )
    batches = samplers.batches_of(steps)
    assert sorted(np.concatenate(batches)) == [
        row for row, cell in enumerate(of) if cell is not None
    ]
    for rows in batches:
        (cell,) = {of[row] for row in rows}
        assert len(rows) <= buckets.sizes[cell]


def test_the_limit_in_seconds_is_the_largest_that_fits():
    same = data.Lengths(np.full(500, 10.0), np.zeros(500))
    n = int(LIMIT.largest(10.0, 0))
    made = comparison(same, ranks=1)
    arm = made.with_largest_seconds(
        lambda seconds: made.ours(
            "x", data.Random(limit=data.at_most_seconds(seconds)), a=1
        )
    )
    assert (
        10 * n / 1.02 <= arm.params["max_seconds"] < 10 * (n + 1)
        and arm.params["a"] == 1
    )
    assert made.largest_share(arm.epoch(0)) <= 1 < float(LIMIT.share(n + 1, 10.0, 0))

    def grows(seconds):
        return batching.BatchingArm(
            "x",
            lambda number: [[np.arange(int(seconds / 10) + 20 * number)]],
        )

    arm = made.with_largest_seconds(grows)  # the last epoch has the largest batch
    assert 0.98 < made.largest_share(arm.epoch(batching.EPOCHS - 1)) <= 1
    long = data.Lengths(
        np.full(200, 320.0), np.zeros(200)
    )  # fits alone, beyond where the search begins
    made = comparison(long, ranks=1)
    arm = made.with_largest_seconds(
        lambda seconds: made.ours("x", data.Random(limit=data.at_most_seconds(seconds)))
    )
    assert made.largest_share(arm.epoch(0)) <= 1


def test_pairs_that_meet_again_are_counted_as_one_by_one():
    random = np.random.default_rng(0)
    one, other = (np.array_split(random.permutation(40)[:size], 7) for size in (40, 33))
    pairs = {
        frozenset(pair)
        for rows in one
        for pair in itertools.combinations(rows.tolist(), 2)
    }
    again = {
        frozenset(pair)
        for rows in other
        for pair in itertools.combinations(rows.tolist(), 2)
    }
    epochs = [[[rows] for rows in batches] for batches in (one, other)]
    assert batching.met_again(*epochs) == pytest.approx(len(pairs & again) / len(pairs))
    assert batching.met_again(epochs[0], epochs[0]) == 1
    alone = [[np.array([0])]]
    assert batching.met_again(alone, alone) == 0


def test_a_sampler_that_draws_other_batches_than_accounted_for_is_not_timed(few):
    balanced = data.Balanced(limit=LIMIT)
    arm = comparison(few, cuts=True).ours("balanced", balanced, timed=True)
    epochs = [arm.epoch(0), arm.epoch(1)]
    steps_ms, next_ms = samplers.pace(arm.sampler(), epochs)
    assert len(steps_ms) == 2 and len(next_ms) == sum(
        len(steps) - 1 for steps in epochs
    )
    with pytest.raises(AssertionError, match="LengthSampler draws other batches"):
        samplers.pace(arm.sampler(), epochs[::-1])


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (
            "a,b\n1,2\n",
            [],
            "--lengths: expected CSV with the columns seconds and tokens",
        ),
        (
            "seconds,tokens\n" + "-1,3\n" * 100,
            [],
            "--lengths: expected CSV with the columns seconds and tokens",
        ),
        (
            "seconds,tokens\n" + "1.5,3\n" * 99,
            [],
            "--lengths: expected at least 100 utterances, got 99.",
        ),
        (
            "seconds,tokens\n400,3\n" + "4,3\n" * 99,
            [],
            "--lengths: expected utterances that fit the limit of memory alone, got 1.",
        ),
        (
            "seconds,tokens\n" + "4,3\n" * 100,
            ["--ranks", "0", "1"],
            "--ranks: expected 1 or more, got 0.",
        ),
        (
            "seconds,tokens\n" + "4,3\n" * 100,
            ["--ranks", "101"],
            "--ranks: expected at most 100, the number of utterances, got 101.",
        ),
    ],
)
def test_a_bad_table_is_one_line_and_nothing_is_written(
    text, arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none.csv").write_text(text)
    assert main(["bench", "batching", "--lengths", "none.csv", *arguments]) == 2
    *_, err = capsys.readouterr().err.strip().splitlines()
    assert err.startswith("asrkit bench: " + message)
    assert [path.name for path in tmp_path.iterdir()] == ["none.csv"]
