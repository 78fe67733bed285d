"""What a kernel becomes on a GPU, read without one.

Registers, spills, shared memory, resident warps and SASS instructions.

Triton and Numba compile for an architecture that is not here; their binaries are read with the
disassembler that comes with Triton. So these numbers are exact, and say nothing about time.
RuntimeError where a compiler or the disassembler is missing.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from asrkit.shapes import expect

ARCHITECTURES = {80: "A100", 90: "H100 and H200", 100: "B200"}  # sm_ number -> devices of it
# Limits of a multiprocessor: CUDA programming guide 13.0, table "Technical Specifications per
# Compute Capability"; but for shared memory they are alike in these three.
SHARED_KIB = {80: 164, 90: 228, 100: 228}
WARPS = 64
BLOCKS = 32
REGISTERS = 65536
RESERVED_B = 1024  # of shared memory, taken by the system for each block
# What is handed out at least: registers of a warp, shared memory of a block, warps (there are four
# schedulers).
STEP_REGISTERS = 256
STEP_SHARED_B = 128
STEP_WARPS = 4
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)([^;]*);")
USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")


class Instruction(NamedTuple):
    """One line of SASS; `opcode` with its modifiers, for example LDG.E.128."""

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def bytes(self) -> int:
        """Bytes that a load or store moves for each thread: 4 unless its modifiers say more."""
        sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
        for part in self.opcode.split("."):
            if part in sizes:
                return sizes[part]
        return 4

    @property
    def target(self) -> int | None:
        """Where a branch goes to; None for anything else."""
        if self.opcode.split(".")[0] != "BRA":
            return None
        address = re.search(r"0x([0-9a-f]+)$", self.operands.strip())
        return int(address[1], 16) if address else None


@dataclass(frozen=True, kw_only=True)
class Cubin:
    """A compiled kernel and what a launch of it takes.

    Attributes:
        name: The kernel.
        cc: Compute capability, 90 for sm_90.
        threads: Threads of a block.
        registers: Registers of a thread.
        stack_B: Bytes of a thread's stack: spills and local arrays.
        shared_B: Bytes of a block's shared memory, static and dynamic.
        instructions: Those of the kernel, without functions that it calls.
    """

    name: str
    cc: int
    threads: int
    registers: int
    stack_B: int
    shared_B: int
    instructions: tuple[Instruction, ...]

    @property
    def opcodes(self) -> Counter[str]:
        """How often each instruction stands in the kernel, by name without modifiers."""
        return Counter(line.opcode.split(".")[0] for line in self.instructions)

    @property
    def spills(self) -> int:
        """Instructions that move registers to or from local memory."""
        return self.opcodes["STL"] + self.opcodes["LDL"]

    @property
    def warps(self) -> int:
        """Warps that fit on a multiprocessor at the same time."""
        warps = -(-self.threads // 32)  # of a block
        registers = _round_up(self.registers * 32, STEP_REGISTERS)  # of a warp
        shared_B = _round_up(self.shared_B + RESERVED_B, STEP_SHARED_B)
        by_registers = BLOCKS
        if registers:
            by_registers = REGISTERS // registers // STEP_WARPS * STEP_WARPS // warps
        by_shared = SHARED_KIB[self.cc] * 1024 // shared_B
        return warps * min(BLOCKS, WARPS // warps, by_registers, by_shared)

    @property
    def loops(self) -> list[tuple[Instruction, ...]]:
        """Innermost loops in their order.

        A loop reaches from the target of a branch that goes back up to that branch.
        """
        spans = set()
        for line in self.instructions:
            if line.target is not None and line.target < line.address:
                spans.add((line.target, line.address))
        innermost = []
        for start, end in sorted(spans):
            others = spans - {(start, end)}
            if not any(start <= first and last <= end for first, last in others):
                loop = [line for line in self.instructions if start <= line.address <= end]
                innermost.append(tuple(loop))
        return innermost


def _round_up(number: int, step: int) -> int:
    """`number` rounded up to a multiple of `step`."""
    return -(-number // step) * step


def compile_triton(
    kernel: Any,
    types: Mapping[str, Any],
    *,
    cc: int,
    warps: int = 4,
    stages: int = 3,
    aligned: Sequence[str] = (),
) -> Cubin:
    """Compile a Triton kernel.

    Args:
        kernel: A function under triton.jit.
        types: Of every argument its Triton type ("*bf16", "i32"), or the value of one that is
            tl.constexpr.
        cc: Compute capability, 90 for sm_90.
        warps: Warps of a block.
        stages: Stages of software pipelining.
        aligned: Arguments that are multiples of 16, as Triton finds out of pointers and integers at
            a launch.

    Raises:
        RuntimeError: A tool is missing, or TRITON_INTERPRET=1 leaves nothing to compile.
    """
    _expect_known(cc)
    _tool("cuobjdump")
    if not hasattr(kernel, "create_binder"):
        raise RuntimeError(
            f"{kernel!r} is no compiled kernel: "
            "unset TRITON_INTERPRET, which Triton reads as it is imported."
        )
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    place = {name: (number,) for number, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature={name: types[name] if _is_type(types[name]) else "constexpr" for name in place},
        constexprs={place[name]: value for name, value in types.items() if not _is_type(value)},
        attrs={place[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", cc, 32), options={"num_warps": warps, "num_stages": stages}
    )
    return read(
        made.asm["cubin"],
        kernel.__name__,
        cc=cc,
        threads=32 * made.metadata.num_warps,
        shared_B=made.metadata.shared,
    )


def compile_numba(
    kernel: Any, types: tuple[Any, ...], *, cc: int, threads: int, dynamic_B: int = 0
) -> Cubin:
    """Compile a Numba kernel.

    Args:
        kernel: A function under numba.cuda.jit.
        types: Types of its arguments, as numba.typeof gives them.
        cc: Compute capability, 90 for sm_90.
        threads: Threads of a block.
        dynamic_B: Bytes of dynamic shared memory at the launch.

    Raises:
        RuntimeError: In Numba's simulator, and where numba-cuda, its NVVM or its linker are missing
            or fail.
    """
    _expect_known(cc)
    _tool("cuobjdump")
    lacks = [name for name in ("numba_cuda", "cuda.core") if not _found(name)]
    if lacks:
        raise RuntimeError(
            f"Numba's kernels cannot be compiled without {', '.join(lacks)}: "
            "pip install 'asrkit[cuda]'."
        )
    from numba import config, cuda

    if config.ENABLE_CUDASIM:
        raise RuntimeError(
            "Numba's simulator compiles nothing: unset NUMBA_ENABLE_CUDASIM before Python starts."
        )
    from cuda.core import Program, ProgramOptions

    try:
        with _device(cc):
            ptx, _ = cuda.compile(
                kernel.py_func, types, cc=divmod(cc, 10), device=False, abi="numba"
            )
        code = Program(ptx, "ptx", ProgramOptions(arch=f"sm_{cc}")).compile("cubin").code
    except Exception as error:  # what NVVM and the linker raise has no class in common
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise RuntimeError(
            f"Numba cannot compile for sm_{cc} here: {why} pip install 'asrkit[cuda]'."
        ) from error
    return read(code, kernel.py_func.__name__, cc=cc, threads=threads, dynamic_B=dynamic_B)


def read(
    code: bytes,
    name: str,
    *,
    cc: int,
    threads: int,
    shared_B: int | None = None,
    dynamic_B: int = 0,
) -> Cubin:
    """Read a kernel of a binary.

    Args:
        code: The binary (cubin).
        name: What the kernel's mangled name contains.
        cc: Compute capability, 90 for sm_90.
        threads: Threads of a block.
        shared_B: Bytes of shared memory where the compiler knows all of them; else those that the
            binary says, and `dynamic_B`.
        dynamic_B: Bytes of dynamic shared memory at the launch.

    Raises:
        RuntimeError: The binary has no such kernel, or the disassembler is missing.
    """
    _expect_known(cc)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        sass = _run("cuobjdump", "-sass", file.name)
    for function, registers, stack, static in USAGE.findall(usage):
        if name in function:
            text = sass.partition(f"Function : {function}\n")[2].partition("Function : ")[0]
            if shared_B is None:
                shared_B = int(static) + dynamic_B
                if cc >= 90 and int(static) >= RESERVED_B:  # the system's part is counted in
                    shared_B -= RESERVED_B
            return Cubin(
                name=name,
                cc=cc,
                threads=threads,
                registers=int(registers),
                stack_B=int(stack),
                shared_B=shared_B,
                instructions=tuple(_instructions(text)),
            )
    kernels = ", ".join(function for function, *_ in USAGE.findall(usage))
    raise RuntimeError(f"the binary holds no kernel {name!r}: {kernels}")


def _instructions(text: str) -> Iterator[Instruction]:
    """Those of one function, without what follows its end: a branch to itself, and padding."""
    for address, predicate, opcode, operands in LINE.findall(text):
        line = Instruction(int(address, 16), predicate, opcode, operands.strip())
        if line.target == line.address:
            return
        yield line


def _is_type(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, tuple) and all(map(_is_type, value)))


def _expect_known(cc: int) -> None:
    expect(cc in ARCHITECTURES, "cc", f"one of {sorted(ARCHITECTURES)}", cc)


def _found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def _tool(name: str) -> str:
    """Path of a program that comes with Triton's wheel."""
    spec = find_spec("triton")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "backends/nvidia/bin" / name
        if path.exists():
            return str(path)
    raise RuntimeError(
        f"{name} is missing: it comes with triton, which comes with torch on Linux. "
        "pip install triton."
    )


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([_tool(tool), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} {arguments[0]} fails: {done.stderr.strip()[:300]}")
    return done.stdout


@contextmanager
def _device(cc: int) -> Iterator[None]:
    """Tell Numba that the current device is an sm_`cc`.

    It asks the device for that where a kernel calls a function of its own.
    """
    from numba.cuda import dispatcher

    ask: Callable[[], Any] = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=divmod(cc, 10))
    try:
        yield
    finally:
        dispatcher.get_current_device = ask
