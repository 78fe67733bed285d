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
from asrkit.training import Prepared, attention_loss, training_loss

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


def nats_written_out(model, encoded, labels, smoothing, prompt):
    """Cross-entropy of one text about frames (1, T, D), a token at a time."""
    V = model.vocab_size
    total = torch.zeros((), dtype=torch.float64)
    text = [*prompt]
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
        wanted = wanted + nats_written_out(model, frames, labels, 0.1, [model.bos])
    wanted = wanted / 12  # labels of all utterances
    weights = list(model.parameters())
    wanted_gradients = torch.autograd.grad(wanted, weights)
    loss, lean = training_loss(model, batch, SHORT)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12) and not lean
    for gradient, other in zip(
        torch.autograd.grad(loss, weights), wanted_gradients, strict=True
    ):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("prompt", [[N + 1], [N + 1, 3, 3, 7, 0]])
def test_a_prompt_is_read_and_not_counted(prompt):
    batch = four_utterances()
    model = model_in_float64()
    encoded, lengths, _ = model.encode(batch.features, batch.lengths)
    with torch.no_grad():
        wanted = sum(
            nats_written_out(
                model,
                encoded[b : b + 1, : lengths[b]],
                batch.targets[b, : batch.target_lengths[b]].tolist(),
                0.0,
                prompt,
            )
            for b in range(4)
        )
        given = (model, encoded, lengths, batch.targets, batch.target_lengths)
        found = attention_loss(*given, prompt=prompt)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    if prompt == [model.bos]:
        assert attention_loss(*given).item() == found.item()
    with pytest.raises(
        ValueError, match=r"^prompt: expected 1 to 511 tokens, .* got 0"
    ):
        attention_loss(*given, prompt=[])


LOSS_ARGUMENTS = [
    ({"lengths": torch.tensor([11, 2, 7, 1])}, "lengths: expected 0 to 10, got 1 to 11."),
    ({"lengths": torch.tensor([10, -2, 7, 1])}, "lengths: expected 0 to 10, got -2 to 10."),
    ({"lengths": torch.ones(4)}, "lengths: expected int32 or int64, got torch.float32."),
    ({"targets": torch.full((4, 6), N + 3)}, f"targets: expected tokens from 0 to below V={N + 3}"),
    ({"targets": torch.full((4, 6), -1)}, f"targets: expected tokens from 0 to below V={N + 3}"),
    ({"targets": torch.ones(4, 6)}, "targets: expected int32 or int64, got torch.float32."),
    ({"target_lengths": torch.tensor([7, 6, 0, 1])}, "target_lengths: expected 0 to 6, got 0 to 7."),
    ({"target_lengths": torch.tensor([5, 6, -1, 1])}, "target_lengths: expected 0 to 6, got -1"),
    ({"target_lengths": torch.ones(4)}, "target_lengths: expected int32 or int64, got torch.float"),
    ({"target_lengths": torch.tensor([5, 6])}, "target_lengths: expected shape (B=4), got (2,)."),
    ({"prompt": [N + 3]}, f"prompt: expected tokens from 0 to below V={N + 3}"),
    ({"prompt": [1.5]}, "prompt: expected int32 or int64 tokens, got torch.float32."),
    ({"prompt": "de"}, "prompt: expected token ids (P,) or (B, P), prompts of one length"),
    ({"smoothing": 0.6}, "smoothing: expected a share from 0 to 0.5, got 0.6."),
    ({"smoothing": -0.1}, "smoothing: expected a share from 0 to 0.5, got -0.1."),
    ({"smoothing": math.nan}, "smoothing: expected a share from 0 to 0.5, got nan."),
    ({"smoothing": "x"}, "smoothing: expected a share from 0 to 0.5, got 'x'."),
    ({"encoded": torch.zeros(4, 10, 16)}, "encoded: expected torch.float64, as the model's"),
    ({"model": None}, "model: expected an AEDModel, got NoneType."),
]  # fmt: skip


@pytest.mark.parametrize("changes, message", LOSS_ARGUMENTS)
def test_arguments_of_the_loss_that_do_not_fit_are_refused_by_name(changes, message):
    batch = four_utterances()
    model = model_in_float64()
    encoded, lengths, _ = model.encode(batch.features, batch.lengths)
    given = {
        "model": model,
        "encoded": encoded,
        "lengths": lengths,
        "targets": batch.targets,
        "target_lengths": batch.target_lengths,
    }
    with pytest.raises(ValueError) as refused:
        attention_loss(**(given | changes))
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_whole_numbers_of_32_bits_are_taken_and_a_prompt_may_differ_by_utterance():
    batch = four_utterances()
    model = model_in_float64()
    encoded, lengths, _ = model.encode(batch.features, batch.lengths)
    wanted = attention_loss(
        model, encoded, lengths, batch.targets, batch.target_lengths
    )
    narrow = (lengths.int(), batch.targets.int(), batch.target_lengths.int())
    assert attention_loss(model, encoded, *narrow).item() == wanted.item()
    prompts = [[model.bos, token] for token in (3, 4, 5, 6)]
    parts = 0.0
    for b, prompt in enumerate(prompts):
        one = slice(b, b + 1)
        row = (
            encoded[one],
            lengths[one],
            batch.targets[one],
            batch.target_lengths[one],
        )
        parts += attention_loss(model, *row, prompt=prompt).item()
    given = (model, encoded, lengths, batch.targets, batch.target_lengths)
    assert attention_loss(*given, prompt=prompts).item() == pytest.approx(
        parts, rel=1e-12
    )


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
