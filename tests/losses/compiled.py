"""Compile kernels for GPUs that this machine lacks, and count the bytes that each thread spills."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from asrkit.compilers import numba_ptx

ARCHITECTURES = (80, 90, 100)  # A100; H100 and H200; B200
USAGE = re.compile(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
needs_nvvm = pytest.mark.skipif(
    not find_spec("numba_cuda") or not find_spec("nvidia.cu13"),
    reason="needs numba-cuda[cu13]",
)


def triton_spilled_B(kernel, types, cc, folder, **options):
    """Bytes of a thread's spills and local arrays in a kernel of Triton.

    Args:
        kernel: A function under triton.jit.
        types: For each argument its Triton type ("*bf16", "i32"), or the value of a constant.
        cc: Compute capability, 90 for sm_90.
        folder: Folder for the binary.
        **options: Compiler options, such as num_warps.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {}
    constants = {}
    aligned = {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = types[name]
        if not isinstance(types[name], str):
            signature[name] = "constexpr"
            constants[place,] = types[name]
        elif types[name].startswith("*"):  # tensors start at multiples of 16 bytes
            aligned[place,] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=constants, attrs=aligned
    )
    options = {"enable_fp_fusion": True} | options
    binary = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options)
    return _spilled_B(binary.asm["cubin"], folder)


def numba_spilled_B(kernel, types, cc, folder):
    """Bytes of a thread's spills and local arrays in a kernel of Numba.

    Args:
        kernel: A function under numba.cuda.jit.
        types: Types of its arguments, as numba.typeof gives them.
        cc: Compute capability, 90 for sm_90.
        folder: Folder for the binary.
    """
    from cuda.core import Program, ProgramOptions

    ptx = numba_ptx(kernel, types, cc)
    options = ProgramOptions(arch=f"sm_{cc}")
    return _spilled_B(Program(ptx, "ptx", options).compile("cubin").code, folder)


def _spilled_B(code, folder):
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    binary = folder / "kernel.cubin"
    binary.write_bytes(code)
    done = subprocess.run(
        [tool, "-res-usage", binary], capture_output=True, text=True, check=True
    )
    usages = USAGE.findall(
        done.stdout
    )  # the kernel, and functions that are not inlined
    assert usages, done.stdout
    return sum(int(stack_B) + int(local_B) for stack_B, local_B in usages)
