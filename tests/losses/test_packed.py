"""Packed lattices: the same numbers as with padding, and rows, gradients and memory of valid nodes only."""

import inspect
import math

import pytest
import torch

from asrkit.losses import pack_joint, packed_offsets, rnnt_loss, rnnt_loss_packed
from asrkit.losses.packed import IMPLS
from asrkit.workbench.measure import peak_memory

EXACT = ["reference", "wavefront"]
ON_GPU = {"triton"}
ALL = [
    pytest.param(impl, marks=pytest.mark.gpu) if impl in ON_GPU else impl
    for impl in IMPLS
]
FRAMES, LABELS = (
    torch.tensor([1, 6, 4, 5]),
    torch.tensor([3, 0, 2, 4]),
)  # T=1 and U=0 among them
SHAPES = [(1, 4), (6, 1), (4, 3), (5, 5)]
ACTIVATIONS = {"none": lambda x: x, "relu": torch.relu, "tanh": torch.tanh}


def valid(padded):
    """The rows of a padded (B, T, U1, ...) that belong to nodes, packed."""
    return torch.cat(
        [padded[b, :T, :U1].flatten(0, 1) for b, (T, U1) in enumerate(SHAPES)]
    )


def halves(dtype=torch.float64, D=7):
    g = torch.Generator().manual_seed(1)
    encoded, predicted = (
        torch.randn(4, size, D, generator=g, dtype=torch.float64).to(dtype)
        for size in (6, 5)
    )
    return encoded.requires_grad_(), predicted.requires_grad_()


def lattice(dtype=torch.float64, V=6):
    g = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(4, 6, 5, V, generator=g, dtype=torch.float64)
    return logits.to(dtype), torch.randint(0, V - 1, (4, 4), generator=g)


def differentiated(loss, logits, *rest, impl, **options):
    device = "cuda" if impl in ON_GPU else "cpu"
    logits, *rest = (tensor.detach().to(device) for tensor in (logits, *rest))
    costs = loss(logits.requires_grad_(), *rest, reduction="none", impl=impl, **options)
    return costs.detach().cpu(), torch.autograd.grad(
        costs, logits, torch.arange(1.0, 5).to(costs)
    )[0].cpu()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_packed_joint_is_the_padded_one_without_its_padding(activation):
    encoded, predicted = halves()
    dense = valid(ACTIVATIONS[activation](encoded[:, :, None] + predicted[:, None]))
    packed = pack_joint(encoded, predicted, FRAMES, LABELS, activation=activation)
    torch.testing.assert_close(packed, dense, rtol=0, atol=0)
    weight = torch.randn(dense.shape, dtype=torch.float64)
    wanted = torch.autograd.grad(dense, (encoded, predicted), weight, retain_graph=True)
    for _ in range(2):
        for got, grad in zip(
            torch.autograd.grad(
                packed, (encoded, predicted), weight, retain_graph=True
            ),
            wanted,
            strict=True,
        ):
            torch.testing.assert_close(got, grad)
    expanded = torch.ones((), dtype=torch.float64).expand(dense.shape)
    wanted = torch.autograd.grad(dense, (encoded, predicted), expanded)
    for got, grad in zip(
        torch.autograd.grad(packed, (encoded, predicted), expanded), wanted, strict=True
    ):
        torch.testing.assert_close(got, grad)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_only_the_results_are_rounded(activation, dtype):
    encoded, predicted = halves(dtype)
    wide = [half.detach().double().requires_grad_() for half in (encoded, predicted)]
    total = (wide[0][:, :, None] + wide[1][:, None]).to(dtype).double()
    dense = valid(ACTIVATIONS[activation](total))
    packed = pack_joint(encoded, predicted, FRAMES, LABELS, activation=activation)
    eps, weight = 4 * torch.finfo(dtype).eps, torch.randn(dense.shape).to(dtype)
    torch.testing.assert_close(packed.double(), dense, rtol=eps, atol=eps)
    grads = torch.autograd.grad(packed, (encoded, predicted), weight)
    wanted = torch.autograd.grad(dense, wide, weight.double())
    for got, one in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got.double(), one, rtol=2 * eps, atol=4 * eps)


