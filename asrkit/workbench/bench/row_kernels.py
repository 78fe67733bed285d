"""What the row kernels of the losses on given logits ask of a GPU, read from their binaries:
instructions and bytes a logit.

Counted in the loop over tokens: of the innermost loops that read logits, the one that reads most of
them in a trip; its instructions and the bytes that it moves, over the logits of a trip. What a node
costs once (the sum over lanes, the blank, the label) is left out, and so is nothing else: these
loops hold no branch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from asrkit.workbench.profiling.cubin import Cubin, Instruction, compile_numba, compile_triton

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
MANY = 8  # whole blocks, of which no compiler unrolls all


@dataclass(frozen=True, kw_only=True)
class RowKernel:
    """A compiled pass over the logits."""

    cubin: Cubin
    instructions: float  # of a thread for each logit
    bytes: float  # read and written for each logit


def row_kernels(
    impl: str, dtype: torch.dtype, *, V: int, n: int = 0, cc: int = 90, together: int = 1
) -> dict[str, RowKernel]:
    """The "scores" and "gradient" kernels of an implementation, compiled and read.

    V is taken to have many blocks, so that a loop is left to count; numba_cuda's kernels do not
    depend on it.

    Args:
        impl: "triton", "numba_cuda", or "simplest" for the gradient's loop as one would write it.
        dtype: of the logits.
        V: tokens with blank.
        n: durations.
        cc: compute capability times ten, as in sm_90.
        together: logits that a thread reads at once, see asrkit.losses.logit_rows.triton.

    Raises:
        RuntimeError: a compiler is missing, see asrkit.workbench.profiling.cubin.
    """
    if impl != "triton":
        return _compiled(impl, dtype, 0, 0, cc, 1)
    from asrkit.losses.logit_rows import triton as rows

    return _compiled(impl, dtype, MANY * rows.MAX_BLOCK + V % rows.MAX_BLOCK, n, cc, together)


@lru_cache
def _compiled(
    impl: str, dtype: torch.dtype, V: int, n: int, cc: int, together: int
) -> dict[str, RowKernel]:
    """Kept for the process: seconds are compiled at, and one kernel serves many a V."""
    if impl == "triton":
        cubins = _triton(dtype, V, n, cc, together)
    elif impl == "simplest":
        cubins = _simplest(dtype, cc)
    else:
        cubins = _numba(dtype, cc)
    return {name: counted(cubin, dtype.itemsize) for name, cubin in cubins}


def kernel_table(
    impls: Sequence[str], dtypes: Sequence[torch.dtype], *, V: int, cc: int = 90
) -> list[dict[str, Any]]:
    """A row for each kernel: instructions and bytes a logit, registers, spills and warps.

    Kernels whose compiler is missing are left out.

    Args:
        impls: see `row_kernels`.
        dtypes: of the logits.
        V: tokens with blank.
        cc: compute capability times ten.
    """
    rows = []
    for dtype, impl in product(dtypes, impls):
        try:
            kernels = row_kernels(impl, dtype, V=V, cc=cc)
        except (ImportError, RuntimeError):
            continue
        for name, kernel in kernels.items():
            rows.append(
                {
                    "kernel": impl,
                    "logits": str(dtype).removeprefix("torch."),
                    "pass": name,
                    "instructions a logit": kernel.instructions,
                    "bytes a logit": kernel.bytes,
                    "registers": kernel.cubin.registers,
                    "spills": kernel.cubin.spills,
                    "warps": kernel.cubin.warps,
                }
            )
    return rows


def triton_types(
    dtype: torch.dtype, V: int, n: int = 0, **constants: Any
) -> dict[str, dict[str, Any]]:
    """What Triton's row kernels are called with: types of arguments, and values of constants.

    Args:
        dtype: of the logits.
        V: tokens with blank.
        n: durations.
        **constants: other values of constants.
    """
    from asrkit.losses.logit_rows import triton as rows

    logits_type = f"*{NAMES[dtype]}"
    known: dict[str, Any] = {
        "targets": "*i64",
        "table": "*i64",
        "own": "*i64",
        "logits": logits_type,
        "out": logits_type,
        "U": "i32",
        "blank": "i32",
        "clamp": "fp32",
        "V": V,
        "N": n,
        "FUSED": True,
        "CLAMPS": False,
        "TOGETHER": 1,
    }
    known |= rows.blocks(V, n) | constants
    types = {}
    for name, kernel in (("scores", rows._scores), ("gradient", rows._gradient)):
        types[name] = {argument: known.get(argument, "*fp32") for argument in kernel.arg_names}
    return types


def _triton(
    dtype: torch.dtype, V: int, n: int, cc: int, together: int
) -> Iterator[tuple[str, Cubin]]:
    from asrkit.losses.logit_rows import triton as rows

    for name, types in triton_types(dtype, V, n, TOGETHER=together).items():
        pointers = [argument for argument, kind in types.items() if str(kind).startswith("*")]
        kernel = getattr(rows, f"_{name}")
        warps = rows.OPTIONS["num_warps"]
        yield name, compile_triton(kernel, types, cc=cc, warps=warps, aligned=pointers)


def numba_types(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """What Numba's row kernels are called with, for logits in `dtype`; bfloat16 as bit patterns."""
    from numba import types

    kinds = {
        torch.float32: types.float32,
        torch.float16: types.float16,
        torch.bfloat16: types.uint16,
    }
    logits = types.Array(kinds[dtype], 1, "C")
    floats = types.Array(types.float32, 1, "C")
    table = types.Array(types.int64, 2, "C")
    options = (types.int64, types.int64, types.boolean)
    saved = (floats, floats, floats)
    return {
        "scores": (logits, table, table, *options, *saved),
        "gradient": (logits, logits, table, table, table, *options, types.float32, *saved, floats),
    }


