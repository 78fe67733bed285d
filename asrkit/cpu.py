"""What this CPU has instructions for: products of bfloat16, and products of int8.

Everything here asks `torch.cpu.get_capabilities`, which reads the CPU's flags. Whether oneDNN takes
a dtype at all, perhaps by slower instructions, is another question: `asrkit.models.packed`.
"""

import torch

from asrkit.shapes import expect

BFLOAT16_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "avx512_bf16"}  # and what people call them
# Products of unsigned by signed numbers of 8 bits with sums of 32 bits. Older CPUs add pairs in 16
# bits, which overflow.
X86_INT8_FLAGS = ("avx512_vnni", "avx_vnni", "amx_int8")
ARM_INT8_FLAGS = ("arm_dot", "dot")
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


def has_int8(*, arm: bool = False) -> bool:
    """Whether this CPU has instructions for products of int8.

    Args:
        arm: Whether Arm's dot product will do. On Arm `asrkit.models.int8` was never run.
    """
    flags: tuple[str, ...] = X86_INT8_FLAGS
    if arm:
        flags += ARM_INT8_FLAGS
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(flag) for flag in flags)


def expect_int8(*, arm: bool = False, remedy: str = OTHER_DTYPES) -> None:
    """ValueError unless `has_int8`.

    Args:
        arm: As `has_int8` takes it.
        remedy: What the error says to do instead.
    """
    wanted = "an x86 CPU with VNNI or AMX"
    if arm:
        wanted = "a CPU with VNNI, AMX or Arm's dot product"
    architecture = torch.cpu.get_capabilities().get("architecture", "unknown")
    expect(has_int8(arm=arm), "int8", wanted, f"one without ({architecture})", remedy)
