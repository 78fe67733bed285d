"""Jasper without a GPU: memory against a count of tensors, launches by structure, seeds."""

import math
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asrkit.models import CTCModel, JasperConfig, presets
from asrkit.models.inference import fold
from asrkit.workbench.claims import load_claims, published
from asrkit.workbench.cost import encoder_flops, two_numbers
from asrkit.workbench.lessons import jasper as lesson
from asrkit.workbench.lessons.jasper import TrainingMemory

MINI = presets.mini_jasper()
GIB = lesson.GIB


def random_model(config):
    torch.manual_seed(0)
    model = CTCModel(config).eval()
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm1d):
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)
    return model


# Memory


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that real ops returned and that are still alive."""

    def __init__(self):
        super().__init__()
        self.alive = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.note(tree_leaves(result))
        return result

    def note(self, results):
        for tensor in results:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                weak = StorageWeakRef(storage)
                self.alive[weak.cdata] = (weak, storage.nbytes())
        self.alive = {
            key: one for key, one in self.alive.items() if not one[0].expired()
        }
        self.most = max(self.most, sum(size for _, size in self.alive.values()))


def test_the_count_without_numbers_is_that_of_real_tensors():
    """On a CPU the storages that live, since only CUDA's allocator keeps a peak."""
    batch, frames = 8, 200
    counted = lesson.training_peak(batch, frames, "float32", MINI)
    torch.manual_seed(0)
    model = CTCModel(MINI).train()
    features = torch.randn(batch, frames, MINI.encoder.bins)
    lengths = torch.tensor([frames] * (batch - 1) + [frames - 1])
    weights = list(model.parameters())
    momenta = [torch.zeros_like(weight) for weight in weights]
    step = lesson.momentum_step(model, momenta, lengths)
    held = [*weights, *model.buffers(), *momenta, features]
    with LiveBytes() as live:
        live.note(held)
        step(features)
    assert counted == pytest.approx(live.most, rel=0.02)


def test_memory_is_a_line_over_the_batch_and_mixed_precision_takes_less():
    memories = {
        precision: lesson.training_memory(precision, 400, MINI)
        for precision in ("float32", "mixed")
    }
    for precision, memory in memories.items():
        there = lesson.training_peak(48, 400, precision, MINI) / GIB
        assert memory.peak_GiB(48) == pytest.approx(there, rel=0.01)
    ratio = memories["mixed"].utterance_GiB / memories["float32"].utterance_GiB
    assert 0.45 < ratio < 0.6


def test_the_largest_batch_is_the_last_power_of_two_that_fits():
    memory = TrainingMemory(fixed_GiB=2.0, utterance_GiB=0.5)
    assert memory.peak_GiB(16) == 10.0
    assert memory.largest_batch(10.0) == 16
    assert memory.largest_batch(9.99) == 8
    assert memory.largest_batch(2.5) == 1
    assert memory.largest_batch(2.4) == 0


FULL = {  # GiB of Jasper 10x5 DR at 1,920 frames, by precision: fixed, and of an utterance
    "float32": TrainingMemory(fixed_GiB=2.479, utterance_GiB=0.5365),
    "mixed": TrainingMemory(fixed_GiB=3.099, utterance_GiB=0.2811),
}


@pytest.mark.parametrize("precision", FULL)
def test_the_published_model_takes_what_the_limits_are_reckoned_with(precision):
    found = lesson.training_peak(16, 1920, precision) / GIB
    assert found == pytest.approx(FULL[precision].peak_GiB(16), rel=0.01)


def test_published_batches_beside_those_that_fit():
    limits = lesson.batch_limits(FULL)
    found = {
        (one["card, GiB"], one["precision"]): tuple([*one.values()][2:])
        for one in limits
    }
    assert found == {
        (16, "float32"): (16, 16, "agrees"),
        (16, "mixed"): (16, 32, "borderline"),
        (32, "float32"): (32, 32, "agrees"),
        (32, "mixed"): (64, 64, "agrees"),
        (80, "float32"): (64, 128, "borderline"),
        (80, "mixed"): (64, 256, "no maximum"),
    }
    tight = replace(FULL["float32"], utterance_GiB=2.0)
    assert lesson.batch_limits({"float32": tight})[0]["verdict"] == "does not fit"


def test_the_claim_of_larger_batches_has_the_batches_that_fit():
    (claim,) = [one for one in load_claims() if one.id == "jasper-mixed-larger-batch"]
    limits = lesson.batch_limits(FULL)
    counted = {
        one["precision"]: one["counted"] for one in limits if one["card, GiB"] == 32
    }
    assert claim.params == {f"{name}_batch": batch for name, batch in counted.items()}
    for line in published("jasper_training.csv"):
        if line["system"] == "DGX A100":
            assert line["batch"] <= 64


