"""Comparisons of a case: exact in every layout, and no larger than what they compare."""

from functools import partial

import pytest
import torch

from asrkit.workbench.bench.agreement import CHUNK, apart, compare_arms
from asrkit.workbench.bench.cases import Case
from asrkit.workbench.measure import peak_memory

MIB = 2**20
SCALARS = 1024  # bytes, for norms and other single numbers
LARGE = 64 * MIB // 4  # numbers of 64 MiB in float32


def test_a_comparison_makes_no_copy_of_what_it_compares():
    x = torch.ones(64, LARGE // 64)
    y = x + 1
    found = []
    assert peak_memory(lambda: found.extend(apart(x, y))) <= 32 * MIB + SCALARS
    assert found == pytest.approx([LARGE**0.5] * 2)


def test_an_error_that_ends_the_gpus_context_is_not_blamed_on_the_arms_that_follow(
    monkeypatch,
):
    """What CUDA does then: every call fails, the wait too."""
    dead, ran = [], []

    def call(name, breaks=False):
        ran.append(name)
        dead.extend([True] * breaks)
        if dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return (torch.ones(1),)

    def synchronize(device=None):
        if dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    arms = {
        "first": partial(call, "first"),
        "bad": partial(call, "bad", True),
        "third": partial(call, "third"),
    }
    with pytest.raises(RuntimeError, match="illegal memory access"):
        compare_arms(Case(what="x", arms=arms, params={}), "cuda")
    assert ran == ["first", "bad"]
    dead.clear()
    arms["bad"] = lambda: (torch.zeros(1),)
    assert [*compare_arms(Case(what="x", arms=arms, params={}), "cuda")[1]] == [
        "bad"
    ]  # alive: only that one is wrong


def layouts():
    """Pairs of (x, y) by what is special about them."""
    draw = torch.Generator().manual_seed(0)
    wide = torch.randn(3, CHUNK + 5, generator=draw)
    yield "rows longer than a chunk", wide, wide * 1.5
    yield "of which one is turned", wide, (wide * 1.5).t().contiguous().t()
    yield "short rows, turned", wide.t(), (wide * 1.5).t()
    yield "every other number", wide.flatten()[::2], wide.flatten()[::2] * 1.5
    yield "one number", wide[0, 0], wide[0, 0] * 1.5
    yield "one chunk and nothing more", wide[0, :CHUNK], wide[0, :CHUNK] * 1.5
    yield "none", wide[:, :0], wide[:, :0]


@pytest.mark.parametrize(
    "x, y", [pytest.param(x, y, id=name) for name, x, y in layouts()]
)
def test_norms_are_those_of_the_whole_in_every_layout(x, y):
    off, size = apart(x, y)
    assert (off, size) == pytest.approx(
        ((x.double() - y.double()).norm().item(), x.double().norm().item()), rel=1e-12
    )


def test_differences_of_halves_neither_overflow_nor_vanish():
    x, y = (
        torch.full((4,), 6e4, dtype=torch.float16),
        torch.full((4,), -6e4, dtype=torch.float16),
    )
    assert apart(x, y)[0] == pytest.approx(2 * x.double().norm().item())
    assert apart(torch.tensor([torch.nan]), torch.ones(1))[0] != 0.0


def test_an_arm_that_raises_anything_or_differs_from_infinity_or_gives_nothing_is_left_out():
    def breaks():
        raise KeyError("gone")

    arms = {
        "first": lambda: (torch.tensor([torch.inf, 1.0]),),
        "finite": lambda: (torch.tensor([5.0, 7.0]),),
        "breaks": breaks,
        "empty": lambda: (),
    }
    _, failures = compare_arms(Case(what="x", arms=arms, params={}))
    assert [*failures] == ["finite", "breaks", "empty"]
    assert "breaks fails: 'gone'" in failures["breaks"]
