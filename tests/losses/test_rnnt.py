"""The RNN-T loss: published values, closed forms, brute force, its own features; see test_transducers.py for the rest."""

import inspect
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from asrkit.losses import arguments, rnnt_loss
from asrkit.losses.arguments import fastest

sys.path.insert(0, str(Path(__file__).parent))
from ragged import graded, lattice

EXACT = ["reference", "wavefront"]
OURS = [*EXACT, "numba_cpu"]
ALL = [*OURS, "torchaudio"]
ours = pytest.mark.parametrize("impl", OURS)
every = pytest.mark.parametrize("impl", ALL)


def precision(impl):
    return torch.float64 if impl in EXACT else torch.float32


def whole(logits, targets):
    """Arguments for logits (T, U1, V) or (B, T, U1, V) without padding; `targets` are lists."""
    logits = logits if logits.dim() == 4 else logits[None]
    B, T, U1, _ = logits.shape
    labels = torch.tensor(targets, dtype=torch.long).view(B, U1 - 1)
    frames = torch.full((B,), T)
    counts = torch.full((B,), U1 - 1)
    return logits, labels, frames, counts


def full(seed, T, U, V, dtype):
    """Two utterances that fill their tensors."""
    logits, targets, *_ = lattice(seed, 2, T, U, V, dtype=dtype)
    frames = torch.full((2,), T)
    labels = torch.full((2,), U)
    return logits, targets, frames, labels


def value_and_gradient(logits, *rest, **options):
    """The losses (B,), and the gradient of their sum."""
    logits = logits.clone().requires_grad_()
    costs = rnnt_loss(logits, *rest, reduction="none", **options)
    return costs.detach(), torch.autograd.grad(costs.sum(), logits)[0]


SMALL = """.1 .6 .1 .1 .1  .1 .1 .6 .1 .1  .1 .1 .2 .8 .1  .1 .6 .1 .1 .1  .1 .1 .2 .1 .1  .7 .1 .2 .1 .1"""
SMALL_GRADIENT = """
    -.1311669 -.3999268 .1770312 .1770312 .1770312    -.1857275 .1224705 -.1816841 .1224705 .1224705
    -.3209125 .0626914 .0692847 .1262450 .0626914    .0545607 -.2182427 .0545607 .0545607 .0545607
    .1207396 .1207396 -.4829583 .1207396 .1207396    -.6925882 .1687112 .1864547 .1687112 .1687112"""
SINE = (
    torch.arange(96.0).sin().view(4, 3, 8).numpy()
)  # the published values are for a float32 sine
BY_FRAME = np.array([[0, 1, 2], [0, 0, 0], [0, 2, 4], [0, 3, 3]])
BY_LABEL = np.array([[0, 0, 1], [0, 1, 1], [1, 0, 1], [2, 2, 0]])
PUBLISHED = [  # logits, targets, blank, losses
    (np.random.RandomState(0).randn(1, 4, 3, 3), [[1, 2]], 0, [6.0918525224]),
    (
        np.random.RandomState(0).randn(4, 8, 11, 5).astype(np.float32),
        [
            [1, 2, 4, 3, 2, 2, 1, 1, 1, 1],
            [3, 2, 2, 3, 4, 1, 1, 1, 1, 1],
            [4, 4, 1, 2, 1, 3, 4, 3, 1, 2],
            [1, 1, 2, 1, 2, 3, 3, 1, 1, 1],
        ],
        0,
        [22.1381174048, 21.1284331903, 21.2972965017, 18.1578732138],
    ),
    (SINE, [[1, 2]], 0, [9.2287629293]),
    (SINE, [[1, 2]], 7, [8.3976941561]),
    (BY_FRAME[:, None] + BY_LABEL, [[0, 1, 0]], 2, [7.5040133560]),
]


@every
@pytest.mark.parametrize(("logits", "targets", "blank", "expected"), PUBLISHED)
def test_published_losses(logits, targets, blank, expected, impl):
    logits = torch.from_numpy(logits).to(precision(impl))
    inputs = whole(logits, targets)
    actual = rnnt_loss(*inputs, blank, reduction="none", impl=impl)
    assert actual.tolist() == pytest.approx(
        expected, abs=2e-9 if impl in EXACT else 2e-5
    )