# Launches


@pytest.mark.parametrize("lengths", [[40, 40], [40, 17], [40, 1]])
def test_masks_in_each_convolution_change_nothing(lengths):
    model = random_model(MINI).double()
    features = torch.randn(2, 40, 80, dtype=torch.float64)
    lengths = torch.tensor(lengths)
    with torch.no_grad():
        wanted, wanted_lengths = model(features, lengths)
        found, found_lengths = lesson.masked_everywhere(model, features, lengths)
    assert torch.equal(found_lengths, wanted_lengths)
    for row, end in enumerate(wanted_lengths.tolist()):
        assert torch.allclose(found[row, :end], wanted[row, :end], atol=1e-12)


def test_lengths_and_masks_are_most_of_the_published_launches():
    """Each of the 108 convolutions: mask of 3 launches, length of 7, itself, its norm."""
    model = random_model(lesson.narrowed(presets.jasper_10x5dr(), 64))
    theirs = lesson.launches_of_call(lambda x, n: lesson.masked_everywhere(model, x, n))
    assert theirs == 108 * 12 + 53 + 55 + 4  # ReLUs, sums of branches, head
    ragged = lesson.launches_of_call(model)
    full = lesson.launches_of_call(model, ragged=False)
    assert full < ragged < theirs / 3
    assert full > 108 * 2 + 53 + 55


def test_folded_norms_and_branches_leave_a_launch_or_two_for_each_convolution():
    """53 convolutions and ten products of branches, a bias and a ReLU each at most."""
    model = random_model(lesson.narrowed(presets.jasper_10x5dr(), 64))
    eager = lesson.launches_of_call(model, ragged=False)
    folded = lesson.launches_of_call(fold(model), ragged=False)
    assert folded < 160 < eager / 2


# Seeds


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_the_smallest_of_n_normals_is_expected_where_it_is(n):
    known = {
        1: 0.0,
        2: -1 / math.sqrt(math.pi),
        3: -1.5 / math.sqrt(math.pi),
        8: -1.42360,
    }
    assert lesson.expected_minimum(n) == pytest.approx(known[n], abs=1e-4)


# Latencies


def latencies(precision):
    return [
        cell
        for cell in lesson.published_latencies("DGX A100")
        if cell.precision == precision
    ]


@pytest.mark.parametrize(("precision", "floor_ms", "rate", "deviation"), [
    ("FP16", 35.0, 146, 0.06),
    ("TF32", 37.0, 78, 0.11),
])  # fmt: skip
def test_the_published_cells_of_an_a100_are_two_numbers(
    precision, floor_ms, rate, deviation
):
    cells = latencies(precision)
    found = two_numbers(cells)
    assert len(cells) == 15
    assert found.floor_ms == pytest.approx(floor_ms, rel=0.01)
    assert found.TFLOP_per_s == pytest.approx(rate, rel=0.01)
    assert found.deviation == pytest.approx(deviation, abs=0.005)


# Claims


def test_the_claim_of_parameters_has_those_of_the_model():
    (claim,) = [one for one in load_claims() if one.id == "jasper-parameters-333m"]
    with torch.device("meta"):
        model = CTCModel(presets.jasper_10x5dr())
    first, *blocks, wide, last = [
        sum(weight.numel() for weight in stage.parameters())
        for stage in model.encoder.stages
    ]
    head = sum(weight.numel() for weight in model.output.parameters())
    assert claim.params == {
        "first": first,
        "blocks": sum(blocks),
        "wide": wide,
        "last": last,
        "head": head,
    }


def test_claims_about_latencies_have_the_numbers_that_are_fitted_and_counted():
    claims = {
        one.id: one.params for one in load_claims() if one.id.startswith("jasper-")
    }
    rate = encoder_flops(JasperConfig(), B=1, T=100) / 1e9
    for name in ("jasper-two-numbers", "jasper-fp32-above-peak"):
        assert claims[name]["GFLOP_per_s"] == pytest.approx(rate, abs=0.005)
    cells = latencies("FP16")
    found = two_numbers(cells)
    above = [one for one in cells if found.ms(one.FLOP) > found.floor_ms]
    assert [(one.batch, one.seconds) for one in above] == [(16, 16.7)]
    fitted = claims["jasper-two-numbers"]
    assert fitted["floor_ms"] == pytest.approx(found.floor_ms, abs=0.005)
    assert fitted["TFLOP_per_s"] == pytest.approx(found.TFLOP_per_s, abs=0.05)
