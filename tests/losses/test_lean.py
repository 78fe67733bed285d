"""Losses that never build the joint: the values and gradients of those that do, in a tile's memory."""

import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asrkit.losses import dropout, rnnt_loss, rnnt_loss_lean, tdt_loss, tdt_loss_lean
from asrkit.workbench.measure import peak_memory

sys.path.insert(0, str(Path(__file__).parent))
from ragged import expect_no_worse_than, graded, halves, poisoned_halves

IMPLS = ["plain", "numba_cpu"]
both = pytest.mark.parametrize("impl", IMPLS)


def dense(
    encoded,
    predicted,
    weight,
    bias,
    *rest,
    activation="relu",
    keep=1,
    of=rnnt_loss,
    **options,
):
    """A loss of the logits (B, T, U1, V) that the lean losses never build."""
    function = getattr(torch, activation)
    hidden = function(encoded[:, :, None] + predicted[:, None])
    logits = (hidden * keep) @ weight.T + bias
    return of(logits, *rest, **options)


def with_relu(*tensors, **options):
    return rnnt_loss_lean(*tensors, **{"activation": "relu"} | options)


def close(actual, expected, **tolerance):
    """Compare each tensor of two lists."""
    torch.testing.assert_close(list(actual), list(expected), **tolerance)


SIZES = st.tuples(
    st.integers(0, 10**6),  # seed
    st.integers(1, 4),  # B
    st.integers(1, 7),  # T
    st.integers(0, 5),  # U
    st.integers(1, 20),  # D
    st.integers(2, 9),  # V
)
SHARED = {
    "blank": st.sampled_from([0, -1]),
    "activation": st.sampled_from(["relu", "tanh"]),
    "fastemit_lambda": st.sampled_from([0.0, 0.4]),
}
SETS = [
    (0, 1),
    (1,),
    (0, 1, 2, 3, 4),
    (2, 1),
    (2, 4),
]
TDT = {
    "durations": st.sampled_from(SETS),
    "sigma": st.sampled_from([0.0, 0.05]),
    "omega": st.sampled_from([0.0, 1.0]),
}
OPTIONS = st.fixed_dictionaries(SHARED) | st.fixed_dictionaries(SHARED | TDT)


@given(SIZES, OPTIONS, st.sampled_from([3, 1000]))
def test_values_and_gradients_are_those_of_the_joint(sizes, options, tile):
    n = len(options.get("durations", ()))
    lean, loss = (tdt_loss_lean, tdt_loss) if n else (with_relu, rnnt_loss)
    tensors, rest = halves(*sizes, n=n, dtype=torch.float64, blank=options["blank"])
    truth = graded(dense, tensors, *rest, of=loss, impl="reference", **options)
    actual = graded(lean, tensors, *rest, impl="plain", tile=tile, **options)
    close(actual, truth, rtol=1e-12, atol=1e-11)
    low = [tensor.float() for tensor in tensors]
    rival = graded(dense, low, *rest, of=loss, impl="wavefront", **options)
    for impl in IMPLS:
        actual = graded(lean, low, *rest, impl=impl, tile=tile, **options)
        expect_no_worse_than(rival, actual, truth, 1e-5)


@both
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_exact_as_a_joint_in_half_precision(
    impl, activation, dtype
):
    tensors, rest = halves(1, 3, 20, 8, 48, 30, dtype=dtype)
    wide = [tensor.double() for tensor in tensors]
    truth = graded(dense, wide, *rest, activation=activation)
    rival = graded(dense, tensors, *rest, activation=activation, impl="wavefront")
    actual = graded(rnnt_loss_lean, tensors, *rest, activation=activation, impl=impl)
    assert [tensor.dtype for tensor in actual] == [torch.float32, *[dtype] * 4]
    expect_no_worse_than(rival, actual, truth, torch.finfo(dtype).eps)


@both
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_dropout_equals_that_of_the_joint_with_the_same_mask(impl, activation):
    B, T, U, D, p = 3, 6, 4, 24, 0.3
    tensors, rest = halves(2, B, T, U, D, 9)
    nodes = (
        torch.arange(B)[:, None, None],
        torch.arange(T)[:, None],
        torch.arange(U + 1),
    )
    keys = dropout.node_keys(*nodes, seed=77)
    kept = dropout.mask(keys.flatten(), D, p)
    keep = kept.view(B, T, U + 1, D) / (1 - p)
    expected = graded(dense, tensors, *rest, activation=activation, keep=keep)
    options = {"activation": activation, "dropout": p, "impl": impl, "tile": 7}
    actual = graded(rnnt_loss_lean, tensors, *rest, seed=77, **options)
    close(actual, expected, rtol=1e-4, atol=2e-5)

    def loss(seed=None):
        return rnnt_loss_lean(*tensors, *rest, seed=seed, **options)

    assert loss(77) != loss(78)
    torch.manual_seed(5)
    drawn = loss()
    torch.manual_seed(5)
    assert loss() == drawn != loss()


