"""Training of encoder-decoder models: cross-entropy written out."""

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


def nats_written_out(model, encoded, labels):
    """Cross-entropy of one text about frames (1, T, D), a token at a time."""
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
def test_the_loss_is_the_cross_entropy_written_out_plus_ctc_and_so_are_gradients(name):
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
        total = total + nats_written_out(model, frames, text)
    wanted = total / 12 + SHORT.ctc_weight * by_ctc
    expect_same(
        loss_and_gradients(model, batch, SHORT), (wanted, gradients(wanted, model))
    )


def test_what_lies_in_the_padding_does_not_matter():
    batch = four_utterances()
    model = model_in_float64()
    dirty = with_padding(batch, 10**6)
    # more columns than anybody has labels
    dirty = dirty._replace(targets=F.pad(dirty.targets, (0, 3), value=-1))
    # torch's CTC reads the labels behind the last
    for other, config in (
        (dirty._replace(targets=batch.targets), SHORT),
        (dirty, ALONE),
    ):
        expect_same(
            loss_and_gradients(model, other, config),
            loss_and_gradients(model, batch, config),
        )


def test_silence_has_an_end_to_learn():
    model = model_in_float64()
    silent = four_utterances()._replace(target_lengths=torch.zeros(4, dtype=torch.long))
    nats, of_weights = loss_and_gradients(model, silent, ALONE)
    assert nats.isfinite() and nats > 0  # eos, once for each utterance
    empty = silent._replace(targets=silent.targets[:, :0])
    expect_same(loss_and_gradients(model, empty, ALONE), (nats, of_weights))


def test_ctc_beside_is_optional_and_its_head_then_idle(tiny_speech, tmp_path):
    run(tiny_speech, tmp_path / "a", ALONE, replace(ATTENTION, ctc=False))
    idle = run(tiny_speech, tmp_path / "b", ALONE, ATTENTION)
    found = load_checkpoint(idle.path).model.ctc_head.weight
    torch.manual_seed(ALONE.seed)
    start = AEDModel(ATTENTION).ctc_head.weight
    torch.testing.assert_close(found, start, rtol=1e-2, atol=1e-4)  # decays alone
