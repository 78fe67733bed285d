"""Jasper reckoned: memory against a count of tensors, launches by structure, what seeds tell."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asrkit.models import CTCModel, JasperConfig, presets
from asrkit.models.folded import fold
from asrkit.workbench.claims import load_claims, published
from asrkit.workbench.lessons.jasper import studies
from asrkit.workbench.lessons.jasper.studies import TrainingMemory

MINI = presets.mini_jasper()
GIB = studies.GIB


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
    counted = studies.training_peak(batch, frames, config=MINI)
    torch.manual_seed(0)
    model = CTCModel(MINI).train()
    for stage in model.encoder.stages:
        stage.dropout = studies._Dropout(stage.dropout.p)
    features = torch.randn(batch, frames, MINI.encoder.bins)
    lengths = torch.tensor([frames] * (batch - 1) + [frames - 1])
    weights = list(model.parameters())
    momenta = [torch.zeros_like(weight) for weight in weights]
    forward = partial(studies.masked_everywhere, model)
    step = studies._MomentumStep(forward, weights, momenta, lengths)
    held = [*weights, *model.buffers(), *momenta, features]
    with LiveBytes() as live:
        live.note(held)
        step(features)
    assert counted == pytest.approx(live.most, rel=0.02)


def test_memory_is_a_line_over_the_batch_and_mixed_precision_takes_less():
    memories = {
        precision: studies.training_memory(400, precision, config=MINI)
        for precision in ("float32", "mixed")
    }
    for precision, memory in memories.items():
        there = studies.training_peak(48, 400, precision, config=MINI) / GIB
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
    found = studies.training_peak(16, 1920, precision) / GIB
    assert found == pytest.approx(FULL[precision].peak_GiB(16), rel=0.01)


def test_published_batches_beside_those_that_fit():
    limits = studies.batch_limits(FULL["float32"], FULL["mixed"])
    found = {
        (one.card_GiB, one.precision): (one.printed, one.counted, one.verdict)
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
    for one in limits:
        assert one.peak_GiB + one.left_GiB == pytest.approx(
            one.card_GiB - studies.DRIVER_GIB
        )
    tight = studies.batch_limits(
        replace(FULL["float32"], utterance_GiB=2.0), FULL["mixed"]
    )
    assert tight[0].verdict == "does not fit"


def test_the_claim_of_larger_batches_has_the_batches_that_fit():
    (claim,) = [one for one in load_claims() if one.id == "jasper-mixed-larger-batch"]
    limits = studies.batch_limits(FULL["float32"], FULL["mixed"])
    counted = {one.precision: one.counted for one in limits if one.card_GiB == 32}
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
        found, found_lengths = studies.masked_everywhere(model, features, lengths)
    assert torch.equal(found_lengths, wanted_lengths)
    for row, end in enumerate(wanted_lengths.tolist()):
        assert torch.allclose(found[row, :end], wanted[row, :end], atol=1e-12)


def test_lengths_and_masks_are_most_of_the_published_launches():
    """Each of the 108 convolutions: mask of 3 launches, length of 7, itself, its norm."""
    model = random_model(studies.narrowed(presets.jasper_10x5dr(), 64))
    theirs = studies.launches_of_call(
        lambda x, n: studies.masked_everywhere(model, x, n)
    )
    assert theirs == 108 * 12 + 53 + 55 + 4  # ReLUs, sums of branches, head
    ragged = studies.launches_of_call(model)
    full = studies.launches_of_call(model, ragged=False)
    assert full < ragged < theirs / 3
    assert full > 108 * 2 + 53 + 55


def test_folded_norms_and_branches_leave_a_launch_or_two_for_each_convolution():
    """53 convolutions and ten products of branches, a bias and a ReLU each at most."""
    model = random_model(studies.narrowed(presets.jasper_10x5dr(), 64))
    eager = studies.launches_of_call(model, ragged=False)
    folded = studies.launches_of_call(fold(model), ragged=False)
    assert folded < 160 < eager / 2


# Seeds


def test_the_published_seeds_have_their_printed_mean_and_the_reported_one_is_among_them():
    lines = {
        (line["system"], line["set"]): line for line in published("jasper_seeds.csv")
    }
    runs = studies.seed_runs()
    assert len(runs) == 8
    for run in runs:
        line = lines[run.system, run.set]
        assert run.mean == pytest.approx(line["mean_percent"], abs=0.0055)
        assert run.std * math.sqrt(7 / 8) == pytest.approx(
            line["std_percent"], abs=0.0055
        )
        assert run.reported in run.percent
        assert run.gain == pytest.approx(run.mean - run.reported)
    (one,) = studies.seed_runs("DGX A100", "test-clean")
    assert one.gain == pytest.approx(0.24, abs=0.005)
    with pytest.raises(
        ValueError, match="system, of: expected a line of jasper_seeds.csv"
    ):
        studies.seed_runs("T4")


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_the_smallest_of_n_normals_is_expected_where_it_is(n):
    known = {
        1: 0.0,
        2: -1 / math.sqrt(math.pi),
        3: -1.5 / math.sqrt(math.pi),
        8: -1.42360,
    }
    assert studies.expected_minimum(n) == pytest.approx(known[n], abs=1e-4)


def test_the_chance_of_a_gain_is_what_drawing_finds():
    best = np.random.default_rng(0).normal(size=(200_000, 8)).min(1)
    for gain in (0.0, 0.13, 0.3):
        share = (best * 0.2 <= -gain).mean()
        assert studies.chance_of_gain(gain, 0.2, 8) == pytest.approx(share, abs=0.005)


def test_a_permutation_test_counts_all_divisions():
    assert studies.permutation_p([1.0, 2.0], [3.0, 4.0]) == pytest.approx(2 / 6)
    assert studies.permutation_p([1.0, 1.0], [1.0]) == 1.0
    one, other = [0.1, 0.9, 0.4], [0.8, 1.3]
    seen = abs(np.mean(one) - np.mean(other))
    pooled = Counter(enumerate([*one, *other]))
    count = 0
    for part in itertools.combinations(pooled, 3):
        rest = [value for value in pooled if value not in part]
        gap = np.mean([v for _, v in part]) - np.mean([v for _, v in rest])
        count += abs(gap) >= seen - 1e-9
    assert studies.permutation_p(one, other) == pytest.approx(count / 10)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: studies.training_peak(2, 10, "float16"),
     "precision: expected 'float32' or 'mixed', got 'float16'"),
    (lambda: studies.permutation_p([], [1.0]), "one, other: expected a value each"),
    (lambda: studies.permutation_p([0.0] * 11, [1.0] * 10), "one, other: expected at most 20"),
])  # fmt: skip
def test_what_cannot_be_reckoned_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


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
    from asrkit.workbench.cost import encoder_flops, published_latencies, two_numbers

    claims = {
        one.id: one.params for one in load_claims() if one.id.startswith("jasper-")
    }
    rate = encoder_flops(JasperConfig(), B=1, T=100) / 1e9
    for name in ("jasper-two-numbers", "jasper-fp32-above-peak"):
        assert claims[name]["GFLOP_per_s"] == pytest.approx(rate, abs=0.005)
    cells = published_latencies("DGX A100", "FP16")
    found = two_numbers(cells)
    above = [one for one in cells if found.ms(one.FLOP) > found.floor_ms]
    assert [(one.batch, one.seconds) for one in above] == [(16, 16.7)]
    fitted = claims["jasper-two-numbers"]
    assert fitted["floor_ms"] == pytest.approx(found.floor_ms, abs=0.005)
    assert fitted["TFLOP_per_s"] == pytest.approx(found.TFLOP_per_s, abs=0.05)
