"""The joint in training, in four forms with the same losses, and the rule that chooses one."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from asrkit.models import TransducerModel, make_model
from asrkit.training import (
    Prepared,
    TrainConfig,
    joint_peak_bytes,
    objective,
    training_loss,
)
from asrkit.training.objective import chooses_lean
from asrkit.workbench import cost
from asrkit.workbench.measure import host_reads

sys.path.insert(0, str(Path(__file__).parent))
from trainings import ATTENTION, CTC, ENCODERS, TRANSDUCER

PLAIN_ENCODER = replace(ENCODERS["conv"], dropout=0.0)
SMALL = replace(TRANSDUCER, encoder=PLAIN_ENCODER, dropout=0.0)
MODELS = {
    "rnnt": SMALL,
    "rnnt_relu": replace(SMALL, activation="relu"),
    "tdt": replace(SMALL, durations=(0, 1, 2, 4)),
    "without_ctc": replace(SMALL, ctc=False),
}
FLOAT32 = TrainConfig(precision="float32", omega=0.0, threads=1)
SHAPE = {"B": 8, "T": 100, "U1": 30, "V": 1025, "D": 640}
ON_CPU = SHAPE | {"dtype": torch.float32, "gpu_bytes": None}


def make(config, seed=0):
    torch.manual_seed(seed)
    return TransducerModel(config).train()


def batch(V=SMALL.vocab_size):
    generator = torch.Generator().manual_seed(1)
    return Prepared(
        features=torch.randn(3, 80, 80, generator=generator),
        lengths=torch.tensor([80, 66, 40]),
        targets=torch.randint(V, (3, 7), generator=generator),
        target_lengths=torch.tensor([7, 0, 5]),
        speech_s=2.0,
    )


def loss_and_gradients(model, config):
    torch.manual_seed(5)
    loss, joint = training_loss(model, batch(), config)
    return loss.detach(), torch.autograd.grad(loss, [*model.parameters()]), joint


# --- the rule


@pytest.mark.parametrize("change, lean", [
    ({"D": 128}, True),  # a cheap product
    ({"V": 29}, True),
    ({}, False),  # an expensive one
    ({"dtype": torch.bfloat16}, False),
    ({"B": 64}, True),  # a joint of 2 GB
    ({"D": 128, "gpu_bytes": 80 * 2**30}, False),  # slower on a GPU in float32
    ({"dtype": torch.bfloat16, "gpu_bytes": 80 * 2**30}, True),  # three times as fast
    ({"B": 64, "gpu_bytes": 2**30}, True),  # does not fit
    ({"B": 4, "gpu_bytes": 2**28}, False),
    ({"B": 4, "U1": 60, "gpu_bytes": 2**28}, True),
])  # fmt: skip
def test_the_rule_takes_lean_where_it_is_faster_or_the_joint_does_not_fit(change, lean):
    assert chooses_lean(**(ON_CPU | {"B": 1} | change)) is lean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("V", "D"), [(1024, 640), (300, 320), (128, 1024)])
def test_the_bytes_of_the_joint_equal_the_cost_model(V, D, dtype):
    shape = {"B": 4, "T": 200, "U1": 50, "V": V, "D": D}
    counted = cost.joint_bytes("overwrite", itemsize=dtype.itemsize, **shape).total
    assert joint_peak_bytes(dtype=dtype, **shape) == pytest.approx(counted, rel=0.05)


# --- the losses


@pytest.mark.parametrize("name", MODELS)
def test_all_forms_have_the_loss_and_gradients_of_the_full_joint(name, monkeypatch):
    monkeypatch.setattr(objective, "PAGED_BYTES", 50_000)  # one utterance of the batch
    model = make(MODELS[name])
    config = FLOAT32
    if name == "without_ctc":
        config = replace(config, ctc_weight=0.0)
    full, gradients, joint = loss_and_gradients(model, replace(config, joint="full"))
    assert joint == "full"
    forms = {"lean": "lean", "auto": "lean", "split": "split", "packed": "packed"}
    if name == "tdt":
        del forms["packed"]
    for choice, wanted in forms.items():
        loss, ours, joint = loss_and_gradients(model, replace(config, joint=choice))
        assert joint == wanted
        torch.testing.assert_close(loss, full, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours, gradients, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["rnnt", "tdt"])
def test_under_autocast_all_forms_are_as_close_to_float32_as_the_full_joint(name):
    model = make(MODELS[name])
    exact = loss_and_gradients(model, replace(FLOAT32, joint="full"))[1]
    errors = {}
    for choice in ("full", "lean", "split", *["packed"] * (name == "rnnt")):
        config = replace(FLOAT32, joint=choice, precision="bfloat16")
        loss, gradients, _ = loss_and_gradients(model, config)
        assert loss.dtype == torch.float32
        pairs = zip(gradients, exact, strict=True)
        errors[choice] = sum(float((half - wanted).norm()) for half, wanted in pairs)
    assert max(errors.values()) <= 1.5 * errors["full"]


@pytest.mark.parametrize("joint", ["lean", "packed", "split"])
def test_dropout_in_the_joint_follows_the_seed_and_acts_in_training_only(joint):
    model = make(replace(SMALL, dropout=0.4))
    lean = replace(FLOAT32, joint=joint)
    full = replace(FLOAT32, joint="full")

    def losses(config, seeds):
        per_label = []
        for seed in seeds:
            torch.manual_seed(seed)
            with torch.no_grad():
                per_label.append(training_loss(model, batch(), config).per_label)
        return torch.stack(per_label)

    ours = losses(lean, range(20))
    theirs = losses(full, range(20))
    assert torch.equal(losses(lean, [0]), ours[:1])
    assert len(ours.unique()) == 20
    assert 0.5 < ours.std() / theirs.std() < 2
    model.dropout.eval()
    again = losses(lean, [1])
    other = losses(full, [2])
    torch.testing.assert_close(again, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size, utterances", [
    (3 * 50_000, [3]),
    (2 * 50_000, [2, 1, 2, 1]),  # backward computes each again
    (0, [1] * 6),  # at least one
])  # fmt: skip
def test_split_computes_as_many_utterances_as_fit(size, utterances, monkeypatch):
    model = make(SMALL)
    shape = {"B": 1, "T": 20, "U1": 8, "V": SMALL.vocab_size + 1, "D": 16}
    assert 25_000 < joint_peak_bytes(dtype=torch.float32, **shape) < 50_000
    monkeypatch.setattr(objective, "PAGED_BYTES", size)
    seen = []
    join = model.join
    monkeypatch.setattr(model, "join", lambda e, p: seen.append(len(e)) or join(e, p))
    loss_and_gradients(model, replace(FLOAT32, joint="split"))
    assert sorted(seen) == sorted(utterances)


@pytest.mark.parametrize("joint", ["packed", "split"])
def test_no_form_reads_from_the_device(joint, monkeypatch):
    monkeypatch.setattr(objective, "PAGED_BYTES", 50_000)
    with torch.device("meta"):
        model = TransducerModel(replace(SMALL, dropout=0.1)).train()
    on_meta = batch()._replace(features=torch.empty(3, 80, 80, device="meta"))
    config = replace(FLOAT32, joint=joint)

    def step():
        training_loss(model, on_meta, config).per_label.backward()

    assert host_reads(step, device="meta") == {}


# --- joints that only the model itself can compute


class ModifiedJoin(TransducerModel):
    def join(self, encoded, predicted):
        return 0.5 * super().join(encoded, predicted)


def with_two_layers(model):
    model.output = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), model.output)


def with_modified_join(model):
    model.__class__ = ModifiedJoin


@pytest.mark.parametrize("change", [with_two_layers, with_modified_join])
def test_auto_builds_a_modified_joint_and_lean_and_packed_refuse_it(
    change, monkeypatch
):
    monkeypatch.setattr(objective, "PAGED_BYTES", 0)
    model = make(SMALL)
    change(model)
    full, gradients, joint = loss_and_gradients(model, FLOAT32)
    assert joint == "full"
    loss, ours, _ = loss_and_gradients(model, replace(FLOAT32, joint="split"))
    torch.testing.assert_close((loss, ours), (full, gradients), rtol=1e-3, atol=1e-5)
    for joint in ("lean", "packed"):
        message = f"^joint: expected an unmodified TransducerModel with '{joint}', got"
        with pytest.raises(ValueError, match=message):
            training_loss(model, batch(), replace(FLOAT32, joint=joint))


def test_packed_has_no_loss_of_tdt():
    message = "^joint: expected another for a model with durations, got 'packed'"
    with pytest.raises(ValueError, match=message):
        training_loss(make(MODELS["tdt"]), batch(), replace(FLOAT32, joint="packed"))


@pytest.mark.parametrize("config, joint", [
    *((MODELS["rnnt"], joint) for joint in ("full", "packed", "split", "lean")),
    *((MODELS["tdt"], joint) for joint in ("full", "split", "lean")),
    (CTC, "auto"),
    (ATTENTION, "auto"),
])  # fmt: skip
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_feature_that_is_not_finite_shows_in_loss_and_gradients(config, joint, value):
    torch.manual_seed(0)
    model = make_model(config).train()
    corrupt = batch()
    corrupt.features[0, 3, 5] = value
    loss = training_loss(model, corrupt, replace(FLOAT32, joint=joint)).per_label
    (grad,) = torch.autograd.grad(loss, next(model.parameters()))
    assert loss.isnan() and grad.isnan().any()
