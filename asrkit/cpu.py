"""What this CPU has instructions for: AVX-512, products of bfloat16, and products of int8.

Everything here asks `torch.cpu.get_capabilities`, which reads the CPU's flags. Whether oneDNN takes
a dtype at all, perhaps by slower instructions, is another question: `asrkit.models.cpu.prepacked`.
"""

import torch

from asrkit.shapes import expect

BFLOAT16_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "avx512_bf16"}  # and what people call them
# Products of unsigned by signed numbers of 8 bits with sums of 32 bits. Older CPUs add pairs in 16
# bits, which overflow.
INT8_FLAGS = ("avx512_vnni", "avx_vnni", "amx_int8")
OTHER_DTYPES = "Compute in bfloat16 or float32: --dtype bfloat16 or --dtype float32."


def bfloat16_instructions() -> str:
    """What this CPU multiplies bfloat16 by: "AMX", "avx512_bf16", or "" where it has neither."""
    capabilities = torch.cpu.get_capabilities()
    for flag, name in BFLOAT16_FLAGS.items():
        if capabilities.get(flag):
            return name
    return ""


def fast_dtype(device: str = "cpu") -> str:
    """Name of the dtype that a device multiplies fastest: "bfloat16" where it has instructions for
    that, else "float32".

    Args:
        device: "cpu"; or "cuda", perhaps with a number, which is "float32" where no GPU is here.
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

    On Arm `asrkit.models.cpu.int8` was never run.
    """
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(flag) for flag in INT8_FLAGS)


def expect_int8() -> None:
    """ValueError unless `has_int8`."""
    architecture = torch.cpu.get_capabilities().get("architecture", "unknown")
    wanted = "an x86 CPU with VNNI or AMX"
    expect(has_int8(), "int8", wanted, f"one without ({architecture})", OTHER_DTYPES)
