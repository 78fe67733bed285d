from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asrkit.data import (
    CANARY_COMPUTE,
    CANARY_MEMORY,
    Cost,
    Limit,
    at_most_seconds,
    at_most_utterances,
    attention,
    linear,
    padding_account,
    transducer_joint,
)
from asrkit.workbench.cost import joint_bytes

coefficients = st.floats(0, 10).map(lambda value: round(value, 3))
costs = st.builds(
    lambda *c: Cost(name="any", unit="u", source="a test", per_batch=c[0], per_utterance=c[1], per_second=c[2], per_token=c[3],
                    per_second2=c[4], per_pair=c[5]),
    *[coefficients] * 6,
)  # fmt: skip


@settings(deadline=None)
@given(costs, st.integers(1, 500), st.floats(0.1, 100), st.integers(0, 1000))
def test_a_cost_is_its_formula(cost, n, D, U):
    c = asdict(cost)
    each = (
        c["per_utterance"]
        + c["per_second"] * D
        + c["per_token"] * U
        + c["per_second2"] * D**2
        + c["per_pair"] * D * U
    )
    assert cost(n, D, U) == pytest.approx(c["per_batch"] + n * each, rel=1e-12)
    many = cost(np.array([n, 2 * n]), np.array([D, D]), np.array([U, U]))
    assert many == pytest.approx([cost(n, D, U), cost(2 * n, D, U)])


@settings(deadline=None)
@given(costs, st.floats(1, 50), st.floats(1, 300))
def test_slopes_are_the_differences_of_the_cost(cost, D, U):
    of_second = (cost(1, D + 1e-3, U) - cost(1, D - 1e-3, U)) / 2e-3
    of_token = (cost(1, D, U + 1e-3) - cost(1, D, U - 1e-3)) / 2e-3
    assert cost.slopes(D, U) == pytest.approx((of_second, of_token), rel=1e-4, abs=1e-6)


def test_formulas_name_their_terms():
    assert CANARY_COMPUTE.formula == "n (7.5 D + 0.4 U) GMAC"
    assert linear().formula == "n (1 D) padded s"
    assert attention(quadratic=20).formula == "n (1 D + 0.05 D²) padded s"
    assert (
        Cost(
            name="c", unit="u", source="", per_batch=3, per_utterance=2, per_pair=0.5
        ).formula
        == "3 + n (2 + 0.5 D·U) u"
    )
    assert Cost(name="c", unit="u", source="").formula == "n (0) u"


def test_what_the_named_costs_say_holds():
    assert attention(quadratic=15)(1, 15, 0) == 2 * 15  # both terms weigh the same
    parts = joint_bytes("numba", B=3, T=25, U1=8, V=1025, D=0).parts  # 2 s
    assert (
        transducer_joint()(3, 2.0, 7)
        == 2 * parts["logits"]
        == 2 * 3 * 25 * 8 * 1025 * 4
    )
    # cells of the profile that NeMo's documentation prints: seconds, tokens, batch size
    assert CANARY_MEMORY(1, 40.0, 480) == pytest.approx(1 / 21, rel=0.07)


@settings(deadline=None)
@given(costs, st.floats(0.1, 1e5), st.floats(0.1, 40), st.integers(0, 300))
def test_the_largest_batch_fits_and_one_more_does_not(cost, most, D, U):
    limit = Limit(cost, most)
    n = int(limit.largest(D, U))
    assert n == 0 or limit.share(n, D, U) <= 1
    assert n >= 2**31 or limit.share(n + 1, D, U) > 1


@pytest.mark.parametrize("D", [0.1, 0.3, 0.7, 1.1, 12.34, 1 / 3])
@pytest.mark.parametrize("n", [1, 3, 7, 49, 1000])
def test_a_limit_that_is_met_exactly_is_met(D, n):
    assert at_most_seconds(n * D).largest(D, 0) == n
    assert at_most_seconds(np.nextafter(n * D, 0)).largest(D, 0) == n - 1
    assert at_most_utterances(n).largest(
        np.array([D, 40.0]), np.array([0, 999])
    ).tolist() == [n, n]


def test_what_a_batch_costs_for_itself_leaves_less_room():
    limit = Limit(Cost(name="c", unit="u", source="", per_batch=6, per_second=1), 10)
    assert limit.largest(np.array([1.0, 2.0, 4.0, 5.0]), 0).tolist() == [4, 2, 1, 0]
    assert (
        Limit(Cost(name="c", unit="u", source="", per_batch=11), 10).largest(1.0, 0)
        == 0
    )
    assert (
        Limit(Cost(name="c", unit="u", source="", per_batch=10), 10).largest(1.0, 0)
        > 2**30
    )  # each costs nothing
    assert (
        Limit(Cost(name="c", unit="u", source="", per_second=1), 10).largest(1.0, 2**62)
        == 10
    )  # ENDLESS tokens