def _numba(dtype: torch.dtype, cc: int) -> Iterator[tuple[str, Cubin]]:
    from asrkit.losses.logit_rows import numba_cuda as rows

    threads = rows.LANES * rows.ROWS
    for name, types in numba_types(dtype).items():
        shared_B = 0
        if name == "scores":
            shared_B = 8 * threads
        kernel = getattr(rows, f"_{name}")
        yield name, compile_numba(kernel, types, cc=cc, threads=threads, dynamic_B=shared_B)


def _simplest(dtype: torch.dtype, cc: int) -> Iterator[tuple[str, Cubin]]:
    """The gradient's loop without any of the techniques that keep its instructions few."""
    import numpy as np
    from numba import cuda, types

    @cuda.jit
    def gradient(x, out, z, place):
        for v in range(place[0] + cuda.threadIdx.x, place[1], cuda.blockDim.x):
            out[v] = math.exp(np.float32(x[v]) - z[place[2]])

    logits = types.Array(getattr(types, str(dtype).removeprefix("torch.")), 1, "C")
    normalisers = types.Array(types.float32, 1, "C")
    place = types.Array(types.int64, 1, "C")
    kinds = (logits, logits, normalisers, place)
    yield "gradient", compile_numba(gradient, kinds, cc=cc, threads=128)


def counted(cubin: Cubin, size: int) -> RowKernel:
    """A kernel's loop over logits of `size` bytes; one that writes them writes each once, one that
    does not reads each once.
    """
    loop = max(cubin.loops, key=_read)
    read = _read(loop)
    written = _written(loop)
    logits = (written or read) // size
    return RowKernel(
        cubin=cubin,
        instructions=len(loop) / logits,
        bytes=(read + written) / logits,
    )


def _read(loop: tuple[Instruction, ...]) -> int:
    return sum(step.bytes for step in loop if step.opcode.startswith("LDG"))


def _written(loop: tuple[Instruction, ...]) -> int:
    return sum(step.bytes for step in loop if step.opcode.startswith("STG"))
