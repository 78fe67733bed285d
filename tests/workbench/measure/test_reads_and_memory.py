"""Host reads of a step with a known number of them, and peaks that follow from shapes."""

import pytest
import torch
from torch import nn

from asrkit.workbench.measure import fake_peak, host_reads

HERE = "tests/workbench/measure/test_reads_and_memory.py"


def planted(x):
    y = (x * 2).sum()
    if y.isfinite():
        y = y + x.max().item()
    return y.backward()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_planted_read_is_found_with_its_file_and_line(device):
    x = torch.ones(3, 4, device=device, requires_grad=True)
    first = planted.__code__.co_firstlineno
    found = host_reads(lambda: planted(x), device=device)
    assert found == {f"{HERE}:{first + number}": 1 for number in (2, 3)}
    assert x.grad.shape == x.shape
    assert host_reads(lambda: (x * 2).sum().backward(), device=device) == {}


READS = {
    "a copy to the host": lambda x, host: x.to("cpu"),
    "a copy to the host, by name": lambda x, host: x.cpu() + host,
    "a copy into host memory": lambda x, host: host.copy_(x),
    "a copy of pageable memory": lambda x, host: host.to("meta"),
    "equal": lambda x, host: torch.equal(x, x),
    "a whole number": lambda x, host: host[x.long().sum()],
}
WAITLESS = {
    "host tensors": lambda x, host: (host.tolist(), host.sum().item(), host.nonzero()),
    "a copy that does not block": lambda x, host: host.to("meta", non_blocking=True),
    "a copy back that does not block": lambda x, host: x.to("cpu", non_blocking=True),
    "work on the device": lambda x, host: x.softmax(0).where(x > 0, 0.0),
}


def reads(call):
    x = torch.ones(2, device="meta")
    host = torch.ones(2)
    return host_reads(lambda: call(x, host), device="meta").total()


@pytest.mark.parametrize("name", READS)
def test_each_kind_of_read_counts_once(name):
    assert reads(READS[name]) == 1


@pytest.mark.parametrize("name", WAITLESS)
def test_work_on_one_side_does_not_count(name):
    assert reads(WAITLESS[name]) == 0


def test_a_size_that_numbers_decide_is_refused():
    with pytest.raises(RuntimeError, match="nonzero"):
        host_reads(lambda: torch.ones(3, device="meta").nonzero(), device="meta")


def test_another_device_is_refused():
    with pytest.raises(ValueError, match="^device: expected one of '"):
        host_reads(int, device="gpu")


def test_the_peak_is_the_one_that_torchs_own_tracker_notes():
    from torch.distributed._tools.mem_tracker import MemTracker

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        x = torch.randn(100, 8)
    step = lambda x: model(x).sum().backward()  # noqa: E731
    tracker = MemTracker()
    tracker.track_external(model, x)
    with tracker:
        step(x)
    wanted = tracker.get_tracker_snapshot("peak")[torch.device("meta")]["Total"]
    model.zero_grad()
    assert fake_peak(step, x, held=[model], steps=1) == wanted > 0
