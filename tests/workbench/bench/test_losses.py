"""Cases of the losses on a GPU, as far as they can be seen without one: shapes, arms, and what is counted when."""

import pytest
import torch

from asrkit.workbench.bench import row_kernels
from asrkit.workbench.bench.agreement import near
from asrkit.workbench.bench.cases import Case
from asrkit.workbench.bench.suites import losses


@pytest.fixture
def made(monkeypatch):
    """Calls of `logits_case` and `joint_case` by the suite on a GPU with room for everything; the cases have nothing in them."""
    calls = list[tuple]()

    def case(kind):
        def make(*told, dtype=torch.float32, trained=False):
            *loss, shape, device = told
            calls.append((kind, tuple(shape), dtype))
            return Case(
                what=kind,
                arms={"arm": tuple},
                params={"shape": shape},
                ratios=[],
            )

        return make

    for kind in ("logits_case", "joint_case", "ragged_case"):
        monkeypatch.setattr(losses, kind, case(kind))
    return calls


def test_on_a_gpu_the_shape_that_is_asked_for_most_comes_first(made):
    cases = [*losses.suite("cuda", False)]
    assert made[:3] == [
        ("joint_case", losses.ODD, torch.float32),
        ("logits_case", (32, 200, 101, 1025), torch.float32),
        ("logits_case", (32, 200, 101, 1025), torch.bfloat16),
    ]
    assert len(cases) == len(made)


def test_kernels_are_compiled_once_in_a_process(monkeypatch):
    compiled = list[tuple]()

    def compile_(*given):
        compiled.append(given)
        return {}

    monkeypatch.setattr(row_kernels, "_triton", compile_)
    monkeypatch.setattr(row_kernels, "_numba", compile_)
    row_kernels._compiled.cache_clear()
    try:
        for V in (9, 1024, 1025, 2048):
            row_kernels.row_kernels("numba_cuda", torch.bfloat16, V=V, n=V % 2)
            row_kernels.row_kernels("triton", torch.bfloat16, V=V)
    finally:
        row_kernels._compiled.cache_clear()
    assert len([one for one in compiled if len(one) == 2]) == 1  # Numba's: of any V
    assert len([one for one in compiled if len(one) == 5]) == 3  # 2048 tokens are blocks like 1024


def test_an_eager_joint_in_bfloat16_stands_beside_the_lean_loss_on_a_gpu():
    leaves, rest = losses.joint_inputs((2, 12, 5, 16, 12), "cpu")
    ways = losses.joint_arms(leaves, rest, gpu=True)
    more = {"lean_triton", "lean_triton_bfloat16", "joint_triton_bfloat16", "torchaudio_bfloat16"}
    assert {*ways} - {*losses.joint_arms(leaves, rest)} == more
    half, whole = ways["torchaudio_bfloat16"](), ways["torchaudio"]()
    near(half, whole, 0.05)
    assert not torch.equal(half[0], whole[0]), "its joint is in float32"


def test_torchaudio_has_no_arm_where_its_offsets_end():
    """It would raise, and the cases that follow would not be made."""
    both = {"torchaudio", "torchaudio_bfloat16"}
    assert both <= {*losses.excluded_arms((128, 200, 101, 640, 1024), False)}
    assert not both & {*losses.excluded_arms((32, 200, 101, 640, 1025), False)}


def test_a_table_of_kernels_leaves_out_those_whose_compiler_is_missing(monkeypatch):
    compiled = row_kernels.row_kernels

    def without_triton(impl, dtype, **sizes):
        if impl == "triton":
            raise ImportError("no triton")
        return compiled(impl, dtype, **sizes)

    monkeypatch.setattr(row_kernels, "row_kernels", without_triton)
    impls = ("simplest", "numba_cuda", "triton")
    rows = row_kernels.kernel_table(impls, (torch.float32,), V=1025)
    by_kernel = {(row["kernel"], row["pass"]): row["instructions a logit"] for row in rows}
    assert set(by_kernel) == {
        ("simplest", "gradient"), ("numba_cuda", "scores"), ("numba_cuda", "gradient"),
    }  # fmt: skip
    assert by_kernel["simplest", "gradient"] > 2 * by_kernel["numba_cuda", "gradient"]
