from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
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
from asrkit.data.batching.padding import TERMS
from asrkit.workbench.cost import joint_bytes


def cost_of(**terms):
    return Cost(name="c", unit="u", source="a test", **terms)


coefficients = st.floats(0, 10).map(lambda value: round(value, 3))
costs = st.builds(
    cost_of,
    **dict.fromkeys(("per_batch", *TERMS), coefficients),
)


@given(costs, st.integers(1, 500), st.floats(0.1, 100), st.integers(0, 1000))
def test_a_cost_is_its_formula(cost, n, D, U):
    each = cost.per_utterance + cost.per_second * D + cost.per_token * U
    each += cost.per_second2 * D**2 + cost.per_pair * D * U
    assert cost(n, D, U) == pytest.approx(cost.per_batch + n * each, rel=1e-12)
    many = cost(np.array([n, 2 * n]), np.array([D, D]), np.array([U, U]))
    assert many == pytest.approx([cost(n, D, U), cost(2 * n, D, U)])


@given(costs, st.floats(1, 50), st.floats(1, 300))
def test_slopes_are_the_differences_of_the_cost(cost, D, U):
    of_second = (cost(1, D + 1e-3, U) - cost(1, D - 1e-3, U)) / 2e-3
    of_token = (cost(1, D, U + 1e-3) - cost(1, D, U - 1e-3)) / 2e-3
    assert cost.slopes(D, U) == pytest.approx((of_second, of_token), rel=1e-4, abs=1e-6)


def test_formulas_name_their_terms():
    assert CANARY_COMPUTE.formula == "n (7.5 D + 0.4 U) GMAC"
    assert attention(quadratic=20).formula == "n (1 D + 0.05 D²) padded s"
    many = cost_of(per_batch=3, per_utterance=2, per_pair=0.5)
    assert many.formula == "3 + n (2 + 0.5 D·U) u"
    assert cost_of().formula == "n (0) u"


def test_the_named_costs_match_their_sources():
    assert attention(quadratic=15)(1, 15, 0) == 2 * 15  # both terms are equal
    parts = joint_bytes("numba", B=3, T=25, U1=8, V=1025, D=0).parts  # 2 s
    bytes_of_joint = transducer_joint()(3, 2.0, 7)
    assert bytes_of_joint == 2 * parts["logits"] == 2 * 3 * 25 * 8 * 1025 * 4
    # cells of the profile that NeMo's documentation prints: seconds, tokens, batch size
    assert CANARY_MEMORY(1, 40.0, 480) == pytest.approx(1 / 21, rel=0.07)


@given(costs, st.floats(0.1, 1e5), st.floats(0.1, 40), st.integers(0, 300))
def test_the_largest_batch_fits_and_one_more_does_not(cost, most, D, U):
    limit = Limit(cost, most)
    n = int(limit.largest(D, U))
    assert n == 0 or limit.share(n, D, U) <= 1
    assert n >= 2**31 or limit.share(n + 1, D, U) > 1


@pytest.mark.parametrize("D", [0.1, 0.3, 0.7, 1.1, 12.34, 1 / 3])
@pytest.mark.parametrize("n", [1, 3, 7, 49, 1000])
def test_a_batch_at_the_limit_fits(D, n):
    assert at_most_seconds(n * D).largest(D, 0) == n
    assert at_most_seconds(np.nextafter(n * D, 0)).largest(D, 0) == n - 1
    many = at_most_utterances(n).largest(np.array([D, 40.0]), np.array([0, 999]))
    assert many.tolist() == [n, n]


@pytest.mark.parametrize(
    "terms, seconds, tokens, sizes",
    [
        ({"per_batch": 6, "per_second": 1}, [1, 2, 4, 5], 0, [4, 2, 1, 0]),
        ({"per_batch": 11}, [1], 0, [0]),
        ({"per_batch": 10}, [1], 0, [2**31]),  # utterances without cost
        ({"per_second": 1}, [1], 2**62, [10]),  # ENDLESS tokens
    ],
)
def test_the_fixed_cost_of_a_batch_leaves_less_room(terms, seconds, tokens, sizes):
    limit = Limit(cost_of(**terms), 10)
    assert limit.largest(np.array(seconds, dtype=float), tokens).tolist() == sizes


def test_an_account_computed_by_hand():
    cost = cost_of(per_batch=1, per_second=2, per_token=1)
    batches = [([1.0, 3.0], [2, 4]), ([2.0], [5]), ([4.0, 4.0, 2.0], [1, 1, 4])]
    account = padding_account(batches, cost=cost, limit=at_most_seconds(10), ranks=2)
    # padded: 1 + 2 (6 + 4) = 21, 1 + 4 + 5 = 10 | 1 + 3 (8 + 4) = 37, nothing; useful: (4 + 10) + 9 + (9 + 9 + 8)
    wanted = {
        "batches": 3,
        "steps": 2,
        "utterances": 6,
        "batch_size": 2.0,
        "hours": 16 / 3600,
        "audio_padding": 1 - 16 / (6 + 2 + 12),
        "token_padding": 1 - 17 / (8 + 5 + 12),
        "lattice_padding": 1 - (2 + 12 + 10 + 4 + 4 + 8) / (24 + 10 + 48),
        "compute_padding": 1 - 49 / (20 + 9 + 36),
        "memory": (0.6 + 0.2 + 1.2) / 3,
        "memory_max": 1.2,
        "straggler": 1 - (21 + 10 + 37) / (2 * (21 + 37)),
        "utilisation": 49 / (2 * (21 + 37)),
    }
    assert asdict(account) == pytest.approx(wanted)


SECONDS = "batches: expected seconds above 0 and tokens of each utterance"


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: cost_of(per_token=-1.0), r"per_token: expected not below 0, got -1.0"),
        (
            lambda: cost_of(per_pair=float("nan")),
            "per_pair: expected a finite number, got nan",
        ),
        (lambda: Limit(linear(), 0), "most: expected above 0, got 0"),
        (lambda: padding_account([], cost=linear()), "batches: expected at least one"),
        (
            lambda: padding_account([([1.0], [1])], cost=linear(), ranks=0),
            r"ranks, phases: expected whole numbers of at least 1, got \(0, 1\)",
        ),
        (
            lambda: padding_account([([1.0], [1])], cost=attention(), phases=2),
            "cost: expected one linear in seconds, .* Only recurrent layers run in phases",
        ),
        (lambda: padding_account([([1.0, 2.0], [1])], cost=linear()), SECONDS),
        (
            lambda: padding_account([([2.0, float("nan")], [1, 1])], cost=linear()),
            SECONDS,
        ),
    ],
)
def test_invalid_accounts_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
