"""The transducer loss: published values, closed forms, brute force, invariances, agreement with the float64 reference."""

import inspect
import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asrkit.losses import resolve, rnnt_loss
from asrkit.losses.rnnt import IMPLS
from asrkit.losses.rnnt.reference import backward_variables, forward_variables

EXACT = ["reference", "wavefront"]
ALL = [*EXACT, "torchaudio"]


def lattice(seed, B, T, U, V, dtype=torch.float64, ragged=True, blank=-1):
    """Random (logits, targets, logit_lengths, target_lengths); one utterance at least is as long as the tensors."""
    g = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(B, T, U + 1, V, generator=g, dtype=torch.float64)).to(dtype)
    targets = torch.randint(0, V - 1, (B, U), generator=g)
    targets += (targets >= blank % V).long()
    frames, labels = torch.full((B,), T), torch.full((B,), U)
    if ragged:
        frames[1:] = torch.randint(1, T + 1, (B - 1,), generator=g)
        labels[:-1] = torch.randint(0, U + 1, (B - 1,), generator=g)
    return logits, targets, frames, labels


def value_and_gradient(logits, *rest, weight=None, **options):
    logits = logits.clone().requires_grad_()
    costs = rnnt_loss(logits, *rest, reduction="none", **options)
    weight = torch.ones_like(costs) if weight is None else weight.to(costs)
    return costs.detach(), torch.autograd.grad(costs, logits, weight)[0]


@pytest.mark.parametrize("impl", ALL)
def test_small_case_of_warp_transducer_has_the_published_loss_and_gradient(impl):
    logits = torch.tensor(
        [
            0.1,
            0.6,
            0.1,
            0.1,
            0.1,
            0.1,
            0.1,
            0.6,
            0.1,
            0.1,
            0.1,
            0.1,
            0.2,
            0.8,
            0.1,
            0.1,
            0.6,
            0.1,
            0.1,
            0.1,
            0.1,
            0.1,
            0.2,
            0.1,
            0.1,
            0.7,
            0.1,
            0.2,
            0.1,
            0.1,
        ]
    ).view(1, 2, 3, 5)
    rest = torch.tensor([[1, 2]]), torch.tensor([2]), torch.tensor([2])
    wanted = torch.tensor(
        [
            [-0.1311669, -0.3999268, 0.1770312, 0.1770312, 0.1770312],
            [-0.1857275, 0.1224705, -0.1816841, 0.1224705, 0.1224705],
            [-0.3209125, 0.0626914, 0.0692847, 0.1262450, 0.0626914],
            [0.0545607, -0.2182427, 0.0545607, 0.0545607, 0.0545607],
            [0.1207396, 0.1207396, -0.4829583, 0.1207396, 0.1207396],
            [-0.6925882, 0.1687112, 0.1864547, 0.1687112, 0.1687112],
        ]
    )
    cost, grad = value_and_gradient(logits, *rest, blank=0, impl=impl)
    assert cost.item() == pytest.approx(4.4956667662, abs=1e-6)
    torch.testing.assert_close(grad.view(6, 5), wanted, rtol=0, atol=3e-7)
    for last in (4, -1):
        assert rnnt_loss(logits, *rest, blank=last, impl=impl).item() == pytest.approx(5.0956667527, abs=1e-6)


@pytest.mark.parametrize("impl", ALL)
def test_published_random_cases(impl):
    one = torch.from_numpy(np.random.RandomState(0).randn(1, 4, 3, 3)).float()
    cost = rnnt_loss(one, torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2]), blank=0, impl=impl)
    assert cost.item() == pytest.approx(6.0918525224, abs=2e-6)
    four = torch.from_numpy(np.random.RandomState(0).randn(4, 8, 11, 5)).float()
    targets = torch.tensor(
        [
            [1, 2, 4, 3, 2, 2, 1, 1, 1, 1],
            [3, 2, 2, 3, 4, 1, 1, 1, 1, 1],
            [4, 4, 1, 2, 1, 3, 4, 3, 1, 2],
            [1, 1, 2, 1, 2, 3, 3, 1, 1, 1],
        ]
    )
    costs = rnnt_loss(four, targets, torch.full((4,), 8), torch.full((4,), 10), 0, -1, "none", impl=impl)
    assert costs.tolist() == pytest.approx([22.1381174048, 21.1284331903, 21.2972965017, 18.1578732138], abs=1e-5)