def test_tiles_do_not_show():
    encoded = torch.randn(1, 300, 40, requires_grad=True)
    predicted = torch.randn(1, 50, 40, requires_grad=True)
    lengths = torch.tensor([300]), torch.tensor([49])
    packed = pack_joint(encoded, predicted, *lengths, activation="tanh")
    dense = (encoded[0, :, None] + predicted[0]).tanh().flatten(0, 1)
    torch.testing.assert_close(packed, dense, rtol=0, atol=0)
    weight = torch.randn(dense.shape)
    wanted = torch.autograd.grad(dense, (encoded, predicted), weight)
    found = torch.autograd.grad(packed, (encoded, predicted), weight)
    for got, one in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-4)


def test_what_lies_in_the_padding_of_either_half_cannot_matter():
    plain, spoilt = halves(), halves()
    with torch.no_grad():
        for b, (T, U1) in enumerate(SHAPES):
            spoilt[0][b, T:], spoilt[1][b, U1:] = math.nan, math.inf
    results = []
    for given in (plain, spoilt):
        packed = pack_joint(*given, FRAMES, LABELS, activation="tanh")
        results.append((packed, *torch.autograd.grad(packed.square().sum(), given)))
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    for b, (T, U1) in enumerate(SHAPES):
        assert (results[1][1][b, T:] == 0).all()
        assert (results[1][2][b, U1:] == 0).all()


