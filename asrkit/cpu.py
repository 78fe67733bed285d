"""Instructions of this CPU: AVX-512, products of bfloat16, and products of int8.

Everything here reads the CPU's flags. Whether oneDNN supports a dtype at all, perhaps by slower
instructions, is `asrkit.models.cpu.prepacked.onednn_supports`.
"""

import os
import re

import torch

from asrkit.shapes import expect

OTHER_DTYPES = "Compute in bfloat16 or float32: --dtype bfloat16 or --dtype float32."

# Variables that limit the instructions of oneDNN and FBGEMM, and their values that allow VNNI.
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "FBGEMM_ENABLE_INSTRUCTIONS")
WITH_VNNI = "|ALL|DEFAULT|AVX512_CORE_(VNNI|BF16|FP16|AMX.*)|AVX10_.*"


def _limited() -> bool:
    """Whether a variable limits oneDNN or FBGEMM; each limit counts as one to AVX2."""
    values = (os.environ.get(name, "").upper() for name in LIMITS)
    return not all(re.fullmatch(WITH_VNNI, value) for value in values)


def _has(*flags: str) -> bool:
    """Whether the CPU has one of these flags; only avx2 counts if instructions are limited."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(flag) for flag in flags if flag == "avx2" or not _limited())


def fast_dtype(device: str = "cpu") -> str:
    """Name of the dtype that a device multiplies fastest: "bfloat16" if it has instructions for it,
    else "float32".

    Args:
        device: "cpu"; or "cuda", with or without a number. Without a GPU the result is "float32".
    """
    if device.startswith("cuda"):
        has = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has = _has("amx_bf16", "avx512_bf16")
    return "bfloat16" if has else "float32"


def has_avx512() -> bool:
    """Whether this CPU has AVX-512, without which prepacked convolutions are slower."""
    return _has("avx512_f")


def has_int8() -> bool:
    """Whether this is an x86 CPU with AVX2, and torch has FBGEMM.

    asrkit's int8 layers were never run on Arm.
    """
    return _has("avx2") and "fbgemm" in torch.backends.quantized.supported_engines


def sums_int8_in_32_bits() -> bool:
    """Whether oneDNN and FBGEMM add products of unsigned and signed 8-bit numbers in 32 bits.

    With AVX2 and plain AVX-512 they add pairs of products in 16 bits, which may overflow. FBGEMM
    does so too on a CPU that has avx_vnni without avx512_vnni, although its instructions have
    32-bit sums.
    """
    return _has("avx512_vnni", "amx_int8")


def expect_int8() -> None:
    """ValueError unless `has_int8`."""
    architecture = torch.cpu.get_capabilities().get("architecture", "unknown")
    wanted = "an x86 CPU with AVX2"
    expect(has_int8(), "int8", wanted, f"one without ({architecture})", OTHER_DTYPES)
