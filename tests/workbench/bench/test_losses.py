"""Cases of the losses on a GPU, as far as they can be seen without one: shapes, arms, and what is counted when."""

import re

import pytest
import torch

from asrkit.workbench.bench import row_kernels
from asrkit.workbench.bench.agreement import near
from asrkit.workbench.bench.cases import Case
from asrkit.workbench.bench.suites import losses
from asrkit.workbench.cost import lean_peak

GOAL = {
    "B": 32,
    "T": 200,
    "U1": 101,
    "D": 640,
    "V": 1024,
}  # at which the lean loss is to take a fiftieth of the memory


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
                more=lambda: ["counted"],
            )

        return make

    for kind in ("logits_case", "joint_case", "ragged_case"):
        monkeypatch.setattr(losses, kind, case(kind))
    return calls


def test_rows_that_are_not_aligned_are_measured_early_on_a_gpu(made):
    cases = [*losses.suite("cuda", False)]
    odd = [call for call in made[:4] if call[1][-1] == 1025]
    assert {(kind, dtype) for kind, _, dtype in odd} >= {
        ("logits_case", torch.bfloat16),
        ("joint_case", torch.float32),
    }
    assert all(case.more() == ["counted"] for case in cases if case.arms)
    assert [case.what for case in cases if case.measure] == ["rnnt-loss-joint, largest"]


def test_kernels_are_not_counted_in_the_part_that_is_owed(made):
    cases = [*losses.suite("cuda", False, first=True)]
    assert len(cases) == 3 and all(case.more() == () for case in cases)


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


def test_what_is_counted_becomes_records_and_what_cannot_be_is_told(monkeypatch, capsys):
    seen = {"instructions_a_logit": 4.0, "bytes_a_logit": 2.0}
    told = {"triton": {"scores": seen, "gradient": seen}, "numba_cuda": "not counted: no NVVM"}
    monkeypatch.setattr(losses, "counts", lambda impl, logits, n: {"sass": told[impl]})
    found = [*losses.counted("rnnt-loss", ["numba_cuda", "triton"], torch.ones(1, 2, 3, 4), 0)]
    assert [(one.metric, one.unit, one.value, one.params["kernel"]) for one in found] == [
        (metric, unit, value, kernel) for kernel in ("scores", "gradient")
        for metric, unit, value in (("instructions_a_logit", "1", 4.0), ("bytes_a_logit", "B", 2.0))
    ]  # fmt: skip
    assert {one.impl for one in found} == {"triton"}
    assert "rnnt-loss: kernels of numba_cuda: not counted: no NVVM" in capsys.readouterr().err
    assert all(one.record() for one in found)


def test_an_eager_joint_in_bfloat16_stands_beside_the_lean_loss_on_a_gpu():
    leaves, rest = losses.joint_inputs((2, 12, 5, 16, 12), "cpu")
    ways = losses.joint_arms(leaves, rest, gpu=True)
    more = {"lean_triton", "lean_triton_bfloat16", losses.SMALL_TILE, "torchaudio_bfloat16"}
    assert {*ways} - {*losses.joint_arms(leaves, rest)} == more
    half, whole = ways["torchaudio_bfloat16"](), ways["torchaudio"]()
    near(half, whole, 0.05)
    assert not torch.equal(half[0], whole[0]), "its joint is in float32"


def test_torchaudio_has_no_arm_where_its_offsets_end():
    """It would raise, and the cases that follow would not be made."""
    both = {"torchaudio", "torchaudio_bfloat16"}
    assert both <= {*losses.excluded_arms((128, 200, 101, 640, 1024), False)}
    assert not both & {*losses.excluded_arms((32, 200, 101, 640, 1025), False)}


def test_a_small_tile_can_reach_a_fiftieth_of_an_eager_joints_memory():
    """By formula: an eager joint holds its hidden layer in bfloat16, its logits in float32 and their gradient, at least."""
    N, D, V = GOAL["B"] * GOAL["T"] * GOAL["U1"], GOAL["D"], GOAL["V"]
    usual = lean_peak(**GOAL)
    rest = usual.total - usual.parts["tile"] + 2 * D * V  # with the padded weight
    limit = N * (2 * D + 4 * V + 4 * V) / 50
    assert usual.total > limit
    assert rest + (losses.small_tile_nodes(D, V) + 128) * 2 * (D + V) < limit
    assert re.fullmatch("lean_triton.*_bfloat16", losses.SMALL_TILE)


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
