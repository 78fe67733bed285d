"""Kernels compiled for GPUs that are not here: what is read from their binaries, against what is known of them."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from asrkit.workbench.profiling import cubin
from asrkit.workbench.profiling.cubin import (
    ARCHITECTURES,
    Cubin,
    Instruction,
    compile_numba,
    compile_triton,
)

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

needs_numba_cuda = pytest.mark.skipif(
    not find_spec("numba_cuda"), reason="needs the package numba-cuda"
)
EMPTY = Cubin(name="k", cc=90, threads=128, registers=32, stack_B=0, shared_B=0, instructions=())


@triton.jit
def _double(x, out, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place) * 2)


def summed(row, out):
    """A kernel of Numba: one thread adds up a row."""
    total = row[0]
    for i in range(1, len(row)):
        total += row[i]
    out[0] = total


@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_a_copy_has_the_loads_and_stores_that_its_alignment_allows(cc):
    types = {"x": "*fp32", "out": "*fp32", "BLOCK": 512}
    apart = compile_triton(_double, types, cc=cc)
    aligned = compile_triton(_double, types, cc=cc, aligned=["x", "out"])
    assert (apart.opcodes["LDG"], aligned.opcodes["LDG"]) == (4, 1)  # 512 elements on 128 threads
    assert {one.bytes for one in apart.instructions if one.opcode.startswith(("LDG", "STG"))} == {4}
    assert {one.bytes for one in aligned.instructions if one.opcode.startswith(("LDG", "STG"))} == {
        16
    }
    assert (aligned.spills, aligned.stack_B, aligned.shared_B, aligned.loops) == (0, 0, 0, [])
    assert (aligned.threads, aligned.warps) == (128, 64) and 8 <= aligned.registers <= 32


@needs_numba_cuda
@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_a_loop_of_numba_is_found_with_its_loads(cc):
    from numba import cuda, types

    array = types.Array(types.float32, 1, "C")
    made = compile_numba(cuda.jit(summed), (array, array), cc=cc, threads=32, dynamic_B=512)
    assert made.shared_B == 512 and made.spills == 0
    loads = [sum(one.opcode.startswith("LDG") for one in loop) for loop in made.loops]
    assert loads and min(loads) >= 1
    assert all(
        sum(one.opcode.startswith("FADD") for one in loop) == n
        for loop, n in zip(made.loops, loads, strict=True)
    )


def kernel(**fields):
    """A compiled kernel of 128 threads with other fields."""
    return Cubin(**{**EMPTY.__dict__, **fields})


@pytest.mark.parametrize("made, warps", [
    (kernel(), 64),
    (kernel(registers=33), 48),  # 40 registers a thread: 1,280 a warp, 51 warps, in whole blocks of four
    (kernel(registers=168, threads=384), 12),  # as warp-specialised matrix kernels are built for
    (kernel(registers=255), 8),
    (kernel(threads=32), 32),  # as many blocks as there can be
    (kernel(shared_B=100 * 1024), 8),  # two blocks of 101 KiB in 228
    (kernel(shared_B=100 * 1024, cc=80), 4),
])  # fmt: skip
def test_resident_warps_follow_from_the_scarcest_resource(made, warps):
    assert made.warps == warps


def test_an_innermost_loop_is_what_a_branch_back_spans():
    lines = [(0, "MOV", "R1, R2"), (16, "IADD3", "R1"), (32, "LDG.E.64", "R2"), (48, "BRA", "0x20"), (64, "BRA", "0x10"),
             (80, "BRA", "0xf0"), (96, "STL", "[R1]")]  # fmt: skip
    made = kernel(
        instructions=tuple(Instruction(at, "", opcode, operands) for at, opcode, operands in lines)
    )
    assert [[one.address for one in loop] for loop in made.loops] == [[32, 48]]
    assert made.spills == 1 and made.instructions[2].bytes == 8


def test_what_is_missing_is_named(monkeypatch):
    with pytest.raises(ValueError, match="cc: expected one of"):
        compile_triton(_double, {}, cc=75)
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        compile_triton(summed, {}, cc=90)
    monkeypatch.setattr(cubin, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="comes with triton"):
        compile_triton(_double, {}, cc=90)


@needs_numba_cuda
def test_numba_says_what_it_lacks(monkeypatch):
    from numba import config, cuda, types

    monkeypatch.setattr(cubin, "_found", lambda name: name != "cuda.core")
    with pytest.raises(RuntimeError, match=r"without cuda\.core: pip install"):
        compile_numba(None, (), cc=90, threads=32)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="Numba cannot compile for sm_90 here: TypingError"):
        compile_numba(cuda.jit(summed), (types.int64, types.int64), cc=90, threads=32)
    monkeypatch.setattr(config, "ENABLE_CUDASIM", True)
    with pytest.raises(RuntimeError, match="simulator compiles nothing"):
        compile_numba(None, (), cc=90, threads=32)


def test_importing_it_leaves_compilers_alone():
    code = "import sys, asrkit.workbench.profiling.cubin; assert not {'triton', 'numba.cuda'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
