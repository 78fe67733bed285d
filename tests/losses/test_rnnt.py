"""The transducer loss: published values, closed forms, brute force, invariances, agreement with the float64 reference."""

import inspect
import math
from functools import partial
from importlib import import_module
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asrkit.losses import rnnt_loss
from asrkit.losses.choice import fastest
from asrkit.losses.reference import backward_variables, forward_variables
from asrkit.losses.rnnt import IMPLS

EXACT = ["reference", "wavefront"]
OURS = [*EXACT, "numba_cpu"]
ALL = [*OURS, "torchaudio"]
FAST = ["wavefront", "numba_cpu"]


def precision(impl):
    return torch.float64 if impl in EXACT else torch.float32


def close(impl, exact=1e-11, single=1e-5):
    """Tolerances of a comparison with float64: what its own arithmetic grants an implementation."""
    return {
        "rtol": exact if impl in EXACT else single,
        "atol": exact if impl in EXACT else single,
    }


def lattice(seed, B, T, U, V, dtype=torch.float64, ragged=True, blank=-1):
    """Random (logits, targets, logit_lengths, target_lengths); one utterance at least is as long as the tensors."""
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(B, T, U + 1, V, generator=g, dtype=torch.float64)).to(
        dtype
    )
    targets = torch.randint(0, V - 1, (B, U), generator=g)
    targets += (targets >= blank % V).long()
    frames, labels = torch.full((B,), T), torch.full((B,), U)
    if ragged:
        frames[1:] = torch.randint(1, T + 1, (B - 1,), generator=g)
        labels[:-1] = torch.randint(0, U + 1, (B - 1,), generator=g)
    return logits, targets, frames, labels


def whole(logits, targets):
    """Arguments of logits (T, U1, V) or (B, T, U1, V) without padding; `targets` are lists."""
    logits = logits if logits.dim() == 4 else logits[None]
    B, T, U1, _ = logits.shape
    return (
        logits,
        torch.tensor(targets, dtype=torch.long).view(B, U1 - 1),
        torch.full((B,), T),
        torch.full((B,), U1 - 1),
    )


def value_and_gradient(logits, *rest, weight=None, **options):
    logits = logits.clone().requires_grad_()
    costs = rnnt_loss(logits, *rest, reduction="none", **options)
    weight = torch.ones_like(costs) if weight is None else weight.to(costs)
    return costs.detach(), torch.autograd.grad(costs, logits, weight)[0]


SMALL = """.1 .6 .1 .1 .1  .1 .1 .6 .1 .1  .1 .1 .2 .8 .1  .1 .6 .1 .1 .1  .1 .1 .2 .1 .1  .7 .1 .2 .1 .1"""
SMALL_GRADIENT = """
    -.1311669 -.3999268 .1770312 .1770312 .1770312    -.1857275 .1224705 -.1816841 .1224705 .1224705
    -.3209125 .0626914 .0692847 .1262450 .0626914    .0545607 -.2182427 .0545607 .0545607 .0545607
    .1207396 .1207396 -.4829583 .1207396 .1207396    -.6925882 .1687112 .1864547 .1687112 .1687112"""