@both
def test_the_contents_of_the_padding_do_not_matter(impl):
    tensors, rest = halves(3, 4, 6, 4, 8, 5)
    plain = graded(with_relu, tensors, *rest, impl=impl)
    tensors, rest = poisoned_halves(tensors, *rest)
    actual = graded(with_relu, tensors, *rest, impl=impl)
    close(actual, plain, rtol=0, atol=0)
    _, frames, labels = rest
    for b in range(4):
        assert (actual[1][b, frames[b] :] == 0).all()
        assert (actual[2][b, labels[b] + 1 :] == 0).all()


def test_neither_threads_nor_the_size_of_tiles_change_the_result():
    tensors, rest = halves(4, 3, 12, 5, 40, 17)
    layer = {"activation": "tanh", "dropout": 0.3, "seed": 5}
    expected = graded(rnnt_loss_lean, tensors, *rest, tile=1000, **layer)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for tile in (64, 1000):
            actual = graded(rnnt_loss_lean, tensors, *rest, tile=tile, **layer)
            close(actual, expected, rtol=1e-5, atol=1e-5)
            assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float32, 0.08), (torch.bfloat16, 0.12)]
)
def test_memory_is_a_tile_and_not_a_joint(dtype, share):
    B, T, U, D, V = 2, 60, 29, 64, 512
    tensors, (targets, *_) = halves(6, B, T, U, D, V, dtype=dtype)
    frames = torch.full((B,), T)
    labels = torch.full((B,), U)
    rest = targets, frames, labels
    lean = peak_memory(lambda: graded(with_relu, tensors, *rest, tile=128))
    whole = peak_memory(lambda: graded(dense, tensors, *rest, impl="wavefront"))
    tile = 128 * (2 * D + V) * dtype.itemsize
    rows = B * (T + U + 1)
    nodes = B * T * (U + 1)
    sums = 3 * 4 * (V * D + 16 * V + rows * D)
    assert lean <= tile + sums + 48 * nodes
    assert lean <= share * whole


def test_autocast_sets_the_dtype_of_the_products():
    tensors, rest = halves(7, 2, 10, 4, 32, 16)
    exact = graded(with_relu, tensors, *rest)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = graded(with_relu, tensors, *rest)

    def rounded(encoded, predicted, weight, *others, **options):
        return with_relu(encoded, predicted, weight.bfloat16(), *others, **options)

    assert {part.dtype for part in cast} == {torch.float32}
    expected = graded(rounded, tensors, *rest)
    close(cast, expected, rtol=0, atol=0)
    assert not torch.equal(exact[0], cast[0])


@both
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_inputs_that_are_not_finite_reach_the_loss_and_the_gradients(impl, value):
    tensors, (targets, *_) = halves(12, 2, 5, 3, 8, 6)
    frames = torch.tensor([5, 5])
    labels = torch.tensor([3, 3])
    rest = targets, frames, labels
    tensors[0][1, 2, 3] = value
    cost, *grads = graded(rnnt_loss_lean, tensors, *rest, activation="relu", impl=impl)
    assert cost.isnan().tolist() == [False, True]
    assert all(grad.isnan().any() for grad in grads)
    assert grads[0][0].isfinite().all()


@both
def test_strided_halves_and_a_bias_of_another_dtype_work(impl):
    tensors, rest = halves(13, 2, 5, 3, 8, 6)
    expected = with_relu(*tensors, *rest)
    strided = [torch.stack((tensor, tensor), -1)[..., 0] for tensor in tensors]
    actual = with_relu(*strided, *rest, impl=impl)
    torch.testing.assert_close(actual, expected)
    *others, bias = tensors
    half = bias.bfloat16().requires_grad_()
    with_relu(*others, half, *rest, impl=impl).backward()
    none, zeros = (
        with_relu(*others, no_bias, *rest, impl=impl)
        for no_bias in (None, torch.zeros_like(bias))
    )
    assert none == zeros


def test_a_single_gradient_can_be_computed_and_the_graph_used_twice():
    tensors, rest = halves(8, 2, 5, 3, 8, 6)
    weight = tensors[2].requires_grad_()
    cost = with_relu(*tensors, *rest)
    first = torch.autograd.grad(cost, weight, retain_graph=True)
    second = torch.autograd.grad(cost, weight, retain_graph=True)
    close(first, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(cost, weight, create_graph=True)
    with torch.no_grad():
        assert with_relu(*tensors, *rest) == cost


def test_random_numbers_are_drawn_on_the_host_after_the_checks():
    tensors, (targets, *lengths) = halves(14, 2, 5, 3, 8, 6 + 2)
    options = {"durations": (0, 1), "omega": 0.5, "dropout": 0.5}
    options |= {"activation": "relu"}
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="tile: expected"):
        tdt_loss_lean(*tensors, targets % 5, *lengths, tile=0, **options)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.device("meta"):
        actual = tdt_loss_lean(*tensors, targets % 5, *lengths, **options)
    assert actual.isfinite()
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("loss", [rnnt_loss_lean, tdt_loss_lean])
def test_the_activation_has_no_default(loss):
    tensors, rest = halves(15, 2, 5, 3, 8, 6)
    with pytest.raises(TypeError, match="'activation'"):
        loss(*tensors, *rest)
