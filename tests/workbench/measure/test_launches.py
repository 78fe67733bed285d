"""Launches and waits of ops for which both are known."""

from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from asrkit.workbench.measure import launch_profile

X = torch.arange(20.0).view(4, 5)
MASK = X % 2 == 0
ROWS = torch.tensor([0, 1])
KNOWN = {  # calls by (launches, waits)
    (0, 0): {
        "views": lambda: X.view(2, 10).t()[1:, None].expand(-1, 3, -1).detach(),
        "memory": lambda: (X.new_empty(2), torch.empty_strided((2, 2), (1, 2))),
        "nothing to do": lambda: (X.to(torch.float32), torch.cat([X[:0], X[:0]])),
        "values that stay on the CPU": lambda: torch.tensor([1.0]),
    },
    (1, 0): {
        "filled memory": lambda: torch.zeros(3),
        "a cast": lambda: X.to(torch.bfloat16),
        "a linear layer": lambda: F.linear(X, X, X[:, 0]),
        "indexing with positions": lambda: X[ROWS],
    },
    (2, 0): {
        "a sum and a product": lambda: (X + X) * 2,
        "where with a number, which is filled in first": lambda: X.where(MASK, 0.0),
        "a known number of repeats": lambda: ROWS.repeat_interleave(
            ROWS, output_size=1
        ),
    },
    (0, 1): {
        "item": lambda: X[0, 0].item(),
        "tolist": lambda: X.tolist(),
        "numpy": lambda: X.numpy(),
        "a copy to the CPU": lambda: X.cpu(),
    },
    (1, 1): {
        "bool": lambda: bool(MASK.any()),
        "values from Python": lambda: torch.tensor([1.0], device="cpu"),
        "nonzero": lambda: MASK.nonzero(),
        "a mask as an index": lambda: X[MASK],
        "equal": lambda: torch.equal(X, X),
    },
    (2, 1): {
        "repeats whose number the device knows": lambda: ROWS.repeat_interleave(ROWS),
    },
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("counts", KNOWN)
def test_known_launches_and_waits(counts, inference):
    for name, call in KNOWN[counts].items():
        with torch.inference_mode(inference):
            found = launch_profile(call)
        assert (found.launches, found.syncs) == counts, (name, found)
        assert found.sync_sites.total() == found.syncs


def test_ops_and_sites_are_counted_by_name_and_line():
    def fn():
        for _ in range(3):
            if (X + 1).sum().item() > 0:
                X.mul(2).tolist()

    found = launch_profile(fn)
    assert found.ops == Counter(add=3, sum=3, mul=3, _local_scalar_dense=3, tolist=3)
    file = "tests/workbench/measure/test_launches.py"
    first = fn.__code__.co_firstlineno
    assert found.sync_sites == {f"{file}:{first + n}": 3 for n in (2, 3)}


def test_nothing_stays_behind_not_even_after_an_error():
    with pytest.raises(ZeroDivisionError):
        launch_profile(lambda: 1 / 0)
    assert launch_profile(lambda: None).ops == Counter()


def test_another_kind_of_device_is_refused():
    wanted = "device: expected one of 'cpu', 'cuda', 'meta', got 'gpu'."
    with pytest.raises(ValueError, match=wanted):
        launch_profile(int, device="gpu")


@pytest.mark.gpu
def test_on_a_gpu_the_driver_counts_too():
    x = torch.ones(4, device="cuda")
    found = launch_profile(lambda: (x + 1).sum().item(), device="cuda")
    assert found.launches == 2
    assert found.syncs == 1
    assert found.driver["cudaLaunchKernel"] >= 2
    assert found.driver["cudaStreamSynchronize"] >= 1
    assert "cudaGraphLaunch" not in found.driver
    both = launch_profile(lambda: x.cpu().to("cuda", non_blocking=True), device="cuda")
    assert both.launches == 2
    assert both.syncs == 1
