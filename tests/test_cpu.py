"""Instructions of a CPU, from its flags."""

import pytest
import torch

from asrkit.cpu import LIMITS, expect_int8, fast_dtype, has_int8, sums_int8_in_32_bits


@pytest.fixture
def cpu(monkeypatch):
    """cpu(architecture, *flags): makes torch report these flags."""

    def make(architecture, *flags):
        capabilities = dict.fromkeys(flags, True)
        capabilities |= {"architecture": architecture}
        for name in LIMITS:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)

    return make


@pytest.mark.parametrize("flag, dtype, vnni", [
    ("avx512_f", "float32", False),
    ("avx_vnni", "float32", False),  # FBGEMM does not use it, but oneDNN does
    ("avx512_vnni", "float32", True),
    ("amx_int8", "float32", True),
    ("avx512_bf16", "bfloat16", False),
    ("amx_bf16", "bfloat16", False),
])  # fmt: skip
def test_flags_beyond_avx2(cpu, flag, dtype, vnni, monkeypatch):
    cpu("x86_64", "avx2", flag)
    expect_int8()
    assert (fast_dtype(), sums_int8_in_32_bits()) == (dtype, vnni)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    expect_int8()
    assert (fast_dtype(), sums_int8_in_32_bits()) == ("float32", False)


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value, wide", [
    *[(value, False) for value in ("AVX2", "avx2", "SSE41", "AVX512_CORE", "avx2_vnni_2")],
    *[(value, True) for value in ("", "all", "DEFAULT", "avx512_core_vnni", "AVX512_CORE_BF16")],
    *[(value, True) for value in ("AVX512_CORE_FP16", "AVX512_CORE_AMX_FP16", "AVX10_1_512")],
])  # fmt: skip
def test_limits_of_instructions(cpu, name, value, wide, monkeypatch):
    cpu("x86_64", "avx2", "avx512_vnni")
    monkeypatch.setenv(name, value)
    assert has_int8() and sums_int8_in_32_bits() == wide


def test_a_cpu_without_int8_is_refused_with_a_remedy(cpu):
    cpu("aarch64", "dot")  # Arm's dot product does not count
    assert not has_int8()
    message = (
        r"^int8: expected an x86 CPU with AVX2, got one without \(aarch64\)\. "
        r"Compute in bfloat16 or float32: --dtype bfloat16 or --dtype float32\.$"
    )
    with pytest.raises(ValueError, match=message):
        expect_int8()
