"""Launches and waits of ops for which both are known."""

import inspect
from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from asrkit.workbench.measure import launch_profile

X, ROWS, MASK = (
    torch.arange(20.0).view(4, 5),
    torch.tensor([0, 1]),
    torch.arange(20).view(4, 5) % 2 == 0,
)

KNOWN = {
    "a sum and a product": (lambda: (X + X) * 2, 2, 0),
    "views": (
        lambda: X.view(2, 10).t()[1:, None].unsqueeze(0).expand(3, -1, -1, -1).detach(),
        0,
        0,
    ),
    "memory": (lambda: (X.new_empty(2), torch.empty_strided((2, 2), (1, 2))), 0, 0),
    "filled memory": (lambda: torch.zeros(3), 1, 0),
    "nothing to do": (
        lambda: (X.to(torch.float32), X.contiguous(), torch.cat([X[:0], X[:0]])),
        0,
        0,
    ),
    "a cast": (lambda: X.to(torch.bfloat16), 1, 0),
    "a linear layer": (lambda: F.linear(X, X, X[:, 0][:4]), 1, 0),
    "where": (lambda: torch.where(MASK, X, X), 1, 0),
    "where with a number, which is filled in first": (
        lambda: torch.where(MASK, X, 0.0),
        2,
        0,
    ),
    "log_softmax": (lambda: X.log_softmax(-1), 1, 0),
    "indexing with positions": (lambda: X[ROWS], 1, 0),
    "copies in one call": (
        lambda: torch._foreach_copy_([X.new_empty(4, 5), X.new_empty(4, 5)], [X, X]),
        1,
        0,
    ),
    "masked_fill": (lambda: X.masked_fill(MASK, 0), 1, 0),
    "a number where a mask says so": (
        lambda: torch.zeros(4, 5).__setitem__(MASK, 1.0),
        2,
        0,
    ),
    "repeats whose number is told": (
        lambda: ROWS.repeat_interleave(ROWS, output_size=1),
        2,
        0,
    ),
    "item": (lambda: X[0, 0].item(), 0, 1),
    "bool": (lambda: bool(MASK.any()), 1, 1),
    "int": (lambda: int(ROWS.sum()), 1, 1),
    "a format": (lambda: f"{X.sum()}", 1, 1),
    "a position on the device as an index": (lambda: X[ROWS[0]], 0, 1),
    "tolist": (lambda: X.tolist(), 0, 1),
    "numpy": (lambda: X.numpy(), 0, 1),
    "a copy to the CPU": (lambda: X.cpu(), 0, 1),
    "values from Python": (lambda: torch.tensor([1.0], device="cpu"), 1, 1),
    "values that stay on the CPU": (lambda: torch.tensor([1.0]), 0, 0),
    "nonzero": (lambda: MASK.nonzero(), 1, 1),
    "where with one argument": (lambda: torch.where(MASK), 1, 1),
    "a mask as an index": (lambda: X[MASK], 1, 1),
    "values where a mask says so": (
        lambda: torch.zeros(4, 5).__setitem__(MASK, torch.ones(10)),
        3,
        1,
    ),
    "masked_select": (lambda: X.masked_select(MASK), 1, 1),
    "unique": (lambda: X.unique(), 1, 1),
    "unique_consecutive": (lambda: ROWS.unique_consecutive(), 1, 1),
    "equal": (lambda: torch.equal(X, X), 1, 1),
    "allclose": (lambda: torch.allclose(X, X), 1, 1),
    "repeats whose number only the device knows": (
        lambda: ROWS.repeat_interleave(ROWS),
        2,
        1,
    ),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_known_launches_and_waits(name, inference):
    fn, launches, syncs = KNOWN[name]
    with torch.inference_mode(inference):
        found = launch_profile(fn)
    assert (found.launches, found.syncs) == (launches, syncs), found
    assert found.sync_sites.total() == syncs
    assert not found.driver


def test_ops_and_sites_are_counted_by_name_and_line():
    def fn():
        for _ in range(3):
            if (X + 1).sum().item() > 0:
                X.mul(2).tolist()

    found = launch_profile(fn)
    assert found.ops == Counter(add=3, sum=3, mul=3, _local_scalar_dense=3, tolist=3)
    here = inspect.getsourcelines(fn)[1]
    assert found.sync_sites == {
        f"tests/workbench/measure/test_launches.py:{line}": 3
        for line in (here + 2, here + 3)
    }


def test_nothing_stays_behind_not_even_after_an_error():
    with pytest.raises(ZeroDivisionError):
        launch_profile(lambda: 1 / 0)
    assert launch_profile(lambda: None).ops == Counter()


@pytest.mark.parametrize("device", ["gpu", "", None, 0])
def test_another_kind_of_device_is_refused(device):
    with pytest.raises(ValueError) as error:
        launch_profile(lambda: None, device=device)
    assert (
        str(error.value)
        == f"device: expected one of 'cpu', 'cuda', 'meta', got {device!r}."
    )


@pytest.mark.gpu
def test_on_a_gpu_the_driver_counts_too():
    x = torch.ones(4, device="cuda")
    found = launch_profile(lambda: (x + 1).sum().item(), device="cuda")
    assert (found.launches, found.syncs) == (2, 1)
    assert found.driver["cudaLaunchKernel"] >= 2
    assert found.driver["cudaStreamSynchronize"] >= 1
    assert "cudaGraphLaunch" not in found.driver
    on_the_cpu = launch_profile(lambda: torch.ones(3) + 1, device="cuda")
    assert (on_the_cpu.launches, on_the_cpu.syncs) == (0, 0)
    both = launch_profile(lambda: x.cpu().to("cuda", non_blocking=True), device="cuda")
    assert (both.launches, both.syncs) == (2, 1)
