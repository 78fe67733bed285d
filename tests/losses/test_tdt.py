"""The TDT loss: published values, brute force, its limits, invariances, agreement with the float64 reference."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asrkit.losses import rnnt_loss, tdt_loss
from asrkit.losses.tdt import IMPLS

EXACT = ["reference", "wavefront"]
ALL = [*EXACT, "numba_cpu"]
SETS = [(1,), (0, 1), (0, 1, 2), (2, 1), (3, 0, 1, 4), (0, 1, 2, 3, 4), (2, 3), (5, 1)]


def precision(impl):
    return torch.float32 if impl == "numba_cpu" else torch.float64


def lattice(seed, B, T, U, V, n, dtype=torch.float64, blank=-1):
    """Random (logits, targets, logit_lengths, target_lengths); one utterance at least is as long as the tensors."""
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(B, T, U + 1, V + n, generator=g, dtype=torch.float64)).to(
        dtype
    )
    targets = torch.randint(0, V - 1, (B, U), generator=g)
    targets += (targets >= blank % V).long()
    frames, labels = torch.full((B,), T), torch.full((B,), U)
    frames[1:] = torch.randint(1, T + 1, (B - 1,), generator=g)
    labels[:-1] = torch.randint(0, U + 1, (B - 1,), generator=g)
    return logits, targets, frames, labels


def one(logits, targets, T, **options):
    targets = torch.tensor([targets], dtype=torch.long)
    return tdt_loss(
        logits, targets, torch.tensor([T]), torch.tensor([targets.shape[1]]), **options
    ).item()


def value_and_gradient(logits, *rest, weight=None, **options):
    logits = logits.clone().requires_grad_()
    costs = tdt_loss(logits, *rest, reduction="none", **options)
    weight = torch.ones_like(costs) if weight is None else weight.to(costs)
    return costs.detach(), torch.autograd.grad(costs, logits, weight)[0]


@pytest.mark.parametrize("impl", ALL)
def test_published_cases(impl):
    sine = torch.arange(4.0 * 3 * 8).sin().to(precision(impl)).view(1, 4, 3, 8)
    near = {"abs": 1e-9 if impl in EXACT else 1e-6}
    assert one(
        torch.zeros(1, 3, 2, 7), [0], 3, durations=(0, 1, 2), sigma=0.05, impl=impl
    ) == pytest.approx(4.1557388251, abs=1e-6)
    assert one(
        torch.zeros(1, 3, 2, 5), [0], 3, durations=[1], impl=impl
    ) == pytest.approx(3.4657359028, abs=1e-6)
    assert one(
        sine, [1, 2], 4, blank=4, durations=(0, 1, 2), sigma=0.05, impl=impl
    ) == pytest.approx(7.0199886219, **near)
    assert one(
        sine, [1, 2], 4, blank=4, durations=(1, 2, 3), impl=impl
    ) == pytest.approx(9.3554420589, **near)


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize("durations", SETS)
@pytest.mark.parametrize(("T", "U"), [(1, 0), (1, 2), (4, 0), (3, 2), (5, 3)])
def test_the_loss_is_the_sum_over_all_paths(impl, durations, T, U):
    V, sigma = 4, 0.1
    logits, targets, *lengths = lattice(3, 1, T, U, V, len(durations), precision(impl))
    tokens, tail = logits[0].double().split([V, len(durations)], -1)
    tokens, tail, paths = (
        (tokens.log_softmax(-1) - sigma).tolist(),
        tail.log_softmax(-1).tolist(),
        [],
    )

    def walk(t, u, score):
        if (t, u) == (T, U):
            paths.append(score)
        for i, d in enumerate(durations if t < T else ()):
            if d > 0 and t + d <= T:
                walk(t + d, u, score + tokens[t][u][-1] + tail[t][u][i])
            if u < U and t + d < T:
                walk(t + d, u + 1, score + tokens[t][u][targets[0, u]] + tail[t][u][i])

    walk(0, 0, 0.0)
    wanted = (
        -torch.tensor(paths, dtype=torch.float64).logsumexp(0).item()
        if paths
        else math.inf
    )
    got = tdt_loss(
        logits, targets, *lengths, durations=durations, sigma=sigma, impl=impl
    ).item()
    assert got == pytest.approx(wanted, rel=1e-12 if impl in EXACT else 1e-6)


@pytest.mark.parametrize("impl", ALL)
def test_one_duration_of_one_frame_is_a_choice_of_frames(impl):
    # uniform logits: every path has T arcs, U of the first T - 1 are labels
    for T, U in [(1, 0), (6, 0), (6, 3), (9, 8)]:
        wanted = T * math.log(5) - math.log(math.comb(T - 1, U))
        assert one(
            torch.zeros(1, T, U + 1, 6), [0] * U, T, durations=(1,), impl=impl
        ) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("impl", ALL)
def test_certain_durations_of_no_frame_for_labels_and_one_for_blank_leave_one_path(
    impl,
):
    # a duration belongs to its node, not to a token: 0 wherever a label is left, 1 at the last row
    T, U, V = 5, 3, 4
    logits, targets, *lengths = lattice(4, 1, T, U, V, 2, precision(impl))
    logits[..., V:] = torch.tensor([60.0, -60.0])
    logits[:, :, U, V:] = torch.tensor([-60.0, 60.0])
    logp = logits[0, ..., :V].double().log_softmax(-1)
    wanted = -sum(logp[0, u, targets[0, u]] for u in range(U)) - logp[:, U, -1].sum()
    assert tdt_loss(
        logits, targets, *lengths, durations=(0, 1), impl=impl
    ).item() == pytest.approx(wanted.item(), rel=1e-6)


def test_reference_gradient_is_the_numerical_one():
    logits, *rest = lattice(1, 2, 3, 1, 2, 3)
    for durations in ((0, 1, 2), (1, 3, 2)):
        options = {
            "durations": durations,
            "sigma": 0.1,
            "reduction": "none",
            "impl": "reference",
        }
        assert torch.autograd.gradcheck(
            lambda x, o=options: tdt_loss(x, *rest, **o),
            logits.clone().requires_grad_(),
        )


@pytest.mark.parametrize("impl", EXACT)
def test_fastemit_scales_the_gradient_of_label_arcs_alone(impl):
    logits, *rest = lattice(12, 2, 5, 3, 4, 3)
    options = {"durations": (0, 1, 2), "impl": impl}
    cost, plain = value_and_gradient(logits, *rest, **options)
    same, scaled = value_and_gradient(logits, *rest, fastemit_lambda=0.5, **options)
    _, more = value_and_gradient(logits, *rest, fastemit_lambda=1.0, **options)
    torch.testing.assert_close(same, cost, rtol=0, atol=0)
    torch.testing.assert_close(more - scaled, scaled - plain)  # linear in lambda
    extra = scaled - plain
    for b, U in enumerate(rest[2].tolist()):
        assert (extra[b].abs().sum() > 0.01) == (U > 0)
        assert extra[b, :, U:].abs().sum() < 1e-12  # no label is left there


durations_sets = st.lists(
    st.integers(0, 6), min_size=1, max_size=5, unique=True
).filter(any)
cases = given(
    seed=st.integers(0, 10**6), B=st.integers(1, 4), T=st.integers(1, 8), U=st.integers(0, 5), V=st.integers(2, 6),
    durations=durations_sets, blank=st.sampled_from([-1, 0, 1]), clamp=st.sampled_from([-1.0, 0.05]),
    sigma=st.sampled_from([0.0, 0.05]), fastemit_lambda=st.sampled_from([0.0, 0.3]),
)  # fmt: skip


def truth_and_rest(seed, B, T, U, V, durations, dtype, **options):
    logits, *rest = lattice(seed, B, T, U, V, len(durations), dtype, options["blank"])
    options |= {"durations": durations, "weight": torch.linspace(-1, 2, B)}
    return (
        value_and_gradient(logits.double(), *rest, impl="reference", **options),
        (logits, *rest),
        options,
    )


@settings(max_examples=200)
@cases
def test_wavefront_agrees_with_the_reference(**case):
    truth, arguments, options = truth_and_rest(dtype=torch.float64, **case)
    for wanted, got in zip(
        truth, value_and_gradient(*arguments, impl="wavefront", **options), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@settings(max_examples=200)
@cases
def test_numba_cpu_agrees_with_the_reference_to_the_rounding_of_float32_and_of_the_gradient(
    **case,
):
    dtype = (torch.float32, torch.float16, torch.bfloat16)[case["seed"] % 3]
    truth, arguments, options = truth_and_rest(dtype=dtype, **case)
    cost, grad = value_and_gradient(
        *arguments, impl="numba_cpu", overwrite_logits=case["seed"] % 2 == 0, **options
    )
    assert (cost.dtype, grad.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(cost.double(), truth[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(
        grad.double(), truth[1].double(), rtol=torch.finfo(dtype).eps, atol=3e-6
    )


@pytest.mark.parametrize("impl", ["wavefront", "numba_cpu"])
@pytest.mark.parametrize(
    "shape", [(1, 300, 3, 5), (1, 63, 64, 9), (2, 5, 0, 3), (3, 1, 9, 7)]
)
def test_long_and_thin_lattices_agree(impl, shape):
    logits, *rest = lattice(5, *shape, 5, precision(impl))
    truth = value_and_gradient(logits.double(), *rest, impl="reference")
    tight = (
        {"rtol": 1e-11, "atol": 1e-11}
        if impl in EXACT
        else {"rtol": 1e-5, "atol": 3e-6}
    )
    for wanted, got in zip(
        truth, value_and_gradient(logits, *rest, impl=impl), strict=True
    ):
        torch.testing.assert_close(got.double(), wanted, **tight)


@pytest.mark.parametrize("impl", ALL)
def test_what_lies_in_the_padding_cannot_matter(impl, expect_padding_cannot_matter):
    expect_padding_cannot_matter(
        partial(value_and_gradient, impl=impl),
        *lattice(7, 4, 6, 4, 5, 5, torch.float32),
    )


@pytest.mark.parametrize("impl", ALL)
def test_an_utterance_without_a_path_costs_infinity_has_no_gradient_and_spares_the_others(
    impl,
):
    logits, targets, *_ = lattice(8, 2, 4, 1, 3, 1, torch.float32)
    rest = targets, torch.tensor([4, 3]), torch.tensor([1, 1])
    cost, grad = value_and_gradient(logits, *rest, durations=(2,), impl=impl)
    assert cost[0] < math.inf
    assert cost[1] == math.inf
    assert grad[0].abs().sum() > 0.1
    assert (grad[1] == 0).all()
    for reduction in ("mean", "sum"):
        assert (
            tdt_loss(logits, *rest, reduction=reduction, durations=(2,), impl=impl)
            == math.inf
        )
    assert one(logits[:1, :1, :1], [], 1, durations=(2, 10**9), impl=impl) == math.inf


@pytest.mark.parametrize("impl", ALL)
def test_not_a_number_is_never_hidden(impl):
    logits, *rest = lattice(9, 2, 4, 2, 3, 5, torch.float32)
    rest = rest[0], torch.tensor([4, 4]), torch.tensor([2, 2])
    for column in (0, 2, 3, 7):
        broken = logits.clone()
        broken[1, 1, 1, column] = math.nan
        cost, grad = value_and_gradient(broken, *rest, impl=impl)
        assert cost[0].isfinite()
        assert cost[1].isnan()
        assert grad[0].isfinite().all()
        assert grad[1].isnan().any()


@pytest.mark.parametrize("impl", ALL)
def test_the_gradient_sums_to_zero_over_tokens_and_over_durations(impl):
    _, grad = value_and_gradient(
        *lattice(10, 3, 8, 5, 6, 5, precision(impl)), impl=impl, fastemit_lambda=0.3
    )
    tiny = 1e-14 if impl in EXACT else 1e-6
    assert grad[..., :6].sum(-1).abs().max() < tiny
    assert grad[..., 6:].sum(-1).abs().max() < tiny


@pytest.mark.parametrize("impl", ALL)
def test_the_same_graph_gives_its_gradient_twice_and_no_second_derivative(impl):
    logits, *rest = lattice(11, 2, 5, 3, 4, 5, torch.float32)
    logits.requires_grad_()
    cost = tdt_loss(logits, *rest, impl=impl)
    first, second = (
        torch.autograd.grad(cost, logits, retain_graph=True)[0] for _ in range(2)
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(cost, logits, create_graph=True)


@pytest.mark.parametrize("impl", ALL)
def test_omega_of_one_is_the_transducer_loss_of_the_token_logits(impl):
    logits, *rest = lattice(13, 3, 6, 3, 4, 5, torch.float32)
    cost, grad = value_and_gradient(
        logits, *rest, omega=1.0, sigma=0.3, fastemit_lambda=0.2, clamp=0.3, impl=impl
    )
    tokens = logits[..., :4].clone().requires_grad_()
    wanted = rnnt_loss(
        tokens, *rest, clamp=0.3, reduction="none", fastemit_lambda=0.2, impl=impl
    )
    torch.testing.assert_close(cost, wanted.detach(), rtol=0, atol=0)
    torch.testing.assert_close(
        grad[..., :4], torch.autograd.grad(wanted.sum(), tokens)[0], rtol=0, atol=0
    )
    assert (grad[..., 4:] == 0).all()


def test_omega_is_drawn_once_a_call_as_the_seed_of_torch_rules_and_zero_draws_nothing():
    logits, *rest = lattice(14, 2, 4, 2, 3, 5, torch.float32)
    tdt, rnnt = tdt_loss(logits, *rest).item(), rnnt_loss(logits[..., :3], *rest).item()
    torch.manual_seed(5)
    costs = [tdt_loss(logits, *rest, omega=0.25).item() for _ in range(60)]
    torch.manual_seed(5)
    drawn = [rnnt if torch.rand(()) < 0.25 else tdt for _ in range(60)]
    assert costs == drawn
    assert 5 < drawn.count(rnnt) < 25
    before = torch.get_rng_state()
    tdt_loss(logits, *rest)
    assert torch.equal(torch.get_rng_state(), before)


GOOD = {
    "logits": torch.zeros(2, 4, 3, 7), "targets": torch.tensor([[0, 1], [2, 3]]), "logit_lengths": torch.tensor([4, 3]),
    "target_lengths": torch.tensor([2, 1]), "durations": (0, 1),
}  # fmt: skip
ADVANCE = "Blank must be able to advance."


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (
            {"durations": (0,)},
            f"durations: expected distinct frame counts, one of them above 0, got (0,). {ADVANCE}",
        ),
        (
            {"durations": range(1, 8)},
            f"durations: expected distinct frame counts, one of them above 0, got range(1, 8). {ADVANCE}",
        ),
        (
            {"durations": tuple(range(7))},
            "logits: expected token logits before the 7 of the durations, got 7 logits in all.",
        ),
        (
            {"sigma": -0.1},
            "sigma: expected a finite number of nats, at least 0, got -0.1.",
        ),
        ({"omega": 1.5}, "omega: expected a probability, got 1.5."),
        (
            {"targets": torch.tensor([[0, 1], [4, 3]])},
            "targets: expected labels 0..4 but blank=4, got 4 in utterance 1.",
        ),
        (
            {"impl": "torchaudio"},
            f"impl: expected one of 'auto', {', '.join(map(repr, IMPLS))}, got 'torchaudio'.",
        ),
    ],
)
def test_bad_input_is_one_line_that_names_argument_wanted_and_got(change, wanted):
    assert tdt_loss(**GOOD).isfinite()
    with pytest.raises(ValueError) as error:
        tdt_loss(**{**GOOD, **change})
    assert str(error.value) == wanted
