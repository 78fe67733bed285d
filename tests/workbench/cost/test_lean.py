"""The model of the lean kernels' time: its sizes against the kernels' own, its sums against a hand's."""

import pytest
import torch

from asrkit.losses import rnnt_loss_lean
from asrkit.workbench.bench.suites import losses
from asrkit.workbench.cost import (
    CARDS,
    card_called,
    joint_flops,
    lean,
    lean_floor_ms,
    lean_ms,
    lean_peak,
    lean_phases,
)
from asrkit.workbench.profiling.fakes import lean_launches

SHAPE = {"B": 32, "T": 200, "U1": 101, "D": 640, "V": 1025}
(H100,) = [card for card in CARDS if card.name == "H100"]


def test_operations_and_bytes_are_those_counted_by_hand():
    phases = {
        phase.name: phase for phase in lean_phases(B=1, T=17, U1=9, D=100, V=129)
    }  # 2 x 2 tiles; 512 rows, 192 x 128
    assert (
        phases["scores"].flops == phases["by_logits"].flops == 2 * 512 * 128 * 256
    )  # two chunks of 128 outputs
    assert phases["by_weight"].flops == phases["by_halves"].flops == 2 * 512 * 192 * 128
    hidden, gradient, weight = (
        512 * 128 * 2,
        512 * 192 * 2,
        4 * 192 * 128 * 2,
    )  # H, G, and the weight for each tile
    assert phases["scores"].cache_B == 3 * hidden + weight  # H made, then read for each chunk
    assert phases["by_halves"].cache_B == gradient + weight
    assert phases["by_weight"].memory_B == hidden + gradient
    assert phases["lattice"].steps == 17 + 9 - 1
    least = joint_flops(N=17 * 9, D=100, V=129, products=4)
    assert least < sum(phase.flops for phase in phases.values())


def test_the_peak_is_a_run_of_tiles_and_the_sums():
    parts = lean_peak(**SHAPE).parts
    rows = 902 * 128  # 5,408 tiles in six runs
    assert parts["tile"] == rows * (1088 + 640) * 2 + 1088 * 640 * 2
    assert parts["lattice"] == 20 * 32 * 200 * 101
    assert parts["gradients"] == 4 * (32 * 301 * 640 + 1088 * 640)
    assert rows * 1088 * 2 <= 1 << 28


def test_sizes_are_those_of_the_kernels():
    kernels = pytest.importorskip("asrkit.losses.lean.triton")
    assert (lean.FRAMES_OF, lean.LABELS_OF, lean.MULTIPLE) == (
        kernels.FRAMES_OF,
        kernels.LABELS_OF,
        kernels.MULTIPLE,
    )
    assert (lean.ROWS, lean.COLUMNS) == (kernels.ROWS, kernels.COLUMNS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [SHAPE, {"B": 2, "T": 40, "U1": 9, "D": 128, "V": 1024}], ids=["padded", "aligned"]
)
def test_all_launches_are_those_counted_on_fakes(shape, dtype):
    for library in ("triton", "numba_cuda"):
        pytest.importorskip(library)
    counted = lean_launches(rnnt_loss_lean, **shape, dtype=dtype, impl="triton")
    phases = lean_phases(**shape, itemsize=dtype.itemsize)
    assert counted.launches == sum(phase.launches for phase in phases)
    for phase in phases:
        if phase.name in ("scores", "by_logits", "by_halves"):
            assert counted.kernels.count(phase.name) == phase.launches


def test_a_smaller_tile_takes_less_memory_and_more_launches():
    pytest.importorskip("triton")
    tile_bytes = 64 << 20
    by_default, smaller = lean_phases(**SHAPE), lean_phases(**SHAPE, tile_bytes=tile_bytes)
    launches = lean_launches(
        rnnt_loss_lean, **SHAPE, impl="triton", tile=tile_bytes // (2 * SHAPE["V"])
    ).kernels
    for phase in smaller:
        if phase.name in ("scores", "by_logits", "by_halves"):
            assert launches.count(phase.name) == phase.launches
    assert sum(phase.launches for phase in smaller) > sum(phase.launches for phase in by_default)
    rows = 246 * 128  # 5,408 tiles in 22 runs
    assert (
        lean_peak(**SHAPE, tile_bytes=tile_bytes).parts["tile"]
        == rows * (1088 + 640) * 2 + 1088 * 640 * 2
    )


def test_a_phase_takes_as_long_as_its_slowest_part():
    card = H100._replace(half_TFLOP_per_s=1000, memory_GB_per_s=1000, cache_GB_per_s=2000)
    tflop, gb = 10**12, 10**9
    for parts, ms in [
        ({"flops": 4 * tflop, "memory_B": gb}, 4 / 0.8), ({"flops": tflop, "memory_B": 4 * gb}, 4 / 0.8),
        ({"cache_B": 4 * gb}, 2 / 0.8), ({"steps": 3000}, 3),
    ]:  # fmt: skip
        assert lean.Phase(name="one", launches=2, **parts).ms(card, 2) == pytest.approx(
            ms + 2 * 0.005
        )


def test_the_prediction_lies_above_the_floor_and_within_reach_of_it():
    floor, predicted = lean_floor_ms(H100, **SHAPE), sum(lean_ms(H100, **SHAPE).values())
    assert floor == pytest.approx(8 * 32 * 200 * 101 * 640 * 1025 / (0.8 * 989.5e9))
    assert floor < predicted < 2 * floor
    assert (
        sum(lean_ms(H100, **SHAPE, itemsize=4).values()) > 8 * predicted
    )  # 67 TFLOP/s without tensor cores


def test_a_card_is_known_by_its_device_and_an_unknown_one_is_refused():
    assert card_called("NVIDIA H100 80GB HBM3") == H100
    assert card_called("NVIDIA H200").name == "H200"
    assert card_called("NVIDIA A100-SXM4-80GB").name == "A100 (80 GB)"
    assert card_called("NVIDIA GeForce RTX 4090") is None
    with pytest.raises(
        ValueError, match="card: expected one whose L2 cache's rate is known, got L4"
    ):
        lean_ms(next(card for card in CARDS if card.name == "L4"), **SHAPE)
    with pytest.raises(ValueError, match="itemsize: expected 2 or 4 bytes, got 8"):
        lean_phases(**SHAPE, itemsize=8)


def test_a_measurement_on_a_known_card_carries_its_prediction(monkeypatch):
    sizes = (32, 200, 101, 640, 1025)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert losses.predicted("cuda", sizes, 2) == {
        "predicted_ms": round(sum(lean_ms(H100, **SHAPE).values()), 3)
    }
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 4090")
    assert losses.predicted("cuda", sizes, 2) == losses.predicted("cpu", sizes, 2) == {}
