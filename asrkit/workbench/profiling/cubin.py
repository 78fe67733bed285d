"""What a kernel becomes on a GPU, read without one: registers, spills, shared memory, resident
warps, SASS instructions.

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
SHARED_KIB = {
    80: 164,
    90: 228,
    100: 228,
}  # of a multiprocessor; this and the limits below: CUDA programming guide 13.0,
WARPS, BLOCKS, REGISTERS = (
    64,
    32,
    65536,
)  # table "Technical Specifications per Compute Capability"; alike in these three
RESERVED_B = 1024  # of shared memory, taken by the system for each block
STEP_REGISTERS, STEP_SHARED_B, STEP_WARPS = (
    256,
    128,
    4,
)  # granularity: of a warp, of a block, and of warps (four schedulers)
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
        """What a load or store moves for each thread: 4 unless its modifiers say otherwise."""
        sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
        return next((sizes[part] for part in self.opcode.split(".") if part in sizes), 4)

    @property
    def target(self) -> int | None:
        """Where a branch goes to; None for anything else."""
        found = (
            re.search(r"0x([0-9a-f]+)$", self.operands.strip())
            if self.opcode.split(".")[0] == "BRA"
            else None
        )
        return int(found[1], 16) if found else None


@dataclass(frozen=True, kw_only=True)
class Cubin:
    """A compiled kernel and what a launch of it takes; `instructions` are those of the kernel,
    without functions it calls.
    """

    name: str
    cc: int  # 90 for sm_90
    threads: int  # of a block
    registers: int  # of a thread
    stack_B: int  # of a thread: spills and local arrays
    shared_B: int  # of a block, static and dynamic
    instructions: tuple[Instruction, ...]

    @property
    def opcodes(self) -> Counter[str]:
        """How often each instruction stands in the kernel, by name without modifiers."""
        return Counter(one.opcode.split(".")[0] for one in self.instructions)

    @property
    def spills(self) -> int:
        """Instructions that move registers to or from local memory."""
        return self.opcodes["STL"] + self.opcodes["LDL"]

    @property
    def warps(self) -> int:
        """Warps that fit on a multiprocessor at the same time."""
        warps = -(-self.threads // 32)
        each = -(-self.registers * 32 // STEP_REGISTERS) * STEP_REGISTERS
        shared = -(-(self.shared_B + RESERVED_B) // STEP_SHARED_B) * STEP_SHARED_B
        by_registers = REGISTERS // each // STEP_WARPS * STEP_WARPS // warps if each else BLOCKS
        return warps * min(
            BLOCKS, WARPS // warps, by_registers, SHARED_KIB[self.cc] * 1024 // shared
        )

    @property
    def loops(self) -> list[tuple[Instruction, ...]]:
        """Innermost loops in their order: from the target of a branch that goes back, up to that
        branch.
        """
        ends = [
            (one.target, one.address)
            for one in self.instructions
            if one.target is not None and one.target < one.address
        ]
        inner = [
            (a, b)
            for a, b in ends
            if not any((c, d) != (a, b) and a <= c and d <= b for c, d in ends)
        ]
        return [
            tuple(one for one in self.instructions if a <= one.address <= b)
            for a, b in sorted(set(inner))
        ]


def compile_triton(
    kernel: Any,
    types: Mapping[str, Any],
    *,
    cc: int,
    warps: int = 4,
    stages: int = 3,
    aligned: Sequence[str] = (),
) -> Cubin:
    """A kernel of triton.jit for sm_`cc`.

    `types`: of every argument its Triton type ("*bf16", "i32"), or the value of one that is
    tl.constexpr. `aligned`: arguments that are multiples of 16, as Triton finds out of pointers and
    integers at a launch. RuntimeError under TRITON_INTERPRET=1, which leaves nothing to compile.
    """
    _expect_known(cc)
    _tool("cuobjdump")
    if not hasattr(kernel, "create_binder"):
        raise RuntimeError(
            f"{kernel!r} is no compiled kernel: unset TRITON_INTERPRET, which Triton reads as it is imported."
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
    """A kernel of numba.cuda.jit for sm_`cc`; `types` as numba.typeof gives them, `dynamic_B` of
    shared memory at the launch.

    RuntimeError in Numba's simulator, and where numba-cuda, its NVVM or its linker are missing or
    fail.
    """
    _expect_known(cc)
    _tool("cuobjdump")
    lacks = [name for name in ("numba_cuda", "cuda.core") if not _found(name)]
    if lacks:
        raise RuntimeError(
            f"Numba's kernels cannot be compiled without {', '.join(lacks)}: pip install 'asrkit[cuda]'."
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
    """What a binary for sm_`cc` holds of the kernel whose (mangled) name contains `name`.

    `shared_B` where the compiler knows all of it; else what the binary says, and `dynamic_B`.
    """
    _expect_known(cc)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        usage, sass = (_run("cuobjdump", flag, file.name) for flag in ("-res-usage", "-sass"))
    for function, registers, stack, static in USAGE.findall(usage):
        if name in function:
            text = sass.partition(f"Function : {function}\n")[2].partition("Function : ")[0]
            lines = tuple(_instructions(text))
            taken = RESERVED_B * (
                cc >= 90 and int(static) >= RESERVED_B
            )  # there the system's part is counted in
            shared = int(static) - taken + dynamic_B if shared_B is None else shared_B
            return Cubin(
                name=name,
                cc=cc,
                threads=threads,
                registers=int(registers),
                stack_B=int(stack),
                shared_B=shared,
                instructions=lines,
            )
    raise RuntimeError(
        f"the binary holds no kernel {name!r}: {', '.join(found[0] for found in USAGE.findall(usage))}"
    )


def _instructions(text: str) -> Iterator[Instruction]:
    """Those of one function, without what follows its end: a branch to itself, and padding."""
    for address, predicate, opcode, operands in LINE.findall(text):
        one = Instruction(int(address, 16), predicate, opcode, operands.strip())
        if one.target == one.address:
            return
        yield one


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
    path = Path(spec.origin).parent / "backends/nvidia/bin" / name if spec and spec.origin else None
    if path is None or not path.exists():
        raise RuntimeError(
            f"{name} is missing: it comes with triton, which comes with torch on Linux. pip install triton."
        )
    return str(path)


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([_tool(tool), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} {arguments[0]} fails: {done.stderr.strip()[:300]}")
    return done.stdout


@contextmanager
def _device(cc: int) -> Iterator[None]:
    """Numba asks the current device for its architecture where a kernel calls a function of its
    own: it is told `cc`.
    """
    from numba.cuda import dispatcher

    ask: Callable[[], Any] = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=divmod(cc, 10))
    try:
        yield
    finally:
        dispatcher.get_current_device = ask