SINE = (
    torch.arange(96.0).sin().view(4, 3, 8).numpy()
)  # the published values took a float32 sine
PUBLISHED = [  # logits, targets, blank, losses
    (np.random.RandomState(0).randn(1, 4, 3, 3), [[1, 2]], 0, [6.0918525224]),
    (
        np.random.RandomState(0).randn(4, 8, 11, 5).astype(np.float32),
        [[1, 2, 4, 3, 2, 2, 1, 1, 1, 1],
         [3, 2, 2, 3, 4, 1, 1, 1, 1, 1], [4, 4, 1, 2, 1, 3, 4, 3, 1, 2], [1, 1, 2, 1, 2, 3, 3, 1, 1, 1]],
        0, [22.1381174048, 21.1284331903, 21.2972965017, 18.1578732138],
    ),
    (SINE, [[1, 2]], 0, [9.2287629293]),
    (SINE, [[1, 2]], 7, [8.3976941561]),
    (
        np.array([[0, 1, 2], [0, 0, 0], [0, 2, 4], [0, 3, 3]])[:, None] + np.array([[0, 0, 1], [0, 1, 1], [1, 0, 1], [2, 2, 0]]),
        [[0, 1, 0]], 2, [7.5040133560],
    ),
]  # fmt: skip


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize("case", range(len(PUBLISHED)))
def test_published_losses(case, impl):
    logits, targets, blank, wanted = PUBLISHED[case]
    got = rnnt_loss(
        *whole(torch.from_numpy(logits).to(precision(impl)), targets),
        blank,
        reduction="none",
        impl=impl,
    )
    assert got.tolist() == pytest.approx(wanted, abs=2e-9 if impl in EXACT else 2e-5)


@pytest.mark.parametrize("impl", ALL)
def test_small_case_of_warp_transducer_has_the_published_loss_and_gradient(impl):
    logits, gradient = (
        torch.tensor([float(x) for x in text.split()]).view(1, 2, 3, 5)
        for text in (SMALL, SMALL_GRADIENT)
    )
    cost, grad = value_and_gradient(*whole(logits, [1, 2]), blank=0, impl=impl)
    assert cost.item() == pytest.approx(4.4956667662, abs=1e-6)
    torch.testing.assert_close(grad, gradient, rtol=0, atol=3e-7)
    for last in (4, -1):
        assert rnnt_loss(
            *whole(logits, [1, 2]), blank=last, impl=impl
        ).item() == pytest.approx(5.0956667527, abs=1e-6)


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize(
    ("T", "U", "V"),
    [(1, 0, 2), (1, 3, 4), (10, 2, 4), (5, 0, 3), (63, 31, 28), (200, 7, 2)],
)
def test_uniform_logits_count_alignments(impl, T, U, V):
    cost = rnnt_loss(*whole(torch.full((T, U + 1, V), 0.1), [0] * U), impl=impl)
    assert cost.item() == pytest.approx(
        (T + U) * math.log(V) - math.log(math.comb(T + U - 1, U)), rel=3e-6
    )


@pytest.mark.parametrize("impl", OURS)
@pytest.mark.parametrize(("T", "U"), [(1, 0), (1, 2), (3, 0), (2, 1), (4, 3), (5, 2)])
def test_the_loss_is_the_sum_over_all_alignments(impl, T, U):
    logits, targets, *lengths = lattice(3, 1, T, U, 4, precision(impl))
    logp, paths = logits[0].double().log_softmax(-1), []
    for emissions in combinations(
        range(T + U - 1), U
    ):  # the last arc is always a blank
        t = u = 0
        score = 0.0
        for step in range(T + U):
            label = step in emissions
            score += logp[t, u, targets[0, u] if label else -1].item()
            t, u = (t, u + 1) if label else (t + 1, u)
        paths.append(score)
    assert len(paths) == math.comb(T + U - 1, U)
    wanted = -torch.tensor(paths, dtype=torch.float64).logsumexp(0).item()
    assert rnnt_loss(logits, targets, *lengths, impl=impl).item() == pytest.approx(
        wanted, rel=1e-13 if impl in EXACT else 1e-6
    )


def test_every_diagonal_of_the_lattice_holds_the_whole_likelihood():
    rng = np.random.default_rng(0)
    arcs = rng.normal(-2, 1, (5, 4)).tolist(), rng.normal(-2, 1, (5, 3)).tolist()
    through = np.add(forward_variables(*arcs), backward_variables(*arcs))
    for k in range(5 + 4 - 1):
        here = np.logaddexp.reduce(
            [through[t, k - t] for t in range(5) if 0 <= k - t < 4]
        )
        assert here == pytest.approx(through[0, 0], abs=1e-12)


