"""Properties of both the RNN-T and the TDT loss: agreement with the float64 reference, invariances, gradients."""

import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asrkit.losses import rnnt_loss, tdt_loss

sys.path.insert(0, str(Path(__file__).parent))
from ragged import DTYPES, expect_no_worse_than, graded, lattice, poisoned

DURATIONS = {rnnt_loss: 0, tdt_loss: 5}  # number of duration logits
FAST = [(loss, impl) for loss in DURATIONS for impl in ("wavefront", "numba_cpu")]
OURS = [*FAST, (rnnt_loss, "reference"), (tdt_loss, "reference")]
fast = pytest.mark.parametrize("loss, impl", FAST)
ours = pytest.mark.parametrize("loss, impl", OURS)
every = pytest.mark.parametrize("loss, impl", [*OURS, (rnnt_loss, "torchaudio")])


def drawn(loss, seed, *sizes, dtype=torch.float32):
    return lattice(seed, *sizes, n=DURATIONS[loss], dtype=dtype)


def full(logits, targets, frames, labels):
    """The same batch without padding."""
    _, T, U1, _ = logits.shape
    frames = torch.full_like(frames, T)
    labels = torch.full_like(labels, U1 - 1)
    return logits, targets, frames, labels


def precision(impl):
    """The dtype to compare in, and a tolerance for the implementation's own arithmetic."""
    if impl == "numba_cpu":
        return torch.float32, 1e-5
    return torch.float64, 1e-11


def exactly(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


SIZES = {
    "seed": st.integers(0, 10**6),
    "B": st.integers(1, 4),
    "T": st.integers(1, 8),
    "U": st.integers(0, 8),
    "V": st.integers(2, 6),
}
SHARED = {
    "blank": st.sampled_from([-1, 0, 1]),
    "clamp": st.sampled_from([-1.0, 0.05]),
    "fastemit_lambda": st.sampled_from([0.0, 0.3]),
}
SETS = st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True).filter(any)
TDT = {"durations": SETS, "sigma": st.sampled_from([0.0, 0.05])}
OPTIONS = st.fixed_dictionaries(SHARED | {"fused_log_softmax": st.booleans()})
OPTIONS |= st.fixed_dictionaries(SHARED | TDT)


def case_and_truth(sizes, options, dtype):
    """A loss, its batch, and the reference's results."""
    loss = tdt_loss if "durations" in options else rnnt_loss
    n = len(options.get("durations", ()))
    logits, *rest = lattice(**sizes, n=n, dtype=dtype, blank=options["blank"])
    if not options.get("fused_log_softmax", True):
        logits = logits.log_softmax(-1)
    truth = graded(loss, logits.double(), *rest, impl="reference", **options)
    return loss, (logits, *rest), truth


@given(st.fixed_dictionaries(SIZES), OPTIONS)
def test_wavefront_in_float64_is_the_reference(sizes, options):
    loss, batch, truth = case_and_truth(sizes, options, torch.float64)
    actual = graded(loss, *batch, impl="wavefront", **options)
    torch.testing.assert_close(actual, truth, rtol=1e-12, atol=1e-11)


