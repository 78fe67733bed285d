"""Instructions of this CPU: AVX-512, products of bfloat16, and products of int8.

Everything here reads the CPU's flags. Whether oneDNN supports a dtype at all, perhaps by slower
instructions, is `asrkit.models.cpu.prepacked.onednn_supports`.
"""

import os
from typing import Any

import torch

from asrkit.shapes import expect

BFLOAT16_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "avx512_bf16"}  # flag -> usual name
# Products of unsigned and signed 8-bit numbers with 32-bit sums. AVX2 and plain AVX-512 add pairs
# in 16 bits, and FBGEMM does so on a CPU that has only avx_vnni.
VNNI_FLAGS = ("avx512_vnni", "amx_int8")
OTHER_DTYPES = "Compute in bfloat16 or float32: --dtype bfloat16 or --dtype float32."


def _flags() -> dict[str, Any]:
    """The CPU's flags; those of a CPU with AVX2 alone if a variable limits oneDNN to AVX2."""
    flags = torch.cpu.get_capabilities()
    if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2":
        return {name: flags.get(name) for name in ("architecture", "avx2")}
    return flags


def bfloat16_instructions() -> str:
    """Instructions that multiply bfloat16 on this CPU: "AMX", "avx512_bf16", or "" for none."""
    flags = _flags()
    for flag, name in BFLOAT16_FLAGS.items():
        if flags.get(flag):
            return name
    return ""


def fast_dtype(device: str = "cpu") -> str:
    """Name of the dtype that a device multiplies fastest: "bfloat16" if it has instructions for it,
    else "float32".

    Args:
        device: "cpu"; or "cuda", with or without a number. Without a GPU the result is "float32".
    """
    has = bool(bfloat16_instructions())
    if device.startswith("cuda"):
        has = torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if has else "float32"


def has_avx512() -> bool:
    """Whether this CPU has AVX-512, without which prepacked convolutions are slower."""
    return bool(_flags().get("avx512_f"))


def has_int8() -> bool:
    """Whether this is an x86 CPU with AVX2, and torch has FBGEMM.

    asrkit's int8 layers were never run on Arm.
    """
    return bool(_flags().get("avx2")) and "fbgemm" in torch.backends.quantized.supported_engines


def has_vnni() -> bool:
    """Whether products of 8-bit numbers have 32-bit sums, which do not overflow."""
    flags = _flags()
    return any(flags.get(flag) for flag in VNNI_FLAGS)


def expect_int8() -> None:
    """ValueError unless `has_int8`."""
    got = f"one without ({_flags().get('architecture', 'unknown')})"
    expect(has_int8(), "int8", "an x86 CPU with AVX2", got, OTHER_DTYPES)