@pytest.mark.parametrize("impl", EXACT)
def test_sine_and_factored_cases(impl):
    sine = torch.arange(4.0 * 3 * 8).sin().double().view(1, 4, 3, 8)  # the published values took a float32 sine
    rest = torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    assert rnnt_loss(sine, *rest, blank=0, impl=impl).item() == pytest.approx(9.2287629293, abs=1e-9)
    assert rnnt_loss(sine, *rest, blank=7, impl=impl).item() == pytest.approx(8.3976941561, abs=1e-9)
    am = torch.tensor([[0, 1, 2], [0, 0, 0], [0, 2, 4], [0, 3, 3]]).double()
    lm = torch.tensor([[0, 0, 1], [0, 1, 1], [1, 0, 1], [2, 2, 0]]).double()
    cost = rnnt_loss((am[:, None] + lm)[None], torch.tensor([[0, 1, 0]]), torch.tensor([4]), torch.tensor([3]), impl=impl)
    assert cost.item() == pytest.approx(7.5040133560, abs=1e-9)


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize(("T", "U", "V"), [(1, 0, 2), (1, 3, 4), (10, 2, 4), (5, 0, 3), (63, 31, 28), (200, 7, 2)])
def test_uniform_logits_count_alignments(impl, T, U, V):
    cost = rnnt_loss(
        torch.full((1, T, U + 1, V), 0.1), torch.zeros(1, U, dtype=torch.long), torch.tensor([T]), torch.tensor([U]), impl=impl
    )
    assert cost.item() == pytest.approx((T + U) * math.log(V) - math.log(math.comb(T + U - 1, U)), rel=3e-6)


@pytest.mark.parametrize("impl", EXACT)
@pytest.mark.parametrize(("T", "U"), [(1, 0), (1, 2), (3, 0), (2, 1), (4, 3), (5, 2)])
def test_the_loss_is_the_sum_over_all_alignments(impl, T, U):
    logits, targets, *lengths = lattice(3, 1, T, U, 4)
    logp, paths = logits[0].log_softmax(-1), []
    for emissions in combinations(range(T + U - 1), U):  # the last arc is always a blank
        t = u = 0
        score = 0.0
        for step in range(T + U):
            label = step in emissions
            score += logp[t, u, targets[0, u] if label else -1].item()
            t, u = (t, u + 1) if label else (t + 1, u)
        paths.append(score)
    assert len(paths) == math.comb(T + U - 1, U)
    wanted = -torch.tensor(paths, dtype=torch.float64).logsumexp(0).item()
    assert rnnt_loss(logits, targets, *lengths, impl=impl).item() == pytest.approx(wanted, abs=1e-12)


def test_every_diagonal_of_the_lattice_holds_the_whole_likelihood():
    rng = np.random.default_rng(0)
    arcs = rng.normal(-2, 1, (5, 4)).tolist(), rng.normal(-2, 1, (5, 3)).tolist()
    through = np.add(forward_variables(*arcs), backward_variables(*arcs))
    for k in range(5 + 4 - 1):
        here = np.logaddexp.reduce([through[t, k - t] for t in range(5) if 0 <= k - t < 4])
        assert here == pytest.approx(through[0, 0], abs=1e-12)


