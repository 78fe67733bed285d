"""What the row kernels of both compilers become on a GPU, read from their binaries; none is at hand, so nothing is timed."""

from importlib.util import find_spec

import pytest
import torch

from asrkit.losses.nodes import Nodes
from asrkit.workbench.bench.row_kernels import row_kernels, triton_types
from asrkit.workbench.profiling.cubin import compile_triton

pytest.importorskip("triton")
NVVM = pytest.mark.skipif(
    not find_spec("numba_cuda") or not find_spec("nvidia.cu13"), reason="needs numba-cuda[cu13]"
)
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("impl, dtype, V, n, cc, scores, gradient", [
    ("triton", BF16, 1025, 0, 80, 9, 10), ("triton", FP32, 8193, 5, 90, 8, 8), ("triton", FP16, 29, 0, 90, 9, 10),
    ("triton", BF16, 1025, 0, 100, 9, 10),
    *[pytest.param("numba_cuda", *given, marks=NVVM) for given in (
        (BF16, 1025, 0, 80, 13, 23), (FP32, 1025, 0, 90, 12, 14), (FP16, 1025, 0, 100, 13, 16.125),
    )],
])  # fmt: skip
def test_row_kernels_move_each_logit_once_a_pass_with_few_instructions(
    impl, dtype, V, n, cc, scores, gradient
):
    """At most so many instructions a logit; one lattice node after another took 51 and some 60 to 80 with signed indices."""
    made = row_kernels(impl, dtype, V=V, n=n, cc=cc)
    assert made["scores"].instructions <= scores and made["gradient"].instructions <= gradient
    assert (made["scores"].bytes, made["gradient"].bytes) == (dtype.itemsize, 2 * dtype.itemsize)
    for one in made.values():
        assert (one.cubin.spills, one.cubin.stack_B) == (0, 0)
        assert one.cubin.registers <= 80 and one.cubin.warps >= 24
        assert not {"DADD", "DMUL", "DFMA"} & set(
            one.cubin.opcodes
        )  # float64 would slow all that follows it


@pytest.mark.parametrize("dtype, size", [(FP32, 4), (BF16, 8)], ids=str)
def test_lanes_read_together_only_where_every_row_is_known_to_start_at_16_bytes(dtype, size):
    """A wider access than that is an error on a GPU, which the interpreter would not see."""
    from asrkit.losses.logit_rows.triton import together

    def asked(logits):
        return together(logits, Nodes.padded(logits, torch.tensor([[4, 2], [3, 1]])))

    whole = torch.zeros(2, 4, 3, 1024, dtype=dtype)
    assert asked(whole) == size
    assert asked(torch.zeros(2, 4, 3, 1025, dtype=dtype)) == 1  # rows of an odd size
    assert (
        asked(torch.zeros(whole.numel() + 1, dtype=dtype)[1:].view(whole.shape)) == 1
    )  # memory that begins elsewhere
    assert asked(torch.zeros(2, 4, 3, 1028, dtype=dtype)[..., :1024]) == (
        size if 1028 % size == 0 else 1
    )
    assert (
        asked(torch.zeros(2, 4, 3, 1025, dtype=dtype)[..., :1024]) == 1
    )  # rows that are apart by an odd step


def test_rows_that_start_at_multiples_of_16_bytes_are_read_by_so_many():
    apart, together = (
        row_kernels("triton", BF16, V=V, cc=80, together=size) for V, size in ((1025, 1), (1024, 8))
    )
    for name in apart:
        assert together[name].bytes == apart[name].bytes  # the same bytes in fewer instructions
        assert together[name].instructions < apart[name].instructions
        sizes = {
            one.bytes
            for loop in together[name].cubin.loops
            for one in loop
            if one.opcode.startswith("LDG")
        }
        assert 16 in sizes


@pytest.mark.parametrize("n, FUSED, CLAMPS", [(0, False, True), (2, True, True)])
def test_every_option_of_the_triton_rows_compiles(n, FUSED, CLAMPS):
    """The interpreter takes what the compiler does not: a name that changes its type, a branch that leaves one undefined."""
    from asrkit.losses.logit_rows import triton as rows

    small = {
        "FUSED": FUSED,
        "CLAMPS": CLAMPS,
        "U": 1,
        "blank": 1,
    }  # at a launch, integers of 1 become constants
    for name, types in triton_types(BF16, 29, n, **small).items():
        made = compile_triton(getattr(rows, f"_{name}"), types, cc=90, warps=1)
        assert made.spills == 0 and made.warps == 32
