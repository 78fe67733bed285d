"""A step from batch to weights that reads nothing from the device, and that makes none of what is not finite."""

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from asrkit.models import (
    AEDConfig,
    AEDModel,
    ConvConfig,
    CTCConfig,
    CTCModel,
    FastConformerConfig,
    LSTMConfig,
    TransducerConfig,
    TransducerModel,
    presets,
)
from asrkit.optim import Lamb, NovoGrad
from asrkit.training import Prepared, TrainConfig, training_loss, update
from asrkit.workbench.measure import fake_peak, host_reads

FULL = TrainConfig(joint="full", precision="float32")
WITHOUT_CTC = TrainConfig(joint="full", precision="float32", ctc_weight=0.0)
LEAN = TrainConfig(joint="lean", precision="float32")


@pytest.fixture
def fused_on_meta():
    """torch's fused optimizers take meta tensors, for which their kernels do have shapes."""
    name = "torch.optim.optimizer._get_fused_kernels_supported_devices"
    with mock.patch(name, return_value=["cpu", "cuda", "meta"]):
        yield


def on_meta(B, T, U, V):
    """A batch whose features have no numbers; lengths and targets lie on the host."""
    return Prepared(
        features=torch.empty(B, T, 80, device="meta"),
        lengths=torch.linspace(T, 0.7 * T, B).long(),
        targets=torch.arange(B * U).view(B, U) % (V - 1),
        target_lengths=torch.linspace(U, 0.5 * U, B).long(),
        speech_s=0.0,
    )


def one_step(model, optimizer, batch, config):
    loss = training_loss(model, batch, config).per_label
    return update(model, optimizer, loss, config)


@pytest.mark.parametrize("durations", [(), (0, 1, 2)])
@pytest.mark.parametrize(
    "encoder", [ConvConfig(layers=1), FastConformerConfig(layers=1)]
)
def test_no_step_of_a_shipped_model_reads_from_the_device(
    encoder, durations, fused_on_meta
):
    sizes = TransducerConfig(
        vocab_size=9,
        encoder=encoder,
        predictor=LSTMConfig(width=16),
        dropout=0.1,
        durations=durations,
    )
    with torch.device("meta"):
        model = TransducerModel(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = on_meta(B=3, T=40, U=4, V=10)
    for config in (FULL, LEAN):
        reads = host_reads(
            lambda c=config: one_step(model, optimizer, batch, c), device="meta"
        )
        assert reads == {}


@pytest.mark.parametrize(
    "encoder", [ConvConfig(layers=1), presets.mini_jasper().encoder]
)
def test_no_step_of_a_ctc_model_by_novograd_reads_from_the_device(encoder):
    with torch.device("meta"):
        model = CTCModel(CTCConfig(vocab_size=9, encoder=encoder))
    optimizer = NovoGrad(model.parameters(), lr=0.1)
    batch = on_meta(B=3, T=40, U=4, V=10)
    reads = host_reads(lambda: one_step(model, optimizer, batch, FULL), device="meta")
    assert reads == {}


@pytest.mark.parametrize(
    "encoder", [ConvConfig(layers=1), FastConformerConfig(layers=1)]
)
def test_no_step_of_an_attention_decoder_reads_from_the_device(encoder, fused_on_meta):
    sizes = AEDConfig(
        vocab_size=12, pad=9, bos=10, eos=11, encoder=encoder, layers=2, ctc=True
    )
    with torch.device("meta"):
        model = AEDModel(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = on_meta(B=3, T=40, U=4, V=10)
    config = replace(FULL, smoothing=0.1)
    reads = host_reads(lambda: one_step(model, optimizer, batch, config), device="meta")
    assert reads == {}


class Stacked(nn.Module):
    """The encoder of MLPerf's RNN-T: two LSTMs, pairs of frames stacked, three LSTMs."""

    def __init__(self, bins, width):
        super().__init__()
        self.before = nn.LSTM(bins, width, 2, batch_first=True)
        self.after = nn.LSTM(2 * width, width, 3, batch_first=True)

    def forward(self, features, lengths):
        frames = self.before(features)[0]
        B, T, D = frames.shape
        pairs = frames[:, : T // 2 * 2].reshape(B, T // 2, 2 * D)
        return self.after(pairs)[0], lengths // 2


def published(width=1024, joint_width=512):
    """A model of the published size: 49,006,592 parameters, 512 more than published, blank's row."""
    model = TransducerModel(
        TransducerConfig(
            vocab_size=1023,
            encoder=ConvConfig(width=width, layers=0),
            predictor=LSTMConfig(width=joint_width, layers=2),
            joint_width=joint_width,
            activation="relu",
            ctc=False,
        )
    )
    model.encoder = Stacked(240, width)
    return model


def fake_step(model, optimizer, batch):
    """Both halves of the joint at full length and a stand-in for the loss, then the real update."""
    features, targets = batch
    encoded, _, _ = model.encode(features, torch.tensor([0]))
    predicted = model.rows(targets)
    logits = model.join(encoded[:, :1], predicted[:, :1])
    loss = logits.sum() + encoded.sum() + predicted.sum()
    update(model, optimizer, loss, FULL)


def test_at_published_size_and_length_fake_tensors_read_nothing_and_tell_the_peak():
    with FakeTensorMode():
        model = published()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        batch = (torch.randn(256, 558, 240), torch.ones(256, 125, dtype=torch.long))
        run = lambda: fake_step(model, optimizer, batch)  # noqa: E731
        assert host_reads(run) == {}
        held = (model, optimizer)
        peak = fake_peak(
            lambda b: fake_step(model, optimizer, b), batch, held=held, device="cpu"
        )
    weights = 4 * 49_006_592
    assert peak > 4 * weights  # weights, gradients, and two of Adam's states
    assert 3.5 < peak / 2**30 < 6


OPTIMIZERS = {
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "AdamW by foreach": torch.optim.AdamW,
    "LAMB": lambda parameters: Lamb(
        parameters, lr=0.1, betas=(0.9, 0.98), weight_decay=0.01
    ),
    "NovoGrad": lambda parameters: NovoGrad(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_leaves_every_bit(name, bad):
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    optimizer = OPTIMIZERS[name](layer.parameters())
    x = torch.randn(4, 3)
    update(layer, optimizer, layer(x).square().sum(), FULL)
    before = copy.deepcopy((layer.state_dict(), optimizer.state_dict()["state"]))
    norm = update(layer, optimizer, layer(x * bad).square().sum(), FULL)
    assert not norm.isfinite()
    after = (layer.state_dict(), optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    update(layer, optimizer, layer(x).square().sum(), FULL)  # the next step is one
    assert not torch.equal(layer.weight, before[0]["weight"])
    assert not hasattr(optimizer, "found_inf")


def test_what_clips_by_itself_gets_the_gradient_as_it_is_and_the_norm_is_that_before():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    x = 100 * torch.randn(4, 3)  # a norm far above FULL.clip
    gradient = torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]
    lamb = Lamb(
        layer.parameters(),
        lr=0.1,
        betas=(0.9, 0.98),
        weight_decay=0.01,
        clip=float("inf"),
    )
    everything = [layer.weight, layer.bias]
    gradients = torch.autograd.grad(layer(x).square().sum(), everything)
    norm = update(layer, lamb, layer(x).square().sum(), FULL)
    assert gradient.norm() > FULL.clip
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(gradients))
    torch.testing.assert_close(lamb.state[layer.weight]["exp_avg"], 0.1 * gradient)
