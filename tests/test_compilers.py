"""What compiled kernels are asked for."""

from types import SimpleNamespace

import pytest
import torch

from asrkit.decoders.transducer import graphs
from asrkit.decoders.transducer.steps import Carry, GreedyOptions
from asrkit.runtime import tf32_asked

MATMUL = torch.backends.cuda.matmul
ASKED = {
    "fp32_precision of products": lambda: setattr(MATMUL, "fp32_precision", "tf32"),
    "fp32_precision of all backends": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "allow_tf32": lambda: setattr(MATMUL, "allow_tf32", True),
    "set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
}


@pytest.fixture
def float32_throughout():
    """torch's settings as they are in a new process, before and afterwards."""

    def reset():
        torch.backends.fp32_precision = MATMUL.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")
        torch.backends.fp32_precision = MATMUL.fp32_precision = "none"

    reset()
    yield
    reset()
    assert MATMUL.allow_tf32 is False  # the old settings can be read again


@pytest.mark.parametrize("way", ASKED)
def test_tf32_is_found_asked_for_by_old_and_new_settings(float32_throughout, way):
    assert not tf32_asked()
    ASKED[way]()
    assert tf32_asked()


@pytest.mark.parametrize("way", ASKED)
def test_the_first_convolutions_take_tf32_by_old_and_new_settings(
    float32_throughout, monkeypatch, way
):
    pytest.importorskip("triton")
    from asrkit.models.fused import triton as kernels

    exact = []

    class Kernel:
        """Keeps what a launch is given for EXACT, before ROWS and BLOCK."""

        def __getitem__(self, grid):
            return lambda *given, **how: exact.append(given[-3])

    monkeypatch.setattr(kernels, "_first_convs", Kernel())
    features, lengths = torch.zeros(1, 8, 8), torch.tensor([8])
    arguments = features, lengths, 2, torch.zeros(16, 4), torch.zeros(9, 4), torch.zeros(4)
    kernels.first_convs(*arguments)
    ASKED[way]()
    kernels.first_convs(*arguments)
    assert exact == [True, False]


@pytest.mark.parametrize("way", ASKED)
def test_a_captured_loop_is_another_in_tf32_by_old_and_new_settings(float32_throughout, way):
    read = SimpleNamespace(confidence="none", blank=0, durations=())
    batch = graphs.DecoderCall(
        read,
        torch.zeros(2, 4, 3),
        torch.zeros(2, dtype=torch.int64),
        Carry(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), torch.zeros(2)),
        GreedyOptions(),
    )
    before = graphs._key(batch)
    ASKED[way]()
    assert graphs._key(batch) != before