def test_the_packed_joint_has_no_second_derivative_and_notices_that_its_result_was_changed():
    encoded, predicted = halves()
    packed = pack_joint(encoded, predicted, FRAMES, LABELS, activation="relu")
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(packed.sum(), encoded, create_graph=True)
    packed.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        packed.sum().backward()


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize(
    "options",
    [{}, {"clamp": 0.1, "fastemit_lambda": 0.2}, {"fused_log_softmax": False}],
)
def test_the_packed_loss_and_its_gradient_are_the_padded_ones(impl, options):
    dtype = torch.float64 if impl in EXACT else torch.float32
    logits, targets = lattice(dtype)
    logits = logits.log_softmax(-1)
    rest = targets, FRAMES, LABELS
    cost, grad = differentiated(rnnt_loss, logits, *rest, impl=impl, **options)
    packed_cost, packed_grad = differentiated(
        rnnt_loss_packed, valid(logits), *rest, impl=impl, **options
    )
    torch.testing.assert_close(packed_cost, cost, rtol=1e-6, atol=0)
    torch.testing.assert_close(packed_grad, valid(grad), rtol=1e-6, atol=1e-7)
    truth = differentiated(
        rnnt_loss, logits.double(), *rest, impl="reference", **options
    )
    torch.testing.assert_close(
        packed_grad.double(), valid(truth[1]), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("impl", ["wavefront", "numba_cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_may_be_written_over_packed_logits(impl, dtype):
    logits, targets = lattice(dtype)
    wanted = differentiated(
        rnnt_loss_packed, valid(logits), targets, FRAMES, LABELS, impl=impl
    )
    leaf = valid(logits).requires_grad_()
    given = leaf * 1
    costs = rnnt_loss_packed(
        given,
        targets,
        FRAMES,
        LABELS,
        reduction="none",
        impl=impl,
        overwrite_logits=True,
    )
    torch.testing.assert_close(costs, wanted[0], rtol=0, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(costs, leaf, torch.arange(1.0, 5))[0],
        wanted[1],
        rtol=0,
        atol=0,
    )
    torch.testing.assert_close(given.detach(), wanted[1], rtol=0, atol=0)


def test_from_halves_to_loss_packed_and_padded_agree_down_to_the_weights():
    linear, targets = torch.nn.Linear(7, 6).double(), lattice()[1]
    encoded, predicted = halves()
    wanted_from = encoded, predicted, linear.weight, linear.bias
    dense = rnnt_loss(
        linear((encoded[:, :, None] + predicted[:, None]).relu()),
        targets,
        FRAMES,
        LABELS,
    )
    packed = rnnt_loss_packed(
        linear(pack_joint(encoded, predicted, FRAMES, LABELS, activation="relu")),
        targets,
        FRAMES,
        LABELS,
    )
    torch.testing.assert_close(packed, dense)
    for got, wanted in zip(
        torch.autograd.grad(packed, wanted_from),
        torch.autograd.grad(dense, wanted_from),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


def test_memory_is_that_of_the_valid_rows():
    halves = (
        torch.randn(8, 100, 64, requires_grad=True),
        torch.randn(8, 40, 64, requires_grad=True),
    )
    frames, labels = torch.tensor([100] + 7 * [30]), torch.tensor([39] + 7 * [9])
    N = packed_offsets(frames, labels)[-1].item()
    tile, made = 8 * 2**20, []  # gradients of one tile
    for options in ({}, {"activation": "tanh"}):
        size = peak_memory(
            lambda options=options: made.append(
                pack_joint(*halves, frames, labels, **options)
            )
        )
        assert 4 * N * 64 <= size <= 4 * N * 64 + 2**16
        grad = torch.ones_like(made[-1])
        assert (
            peak_memory(lambda grad=grad: torch.autograd.grad(made[-1], halves, grad))
            <= tile
        )
    logits, targets = (
        torch.randn(N, 50, requires_grad=True),
        torch.zeros(8, 39, dtype=torch.long),
    )
    assert (
        peak_memory(
            lambda: rnnt_loss_packed(logits, targets, frames, labels).backward()
        )
        <= 1.5 * logits.nbytes
    )


def test_packed_and_padded_doors_share_one_signature():
    ours, theirs = (
        inspect.signature(f).parameters.values() for f in (rnnt_loss_packed, rnnt_loss)
    )
    assert [(p.name, p.default, p.kind) for p in ours] == [
        (p.name, p.default, p.kind) for p in theirs
    ]


HALVES = {"encoded": torch.zeros(2, 4, 8), "predicted": torch.zeros(2, 3, 8), "logit_lengths": torch.tensor([4, 3]),
          "target_lengths": torch.tensor([2, 1])}  # fmt: skip
LOGITS = {**{name: HALVES[name] for name in ("logit_lengths", "target_lengths")}, "logits": torch.zeros(18, 5),
          "targets": torch.tensor([[0, 1], [2, 3]])}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "change", "wanted"),
    [
    (pack_joint, {"activation": "gelu"}, "activation: expected one of 'none', 'relu', 'tanh', got 'gelu'."),
    (pack_joint, {"encoded": torch.zeros(2, 8)}, "encoded: expected shape (B, T, D), got (2, 8)."),
    (pack_joint, {"predicted": torch.zeros(2, 3, 7)}, "predicted: expected shape (B=2, U1, D=8), got (2, 3, 7)."),
    (pack_joint, {"target_lengths": torch.tensor([2, 3])}, "target_lengths: expected 0 to U=2 labels, got 3 in utterance 1."),
    (rnnt_loss_packed, {"logits": torch.zeros(24, 5)},
         "logits: expected N=18 rows, the sum of T (U + 1), got 24. Pack with the lengths that the loss is given."),
    (rnnt_loss_packed, {"logit_lengths": torch.tensor([0, 9])},
         "logit_lengths: expected at least 1 frame, got 0 in utterance 0."),
    (rnnt_loss_packed, {"impl": "torchaudio"},
         "impl: expected one of 'auto', 'reference', 'wavefront', 'numba_cpu', 'triton', got 'torchaudio'."),
    (rnnt_loss_packed, {"logits": torch.zeros(18, 10)[:, ::2], "overwrite_logits": True},
         "logits: expected contiguous with overwrite_logits=True, got (10, 2)."),
],
)  # fmt: skip
def test_bad_input_is_one_line_that_names_argument_wanted_and_got(
    function, change, wanted
):
    good = HALVES if function is pack_joint else LOGITS
    assert function(**good).isfinite().all()
    with pytest.raises(ValueError) as error:
        function(**{**good, **change})
    assert str(error.value) == wanted