def test_the_account_of_batches_worked_out_by_hand():
    cost = Cost(name="c", unit="u", source="", per_batch=1, per_second=2, per_token=1)
    batches = [([1.0, 3.0], [2, 4]), ([2.0], [5]), ([4.0, 4.0, 2.0], [1, 1, 4])]
    account = padding_account(batches, cost=cost, limit=at_most_seconds(10), ranks=2)
    # padded: 1 + 2 (6 + 4) = 21, 1 + 4 + 5 = 10 | 1 + 3 (8 + 4) = 37, nothing; useful: (4 + 10) + 9 + (9 + 9 + 8)
    assert (account.batches, account.steps, account.utterances, account.batch_size) == (
        3,
        2,
        6,
        2.0,
    )
    assert account.hours == pytest.approx(16 / 3600)
    assert account.audio_padding == pytest.approx(1 - 16 / (6 + 2 + 12))
    assert account.token_padding == pytest.approx(1 - 17 / (8 + 5 + 12))
    assert account.lattice_padding == pytest.approx(
        1 - (2 + 12 + 10 + 4 + 4 + 8) / (24 + 10 + 48)
    )
    assert account.compute_padding == pytest.approx(1 - 49 / (20 + 9 + 36))
    assert account.memory == pytest.approx(
        (0.6 + 0.2 + 1.2) / 3
    ) and account.memory_max == pytest.approx(1.2)
    assert account.straggler == pytest.approx(1 - (21 + 10 + 37) / (2 * (21 + 37)))
    assert account.utilisation == pytest.approx(49 / (2 * (21 + 37)))


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 5))
def test_equal_lengths_pad_nothing_and_only_missing_batches_wait(sizes, ranks):
    batches = [(np.full(4, 2.5), np.full(4, 6))] * len(sizes)
    account = padding_account(batches, cost=linear(), ranks=ranks)
    assert (
        account.audio_padding
        == account.token_padding
        == account.lattice_padding
        == account.compute_padding
        == 0
    )
    assert account.memory is None and account.memory_max is None
    steps = -(-len(sizes) // ranks)
    assert (
        account.utilisation
        == pytest.approx(len(sizes) / (steps * ranks))
        == 1 - account.straggler
    )


def test_tokens_that_nobody_knows_are_not_padded():
    account = padding_account(
        [([1.0, 2.0], [0, 0])], cost=CANARY_COMPUTE, limit=Limit(CANARY_MEMORY, 1.0)
    )
    assert (
        account.token_padding == account.lattice_padding == 0
        and account.audio_padding == 0.25
    )


@pytest.mark.parametrize("call, said", [
    (lambda: Cost(name="c", unit="u", source="", per_token=-1.0), r"per_token: expected not below 0, got -1.0"),
    (lambda: Cost(name="c", unit="u", source="", per_pair=float("nan")), "per_pair: expected a finite number, got nan"),
    (lambda: Cost(name="c", unit="u", source="", per_second="a"), "per_second: expected a finite number, got 'a'"),
    (lambda: Limit(linear(), 0), "most: expected above 0, got 0"),
    (lambda: attention(quadratic=0), "quadratic: expected seconds above 0"),
    (lambda: padding_account([], cost=linear()), "batches: expected at least one"),
    (lambda: padding_account([([1.0], [1])], cost=linear(), ranks=0), "ranks, phases: expected whole numbers of at least 1"),
    (lambda: padding_account([([1.0, 2.0], [1])], cost=linear()), "batches: expected seconds above 0 and tokens of each utterance"),
    (lambda: padding_account([([-1.0, 2.0], [1, 1])], cost=linear()), "batches: expected seconds above 0 and tokens of each utterance"),
    (lambda: padding_account([([2.0, float("nan")], [1, 1])], cost=linear()), "batches: expected seconds above 0 and tokens of each utterance"),
    (lambda: padding_account([([2.0, 2.0], [1, -1])], cost=linear()), "batches: expected seconds above 0 and tokens of each utterance"),
    (lambda: padding_account([([], [])], cost=linear()), "batches: expected seconds above 0 and tokens of each utterance"),
])  # fmt: skip
def test_accounts_that_cannot_be_are_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