def test_reference_gradient_is_the_numerical_one():
    logits, *rest = lattice(1, 2, 3, 2, 3)
    for fused in (True, False):
        assert torch.autograd.gradcheck(
            lambda x, fused=fused: rnnt_loss(x, *rest, reduction="none", fused_log_softmax=fused, impl="reference"),
            logits.clone().requires_grad_(),
        )


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(0, 5),
    st.integers(2, 6),
    st.sampled_from([-1, 0, 1]),
    st.booleans(),
    st.sampled_from([-1.0, 0.05]),
)
def test_wavefront_agrees_with_the_reference_as_closely_as_torchaudio_does(seed, B, T, U, V, blank, fused, clamp):
    logits, *rest = lattice(seed, B, T, U, V, torch.float32, blank=blank)
    logits = logits if fused else logits.log_softmax(-1)
    options = {"blank": blank, "clamp": clamp, "fused_log_softmax": fused, "weight": torch.linspace(-1, 2, B)}
    truth = value_and_gradient(logits.double(), *rest, impl="reference", **options)
    rival = value_and_gradient(logits, *rest, impl="torchaudio", **options)
    ours = value_and_gradient(logits, *rest, impl="wavefront", **options)
    for wanted, theirs, got, tiny in zip(truth, rival, ours, (1e-5, 2e-6), strict=True):
        assert (got - wanted).abs().max() <= 2 * (theirs - wanted).abs().max() + tiny
    for wanted, got in zip(truth, value_and_gradient(logits.double(), *rest, impl="wavefront", **options), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", [(1, 1000, 3, 5), (1, 63, 64, 33), (2, 5, 0, 3), (3, 1, 9, 7)])
def test_long_and_thin_lattices_agree_in_float64(shape):
    logits, *rest = lattice(5, *shape)
    truth, ours = (value_and_gradient(logits, *rest, impl=impl) for impl in EXACT)
    for wanted, got in zip(truth, ours, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_give_float32_losses_and_gradients_rounded_once(dtype):
    logits, *rest = lattice(2, 3, 20, 8, 30, dtype)
    truth = value_and_gradient(logits.double(), *rest, impl="reference")
    cost, grad = value_and_gradient(logits, *rest)
    assert (cost.dtype, grad.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(cost.double(), truth[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), truth[1], rtol=torch.finfo(dtype).eps, atol=1e-6)
    if dtype == torch.float16:
        rival = value_and_gradient(logits, *rest, impl="torchaudio")[1]
        assert (grad - truth[1]).abs().max() <= 2 * (rival - truth[1]).abs().max() + 1e-6


@pytest.mark.parametrize("impl", ALL)
def test_what_lies_in_the_padding_cannot_matter(impl):
    logits, targets, frames, labels = lattice(7, 4, 6, 4, 5, torch.float32)
    plain = value_and_gradient(logits, targets, frames, labels, impl=impl)
    for b in range(4):
        logits[b, frames[b] :] = math.nan
        logits[b, :, labels[b] + 1 :] = math.inf
        targets[b, labels[b] :] = -100 if b % 2 else 10**6
    cost, grad = value_and_gradient(logits, targets, frames, labels, impl=impl)
    torch.testing.assert_close(cost, plain[0], rtol=0, atol=0)
    torch.testing.assert_close(grad, plain[1], rtol=0, atol=0)
    for b in range(4):
        assert (grad[b, frames[b] :] == 0).all()
        assert (grad[b, :, labels[b] + 1 :] == 0).all()


@pytest.mark.parametrize("impl", ALL)
def test_rows_nobody_reaches_and_the_company_of_others_cannot_matter(impl):
    logits, targets, frames, labels = lattice(8, 3, 7, 5, 4, torch.float32)
    frames, labels = frames.clamp(max=5), labels.clamp(max=3)
    costs, grads = value_and_gradient(logits, targets, frames, labels, impl=impl)
    for b in range(3):
        T, U = int(frames[b]), int(labels[b])
        alone = logits[b : b + 1, :T, : U + 1], targets[b : b + 1, :U], frames[b : b + 1], labels[b : b + 1]
        cost, grad = value_and_gradient(*alone, impl=impl)
        torch.testing.assert_close(cost[0], costs[b])
        torch.testing.assert_close(grad[0], grads[b, :T, : U + 1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", ALL)
def test_views_and_int32_are_as_good_as_contiguous_int64(impl):
    logits, targets, frames, labels = lattice(9, 2, 5, 3, 4, torch.float32)
    wanted = value_and_gradient(logits, targets, frames, labels, impl=impl)
    view = logits.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    targets = torch.stack((targets, targets), -1).int()[..., 0]
    assert not view.is_contiguous()
    assert not targets.is_contiguous()
    for a, b in zip(value_and_gradient(view, targets, frames.int(), labels.int(), impl=impl), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("impl", EXACT)
def test_gradient_over_tokens_sums_to_zero_at_every_node(impl):
    _, grad = value_and_gradient(*lattice(10, 3, 8, 5, 6), impl=impl, fastemit_lambda=0.3)
    assert grad.sum(-1).abs().max() < 1e-14


@pytest.mark.parametrize("impl", ALL)
def test_the_same_graph_gives_its_gradient_twice_and_no_second_derivative(impl):
    logits, *rest = lattice(11, 2, 5, 3, 4, torch.float32)
    logits.requires_grad_()
    cost = rnnt_loss(logits, *rest, impl=impl)
    first, second = (torch.autograd.grad(cost, logits, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    if impl != "torchaudio":
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(cost, logits, create_graph=True)


@pytest.mark.parametrize("impl", EXACT)
@pytest.mark.parametrize("fused", [True, False])
def test_fastemit_scales_label_arcs_alone_and_leaves_the_loss_as_it_is(impl, fused):
    logits, targets, frames, labels = lattice(12, 2, 6, 4, 5)
    logits = logits.log_softmax(-1)  # where both views of the logits hold the same numbers
    cost, plain = value_and_gradient(logits, targets, frames, labels, impl=impl, fused_log_softmax=False)
    scaled_cost, scaled = value_and_gradient(
        logits, targets, frames, labels, impl=impl, fused_log_softmax=fused, fastemit_lambda=0.25
    )
    torch.testing.assert_close(scaled_cost, cost)
    wanted = plain.clone()
    wanted[..., :-1] *= 1.25
    if fused:
        wanted -= logits.exp() * wanted.sum(-1, keepdim=True)
    torch.testing.assert_close(scaled, wanted)


@pytest.mark.parametrize("impl", ALL)
def test_clamp_limits_the_gradient_of_an_utterance_before_the_incoming_one(impl):
    logits, *rest = lattice(13, 2, 4, 2, 4, torch.float32)
    weight = torch.tensor([1.0, -3.0])
    _, free = value_and_gradient(logits, *rest, impl=impl)
    for clamp in (0.05, 0.0, -1):
        _, grad = value_and_gradient(logits, *rest, impl=impl, clamp=clamp, weight=weight)
        wanted = (free.clamp(-clamp, clamp) if clamp > 0 else free) * weight[:, None, None, None]
        torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("impl", EXACT)
def test_impossible_targets_cost_infinity_and_have_no_gradient(impl):
    logits, targets, *lengths = lattice(14, 2, 4, 2, 4, ragged=False)
    logits[1, :, :, targets[1, 0]] = -math.inf
    cost, grad = value_and_gradient(logits, targets, *lengths, impl=impl)
    assert cost[1] == math.inf
    assert cost[0] < math.inf
    assert grad.isfinite().all()
    assert (grad[1] == 0).all()


@pytest.mark.parametrize("impl", ALL)
def test_reductions_are_the_mean_and_the_sum_of_the_losses(impl):
    arguments = lattice(15, 3, 4, 2, 4, torch.float32)
    costs = rnnt_loss(*arguments, reduction="none", impl=impl)
    assert costs.shape == (3,)
    torch.testing.assert_close(rnnt_loss(*arguments, impl=impl), costs.mean())
    torch.testing.assert_close(rnnt_loss(*arguments, reduction="sum", impl=impl), costs.sum())


def test_implementations_share_one_signature_and_the_door_starts_as_torchaudio_does():
    from torchaudio.functional import rnnt_loss as peer

    first = inspect.signature(IMPLS["reference"])
    assert all(inspect.signature(f) == first for f in IMPLS.values())
    ours, theirs = inspect.signature(rnnt_loss).parameters.values(), inspect.signature(peer).parameters.values()
    assert [(p.name, p.default) for p in ours if p.kind != p.KEYWORD_ONLY] == [(p.name, p.default) for p in theirs]


def test_what_auto_picked_can_be_asked_and_a_named_one_that_cannot_run_says_why():
    logits, *rest = lattice(16, 1, 2, 1, 3)
    assert resolve("auto", logits) == "wavefront"
    assert resolve("torchaudio", logits.float()) == "torchaudio"
    with pytest.raises(ValueError) as error:
        rnnt_loss(logits, *rest, impl="torchaudio")
    assert str(error.value) == (
        "logits: expected float32 or float16 with impl='torchaudio', got torch.float64. Pass impl='wavefront'."
    )
    with pytest.raises(ValueError) as error:
        rnnt_loss(logits.float(), *rest, impl="torchaudio", fastemit_lambda=0.1)
    assert str(error.value) == ("fastemit_lambda: expected 0 with impl='torchaudio', got 0.1. Pass impl='wavefront'.")
    with pytest.raises(ValueError) as error:
        rnnt_loss(logits, *rest, impl="fastest")
    assert str(error.value) == "impl: expected one of 'auto', 'reference', 'wavefront', 'torchaudio', got 'fastest'."


GOOD = {
    "logits": torch.zeros(2, 4, 3, 5),
    "targets": torch.tensor([[0, 1], [2, 3]]),
    "logit_lengths": torch.tensor([4, 3]),
    "target_lengths": torch.tensor([2, 1]),
}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"logits": torch.zeros(2, 4, 5)}, "logits: expected shape (B, T, U1, V), got (2, 4, 5)."),
        ({"logits": torch.zeros(2, 4, 3, 5).long()}, "logits: expected floating point, got torch.int64."),
        ({"logits": torch.zeros(0, 4, 3, 5)}, "logits: expected no empty dimension, got (0, 4, 3, 5)."),
        ({"targets": torch.zeros(2, 3).long()}, "targets: expected shape (B=2, U=2), got (2, 3)."),
        ({"targets": torch.zeros(2, 2)}, "targets: expected int32 or int64, got torch.float32."),
        ({"targets": torch.zeros(2, 2, device="meta").long()}, "targets: expected a tensor on cpu, as the logits, got meta."),
        ({"targets": torch.tensor([[0, 1], [4, 3]])}, "targets: expected labels 0..4 but blank=4, got 4 in utterance 1."),
        ({"targets": torch.tensor([[0, 5], [2, 3]])}, "targets: expected labels 0..4 but blank=4, got 5 in utterance 0."),
        ({"targets": torch.tensor([[-1, 0], [2, 3]])}, "targets: expected labels 0..4 but blank=4, got -1 in utterance 0."),
        ({"logit_lengths": torch.tensor([4, 5])}, "logit_lengths: expected 1 to T=4 frames, got 5 in utterance 1."),
        ({"logit_lengths": torch.tensor([0, 4])}, "logit_lengths: expected 1 to T=4 frames, got 0 in utterance 0."),
        ({"logit_lengths": torch.tensor([4])}, "logit_lengths: expected shape (B=2), got (1,)."),
        ({"target_lengths": torch.tensor([3, 1])}, "target_lengths: expected 0 to U=2 labels, got 3 in utterance 0."),
        ({"target_lengths": torch.tensor([-1, 1])}, "target_lengths: expected 0 to U=2 labels, got -1 in utterance 0."),
        ({"blank": 5}, "blank: expected an index of V=5 tokens, got 5."),
        ({"blank": 1.5}, "blank: expected an index of V=5 tokens, got 1.5."),
        ({"logit_lengths": [4, 3]}, "logit_lengths: expected a tensor, got list. Wrap it in torch.as_tensor."),
        ({"fastemit_lambda": -0.5}, "fastemit_lambda: expected at least 0, got -0.5."),
        ({"reduction": "max"}, "reduction: expected 'none', 'mean' or 'sum', got 'max'."),
    ],
)
def test_bad_input_is_one_line_that_names_argument_wanted_and_got(change, wanted):
    assert rnnt_loss(**GOOD).isfinite()
    with pytest.raises(ValueError) as error:
        rnnt_loss(**{**GOOD, **change})
    assert str(error.value) == wanted
