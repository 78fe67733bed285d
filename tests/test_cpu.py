"""Instructions of a CPU, from its flags."""

import pytest
import torch

from asrkit.cpu import bfloat16_instructions, expect_int8, fast_dtype, has_int8


@pytest.fixture
def cpu(monkeypatch):
    """cpu(architecture, *flags): makes torch report these flags."""

    def make(architecture, *flags):
        capabilities = dict.fromkeys(flags, True)
        capabilities |= {"architecture": architecture, "avx2": True}
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


@pytest.mark.parametrize("flag", ["avx512_vnni", "avx_vnni", "amx_int8"])
def test_an_x86_cpu_needs_one_flag_for_int8(cpu, flag):
    cpu("x86_64", flag)
    assert has_int8()
    expect_int8()


def test_a_cpu_without_int8_is_refused_with_a_remedy(cpu):
    cpu("aarch64", "dot")  # Arm's dot product does not count
    assert not has_int8()
    message = (
        r"^int8: expected an x86 CPU with VNNI or AMX, got one without \(aarch64\)\. "
        r"Compute in bfloat16 or float32: --dtype bfloat16 or --dtype float32\.$"
    )
    with pytest.raises(ValueError, match=message):
        expect_int8()
