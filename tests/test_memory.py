"""Peak memory against allocations whose size is known."""

import ctypes
import os
import sys
from pathlib import Path

import pytest
import torch

from asrkit.losses import rnnt_loss
from asrkit.memory import peak_memory, return_free_memory

MB = 1_000_000
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_peak_counts_tensors_that_exist_at_once(device):
    def zeros(megabytes):
        return torch.zeros(megabytes * MB // 4, device=device)

    def overlap():
        a, b = zeros(4), zeros(8)
        del a
        c = zeros(2)
        return b, c

    def in_turn():
        for _ in range(5):
            zeros(4)

    slack = 0 if device == "cpu" else 4096
    assert abs(peak_memory(overlap, device=device) - 12 * MB) <= slack
    assert abs(peak_memory(in_turn, device=device) - 4 * MB) <= slack
    assert peak_memory(lambda: None, device=device) == 0


def test_earlier_tensors_do_not_count_and_freeing_them_subtracts_nothing():
    held = [torch.zeros(MB)]
    assert peak_memory(lambda: (held.clear(), torch.zeros(MB // 2))) == 2 * MB


def test_memory_allocated_by_the_backward_pass_counts():
    x = torch.ones(MB, requires_grad=True)
    assert peak_memory(lambda: x.sum().backward()) == pytest.approx(4 * MB, abs=64)


@pytest.mark.parametrize(
    ("impl", "multiple", "lattices"), [("torchaudio", 2, 0), ("wavefront", 1, 1)]
)
def test_losses_take_the_memory_in_their_docstrings(impl, multiple, lattices):
    B, T, U1, V = 2, 100, 21, 512
    logits = torch.randn(B, T, U1, V)
    targets = torch.randint(0, V - 1, (B, U1 - 1))
    rest = targets, torch.full((B,), T), torch.full((B,), U1 - 1)

    def forward_backward():
        rnnt_loss(logits.detach().requires_grad_(), *rest, impl=impl).backward()

    lattice_bytes = 16 * B * (T + U1) * (2 * U1 + 1)
    expected = multiple * logits.nbytes + lattices * lattice_bytes
    small = 3 * 2**20  # a tile, its softmax, vectors
    assert expected <= peak_memory(forward_backward) <= expected + small


def test_an_error_inside_is_raised_and_a_wrong_device_is_refused():
    with pytest.raises(ZeroDivisionError):
        peak_memory(lambda: 1 / 0)
    # the profiler still works
    assert peak_memory(lambda: torch.zeros(MB)) == 4 * MB
    with pytest.raises(ValueError, match="^device: expected one of 'cpu', 'cuda'"):
        peak_memory(int, device="meta")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_free_memory_goes_back_to_the_system():
    """With blocks of 64 KiB, which glibc keeps as long as a later one is in use."""

    def held_MB():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MB

    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    return_free_memory()
    blocks = [library.malloc(65_536) for _ in range(2000)]
    for block in blocks:
        ctypes.memset(block, 1, 65_536)
    for block in blocks[:-1]:
        library.free(block)
    before = held_MB()
    return_free_memory()
    assert before - held_MB() > 100
    library.free(blocks[-1])