@every
def test_small_case_of_warp_transducer_has_the_published_loss_and_gradient(impl):
    logits, gradient = (
        torch.tensor([float(x) for x in text.split()]).view(1, 2, 3, 5)
        for text in (SMALL, SMALL_GRADIENT)
    )
    inputs = whole(logits, [1, 2])
    cost, grad = value_and_gradient(*inputs, blank=0, impl=impl)
    assert cost.item() == pytest.approx(4.4956667662, abs=1e-6)
    torch.testing.assert_close(grad, gradient, rtol=0, atol=3e-7)
    for last in (4, -1):
        cost = rnnt_loss(*inputs, blank=last, impl=impl)
        assert cost.item() == pytest.approx(5.0956667527, abs=1e-6)


UNIFORM = [  # T, U, V
    (1, 0, 2),
    (1, 3, 4),
    (10, 2, 4),
    (5, 0, 3),
    (63, 31, 28),
    (200, 7, 2),
]


@every
@pytest.mark.parametrize(("T", "U", "V"), UNIFORM)
def test_uniform_logits_count_alignments(impl, T, U, V):
    logits = torch.full((T, U + 1, V), 0.1)
    cost = rnnt_loss(*whole(logits, [0] * U), impl=impl)
    alignments = math.comb(T + U - 1, U)
    expected = (T + U) * math.log(V) - math.log(alignments)
    assert cost.item() == pytest.approx(expected, rel=3e-6)


@pytest.mark.parametrize(("T", "U"), [(1, 0), (1, 2), (3, 0), (2, 1), (4, 3), (5, 2)])
def test_the_loss_is_the_sum_over_all_alignments(T, U):
    logits, targets, *lengths = lattice(3, 1, T, U, 4)
    logp = logits[0].log_softmax(-1).tolist()
    paths = []

    def walk(t, u, score):
        if (t, u) == (T, U):
            paths.append(score)
        if t < T:
            walk(t + 1, u, score + logp[t][u][-1])
        if t < T and u < U:
            label = targets[0, u]
            walk(t, u + 1, score + logp[t][u][label])

    walk(0, 0, 0.0)
    assert len(paths) == math.comb(T + U - 1, U)  # the last arc is always a blank
    expected = -torch.tensor(paths, dtype=torch.float64).logsumexp(0).item()
    for impl in OURS:
        inputs = logits.to(precision(impl))
        actual = rnnt_loss(inputs, targets, *lengths, impl=impl).item()
        assert actual == pytest.approx(expected, rel=1e-13 if impl in EXACT else 1e-6)


def test_reference_gradient_is_the_numerical_one():
    logits, *rest = lattice(1, 2, 3, 2, 3)
    logits.requires_grad_()
    for fused in (True, False):
        options = {"fused_log_softmax": fused, "impl": "reference", "reduction": "none"}

        def loss(x, options=options):
            return rnnt_loss(x, *rest, **options)

        assert torch.autograd.gradcheck(loss, logits)


@every
def test_expanded_logits_get_the_sum_of_the_gradients_of_their_copies(impl):
    logits, *_ = lattice(17, 1, 5, 2, 4, dtype=torch.float32)
    small = logits[:, :1].requires_grad_()
    _, *rest = lattice(17, 2, 5, 2, 4)
    view = rnnt_loss(small.expand(2, 5, 3, 4), *rest, impl=impl)
    copy = rnnt_loss(small.repeat(2, 5, 1, 1), *rest, impl=impl)
    through_view = torch.autograd.grad(view, small)
    expected = torch.autograd.grad(copy, small)
    torch.testing.assert_close(through_view, expected)


@ours
@pytest.mark.parametrize("fused", [True, False])
def test_fastemit_scales_only_label_arcs_and_does_not_change_the_loss(impl, fused):
    logits, *rest = lattice(12, 2, 6, 4, 5, dtype=precision(impl))
    # so that logits and log-probabilities are the same numbers
    logits = logits.log_softmax(-1)
    options = {"impl": impl, "fused_log_softmax": False}
    cost, expected = value_and_gradient(logits, *rest, **options)
    options |= {"fused_log_softmax": fused, "fastemit_lambda": 0.25}
    scaled_cost, scaled = value_and_gradient(logits, *rest, **options)
    torch.testing.assert_close(scaled_cost, cost)
    expected[..., :-1] *= 1.25
    if fused:
        expected -= logits.exp() * expected.sum(-1, keepdim=True)
    tiny = 1e-11 if expected.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(scaled, expected, rtol=tiny, atol=tiny)