def test_reference_gradient_is_the_numerical_one():
    logits, *rest = lattice(1, 2, 3, 2, 3)
    for fused in (True, False):
        assert torch.autograd.gradcheck(
            lambda x, fused=fused: rnnt_loss(
                x, *rest, reduction="none", fused_log_softmax=fused, impl="reference"
            ),
            logits.clone().requires_grad_(),
        )


def test_on_a_lattice_of_real_size_the_error_is_at_most_twice_torchaudios():
    logits, *rest = lattice(20, 2, 200, 50, 32, torch.float32, ragged=False)
    truth = value_and_gradient(logits.double(), *rest, impl="wavefront")
    peer = value_and_gradient(logits, *rest, impl="torchaudio")
    for impl in FAST:
        for wanted, theirs, got in zip(
            truth, peer, value_and_gradient(logits, *rest, impl=impl), strict=True
        ):
            assert (got - wanted).abs().max() <= 2 * (
                theirs - wanted
            ).abs().max() + 1e-12


CASES = given(
    seed=st.integers(0, 10**6), B=st.integers(1, 4), T=st.integers(1, 7), U=st.integers(0, 8), V=st.integers(2, 6),
    blank=st.sampled_from([-1, 0, 1]), fused=st.booleans(), clamp=st.sampled_from([-1.0, 0.05]),
)  # fmt: skip


def case_and_truth(seed, B, T, U, V, blank, fused, clamp, dtype):
    logits, *rest = lattice(seed, B, T, U, V, dtype, blank=blank)
    logits = logits if fused else logits.log_softmax(-1)
    options = {
        "blank": blank,
        "clamp": clamp,
        "fused_log_softmax": fused,
        "weight": torch.linspace(-1, 2, B),
    }
    return (
        (logits, *rest),
        options,
        value_and_gradient(logits.double(), *rest, impl="reference", **options),
    )


@settings(max_examples=200)
@CASES
def test_float32_agrees_with_the_reference_as_closely_as_torchaudio_does(**case):
    arguments, options, truth = case_and_truth(dtype=torch.float32, **case)
    peer = value_and_gradient(*arguments, impl="torchaudio", **options)
    for impl in FAST:
        ours = value_and_gradient(*arguments, impl=impl, **options)
        for wanted, theirs, got, tiny in zip(
            truth, peer, ours, (1e-5, 2e-6), strict=True
        ):
            assert (got - wanted).abs().max() <= 2 * (
                theirs - wanted
            ).abs().max() + tiny


