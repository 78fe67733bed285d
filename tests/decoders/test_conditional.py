"""The kernel that ends the graph which repeats itself, compiled without a GPU."""

import pytest

from asrkit.decoders.transducer import conditional


def test_the_kernel_of_the_condition_compiles_without_a_gpu():
    pytest.importorskip("cuda.bindings.nvrtc")
    text = conditional.ptx().decode()
    assert ".visible .entry go_on(" in text and "cudaGraphSetConditional" in text
    assert text.endswith("\0")


def test_a_kernel_that_does_not_compile_is_an_error(monkeypatch):
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(conditional, "KERNEL", b"no C")
    with pytest.raises(RuntimeError, match="NVRTC_ERROR_COMPILATION"):
        conditional.ptx()
