"""The losses in Triton against the float64 reference, in Triton's interpreter, and on a GPU if there is one.

The interpreter runs a kernel's Python with NumPy, program after program. It shows wrong indices and wrong sums, but neither
races between lanes nor the rounding of exp2. It truncates bfloat16 where a GPU rounds, so an error of a whole unit is allowed.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from compiled import ARCHITECTURES, triton_spilled_B
from gpu_kernels import LATTICES, check_all, check_large, check_lattice, run_on_cpu

needs_triton = pytest.mark.skipif(
    not find_spec("triton"), reason="needs the package triton"
)


def run_all(device):
    from asrkit.losses import triton

    usual = triton.BLOCK
    triton.BLOCK = 8  # most diagonals are longer
    check_all("triton", device)
    triton.BLOCK = usual
    for sizes in LATTICES[4:6]:  # without durations, and with
        check_lattice("triton", *sizes, device)


def simulated():
    run_all("cpu")


@needs_triton
def test_kernels_agree_with_the_reference_in_the_interpreter():
    run_on_cpu(Path(__file__), TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.gpu
def test_kernels_agree_with_the_reference_on_a_gpu():
    run_all("cuda")
    check_large("triton")


@needs_triton
@pytest.mark.live
@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_the_lattice_compiles_without_spills(cc, tmp_path):
    from asrkit.losses import triton as lattice

    known = dict.fromkeys(("sums", "log_likelihood"), "*fp64")
    known |= dict.fromkeys(("table", "durations"), "*i64")
    known |= {"count": "i32", "label_factor": "fp32", "BLOCK": 128}
    options = {"num_warps": lattice.MAX_WARPS, "num_stages": 1}
    for N, ROOM in ((0, 1), (5, 8)):
        sizes = known | {"N": N, "ROOM": ROOM}
        for kernel in (lattice._sweep, lattice._posteriors):
            types = {name: sizes.get(name, "*fp32") for name in kernel.arg_names}
            assert triton_spilled_B(kernel, types, cc, tmp_path, **options) == 0
