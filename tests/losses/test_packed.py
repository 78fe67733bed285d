"""Packed lattices: the results of padded ones, with rows, gradients and memory for valid nodes only."""

import math

import pytest
import torch

from asrkit.losses import (
    dropout,
    pack_joint,
    packed_offsets,
    rnnt_loss,
    rnnt_loss_packed,
)
from asrkit.losses.lean.driver import NodeTiles
from asrkit.losses.packed import IMPLS
from asrkit.workbench.measure import peak_memory

ON_GPU = {"numba_cuda", "triton"}
ALL = [
    pytest.param(impl, marks=pytest.mark.gpu) if impl in ON_GPU else impl
    for impl in IMPLS
]
# including T=1 and U=0
FRAMES = torch.tensor([1, 6, 4, 5])
LABELS = torch.tensor([3, 0, 2, 4])
LENGTHS = FRAMES, LABELS
SHAPES = [(1, 4), (6, 1), (4, 3), (5, 5)]
ACTIVATIONS = {"none": lambda x: x, "relu": torch.relu, "tanh": torch.tanh}
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def valid(padded):
    """The rows of a padded (B, T, U1, ...) at valid nodes, packed."""
    pairs = zip(padded, SHAPES, strict=True)
    rows = [grid[:T, :U1].flatten(0, 1) for grid, (T, U1) in pairs]
    return torch.cat(rows)


def halves(dtype=torch.float64, D=7):
    g = torch.Generator().manual_seed(1)
    options = {"generator": g, "dtype": torch.float64}
    drawn = [torch.randn(4, 6, D, **options), torch.randn(4, 5, D, **options)]
    return [half.to(dtype).requires_grad_() for half in drawn]


def summed(encoded, predicted):
    return encoded[:, :, None] + predicted[:, None]


def lattice(dtype=torch.float64, V=6):
    g = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(4, 6, 5, V, generator=g, dtype=torch.float64)
    targets = torch.randint(0, V - 1, (4, 4), generator=g)
    return logits.to(dtype), targets


def differentiated(loss, logits, targets, *, impl, **options):
    device = "cuda" if impl in ON_GPU else "cpu"
    logits = logits.detach().to(device).requires_grad_()
    rest = [tensor.to(device) for tensor in (targets, *LENGTHS)]
    costs = loss(logits, *rest, reduction="none", impl=impl, **options)
    weight = torch.arange(1.0, 5).to(costs)
    (grad,) = torch.autograd.grad(costs, logits, weight)
    return costs.detach().cpu(), grad.cpu()


@each_activation
def test_the_packed_joint_is_the_padded_one_without_its_padding(activation):
    inputs = halves()
    dense = valid(ACTIVATIONS[activation](summed(*inputs)))
    packed = pack_joint(*inputs, *LENGTHS, activation=activation)
    torch.testing.assert_close(packed, dense, rtol=0, atol=0)
    one = torch.ones((), dtype=torch.float64)
    for weight in (torch.randn_like(dense), one.expand(dense.shape)):
        expected = torch.autograd.grad(dense, inputs, weight, retain_graph=True)
        for _ in range(2):
            actual = torch.autograd.grad(packed, inputs, weight, retain_graph=True)
            torch.testing.assert_close(actual, expected)


@each_activation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_only_the_results_are_rounded(activation, dtype):
    inputs = halves(dtype)
    wide = [half.detach().double().requires_grad_() for half in inputs]
    rounded = summed(*wide).to(dtype).double()
    dense = valid(ACTIVATIONS[activation](rounded))
    packed = pack_joint(*inputs, *LENGTHS, activation=activation)
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(packed.double(), dense, rtol=eps, atol=eps)
    weight = torch.randn(dense.shape).to(dtype)
    actual = torch.autograd.grad(packed, inputs, weight)
    expected = torch.autograd.grad(dense, wide, weight.double())
    for got, one in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.double(), one, rtol=2 * eps, atol=4 * eps)


@each_activation
@pytest.mark.parametrize(
    "impl", ["plain", "numba_cpu", pytest.param("triton", marks=pytest.mark.gpu)]
)
def test_dropout_has_the_mask_of_its_seed_in_forward_and_backward(impl, activation):
    device = "cuda" if impl in ON_GPU else "cpu"
    inputs = halves(torch.float32, D=33)
    grids = [torch.cartesian_prod(*map(torch.arange, shape)) for shape in SHAPES]
    b = torch.arange(4).repeat_interleave(torch.tensor([len(grid) for grid in grids]))
    keys = dropout.node_keys(b, *torch.cat(grids).T, seed=7)
    kept = dropout.mask(keys, 33, 0.4)
    dense = valid(ACTIVATIONS[activation](summed(*inputs))) * kept / 0.6
    weight = torch.randn_like(dense)
    expected = dense, *torch.autograd.grad(dense, inputs, weight)
    options = {"activation": activation, "dropout": 0.4, "seed": 7, "impl": impl}
    there = [half.detach().to(device).requires_grad_() for half in inputs]
    packed = pack_joint(*there, *LENGTHS, **options)
    actual = packed, *torch.autograd.grad(packed, there, weight.to(device))
    torch.testing.assert_close([part.cpu() for part in actual], [*expected])


