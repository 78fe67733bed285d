"""Losses that never build the joint: the same values and gradients as those that do, in a tile's memory."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asrkit.losses import dropout, rnnt_loss, rnnt_loss_lean, tdt_loss, tdt_loss_lean
from asrkit.workbench.measure import peak_memory

IMPLS = ["plain", "numba_cpu"]
NAMES = ["encoded", "predicted", "weight", "bias"]


def halves(seed, B, T, U, D, V, dtype=torch.float64, ragged=True):
    """Random (encoded, predicted, weight, bias) and (targets, logit_lengths, target_lengths)."""
    g = torch.Generator().manual_seed(seed)
    sizes = (B, T, D), (B, U + 1, D), (V, D), (V,)
    made = tuple(
        torch.randn(size, generator=g, dtype=torch.float64).to(dtype) for size in sizes
    )
    frames, labels = torch.full((B,), T), torch.full((B,), U)
    if ragged:
        frames[1:] = torch.randint(1, T + 1, (B - 1,), generator=g)
        labels[:-1] = torch.randint(0, U + 1, (B - 1,), generator=g)
    return made, (torch.randint(0, V - 1, (B, U), generator=g), frames, labels)


def joint(encoded, predicted, weight, bias, activation="relu", keep=None):
    """The logits (B, T, U1, V) that the lean losses never make."""
    hidden = getattr(torch, activation)(encoded[:, :, None] + predicted[:, None])
    return (hidden if keep is None else hidden * keep) @ weight.T + bias


def value_and_gradients(loss, given, weight=None):
    """Losses (B,) and their gradients by the four tensors."""
    given = [tensor.detach().clone().requires_grad_() for tensor in given]
    costs = loss(*given)
    weight = torch.ones(costs.shape) if weight is None else weight
    return costs.detach(), *torch.autograd.grad(costs, given, weight.to(costs))


def assert_no_worse_than(dense_found, ours, truth, tiny):
    for name, theirs, got, wanted in zip(
        ["loss", *NAMES], dense_found, ours, truth, strict=True
    ):
        error, allowed = (
            (got - wanted).abs().max(),
            2 * (theirs - wanted).abs().max() + tiny * wanted.abs().max().clamp(min=1),
        )
        assert error <= allowed, (name, error.item(), allowed.item())


@settings(max_examples=500, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 7), st.integers(0, 5), st.integers(1, 20), st.integers(2, 9),
    st.sampled_from([0, -1]), st.sampled_from(["relu", "tanh"]), st.sampled_from([3, 1000]), st.sampled_from([0.0, 0.4]),
)  # fmt: skip
def test_values_and_gradients_are_those_of_the_joint(
    seed, B, T, U, D, V, blank, activation, tile, fastemit_lambda
):
    given, (targets, *lengths) = halves(seed, B, T, U, D, V)
    rest = (targets + (blank == 0), *lengths)
    options = {"blank": blank, "reduction": "none", "fastemit_lambda": fastemit_lambda}
    weight = torch.linspace(-1, 2, B)

    def dense(*given, impl):
        return rnnt_loss(joint(*given, activation), *rest, impl=impl, **options)

    def lean(*given, impl):
        return rnnt_loss_lean(
            *given, *rest, activation=activation, tile=tile, impl=impl, **options
        )

    truth = value_and_gradients(lambda *x: dense(*x, impl="reference"), given, weight)
    for wanted, got in zip(
        truth,
        value_and_gradients(lambda *x: lean(*x, impl="plain"), given, weight),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-11)
    low = [tensor.float() for tensor in given]
    dense_found = value_and_gradients(
        lambda *x: dense(*x, impl="wavefront"), low, weight
    )
    for impl in IMPLS:
        assert_no_worse_than(
            dense_found,
            value_and_gradients(lambda *x, impl=impl: lean(*x, impl=impl), low, weight),
            truth,
            1e-5,
        )


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 7), st.integers(0, 4), st.integers(2, 6),
    st.sampled_from([(0, 1), (1,), (0, 1, 2, 3, 4), (2, 1)]), st.sampled_from([0.0, 0.05]),
)  # fmt: skip
def test_tdt_values_and_gradients_are_those_of_the_joint(
    seed, B, T, U, V, durations, sigma
):
    given, (targets, *lengths) = halves(seed, B, T, U, 6, V + len(durations))
    rest, options = (
        (targets % (V - 1), *lengths),
        {"durations": durations, "sigma": sigma, "reduction": "none"},
    )
    truth = value_and_gradients(
        lambda *x: tdt_loss(joint(*x), *rest, impl="reference", **options), given
    )
    ours = value_and_gradients(
        lambda *x: tdt_loss_lean(*x, *rest, impl="plain", tile=3, **options), given
    )
    for wanted, got in zip(truth, ours, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-11)
    low = [tensor.float() for tensor in given]
    for wanted, got in zip(
        truth,
        value_and_gradients(
            lambda *x: tdt_loss_lean(*x, *rest, tile=5, **options), low
        ),
        strict=True,
    ):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_no_worse_than_a_joint_in_half_precision(
    impl, activation, dtype
):
    given, rest = halves(1, 3, 20, 8, 48, 30, dtype)
    options = {"reduction": "none"}
    truth = value_and_gradients(
        lambda *x: rnnt_loss(joint(*x, activation), *rest, **options),
        [x.double() for x in given],
    )
    dense_found = value_and_gradients(
        lambda *x: rnnt_loss(joint(*x, activation), *rest, impl="wavefront", **options),
        given,
    )
    ours = value_and_gradients(
        lambda *x: rnnt_loss_lean(
            *x, *rest, activation=activation, impl=impl, **options
        ),
        given,
    )
    assert [tensor.dtype for tensor in ours] == [torch.float32, *[dtype] * 4]
    assert_no_worse_than(dense_found, ours, truth, torch.finfo(dtype).eps)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_dropout_is_that_of_the_joint_under_the_same_mask(impl, activation):
    B, T, U, D, p = 3, 6, 4, 24, 0.3
    given, rest = halves(2, B, T, U, D, 9, torch.float32)
    keys = dropout.node_keys(
        torch.arange(B)[:, None, None],
        torch.arange(T)[:, None],
        torch.arange(U + 1),
        seed=77,
    )
    keep = dropout.mask(keys.flatten(), D, p).view(B, T, U + 1, D) / (1 - p)
    wanted = value_and_gradients(
        lambda *x: rnnt_loss(joint(*x, activation, keep), *rest, reduction="none"),
        given,
    )
    options = {
        "activation": activation,
        "dropout": p,
        "reduction": "none",
        "impl": impl,
        "tile": 7,
    }
    got = value_and_gradients(
        lambda *x: rnnt_loss_lean(*x, *rest, seed=77, **options), given
    )
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)
    assert not torch.equal(rnnt_loss_lean(*given, *rest, seed=78, **options), got[0])
    torch.manual_seed(5)
    drawn = rnnt_loss_lean(*given, *rest, **options)
    torch.manual_seed(5)
    assert torch.equal(rnnt_loss_lean(*given, *rest, **options), drawn)
    assert not torch.equal(rnnt_loss_lean(*given, *rest, **options), drawn)


@pytest.mark.parametrize("impl", IMPLS)
def test_what_lies_in_the_padding_cannot_matter(impl):
    given, (targets, frames, labels) = halves(3, 4, 6, 4, 8, 5, torch.float32)
    plain = value_and_gradients(
        lambda *x: rnnt_loss_lean(
            *x, targets, frames, labels, impl=impl, reduction="none"
        ),
        given,
    )
    for b in range(4):
        given[0][b, frames[b] :] = math.nan
        given[1][b, labels[b] + 1 :] = math.inf
        targets[b, labels[b] :] = 10**6
    dirty = value_and_gradients(
        lambda *x: rnnt_loss_lean(
            *x, targets, frames, labels, impl=impl, reduction="none"
        ),
        given,
    )
    for one, other in zip(plain, dirty, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    for b in range(4):
        assert (dirty[1][b, frames[b] :] == 0).all()
        assert (dirty[2][b, labels[b] + 1 :] == 0).all()


def test_neither_threads_nor_the_size_of_tiles_change_the_result():
    given, rest = halves(4, 3, 12, 5, 40, 17, torch.float32)
    results, before = {}, torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for tile in (64, 1000):
            results[threads, tile] = value_and_gradients(
                lambda *x, tile=tile: rnnt_loss_lean(*x, *rest, tile=tile), given
            )
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    for tile in (64, 1000):
        for one, other in zip(results[1, tile], results[2, tile], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for one, other in zip(results[1, 64], results[1, 1000], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float32, 0.08), (torch.bfloat16, 0.12)]
)
def test_memory_is_a_tile_and_not_a_joint(dtype, share):
    B, T, U, D, V = 2, 60, 29, 64, 512
    given, rest = halves(6, B, T, U, D, V, dtype, ragged=False)

    def peak(loss):
        return peak_memory(lambda: value_and_gradients(loss, given))

    lean = peak(lambda *x: rnnt_loss_lean(*x, *rest, tile=128, reduction="none"))
    whole = peak(
        lambda *x: rnnt_loss(joint(*x), *rest, impl="wavefront", reduction="none")
    )
    size = torch.finfo(dtype).bits // 8
    tile, sums = (
        128 * (2 * D + V) * size,
        3 * 4 * (V * D + 16 * V + B * (T + U + 1) * D),
    )
    assert lean <= tile + sums + 48 * B * T * (U + 1)
    assert lean <= share * whole


def test_autocast_decides_the_dtype_of_the_products():
    given, rest = halves(7, 2, 10, 4, 32, 16, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = value_and_gradients(
            lambda *x: rnnt_loss_lean(*x, *rest, reduction="none"), given
        )
    low = value_and_gradients(
        lambda e, p, w, b: rnnt_loss_lean(
            e, p, w.bfloat16(), b, *rest, reduction="none"
        ),
        given,
    )
    for one, other in zip(cast, low, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    exact = value_and_gradients(
        lambda *x: rnnt_loss_lean(*x, *rest, reduction="none"), given
    )
    assert not torch.equal(exact[0], cast[0])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_nan_is_heard_in_the_loss_and_in_the_gradients(impl):
    given, rest = halves(12, 2, 5, 3, 8, 6, torch.float32, ragged=False)
    given[0][1, 2, 3] = math.nan
    cost, *grads = value_and_gradients(
        lambda *x: rnnt_loss_lean(
            *x, *rest, activation="tanh", impl=impl, reduction="none"
        ),
        given,
    )
    assert cost.isnan().tolist() == [False, True]
    assert all(grad.isnan().any() for grad in grads)
    assert grads[0][0].isfinite().all()


def test_strided_halves_and_a_bias_of_another_width_are_as_good():
    given, rest = halves(13, 2, 5, 3, 8, 6, torch.float32)
    wanted = value_and_gradients(
        lambda *x: rnnt_loss_lean(*x, *rest, reduction="none"), given
    )
    strided = [torch.stack((tensor, tensor), -1)[..., 0] for tensor in given]
    for impl in IMPLS:
        cost = rnnt_loss_lean(*strided, *rest, impl=impl, reduction="none")
        torch.testing.assert_close(cost, wanted[0])
        rnnt_loss_lean(
            *given[:3], given[3].bfloat16().requires_grad_(), *rest, impl=impl
        ).backward()
        zeros = torch.zeros_like(given[3])
        assert rnnt_loss_lean(*given[:3], None, *rest, impl=impl) == rnnt_loss_lean(
            *given[:3], zeros, *rest, impl=impl
        )


def test_one_gradient_may_be_asked_for_alone_and_the_graph_used_twice():
    given, rest = halves(8, 2, 5, 3, 8, 6, torch.float32)
    weight = given[2].requires_grad_()
    cost = rnnt_loss_lean(*given, *rest)
    first, second = (
        torch.autograd.grad(cost, weight, retain_graph=True)[0] for _ in range(2)
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(cost, weight, create_graph=True)
    with torch.no_grad():
        assert rnnt_loss_lean(*given, *rest) == cost


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_reductions_are_those_of_the_dense_loss(reduction):
    given, rest = halves(9, 3, 5, 3, 8, 6)
    torch.testing.assert_close(
        rnnt_loss_lean(*given, *rest, reduction=reduction),
        rnnt_loss(joint(*given), *rest, reduction=reduction),
    )


def test_tdt_with_omega_one_is_the_plain_loss_and_no_path_costs_infinity():
    given, (targets, *lengths) = halves(10, 2, 5, 2, 8, 6 + 2, torch.float32)
    rest = targets % 5, *lengths
    tokens = (*given[:2], given[2][:6], given[3][:6])
    wanted = value_and_gradients(
        lambda *x: rnnt_loss_lean(*x, *rest, reduction="none"), tokens
    )
    options = {"durations": (0, 1), "omega": 1.0, "sigma": 0.3, "reduction": "none"}
    found = value_and_gradients(lambda *x: tdt_loss_lean(*x, *rest, **options), given)
    for one, other in zip(found, wanted, strict=True):
        n = len(other)  # behind it are the durations
        torch.testing.assert_close(one[:n], other)
        assert (one[n:] == 0).all()
    cost, *grads = value_and_gradients(
        lambda *x: tdt_loss_lean(
            *x,
            rest[0],
            torch.tensor([5, 5]),
            rest[2],
            durations=(2, 4),
            reduction="none",
        ),
        given,
    )
    assert (cost == math.inf).all()
    assert all((grad == 0).all() for grad in grads)


def test_bad_input_is_one_line_that_names_argument_wanted_and_got():
    given, rest = halves(11, 2, 5, 3, 8, 6, torch.float32)
    good = dict(
        zip(
            [*NAMES, "targets", "logit_lengths", "target_lengths"],
            [*given, *rest],
            strict=True,
        )
    )
    cases = {
        "predicted: expected shape (B=2, U1, D=8), got (2, 4, 7).": {
            "predicted": torch.zeros(2, 4, 7)
        },
        "encoded: expected shape (B, T, D), got (2, 5).": {
            "encoded": torch.zeros(2, 5)
        },
        "predicted: expected torch.float32, as encoded, got torch.float64.": {
            "predicted": given[1].double()
        },
        "encoded: expected floating point, got torch.int64.": {
            "encoded": given[0].long()
        },
        "activation: expected one of 'relu', 'tanh', got 'gelu'.": {
            "activation": "gelu"
        },
        "dropout: expected a probability below 1, got 1.": {"dropout": 1},
        "dropout: expected a probability below 1, got a.": {"dropout": "a"},
        "tile: expected a number of nodes, at least 1, got 0.": {"tile": 0},
        "tile: expected a number of nodes, at least 1, got 2.5.": {"tile": 2.5},
        "seed: expected an integer of 32 bits, got -1.": {"seed": -1},
        "impl: expected one of 'auto', 'plain', 'numba_cpu', 'triton', got 'fast'.": {
            "impl": "fast"
        },
    }
    assert rnnt_loss_lean(**good).isfinite()
    for wanted, change in cases.items():
        with pytest.raises(ValueError) as error:
            rnnt_loss_lean(**{**good, **change})
        assert str(error.value) == wanted
    with pytest.raises(
        ValueError,
        match="encoded: expected float32, float16 or bfloat16 with impl='numba_cpu'",
    ):
        rnnt_loss_lean(*[x.double() for x in given], *rest, impl="numba_cpu")
    for durations in ((1, 1), 4):
        with pytest.raises(ValueError, match="durations: expected"):
            tdt_loss_lean(*given, *rest, durations=durations)


def test_what_a_call_draws_is_drawn_on_the_host_after_its_checks():
    given, (targets, *lengths) = halves(14, 2, 5, 3, 8, 6 + 2, torch.float32)
    rest = targets % 5, *lengths
    options = {"durations": (0, 1), "omega": 0.5}
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="tile: expected"):
        tdt_loss_lean(*given, *rest, dropout=0.5, tile=0, **options)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.device("meta"):
        assert tdt_loss_lean(*given, *rest, dropout=0.5, **options).isfinite()
    assert not torch.equal(torch.get_rng_state(), before)
