"""Instructions of a CPU, from its flags."""

import pytest
import torch

from asrkit.cpu import expect_int8, fast_dtype, has_int8, has_vnni


@pytest.fixture
def cpu(monkeypatch):
    """cpu(architecture, *flags): makes torch report these flags."""

    def make(architecture, *flags):
        capabilities = dict.fromkeys(flags, True)
        capabilities |= {"architecture": architecture}
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)

    return make


@pytest.mark.parametrize("flag, dtype, vnni", [
    ("avx512_f", "float32", False),
    ("avx_vnni", "float32", False),  # FBGEMM does not use it
    ("avx512_vnni", "float32", True),
    ("amx_int8", "float32", True),
    ("avx512_bf16", "bfloat16", False),
    ("amx_bf16", "bfloat16", False),
])  # fmt: skip
def test_flags_beyond_avx2(cpu, flag, dtype, vnni, monkeypatch):
    cpu("x86_64", "avx2", flag)
    expect_int8()
    assert (fast_dtype(), has_vnni()) == (dtype, vnni)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    expect_int8()
    assert (fast_dtype(), has_vnni()) == ("float32", False)


def test_a_cpu_without_int8_is_refused_with_a_remedy(cpu):
    cpu("aarch64", "dot")  # Arm's dot product does not count
    assert not has_int8()
    message = (
        r"^int8: expected an x86 CPU with AVX2, got one without \(aarch64\)\. "
        r"Compute in bfloat16 or float32: --dtype bfloat16 or --dtype float32\.$"
    )
    with pytest.raises(ValueError, match=message):
        expect_int8()