@every
def test_clamp_limits_the_gradient_before_the_incoming_one_scales_it(impl):
    batch = lattice(13, 4, 4, 2, 4, dtype=torch.float32)
    free = value_and_gradient(*batch, impl=impl)[1]
    weight = torch.linspace(-1, 2.5, 4)[:, None, None, None]
    for clamp in (0.05, 0.0, -1, math.inf):
        _, grad = graded(rnnt_loss, *batch, impl=impl, clamp=clamp)
        limited = free.clamp(-clamp, clamp) if clamp > 0 else free
        torch.testing.assert_close(grad, limited * weight)


@ours
def test_tokens_of_minus_infinity_or_the_lowest_number_do_not_change_the_loss(
    impl,
):
    logits, *rest = full(19, 4, 2, 5, precision(impl))
    lowest = torch.finfo(logits.dtype).min

    def with_a_token(score):
        more = torch.full_like(logits[..., :1], score)
        masked = torch.cat((logits[..., :4], more, logits[..., 4:]), -1)
        return value_and_gradient(masked, *rest, impl=impl)

    expected = with_a_token(-1e9)
    for low in (-math.inf, lowest):
        torch.testing.assert_close(with_a_token(low), expected)
    all_low = torch.full_like(logits, lowest)
    assert rnnt_loss(all_low, *rest, impl=impl).isfinite()


@ours
def test_unnormalised_scores_work_without_a_softmax(impl):
    logits, *rest = full(20, 4, 2, 5, precision(impl))
    options = {"fused_log_softmax": False, "impl": impl}
    cost, grad = value_and_gradient(logits, *rest, **options)
    for offset in (88.9, 1000.0):
        higher, same = value_and_gradient(logits + offset, *rest, **options)
        torch.testing.assert_close(higher, cost - 6 * offset)  # T + U arcs a path
        torch.testing.assert_close(same, grad, rtol=1e-3, atol=1e-3)


@every
def test_reductions_are_the_mean_and_the_sum_of_the_losses(impl):
    batch = lattice(15, 3, 4, 2, 4, dtype=torch.float32)
    costs = rnnt_loss(*batch, reduction="none", impl=impl)
    assert costs.shape == (3,)
    torch.testing.assert_close(rnnt_loss(*batch, impl=impl), costs.mean())
    summed = rnnt_loss(*batch, reduction="sum", impl=impl)
    torch.testing.assert_close(summed, costs.sum())


# torch's own warning, at a graph break
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_may_call_the_loss():
    x, *rest = lattice(25, 2, 4, 2, 5, dtype=torch.float32)
    x.requires_grad_()

    def model(x):
        return rnnt_loss(torch.tanh(x) * 2, *rest) * 3

    expected = torch.autograd.grad(model(x), x)[0]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    (got,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(got, expected)


def test_the_signature_starts_like_torchaudios():
    from torchaudio.functional import rnnt_loss as peer

    theirs = inspect.signature(peer).parameters
    ours = inspect.signature(rnnt_loss).parameters
    for (name, argument), (expected, other) in zip(
        ours.items(), theirs.items(), strict=False
    ):
        assert (name, argument.default) == (expected, other.default)


def test_auto_chooses_compiled_kernels_on_a_cpu_and_plain_torch_otherwise():
    logits = torch.zeros(1, 2, 2, 3)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert fastest(logits.to(dtype)) == "numba_cpu"
    assert fastest(logits.double()) == fastest(logits.to("meta")) == "wavefront"


def test_auto_tries_kernels_on_a_gpu_except_for_float64(monkeypatch):
    monkeypatch.setattr(arguments, "fastest_on_gpu", lambda device: "numba_cuda")
    for dtype, chosen in ((torch.bfloat16, "numba_cuda"), (torch.float64, "wavefront")):
        scores = SimpleNamespace(dtype=dtype, device=torch.device("cuda"))
        assert fastest(scores) == chosen
        # TDT has no kernels in Numba's CUDA
        assert arguments.choose("auto", ("wavefront",), scores, False) == "wavefront"


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_inside_torch_func_a_loss_is_refused_in_one_line(transform):
    logits, *rest = lattice(2, 2, 4, 2, 5)
    if transform == torch.func.vmap:
        logits = logits[None]
    refused = (
        "^logits: expected a plain tensor, got one inside torch.func. Take gradients"
    )
    with pytest.raises(ValueError, match=refused):
        transform(lambda x: rnnt_loss(x, *rest))(logits)