@given(st.fixed_dictionaries(SIZES), OPTIONS, st.sampled_from(DTYPES), st.booleans())
def test_losses_are_float32_and_gradients_rounded_once(sizes, options, dtype, over):
    loss, batch, truth = case_and_truth(sizes, options, dtype)
    wanted_cost, expected = (part.double() for part in truth)
    eps = torch.finfo(dtype).eps
    options["overwrite_logits"] = over
    logits, *rest = batch
    for impl in ("wavefront", "numba_cpu"):
        cost, grad = graded(loss, logits.clone(), *rest, impl=impl, **options)
        assert (cost.dtype, grad.dtype) == (torch.float32, dtype)
        torch.testing.assert_close(cost.double(), wanted_cost, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(grad.double(), expected, rtol=eps, atol=3e-6)


PEERS = st.fixed_dictionaries(
    {
        "blank": SHARED["blank"],
        "clamp": SHARED["clamp"],
        "fused_log_softmax": st.booleans(),
    }
)


@given(st.fixed_dictionaries(SIZES), PEERS, st.sampled_from(DTYPES[:2]))
def test_the_error_is_at_most_twice_torchaudios(sizes, options, dtype):
    _, batch, truth = case_and_truth(sizes, options, dtype)
    rival = graded(rnnt_loss, *batch, impl="torchaudio", **options)
    for impl in ("wavefront", "numba_cpu"):
        actual = graded(rnnt_loss, *batch, impl=impl, **options)
        expect_no_worse_than(rival, actual, truth, 2e-6)


def test_on_a_lattice_of_real_size_the_error_is_at_most_twice_torchaudios():
    batch = drawn(rnnt_loss, 20, 2, 200, 50, 32)
    logits, *rest = full(*batch)
    truth = graded(rnnt_loss, logits.double(), *rest, impl="wavefront")
    rival = graded(rnnt_loss, logits, *rest, impl="torchaudio")
    for impl in ("wavefront", "numba_cpu"):
        actual = graded(rnnt_loss, logits, *rest, impl=impl)
        expect_no_worse_than(rival, actual, truth, 1e-12)


SHAPES = [  # B, T, U, V
    (1, 300, 3, 5),
    (1, 63, 64, 33),
    (2, 5, 0, 3),
    (3, 1, 9, 7),
]


@fast
@pytest.mark.parametrize("shape", SHAPES)
def test_long_and_thin_lattices_agree(loss, impl, shape):
    dtype, tiny = precision(impl)
    logits, *rest = drawn(loss, 5, *shape, dtype=dtype)
    truth = graded(loss, logits.double(), *rest, impl="reference")
    actual = graded(loss, logits, *rest, impl=impl)
    for expected, got in zip(truth, actual, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=tiny, atol=tiny)


@every
def test_the_contents_of_the_padding_do_not_matter(loss, impl):
    logits, targets, frames, labels = drawn(loss, 7, 4, 6, 4, 5)
    # no utterance reaches the last frame or the last row
    batch = logits, targets, frames.clamp(max=5), labels.clamp(max=3)
    plain = graded(loss, *batch, impl=impl)
    for filler in (math.nan, math.inf):
        actual = graded(loss, *poisoned(*batch, filler=filler), impl=impl)
        exactly(actual, plain)
    for grad, T, U in zip(actual[1], *batch[2:], strict=True):
        assert (grad[T:] == 0).all()
        assert (grad[:, U + 1 :] == 0).all()


def every_other(tensor):
    """The same numbers in a tensor that is not contiguous."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def tokens_first(logits):
    turned = logits.permute(3, 1, 0, 2).contiguous()
    return turned.permute(2, 1, 3, 0)


@every
@pytest.mark.parametrize("view", [every_other, tokens_first])
def test_views_and_int32_are_as_good_as_contiguous_int64(loss, impl, view):
    logits, *integers = drawn(loss, 9, 2, 5, 3, 4)
    expected = graded(loss, logits, *integers, impl=impl)
    seen = view(logits)
    assert not seen.is_contiguous()
    narrow = [every_other(tensor.int()) for tensor in integers]
    actual = graded(loss, seen, *narrow, impl=impl)
    exactly(actual, expected)


@ours
def test_the_gradient_sums_to_zero_over_tokens_and_over_durations(loss, impl):
    dtype, _ = precision(impl)
    batch = drawn(loss, 10, 3, 8, 5, 6, dtype=dtype)
    _, grad = graded(loss, *batch, impl=impl, fastemit_lambda=0.3)
    tiny = 10 * torch.finfo(dtype).eps
    for part in (grad[..., :6], grad[..., 6:]):
        assert part.sum(-1).abs().max() < tiny


@every
def test_the_same_graph_gives_its_gradient_twice_and_no_second_derivative(loss, impl):
    logits, *rest = drawn(loss, 11, 2, 5, 3, 4)
    cost = loss(logits.requires_grad_(), *rest, impl=impl)
    first = torch.autograd.grad(cost, logits, retain_graph=True)
    actual = torch.autograd.grad(cost, logits, retain_graph=True)
    exactly(actual, first)
    if impl != "torchaudio":
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(cost, logits, retain_graph=True, create_graph=True)
        ones = torch.ones(2, *cost.shape, dtype=cost.dtype)
        with pytest.raises(RuntimeError, match="takes one gradient in a call"):
            torch.autograd.grad(cost, logits, ones, is_grads_batched=True)


@ours
def test_impossible_targets_cost_infinity_and_have_no_gradient(loss, impl):
    batch = drawn(loss, 14, 2, 4, 2, 4)
    logits, targets, *lengths = full(*batch)
    logits[1, :, :, targets[1, 0]] = -math.inf
    cost, grad = graded(loss, logits, targets, *lengths, impl=impl)
    assert cost[0] < cost[1] == math.inf
    assert grad.isfinite().all()
    assert grad[0].abs().sum() > 0.1
    assert (grad[1] == 0).all()
    for reduction in ("mean", "sum"):
        options = {"impl": impl, "reduction": reduction}
        assert loss(logits, targets, *lengths, **options) == math.inf


@ours
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_affect_only_their_utterance(loss, impl, value):
    V = 21  # some columns are in the vectorised part of a row, some after it
    columns = V + DURATIONS[loss]
    batch = drawn(loss, 18, 1 + columns, 2, 1, V)
    logits, *rest = full(*batch)
    for column in range(columns):
        t = column % 2
        u = column // 2 % 2
        logits[1 + column, t, u, column] = value
    cost, grad = graded(loss, logits, *rest, impl=impl)
    assert cost.isnan().tolist() == [False] + columns * [True]
    assert grad[0].isfinite().all()
    assert grad[1:].isnan().flatten(1).any(1).all()


@fast
def test_a_gradient_overwrites_the_logits_and_can_be_taken_once(loss, impl):
    logits, *rest = drawn(loss, 21, 3, 5, 3, 6)
    logits.requires_grad_()
    cost = loss(logits, *rest, overwrite_logits=True, impl=impl)
    (written,) = torch.autograd.grad(cost, logits, retain_graph=True)
    assert written.data_ptr() == logits.data_ptr()
    message = "^overwrite_logits: the gradient of this graph was already written over the logits"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(cost, logits)


def test_threads_change_no_bit_and_torch_keeps_its_number_of_threads():
    batch = drawn(rnnt_loss, 23, 5, 12, 6, 7)
    once = graded(rnnt_loss, *batch, impl="numba_cpu")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        actual = graded(rnnt_loss, *batch, impl="numba_cpu")
        exactly(actual, once)
        assert torch.get_num_threads() == threads
