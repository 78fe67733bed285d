"""What compiled kernels are asked for."""

from types import SimpleNamespace

import pytest
import torch

from asrkit.decoders.transducer import graphs
from asrkit.decoders.transducer.steps import Carry, GreedyOptions

MATMUL = torch.backends.cuda.matmul
ASKED = {
    "fp32_precision of products": lambda: setattr(MATMUL, "fp32_precision", "tf32"),
    "fp32_precision of all backends": lambda: setattr(
        torch.backends, "fp32_precision", "tf32"
    ),
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
def test_a_captured_loop_is_another_in_tf32_by_old_and_new_settings(
    float32_throughout, way
):
    read = SimpleNamespace(confidence=False, blank=0, durations=())
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
