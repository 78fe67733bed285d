"""Training of encoder-decoder models: cross-entropy written out."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from asrkit.losses import ctc_loss
from asrkit.models import AEDModel, load_checkpoint
from asrkit.training import Prepared, training_loss
from asrkit.training.objective import attention_loss

sys.path.insert(0, str(Path(__file__).parent))
import trainings
from trainings import ATTENTION, ENCODERS, losses, run
from trainings import V as N

SHORT = replace(trainings.SHORT, smoothing=0.1)


def four_utterances():
    """A batch in float64: one too short for CTC, one without labels, one of a single frame."""
    torch.manual_seed(0)
    return Prepared(
        features=torch.randn(4, 40, 80, dtype=torch.float64),
        lengths=torch.tensor([40, 8, 25, 2]),
        targets=torch.randint(N, (4, 6)),
        target_lengths=torch.tensor([5, 6, 0, 1]),
        speech_s=1.0,
    )


def model_in_float64(**changes):
    torch.manual_seed(1)
    model = AEDModel(replace(ATTENTION, **changes)).double().eval()  # no dropout
    torch.nn.init.normal_(model.output_bias)
    return model


def nats_written_out(model, encoded, labels, smoothing):
    """Cross-entropy of one text about frames (1, T, D), a token at a time."""
    V = model.vocab_size
    total = torch.zeros((), dtype=torch.float64)
    text = [model.bos]
    for right in [*labels, model.eos]:
        tokens = torch.tensor([text])
        logits = model.logits(encoded, torch.tensor([encoded.shape[1]]), tokens)
        logp = logits[0, -1].log_softmax(-1)
        for token in range(V):
            share = 1 - smoothing if token == right else smoothing / (V - 1)
            total = total - share * logp[token]
        text.append(right)
    return total


@pytest.mark.parametrize("name", ENCODERS)
def test_the_loss_is_the_cross_entropy_written_out_plus_ctc_and_so_are_gradients(name):
    batch = four_utterances()
    model = model_in_float64(encoder=ENCODERS[name])
    encoded, lengths, ctc = model.encode(batch.features, batch.lengths)
    nats = ctc_loss(ctc, batch.targets, lengths, batch.target_lengths, model.blank)
    wanted = SHORT.ctc_weight * nats.sum()
    for b in range(4):
        labels = batch.targets[b, : batch.target_lengths[b]].tolist()
        frames = encoded[b : b + 1, : lengths[b]]
        wanted = wanted + nats_written_out(model, frames, labels, 0.1)
    wanted = wanted / 12  # labels of all utterances
    weights = list(model.parameters())
    wanted_gradients = torch.autograd.grad(wanted, weights)
    loss, lean = training_loss(model, batch, SHORT)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12) and not lean
    for gradient, other in zip(
        torch.autograd.grad(loss, weights), wanted_gradients, strict=True
    ):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
def test_smoothing_is_nemos_which_is_torchs_of_v_over_v_minus_1(smoothing):
    batch = four_utterances()
    lone = batch.targets[:1, :5]
    model = model_in_float64()
    V = model.vocab_size
    with torch.no_grad():
        encoded, lengths, _ = model.encode(batch.features[:1], batch.lengths[:1])
        found = attention_loss(
            model, encoded, lengths, lone, torch.tensor([5]), smoothing=smoothing
        )
        given = torch.cat([torch.tensor([[model.bos]]), lone], 1)
        logp = model.logits(encoded, lengths, given)[0].log_softmax(-1)
    right = torch.cat([lone[0], torch.tensor([model.eos])])
    torch_share = smoothing * V / (V - 1)
    by_torch = F.cross_entropy(
        logp, right, label_smoothing=torch_share, reduction="sum"
    )
    # NeMo's SmoothedCrossEntropyLoss mixes the target's log-probability with the mean of all
    of_target = logp.gather(1, right[:, None])[:, 0]
    by_nemo = -((1 - torch_share) * of_target + torch_share * logp.mean(1)).sum()
    assert found.item() == pytest.approx(by_torch.item(), rel=1e-12)
    assert found.item() == pytest.approx(by_nemo.item(), rel=1e-12)


def test_what_lies_in_the_padding_does_not_matter_and_silence_has_an_end_to_learn():
    batch = four_utterances()
    model = model_in_float64()
    loss = training_loss(model, batch, SHORT).per_label
    loss.backward()
    wanted = [weight.grad.clone() for weight in model.parameters()]
    features = batch.features.clone()
    targets = batch.targets.clone()
    for row in range(4):
        features[row, batch.lengths[row] :] = math.nan
        targets[row, batch.target_lengths[row] :] = 10**6
    targets = F.pad(targets, (0, 3), value=-1)  # more columns than anybody has labels
    dirty = batch._replace(features=features, targets=targets)
    model.zero_grad()
    found = training_loss(model, dirty, replace(SHORT, ctc_weight=0.0)).per_label
    found.backward()
    assert found.item() == pytest.approx(
        training_loss(model, batch, replace(SHORT, ctc_weight=0.0)).per_label.item(),
        rel=1e-12,
    )
    assert all(
        weight.grad is None or weight.grad.isfinite().all()
        for weight in model.parameters()
    )
    model.zero_grad()
    clean = dirty._replace(targets=batch.targets)
    training_loss(model, clean, SHORT).per_label.backward()
    for weight, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-9, atol=1e-12)
    silent = batch._replace(target_lengths=torch.zeros(4, dtype=torch.long))
    alone = silent._replace(targets=silent.targets[:, :0])
    nats = training_loss(model, alone, replace(SHORT, ctc_weight=0.0)).per_label
    assert nats.isfinite() and nats > 0  # eos, once for each utterance
    assert nats.item() == pytest.approx(
        training_loss(model, silent, replace(SHORT, ctc_weight=0.0)).per_label.item(),
        rel=1e-12,
    )


def test_ctc_beside_is_optional_and_its_head_then_idle(tiny_speech, tmp_path):
    alone = replace(SHORT, ctc_weight=0.0)
    without_head = run(
        tiny_speech, tmp_path / "a", alone, replace(ATTENTION, ctc=False)
    )
    assert all(math.isfinite(loss) for loss in losses(without_head))
    idle = run(tiny_speech, tmp_path / "b", alone, ATTENTION)
    head = load_checkpoint(idle.path).model.ctc_head
    torch.manual_seed(alone.seed)
    start = AEDModel(ATTENTION).ctc_head
    torch.testing.assert_close(
        head.weight, start.weight, rtol=1e-2, atol=1e-4
    )  # decays alone
