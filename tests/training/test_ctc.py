"""Training by CTC alone: its loss."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from asrkit.losses import ctc_loss
from asrkit.models import CTCModel
from asrkit.optim import NovoGrad
from asrkit.training import update

sys.path.insert(0, str(Path(__file__).parent))
from trainings import (
    CTC,
    ENCODERS,
    SHORT,
    expect_same,
    four_utterances,
    gradients,
    loss_and_gradients,
    losses,
    run,
    with_padding,
)


def model_in_float64(encoder=CTC.encoder):
    torch.manual_seed(1)
    return CTCModel(replace(CTC, encoder=encoder)).double().eval()  # no dropout


@pytest.mark.parametrize("name", ENCODERS)
def test_loss_and_gradients_are_those_of_ctc_for_each_label(
    name,
):
    batch = four_utterances()
    model = model_in_float64(ENCODERS[name])
    log_probs, lengths = model(batch.features, batch.lengths)
    labels = (batch.targets, lengths, batch.target_lengths)
    nats = ctc_loss(log_probs, *labels, model.blank)
    assert nats[1] == 0 < nats[2]  # six labels do not fit; silence has a loss as well
    wanted = nats.sum() / 6  # labels of the others
    expect_same(loss_and_gradients(model, batch), (wanted, gradients(wanted, model)))


def test_padding_has_no_influence_and_a_batch_without_labels_has_a_finite_loss():
    batch = four_utterances()
    model = model_in_float64()
    clean, dirty = (
        loss_and_gradients(model, padded) for padded in (batch, with_padding(batch, 0))
    )
    expect_same(dirty, clean)
    silent = batch._replace(target_lengths=torch.zeros(4, dtype=torch.long))
    assert loss_and_gradients(model, silent)[0].isfinite()


def test_settings_of_transducers_change_nothing(tiny_speech, tmp_path):
    config = replace(SHORT, batch_seconds=9.0)
    plain = run(tiny_speech, tmp_path / "a", config, CTC)
    other = replace(config, joint="lean", ctc_weight=0.0, sigma=0.5, omega=1.0)
    assert losses(run(tiny_speech, tmp_path / "b", other, CTC)) == losses(plain)


def test_novograd_ignores_clipping():
    weights = []
    for clip in (1e-3, 1e3):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        x = torch.randn(4, 3)
        optimizer = NovoGrad(layer.parameters(), 0.1, betas=(0.9, 0.5))
        for factor in (1.0, 50.0):  # with a second step clipping would show
            loss = factor * layer(x).square().sum()
            update(layer, optimizer, loss, replace(SHORT, clip=clip))
        weights.append(layer.weight)
    assert torch.equal(*weights)
