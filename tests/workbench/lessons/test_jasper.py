"""Jasper without a GPU: memory against a count of tensors, launches by structure."""

from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asrkit.models import CTCModel, JasperConfig, presets
from asrkit.models.folding import fold
from asrkit.workbench.claims import load_claims
from asrkit.workbench.cost import encoder_flops, two_numbers
from asrkit.workbench.lessons import jasper as lesson
from asrkit.workbench.lessons.jasper import TrainingMemory

MINI = presets.mini_jasper()
GIB = lesson.GIB
CLAIMS = {claim.id: claim.params for claim in load_claims()}


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

    def __init__(self, held):
        super().__init__()
        self.alive = {}
        self.most = 0
        self.note(held)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.note(tree_leaves(result))
        return result

    def note(self, tensors):
        for tensor in filter(torch.is_tensor, tensors):
            weak = StorageWeakRef(tensor.untyped_storage())
            self.alive[weak.cdata] = (weak, tensor.untyped_storage().nbytes())
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
    momenta = [torch.zeros_like(weight) for weight in model.parameters()]
    step = lesson.momentum_step(model, momenta, lengths)
    held = [*model.parameters(), *model.buffers(), *momenta, features]
    with LiveBytes(held) as live:
        step(features)
    assert counted == pytest.approx(live.most, rel=0.02)


def test_memory_is_a_line_over_the_batch_and_mixed_precision_takes_less():
    memories = {name: lesson.training_memory(name, 400, MINI) for name in FULL}
    for precision, memory in memories.items():
        there = lesson.training_peak(48, 400, precision, MINI) / GIB
        assert memory.peak_GiB(48) == pytest.approx(there, rel=0.01)
    ratio = memories["mixed"].utterance_GiB / memories["float32"].utterance_GiB
    assert 0.45 < ratio < 0.6


@pytest.mark.parametrize(
    ("room_GiB", "batch"), [(10, 16), (9.99, 8), (2.5, 1), (2.4, 0)]
)
def test_the_largest_batch_is_the_last_power_of_two_that_fits(room_GiB, batch):
    memory = TrainingMemory(fixed_GiB=2.0, utterance_GiB=0.5)
    assert memory.largest_batch(room_GiB) == batch


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
    assert CLAIMS["jasper-mixed-larger-batch"] == {
        f"{name}_batch": found[32, name][1] for name in FULL
    }
    tight = replace(FULL["float32"], utterance_GiB=2.0)
    assert lesson.batch_limits({"float32": tight})[0]["verdict"] == "does not fit"


# Launches


@pytest.mark.parametrize("shorter", [40, 17, 1])
def test_masks_in_each_convolution_change_nothing(shorter):
    model = random_model(MINI).double()
    features = torch.randn(2, 40, 80, dtype=torch.float64)
    lengths = torch.tensor([40, shorter])
    with torch.no_grad():
        wanted, ends = model(features, lengths)
        found, found_ends = lesson.masked_everywhere(model, features, lengths)
    assert torch.equal(found_ends, ends)
    for row, end in enumerate(ends.tolist()):
        assert torch.allclose(found[row, :end], wanted[row, :end], atol=1e-12)


def test_launches_of_a_call_follow_from_the_structure():
    """Each of the 108 published convolutions: mask of 3 launches, length of 7, itself, its norm.

    Folded, 53 convolutions and ten products of branches have a bias and a ReLU each at most.
    """
    model = random_model(lesson.narrowed(presets.jasper_10x5dr(), 64))
    theirs = lesson.launches_of_call(lambda x, n: lesson.masked_everywhere(model, x, n))
    ragged = lesson.launches_of_call(model)
    full = lesson.launches_of_call(model, ragged=False)
    folded = lesson.launches_of_call(fold(model), ragged=False)
    assert theirs == 108 * 12 + 53 + 55 + 4  # ReLUs, sums of branches, head
    assert 108 * 2 + 53 + 55 < full < ragged < theirs / 3
    assert folded < 160 < full / 2


# Claims


def test_the_claim_of_parameters_has_those_of_the_model():
    with torch.device("meta"):
        model = CTCModel(presets.jasper_10x5dr())
    parts = [*model.encoder.stages, model.output]
    counts = [sum(weight.numel() for weight in part.parameters()) for part in parts]
    first, *blocks, wide, last, head = counts
    assert CLAIMS["jasper-parameters-333m"] == {
        "first": first, "blocks": sum(blocks), "wide": wide, "last": last, "head": head,
    }  # fmt: skip


def test_claims_about_latencies_have_the_numbers_that_are_fitted_and_counted():
    cells = lesson.published_latencies("DGX A100")
    cells = [cell for cell in cells if cell.precision == "FP16"]
    found = two_numbers(cells)
    above = [one for one in cells if found.ms(one.FLOP) > found.floor_ms]
    assert [(one.batch, one.seconds) for one in above] == [(16, 16.7)]
    fitted = CLAIMS["jasper-two-numbers"]
    assert fitted["floor_ms"] == pytest.approx(found.floor_ms, abs=0.005)
    assert fitted["TFLOP_per_s"] == pytest.approx(found.TFLOP_per_s, abs=0.05)
    counted = pytest.approx(encoder_flops(JasperConfig(), B=1, T=100) / 1e9, abs=0.005)
    assert fitted["GFLOP_per_s"] == counted
    assert CLAIMS["jasper-fp32-above-peak"]["GFLOP_per_s"] == counted
