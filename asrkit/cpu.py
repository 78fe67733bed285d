"""Instructions of this CPU: AVX-512, products of bfloat16, and products of int8.

Everything here reads the CPU's flags, by `torch.cpu.get_capabilities`. Whether oneDNN supports
a dtype at all, perhaps by slower instructions, is `asrkit.models.cpu.prepacked.onednn_supports`.
"""

import torch

from asrkit.shapes import expect

BFLOAT16_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "avx512_bf16"}  # flag -> usual name
# Products of unsigned and signed 8-bit numbers with 32-bit sums. Older CPUs add pairs in 16 bits,
# which overflow.
INT8_FLAGS = ("avx512_vnni", "avx_vnni", "amx_int8")
OTHER_DTYPES = "Compute in bfloat16 or float32: --dtype bfloat16 or --dtype float32."


def bfloat16_instructions() -> str:
    """Instructions that multiply bfloat16 on this CPU: "AMX", "avx512_bf16", or "" for none."""
    capabilities = torch.cpu.get_capabilities()
    for flag, name in BFLOAT16_FLAGS.items():
        if capabilities.get(flag):
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
    return bool(torch.cpu.get_capabilities().get("avx512_f"))


def has_int8() -> bool:
    """Whether this is an x86 CPU with instructions for products of int8.

    asrkit's int8 kernels were never run on Arm.
    """
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(flag) for flag in INT8_FLAGS)


def expect_int8() -> None:
    """ValueError unless `has_int8`."""
    architecture = torch.cpu.get_capabilities().get("architecture", "unknown")
    wanted = "an x86 CPU with VNNI or AMX"
    expect(has_int8(), "int8", wanted, f"one without ({architecture})", OTHER_DTYPES)
