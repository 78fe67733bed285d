"""Comparisons of a case: exact in every layout, and no larger than what they compare."""

from functools import partial

import pytest
import torch

from asrkit.workbench.measure import peak_memory
from asrkit.workbench.measure.comparison import CHUNK, apart, compare_arms
from benchmarks.harness.cases import Case

MIB = 2**20
SCALARS = 1024  # bytes, for norms and other single numbers
LARGE = 64 * MIB // 4  # numbers of 64 MiB in float32


def test_a_comparison_makes_no_copy_of_what_it_compares():
    x = torch.ones(64, LARGE // 64)
    y = x + 1
    found = []
    assert peak_memory(lambda: found.extend(apart(x, y))) <= 32 * MIB + SCALARS
    assert found == pytest.approx([LARGE**0.5] * 2)


def test_an_error_that_ends_the_gpus_context_is_not_attributed_to_later_arms(
    monkeypatch,
):
    """After such an error every call to CUDA fails, also a wait."""
    ran = []
    dead = []

    def wait(device=None):
        if dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def call(name, breaks=False):
        ran.append(name)
        dead.extend([True] * breaks)
        wait()
        return (torch.ones(1),)

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    arms = {name: partial(call, name, name == "bad") for name in ("first", "bad", "x")}
    with pytest.raises(RuntimeError, match="illegal memory access"):
        compare_arms(Case(what="x", arms=arms, params={}), "cuda")
    assert ran == ["first", "bad"]


WIDE = torch.randn(3, CHUNK + 5, generator=torch.Generator().manual_seed(0))
LAYOUTS = {
    "rows longer than a chunk": lambda x: x,
    "short rows, turned": lambda x: x.t(),
    "every other number": lambda x: x.flatten()[::2],
    "one number": lambda x: x[0, 0],
    "one chunk and nothing more": lambda x: x[0, :CHUNK],
    "none": lambda x: x[:, :0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_are_those_of_the_whole_in_every_layout(layout):
    x, y = map(LAYOUTS[layout], (WIDE, 1.5 * WIDE))
    size = x.double().norm().item()
    assert apart(x, y) == pytest.approx((size / 2, size), rel=1e-6)


def test_layouts_may_differ():
    size = WIDE.double().norm().item()
    found = apart(WIDE, (1.5 * WIDE).t().contiguous().t())
    assert found == pytest.approx((size / 2, size), rel=1e-6)


def test_differences_of_halves_neither_overflow_nor_vanish():
    x = torch.full((4,), 6e4, dtype=torch.float16)
    assert apart(x, -x)[0] == pytest.approx(2 * x.double().norm().item())
    assert apart(torch.tensor([torch.nan]), torch.ones(1))[0] != 0.0


def test_an_arm_that_raises_or_differs_from_infinity_or_returns_nothing_is_left_out():
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
