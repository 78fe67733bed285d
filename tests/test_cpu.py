"""Instructions of a CPU, from its flags."""

import pytest
import torch

from asrkit.cpu import (
    bfloat16_instructions,
    expect_int8,
    fast_dtype,
    has_avx512,
    has_int8,
    has_vnni,
)


@pytest.fixture
def cpu(monkeypatch):
    """cpu(architecture, *flags): makes torch report these flags."""

    def make(architecture, *flags):
        capabilities = dict.fromkeys(flags, True)
        capabilities |= {"architecture": architecture}
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)

    return make


@pytest.mark.parametrize("flags, dtype, instructions", [
    ((), "float32", ""),
    (("avx512_vnni",), "float32", ""),
    (("avx512_bf16",), "bfloat16", "avx512_bf16"),
    (("avx512_bf16", "amx_bf16"), "bfloat16", "AMX"),
])  # fmt: skip
def test_bfloat16_is_fast_with_a_flag(cpu, flags, dtype, instructions):
    cpu("x86_64", *flags)
    assert (fast_dtype(), bfloat16_instructions()) == (dtype, instructions)


# FBGEMM does not use avx_vnni.
@pytest.mark.parametrize("flags, vnni", [
    ((), False),
    (("avx512_f",), False),
    (("avx_vnni",), False),
    (("avx512_vnni",), True),
    (("amx_int8",), True),
])  # fmt: skip
def test_int8_needs_avx2_and_has_wide_sums_with_a_flag(cpu, flags, vnni):
    cpu("x86_64", "avx2", *flags)
    expect_int8()
    assert has_int8()
    assert has_vnni() == vnni


def test_a_limit_of_onednn_is_that_of_the_cpu(cpu, monkeypatch):
    cpu("x86_64", "avx2", "avx512_f", "avx512_vnni", "avx512_bf16")
    assert (has_avx512(), has_vnni(), fast_dtype()) == (True, True, "bfloat16")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert has_int8()
    assert (has_avx512(), has_vnni(), fast_dtype()) == (False, False, "float32")


def test_a_cpu_without_int8_is_refused_with_a_remedy(cpu):
    cpu("aarch64", "dot")  # Arm's dot product does not count
    assert not has_int8()
    message = (
        r"^int8: expected an x86 CPU with AVX2, got one without \(aarch64\)\. "
        r"Compute in bfloat16 or float32: --dtype bfloat16 or --dtype float32\.$"
    )
    with pytest.raises(ValueError, match=message):
        expect_int8()
