"""Training by CTC alone: its loss."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from asrkit.losses import ctc_loss
from asrkit.models import CTCModel
from asrkit.optim import NovoGrad
from asrkit.training import Prepared, training_loss, update

sys.path.insert(0, str(Path(__file__).parent))
from trainings import CTC, ENCODERS, SHORT, TOKENIZER, losses, run


def four_utterances():
    """A batch in float64: one that no alignment fits, one without labels, one of a single frame."""
    torch.manual_seed(0)
    return Prepared(
        features=torch.randn(4, 40, 80, dtype=torch.float64),
        lengths=torch.tensor([40, 8, 25, 1]),
        targets=torch.randint(TOKENIZER.vocab_size, (4, 6)),
        target_lengths=torch.tensor([5, 6, 0, 1]),
        speech_s=1.0,
    )


def model_in_float64(encoder=CTC.encoder):
    torch.manual_seed(1)
    return CTCModel(replace(CTC, encoder=encoder)).double().eval()  # no dropout


@pytest.mark.parametrize("name", ENCODERS)
def test_the_loss_is_that_of_the_recursion_over_frames_for_each_label_and_so_are_gradients(
    name,
):
    batch = four_utterances()
    if name == "lstm":  # it stacks pairs of frames
        batch = batch._replace(lengths=batch.lengths.clamp(min=2))
    model = model_in_float64(ENCODERS[name])
    log_probs, lengths = model(batch.features, batch.lengths)
    nats = ctc_loss(
        log_probs, batch.targets, lengths, batch.target_lengths, model.blank
    )
    assert nats[1] == 0 < nats[2]  # six labels do not fit; silence has a loss as well
    wanted = nats.sum() / 12  # labels of all utterances
    wanted_gradients = torch.autograd.grad(wanted, list(model.parameters()))
    loss, lean = training_loss(model, batch, SHORT)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12) and not lean
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-9, atol=1e-12)


def test_what_lies_in_the_padding_does_not_matter_and_a_batch_of_silence_has_no_label_to_share_by():
    batch = four_utterances()
    model = model_in_float64()
    loss = training_loss(model, batch, SHORT).per_label
    features = batch.features.clone()
    targets = batch.targets.clone()
    for row in range(4):
        features[row, batch.lengths[row] :] = math.nan
        targets[row, batch.target_lengths[row] :] = 0
    dirty = batch._replace(features=features, targets=targets)
    assert training_loss(model, dirty, SHORT).per_label.item() == pytest.approx(
        loss.item()
    )
    silent = batch._replace(target_lengths=torch.zeros(4, dtype=torch.long))
    assert training_loss(model, silent, SHORT).per_label.isfinite()


def test_fields_about_the_transducer_change_nothing(tiny_speech, tmp_path):
    plain = run(tiny_speech, tmp_path / "a", model=CTC)
    other = replace(SHORT, joint="lean", ctc_weight=0.0, sigma=0.5, omega=1.0)
    assert losses(run(tiny_speech, tmp_path / "b", other, CTC)) == losses(plain)


def test_no_clipping_touches_what_novograd_normalises():
    torch.manual_seed(0)
    weights = [nn.Linear(3, 2), nn.Linear(3, 2)]
    weights[1].load_state_dict(weights[0].state_dict())
    x = torch.randn(4, 3)
    for layer, clip in zip(weights, (1e-3, 1e3), strict=True):
        optimizer = NovoGrad(layer.parameters(), 0.1, betas=(0.9, 0.5))
        for factor in (1.0, 50.0):  # with a second step clipping would show
            loss = factor * layer(x).square().sum()
            update(layer, optimizer, loss, replace(SHORT, clip=clip))
    assert torch.equal(weights[0].weight, weights[1].weight)
