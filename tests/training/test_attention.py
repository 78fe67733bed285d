"""Training of encoder-decoder models: the loss against cross-entropy, token by token."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from asrkit.losses import ctc_loss
from asrkit.models import AEDModel, load_checkpoint

sys.path.insert(0, str(Path(__file__).parent))
import trainings
from trainings import (
    ATTENTION,
    ENCODERS,
    expect_same,
    four_utterances,
    gradients,
    loss_and_gradients,
    run,
    with_padding,
)

SMOOTHING = 0.1
SHORT = replace(trainings.SHORT, smoothing=SMOOTHING)
ALONE = replace(SHORT, ctc_weight=0.0)


def model_in_float64(**changes):
    torch.manual_seed(1)
    model = AEDModel(replace(ATTENTION, **changes)).double().eval()  # no dropout
    torch.nn.init.normal_(model.output_bias)
    return model


def nats_token_by_token(model, encoded, labels):
    """Cross-entropy of one text given frames (1, T, D), a token at a time."""
    V = model.vocab_size
    total = torch.zeros((), dtype=torch.float64)
    text = [model.bos]
    for right in [*labels, model.eos]:
        tokens = torch.tensor([text])
        logits = model.logits(encoded, torch.tensor([encoded.shape[1]]), tokens)
        logp = logits[0, -1].log_softmax(-1)
        shares = torch.full_like(logp, SMOOTHING / (V - 1))
        shares[right] = 1 - SMOOTHING
        mixed = SMOOTHING * V / (V - 1)  # NeMo's SmoothedCrossEntropyLoss
        by_nemo = (1 - mixed) * logp[right] + mixed * logp.mean()
        expect_same(by_nemo, shares @ logp)
        total = total - by_nemo
        text.append(right)
    return total


@pytest.mark.parametrize("name", ENCODERS)
def test_loss_and_gradients_are_those_of_cross_entropy_plus_ctc(name):
    batch = four_utterances()
    model = model_in_float64(encoder=ENCODERS[name])
    encoded, lengths, ctc = model.encode(batch.features, batch.lengths)
    labels = (batch.targets, lengths, batch.target_lengths)
    nats = ctc_loss(ctc, *labels, model.blank)
    assert nats[1] == 0 < nats[2]
    by_ctc = nats.sum() / 6  # six of the twelve labels do not fit their frames
    total = 0
    for b in range(4):
        text = batch.targets[b, : batch.target_lengths[b]].tolist()
        frames = encoded[b : b + 1, : lengths[b]]
        total = total + nats_token_by_token(model, frames, text)
    wanted = total / 12 + SHORT.ctc_weight * by_ctc
    expect_same(
        loss_and_gradients(model, batch, SHORT), (wanted, gradients(wanted, model))
    )


def test_padding_has_no_influence():
    batch = four_utterances()
    model = model_in_float64()
    dirty = with_padding(batch, 10**6)
    # more columns than any text has labels
    dirty = dirty._replace(targets=F.pad(dirty.targets, (0, 3), value=-1))
    # torch's CTC reads labels in the padding
    for other, config in (
        (dirty._replace(targets=batch.targets), SHORT),
        (dirty, ALONE),
    ):
        expect_same(
            loss_and_gradients(model, other, config),
            loss_and_gradients(model, batch, config),
        )


def test_an_empty_text_trains_eos():
    model = model_in_float64()
    silent = four_utterances()._replace(target_lengths=torch.zeros(4, dtype=torch.long))
    nats, of_weights = loss_and_gradients(model, silent, ALONE)
    assert nats.isfinite() and nats > 0  # eos, once for each utterance
    empty = silent._replace(targets=silent.targets[:, :0])
    expect_same(loss_and_gradients(model, empty, ALONE), (nats, of_weights))


def test_the_auxiliary_ctc_loss_is_optional(tiny_speech, tmp_path):
    run(tiny_speech, tmp_path / "a", ALONE, replace(ATTENTION, ctc=False))
    idle = run(tiny_speech, tmp_path / "b", ALONE, ATTENTION)
    trained = load_checkpoint(idle.path).model.ctc_head.weight
    torch.manual_seed(ALONE.seed)
    start = AEDModel(ATTENTION).ctc_head.weight
    torch.testing.assert_close(
        trained, start, rtol=1e-2, atol=1e-4
    )  # weight decay alone