@settings(max_examples=150)
@CASES
def test_wavefront_in_float64_is_the_reference(**case):
    arguments, options, truth = case_and_truth(dtype=torch.float64, **case)
    for wanted, got in zip(
        truth, value_and_gradient(*arguments, impl="wavefront", **options), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


@settings(max_examples=150)
@CASES
def test_half_precision_gives_float32_losses_and_gradients_rounded_once(**case):
    dtype = (torch.float16, torch.bfloat16)[case["seed"] % 2]
    arguments, options, truth = case_and_truth(dtype=dtype, **case)
    for impl in FAST:
        cost, grad = value_and_gradient(*arguments, impl=impl, **options)
        assert (cost.dtype, grad.dtype) == (torch.float32, dtype)
        torch.testing.assert_close(cost.double(), truth[0], rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(
            grad.double(), truth[1], rtol=torch.finfo(dtype).eps, atol=2e-6
        )
    if dtype == torch.float16:
        peer = value_and_gradient(*arguments, impl="torchaudio", **options)[1]
        assert (grad - truth[1]).abs().max() <= 2 * (peer - truth[1]).abs().max() + 2e-6


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize(
    "shape", [(1, 1000, 3, 5), (1, 63, 64, 33), (2, 5, 0, 3), (3, 1, 9, 7)]
)
def test_long_and_thin_lattices_agree(shape, impl):
    logits, *rest = lattice(5, *shape, precision(impl))
    truth = value_and_gradient(logits.double(), *rest, impl="reference")
    for wanted, got in zip(
        truth, value_and_gradient(logits, *rest, impl=impl), strict=True
    ):
        torch.testing.assert_close(got.double(), wanted, **close(impl))


@pytest.mark.parametrize("impl", ALL)
def test_what_lies_in_the_padding_cannot_matter(impl, expect_padding_cannot_matter):
    expect_padding_cannot_matter(
        partial(value_and_gradient, impl=impl), *lattice(7, 4, 6, 4, 5, torch.float32)
    )


@pytest.mark.parametrize("impl", ALL)
def test_rows_nobody_reaches_and_the_company_of_others_cannot_matter(impl):
    logits, targets, frames, labels = lattice(8, 3, 7, 5, 4, torch.float32)
    frames, labels = frames.clamp(max=5), labels.clamp(max=3)
    costs, grads = value_and_gradient(logits, targets, frames, labels, impl=impl)
    for b in range(3):
        T, U = int(frames[b]), int(labels[b])
        alone = (
            logits[b : b + 1, :T, : U + 1],
            targets[b : b + 1, :U],
            frames[b : b + 1],
            labels[b : b + 1],
        )
        cost, grad = value_and_gradient(*alone, impl=impl)
        torch.testing.assert_close(cost[0], costs[b])
        torch.testing.assert_close(grad[0], grads[b, :T, : U + 1], rtol=1e-5, atol=1e-6)


VIEWS = {
    "tokens first": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "frames and labels swapped": lambda x: (
        x.transpose(1, 2).contiguous().transpose(1, 2)
    ),
    "every other element": lambda x: torch.stack((x, x), -1)[..., 0],
    "inside a larger tensor": lambda x: torch.nn.functional.pad(x, (2, 3, 1, 1, 2, 0))[
        :, 2:, 1:-1, 2:-3
    ],
}


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize("view", VIEWS)
def test_views_and_int32_are_as_good_as_contiguous_int64(view, impl):
    logits, targets, frames, labels = lattice(9, 2, 5, 3, 4, torch.float32)
    wanted = value_and_gradient(logits, targets, frames, labels, impl=impl)
    seen = VIEWS[view](logits)
    assert not seen.is_contiguous()
    cost = rnnt_loss(seen.requires_grad_(), torch.stack((targets, targets), -1).int()[..., 0], frames.int(), labels.int(),
                     reduction="none", impl=impl)  # fmt: skip
    torch.testing.assert_close(cost.detach(), wanted[0], rtol=0, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(cost.sum(), seen)[0], wanted[1], rtol=0, atol=0
    )


@pytest.mark.parametrize("impl", ALL)
def test_expanded_logits_collect_the_gradient_of_every_place_they_stand_for(impl):
    small = lattice(17, 1, 5, 2, 4, torch.float32)[0][:, :1].requires_grad_()
    rest = torch.tensor([[0, 1], [2, 0]]), torch.tensor([5, 3]), torch.tensor([2, 1])
    through_view = torch.autograd.grad(
        rnnt_loss(small.expand(2, 5, 3, 4), *rest, impl=impl), small
    )[0]
    through_copy = torch.autograd.grad(
        rnnt_loss(small.repeat(2, 5, 1, 1), *rest, impl=impl), small
    )[0]
    torch.testing.assert_close(through_view, through_copy)


@pytest.mark.parametrize("impl", OURS)
def test_gradient_over_tokens_sums_to_zero_at_every_node(impl):
    _, grad = value_and_gradient(
        *lattice(10, 3, 8, 5, 6, precision(impl)), impl=impl, fastemit_lambda=0.3
    )
    assert grad.sum(-1).abs().max() < (1e-14 if impl in EXACT else 1e-6)


@pytest.mark.parametrize("impl", ALL)
def test_the_same_graph_gives_its_gradient_twice_and_no_second_derivative(impl):
    logits, *rest = lattice(11, 2, 5, 3, 4, torch.float32)
    logits.requires_grad_()
    cost = rnnt_loss(logits, *rest, impl=impl)
    first, second = (
        torch.autograd.grad(cost, logits, retain_graph=True)[0] for _ in range(2)
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    if impl != "torchaudio":
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(cost, logits, create_graph=True)


@pytest.mark.parametrize("impl", OURS)
@pytest.mark.parametrize("fused", [True, False])
def test_fastemit_scales_label_arcs_alone_and_leaves_the_loss_as_it_is(impl, fused):
    logits, *rest = lattice(12, 2, 6, 4, 5, precision(impl))
    logits = logits.log_softmax(
        -1
    )  # where both views of the logits hold the same numbers
    cost, wanted = value_and_gradient(logits, *rest, impl=impl, fused_log_softmax=False)
    scaled_cost, scaled = value_and_gradient(
        logits, *rest, impl=impl, fused_log_softmax=fused, fastemit_lambda=0.25
    )
    torch.testing.assert_close(scaled_cost, cost)
    wanted[..., :-1] *= 1.25
    if fused:
        wanted -= logits.exp() * wanted.sum(-1, keepdim=True)
    torch.testing.assert_close(scaled, wanted, **close(impl))


@pytest.mark.parametrize("impl", ALL)
def test_clamp_limits_the_gradient_of_an_utterance_before_the_incoming_one(impl):
    logits, *rest = lattice(13, 2, 4, 2, 4, torch.float32)
    weight = torch.tensor([0.0, -3.0])
    _, free = value_and_gradient(logits, *rest, impl=impl)
    for clamp in (0.05, 0.0, -1, math.inf):
        _, grad = value_and_gradient(
            logits, *rest, impl=impl, clamp=clamp, weight=weight
        )
        wanted = (free.clamp(-clamp, clamp) if clamp > 0 else free) * weight[
            :, None, None, None
        ]
        torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("impl", OURS)
def test_impossible_targets_cost_infinity_and_have_no_gradient(impl):
    logits, targets, *lengths = lattice(14, 2, 4, 2, 4, precision(impl), ragged=False)
    logits[1, :, :, targets[1, 0]] = -math.inf
    cost, grad = value_and_gradient(logits, targets, *lengths, impl=impl)
    assert cost[1] == math.inf
    assert cost[0] < math.inf
    assert grad.isfinite().all()
    assert (grad[1] == 0).all()
    assert rnnt_loss(logits, targets, *lengths, impl=impl) == math.inf


@pytest.mark.parametrize("impl", OURS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_probability_makes_the_loss_not_a_number_and_spares_other_utterances(
    impl, value
):
    logits, *rest = lattice(18, 2, 3, 2, 21, precision(impl), ragged=False)
    for t in range(3):
        for u in range(3):
            for v in (
                0,
                7,
                16,
                19,
                20,
            ):  # in and after the part of a row that vector code takes
                broken = logits.clone()
                broken[1, t, u, v] = value
                costs = rnnt_loss(broken, *rest, reduction="none", impl=impl)
                assert costs.isnan().tolist() == [False, True], (t, u, v)
    cost, grad = value_and_gradient(broken, *rest, impl=impl)
    assert cost[0].isfinite() and grad[0].isfinite().all()
    assert grad[1].isnan().any()


@pytest.mark.parametrize("impl", OURS)
def test_tokens_ruled_out_by_minus_infinity_or_the_lowest_number_leave_exact_losses(
    impl,
):
    logits, *rest = lattice(19, 2, 4, 2, 5, precision(impl), ragged=False)
    wanted = value_and_gradient(
        torch.cat((logits[..., :4], logits[..., :1] - 1e9, logits[..., 4:]), -1),
        *rest,
        impl=impl,
    )
    for low in (-math.inf, torch.finfo(logits.dtype).min):
        masked = torch.cat(
            (logits[..., :4], torch.full_like(logits[..., :1], low), logits[..., 4:]),
            -1,
        )
        for got, same in zip(
            value_and_gradient(masked, *rest, impl=impl), wanted, strict=True
        ):
            torch.testing.assert_close(got, same)
    lowest = torch.full_like(logits, torch.finfo(logits.dtype).min)
    assert rnnt_loss(lowest, *rest, impl=impl).isfinite()


@pytest.mark.parametrize("impl", OURS)
def test_scores_that_are_no_log_probabilities_need_no_softmax(impl):
    logits, *rest = lattice(20, 2, 4, 2, 5, precision(impl), ragged=False)
    cost, grad = value_and_gradient(logits, *rest, fused_log_softmax=False, impl=impl)
    for offset in (88.9, 1000.0):
        higher, same = value_and_gradient(
            logits + offset, *rest, fused_log_softmax=False, impl=impl
        )
        torch.testing.assert_close(
            higher, cost - 6 * offset
        )  # T + U arcs on every path
        torch.testing.assert_close(same, grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("clamp", [-1.0, 0.05])
def test_overwriting_gives_the_same_gradient_in_the_place_of_the_logits(impl, clamp):
    logits, *rest = lattice(21, 3, 5, 3, 6, torch.float32)
    weight = torch.tensor([1.0, -2.0, 0.5])
    cost, grad = value_and_gradient(
        logits, *rest, weight=weight, clamp=clamp, impl=impl
    )
    made = logits.clone().requires_grad_()
    ours = rnnt_loss(
        made, *rest, reduction="none", clamp=clamp, overwrite_logits=True, impl=impl
    )
    (written,) = torch.autograd.grad(ours, made, weight, retain_graph=True)
    torch.testing.assert_close(ours.detach(), cost, rtol=0, atol=0)
    torch.testing.assert_close(written, grad, rtol=1e-6, atol=1e-8)
    assert written.data_ptr() == made.data_ptr()
    with pytest.raises(
        RuntimeError,
        match="overwrite_logits: the gradient of this graph already lies over the logits",
    ):
        torch.autograd.grad(ours, made, weight)


@pytest.mark.parametrize("impl", ALL)
def test_reductions_are_the_mean_and_the_sum_of_the_losses(impl):
    arguments = lattice(15, 3, 4, 2, 4, torch.float32)
    costs = rnnt_loss(*arguments, reduction="none", impl=impl)
    assert costs.shape == (3,)
    torch.testing.assert_close(rnnt_loss(*arguments, impl=impl), costs.mean())
    torch.testing.assert_close(
        rnnt_loss(*arguments, reduction="sum", impl=impl), costs.sum()
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_no_bit_and_torch_keeps_as_many_as_it_had(threads):
    arguments = lattice(23, 5, 12, 6, 7, torch.float32)
    once = value_and_gradient(*arguments, impl="numba_cpu")
    torch.set_num_threads(threads)
    for wanted, got in zip(
        once, value_and_gradient(*arguments, impl="numba_cpu"), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert torch.get_num_threads() == threads


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's own, at a graph break
def test_a_compiled_model_may_call_the_loss():
    x, *rest = lattice(25, 2, 4, 2, 5, torch.float32)
    x.requires_grad_()

    def model(x):
        return rnnt_loss(torch.tanh(x) * 2, *rest) * 3

    wanted = torch.autograd.grad(model(x), x)[0]
    torch._dynamo.reset()
    got = torch.autograd.grad(torch.compile(model, backend="eager")(x), x)[0]
    torch.testing.assert_close(got, wanted)


def test_implementations_share_their_signatures_and_the_door_starts_as_torchaudio_does():
    from torchaudio.functional import rnnt_loss as peer

    plain, fast = (
        import_module(f"asrkit.losses.{name}") for name in ("wavefront", "numba_cpu")
    )
    for step in ("arc_log_probs", "lattice", "gradient"):
        assert inspect.signature(getattr(plain, step)) == inspect.signature(
            getattr(fast, step)
        )
    assert set(IMPLS) == {*ALL, "triton"}
    ours, theirs = (
        inspect.signature(rnnt_loss).parameters.values(),
        inspect.signature(peer).parameters.values(),
    )
    assert [(p.name, p.default) for p in ours if p.kind != p.KEYWORD_ONLY] == [
        (p.name, p.default) for p in theirs
    ]


def test_auto_takes_compiled_kernels_on_a_cpu_and_plain_torch_for_what_they_do_not_take():
    logits = torch.zeros(1, 2, 2, 3)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert fastest(logits.to(dtype)) == "numba_cpu"
    assert fastest(logits.double()) == fastest(logits.to("meta")) == "wavefront"


GOOD = {
    "logits": torch.zeros(2, 4, 3, 5),
    "targets": torch.tensor([[0, 1], [2, 3]]),
    "logit_lengths": torch.tensor([4, 3]),
    "target_lengths": torch.tensor([2, 1]),
}
OVER = "overwrite_logits"
NAMES = "'auto', " + ", ".join(map(repr, IMPLS))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (
            {"logits": torch.zeros(2, 4, 5)},
            "logits: expected shape (B, T, U1, V), got (2, 4, 5).",
        ),
        (
            {"logits": torch.zeros(2, 4, 3, 5).long()},
            "logits: expected floating point, got torch.int64.",
        ),
        (
            {"targets": torch.zeros(2, 3).long()},
            "targets: expected shape (B=2, U=2), got (2, 3).",
        ),
        (
            {"targets": torch.tensor([[0, 1], [4, 3]])},
            "targets: expected labels 0..4 but blank=4, got 4 in utterance 1.",
        ),
        (
            {"logit_lengths": torch.tensor([4, 5])},
            "logit_lengths: expected 1 to T=4 frames, got 5 in utterance 1.",
        ),
        (
            {"target_lengths": torch.tensor([3, 1])},
            "target_lengths: expected 0 to U=2 labels, got 3 in utterance 0.",
        ),
        ({"blank": 5}, "blank: expected an index of V=5 tokens, got 5."),
        (
            {"logit_lengths": [4, 3]},
            "logit_lengths: expected a tensor, got list. Wrap it in torch.as_tensor.",
        ),
        (
            {"fastemit_lambda": -0.5},
            "fastemit_lambda: expected a finite number, at least 0, got -0.5.",
        ),
        (
            {"reduction": "max"},
            "reduction: expected one of 'none', 'mean', 'sum', got 'max'.",
        ),
        ({"impl": "fastest"}, f"impl: expected one of {NAMES}, got 'fastest'."),
        (
            {"fastemit_lambda": 0.1, "impl": "torchaudio"},
            "fastemit_lambda: expected 0 with impl='torchaudio', got 0.1. Pass impl='wavefront'.",
        ),
        (
            {OVER: True, "impl": "reference"},
            f"{OVER}: expected False with impl='reference', got True. Pass impl='auto'.",
        ),
        (
            {OVER: True, "logits": torch.zeros(2, 3, 4, 5).transpose(1, 2)},
            f"logits: expected contiguous with {OVER}=True, got (60, 5, 20, 1).",
        ),
    ],
)
def test_bad_input_is_one_line_that_names_argument_wanted_and_got(change, wanted):
    assert rnnt_loss(**GOOD).isfinite()
    with pytest.raises(ValueError) as error:
        rnnt_loss(**{**GOOD, **change})
    assert str(error.value) == wanted


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_inside_torch_func_a_loss_is_refused_in_one_line(transform):
    logits, *rest = GOOD.values()
    if transform == torch.func.vmap:
        logits = logits[None]
    with pytest.raises(ValueError) as error:
        transform(lambda x: rnnt_loss(x, *rest))(logits)
    assert str(error.value) == (
        "logits: expected a plain tensor, got one inside torch.func. Take gradients with torch.autograd."
    )
