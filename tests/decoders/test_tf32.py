"""Settings of torch that captured kernels depend on."""

from types import SimpleNamespace

import pytest
import torch

from asrkit.decoders.transducer import graphs
from asrkit.decoders.transducer.steps import Carry, GreedyOptions

MATMUL = torch.backends.cuda.matmul
SETTINGS = {
    "fp32_precision of products": lambda: setattr(MATMUL, "fp32_precision", "tf32"),
    "fp32_precision of all backends": lambda: setattr(
        torch.backends, "fp32_precision", "tf32"
    ),
    "allow_tf32": lambda: setattr(MATMUL, "allow_tf32", True),
    "set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
}


@pytest.fixture
def float32_throughout():
    """torch's settings of a new process, before and after the test."""

    def reset():
        torch.backends.fp32_precision = MATMUL.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")
        torch.backends.fp32_precision = MATMUL.fp32_precision = "none"

    reset()
    yield
    reset()
    assert MATMUL.allow_tf32 is False  # the old settings can be read


@pytest.mark.parametrize("setting", SETTINGS)
def test_tf32_by_old_or_new_settings_needs_another_capture(float32_throughout, setting):
    read = SimpleNamespace(confidence=False, blank=0, durations=())
    batch = graphs.DecoderCall(
        read,
        torch.zeros(2, 4, 3),
        torch.zeros(2, dtype=torch.int64),
        Carry(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), torch.zeros(2)),
        GreedyOptions(),
    )
    before = graphs._key(batch)
    SETTINGS[setting]()
    assert graphs._key(batch) != before