def test_tiles_do_not_change_the_result(monkeypatch):
    monkeypatch.setattr(NodeTiles, "cpu_tile_bytes", 2**16)
    inputs = [torch.randn(1, size, 40, requires_grad=True) for size in (300, 50)]
    frames = torch.tensor([300])
    labels = torch.tensor([49])
    lengths = frames, labels
    packed = pack_joint(*inputs, *lengths, activation="tanh")
    dense = summed(*inputs).tanh().flatten(0, 2)
    torch.testing.assert_close(packed, dense, rtol=1e-5, atol=1e-6)
    weight = torch.randn(dense.shape)
    expected = torch.autograd.grad(dense, inputs, weight)
    actual = torch.autograd.grad(packed, inputs, weight)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_padding_of_either_half_does_not_matter(dtype):
    poisoned = halves(dtype)
    with torch.no_grad():
        for b, (T, U1) in enumerate(SHAPES):
            poisoned[0][b, T:] = math.nan
            poisoned[1][b, U1:] = math.inf
    results = []
    for inputs in (halves(dtype), poisoned):
        packed = pack_joint(*inputs, *LENGTHS, activation="tanh")
        grads = torch.autograd.grad(packed.square().sum(), inputs)
        results.append((packed, *grads))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    for b, (T, U1) in enumerate(SHAPES):
        assert (grads[0][b, T:] == 0).all()
        assert (grads[1][b, U1:] == 0).all()


def test_the_packed_joint_has_no_second_derivative_and_detects_a_changed_result():
    inputs = halves()
    packed = pack_joint(*inputs, *LENGTHS, activation="relu")
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(packed.sum(), inputs, create_graph=True)
    packed.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        packed.sum().backward()


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize(
    "options",
    [{}, {"clamp": 0.1, "fastemit_lambda": 0.2}, {"fused_log_softmax": False}],
)
def test_the_packed_loss_and_its_gradient_equal_the_padded_ones(impl, options):
    exact = impl in ("reference", "wavefront")
    logits, targets = lattice(torch.float64 if exact else torch.float32)
    logits = logits.log_softmax(-1)
    options = options | {"impl": impl}
    cost, grad = differentiated(rnnt_loss, logits, targets, **options)
    for over in {False, impl != "reference"}:
        packed = valid(logits)
        more = options | {"overwrite_logits": over}
        actual = differentiated(rnnt_loss_packed, packed, targets, **more)
        found_cost, found_grad = actual
        torch.testing.assert_close(found_cost, cost, rtol=1e-6, atol=0)
        torch.testing.assert_close(found_grad, valid(grad), rtol=1e-6, atol=1e-7)
        if impl not in ON_GPU:
            assert torch.equal(packed, found_grad) == over
    options["impl"] = "reference"
    _, truth = differentiated(rnnt_loss, logits.double(), targets, **options)
    wide = found_grad.double()
    torch.testing.assert_close(wide, valid(truth), rtol=1e-4, atol=1e-6)


def test_memory_is_that_of_the_valid_rows():
    halves = [torch.randn(8, size, 64, requires_grad=True) for size in (100, 40)]
    frames = torch.tensor([100] + 7 * [30])
    labels = torch.tensor([39] + 7 * [9])
    lengths = frames, labels
    N = packed_offsets(*lengths)[-1].item()
    tile = 8 * 2**20  # gradients of one tile
    made = []
    for activation in ("none", "tanh"):

        def join(activation=activation):
            made.append(pack_joint(*halves, *lengths, activation=activation))

        result_B = 4 * N * 64
        assert result_B <= peak_memory(join) <= result_B + 2**16
        packed = made[-1]
        grad = torch.ones_like(packed)

        def differentiate(packed=packed, grad=grad):
            torch.autograd.grad(packed, halves, grad)

        assert peak_memory(differentiate) <= tile
    logits = torch.randn(N, 50, requires_grad=True)
    targets = torch.zeros(8, 39, dtype=torch.long)
    rest = targets, *lengths
    peak = peak_memory(lambda: rnnt_loss_packed(logits, *rest).backward())
    assert peak <= 1.5 * logits.nbytes
