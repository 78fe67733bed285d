"""The kernel that ends the WHILE graph compiles without a GPU."""

import pytest

from asrkit.decoders.transducer import conditional


def test_the_kernel_of_the_condition_compiles_without_a_gpu():
    pytest.importorskip("cuda.bindings.nvrtc")
    text = conditional.ptx().decode()
    assert ".visible .entry go_on(" in text
    assert "cudaGraphSetConditional" in text
    assert text.endswith("\0")
