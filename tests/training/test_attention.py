"""Training of encoder-decoder models: cross-entropy written out, and runs like any other's."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from asrkit.cli import main
from asrkit.losses import ctc_loss
from asrkit.models import (
    AEDConfig,
    AEDModel,
    ConvConfig,
    FastConformerConfig,
    JasperConfig,
    LSTMEncoderConfig,
    Stage,
    load_checkpoint,
)
from asrkit.text import CharTokenizer
from asrkit.training import (
    Prepared,
    TrainConfig,
    attention_loss,
    evaluate,
    train,
    training_loss,
    training_step,
)

sys.path.insert(0, str(Path(__file__).parent))
from gang import PLAIN

TOKENIZER = CharTokenizer()
N = TOKENIZER.vocab_size
CONV = ConvConfig(width=16, layers=1, dropout=0.1)
ENCODERS = {
    "conv": CONV,
    "fastconformer": FastConformerConfig(width=16, layers=1, heads=2, subsampling_channels=8),
    "lstm": LSTMEncoderConfig(width=16),
    "jasper": JasperConfig(
        bins=80,
        stages=[
            Stage(channels=16, kernel=5, repeat=1, dropout=0.1, stride=2, dense=False),
            Stage(channels=24, kernel=3, repeat=2, dropout=0.1),
        ],
    ),
}
SMALL = AEDConfig(
    vocab_size=N + 3,
    pad=N,
    bos=N + 1,
    eos=N + 2,
    encoder=CONV,
    width=16,
    layers=2,
    heads=2,
    ctc=True,
)
SHORT = TrainConfig(
    steps=4,
    seconds=math.inf,
    batch_seconds=3.0,
    threads=1,
    peak_lr=1e-3,
    smoothing=0.1,
    precision="float32",
)


def run(speech, out, config=SHORT, model=SMALL, **given):
    """`train` of an encoder-decoder model."""
    return train(model, TOKENIZER, speech, out=out, config=config, progress=False, **given)


def losses(result):
    return [line["loss"] for line in result.history]


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
    model = AEDModel(replace(SMALL, **changes)).double().eval()  # no dropout
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
    for gradient, other in zip(torch.autograd.grad(loss, weights), wanted_gradients, strict=True):
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
    with pytest.raises(ValueError, match=r"^prompt: expected 1 to 511 tokens, .* got 0"):
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
    wanted = attention_loss(model, encoded, lengths, batch.targets, batch.target_lengths)
    narrow = (lengths.int(), batch.targets.int(), batch.target_lengths.int())
    assert attention_loss(model, encoded, *narrow).item() == wanted.item()
    prompts = [[model.bos, token] for token in (3, 4, 5, 6)]
    parts = 0.0
    for b, prompt in enumerate(prompts):
        one = slice(b, b + 1)
        row = (encoded[one], lengths[one], batch.targets[one], batch.target_lengths[one])
        parts += attention_loss(model, *row, prompt=prompt).item()
    given = (model, encoded, lengths, batch.targets, batch.target_lengths)
    assert attention_loss(*given, prompt=prompts).item() == pytest.approx(parts, rel=1e-12)


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
    by_torch = F.cross_entropy(logp, right, label_smoothing=torch_share, reduction="sum")
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
        training_loss(model, batch, replace(SHORT, ctc_weight=0.0)).per_label.item(), rel=1e-12
    )
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())
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
        training_loss(model, silent, replace(SHORT, ctc_weight=0.0)).per_label.item(), rel=1e-12
    )


@pytest.mark.parametrize("name", ENCODERS)
def test_every_encoder_trains_with_a_decoder_and_its_run_resumes(tiny_speech, tmp_path, name):
    model = replace(SMALL, encoder=ENCODERS[name])
    unbroken = run(tiny_speech, tmp_path / "a", model=model)

    def stop(history):
        if len(history) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny_speech, tmp_path / "b", model=model, on_step=stop)
    resumed = run(tiny_speech, tmp_path / "b", model=model)
    # sums of an LSTM depend on where its tensors lie
    assert losses(resumed) == pytest.approx(losses(unbroken), rel=1e-3)
    assert [line["step"] for line in resumed.history] == [1, 2, 3, 4]
    assert resumed.joint is None
    saved = load_checkpoint(resumed.path)
    assert isinstance(saved.model, AEDModel) and saved.model.config == model
    averages = torch.load(tmp_path / "b/state.pt")["ema"]
    assert all(torch.equal(value, averages[key]) for key, value in saved.model.state_dict().items())


def test_it_learns_two_utterances_by_heart(tiny_speech, tmp_path):
    few = tiny_speech.select(range(2))
    config = TrainConfig(
        steps=150,
        seconds=math.inf,
        batch_seconds=5.0,
        peak_lr=3e-3,
        curriculum=(99.0, 0.5),
        threads=1,
        augment=PLAIN,
        ema=0.9,
    )
    model = replace(SMALL, encoder=ConvConfig(width=64, layers=2, dropout=0.0), width=64)
    result = run(few, tmp_path, config, replace(model, dropout=0.0), dev_set=few)
    assert result.history[-1]["loss"] < 0.1 * result.history[0]["loss"]
    assert result.dev is not None and result.dev.rate < 0.5
    assert evaluate(load_checkpoint(result.path), few).errors == result.dev


def test_lanes_evaluation_beside_and_sharding_change_no_loss(tiny_speech, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dev = tiny_speech.select(range(3))
    two = replace(SHORT, lanes=2)
    in_turn = run(tiny_speech, tmp_path / "a", two, dev_set=dev)
    beside = run(tiny_speech, tmp_path / "b", replace(two, evaluate="beside"), dev_set=dev)
    assert losses(beside) == losses(in_turn) and beside.dev == in_turn.dev is not None
    sharded = run(tiny_speech, tmp_path / "c", replace(two, shard=True))
    assert losses(sharded) == pytest.approx(losses(in_turn), rel=1e-4)


def test_ctc_beside_is_optional_and_its_head_then_idle(tiny_speech, tmp_path):
    alone = replace(SHORT, ctc_weight=0.0)
    without_head = run(tiny_speech, tmp_path / "a", alone, replace(SMALL, ctc=False))
    assert all(math.isfinite(loss) for loss in losses(without_head))
    idle = run(tiny_speech, tmp_path / "b", alone)
    head = load_checkpoint(idle.path).model.ctc_head
    torch.manual_seed(alone.seed)
    start = AEDModel(SMALL).ctc_head
    torch.testing.assert_close(head.weight, start.weight, rtol=1e-2, atol=1e-4)  # decays alone
    with pytest.raises(ValueError, match="^ctc_weight: expected 0 for a model without a CTC head"):
        run(tiny_speech, tmp_path / "c", model=replace(SMALL, ctc=False))
    assert not (tmp_path / "c").exists()


def test_smoothing_is_a_setting_of_the_run_and_older_runs_had_none(tiny_speech, tmp_path):
    plain = replace(SHORT, smoothing=0.0)
    smoothed = run(tiny_speech, tmp_path / "a", SHORT)
    assert losses(smoothed) != losses(run(tiny_speech, tmp_path / "b", plain))
    with pytest.raises(ValueError, match=r"smoothing 0\.1 -> 0\.0"):
        run(tiny_speech, tmp_path / "a", plain)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (replace(SMALL, pad=0), "^bos, eos, pad: expected tokens behind the tokenizer's 28, got"),
        (
            replace(SMALL, most=3),
            "^train_set: expected texts of at most 2 tokens, which the model's",
        ),
    ],
)
def test_a_model_that_does_not_fit_the_texts_is_refused(tiny_speech, tmp_path, model, said):
    with pytest.raises(ValueError, match=said) as error:
        run(tiny_speech, tmp_path / "run", model=model)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("smoothing", [-0.1, 0.6, math.nan])
def test_a_smoothing_that_is_no_share_is_refused(smoothing):
    with pytest.raises(ValueError, match="^smoothing: expected "):
        TrainConfig(smoothing=smoothing)


def test_a_step_serves_the_search_for_batch_sizes():
    model = AEDModel(SMALL).train()
    before = model.embedding.weight.detach().clone()
    training_step(model, torch.optim.AdamW(model.parameters()), SHORT)(3, 1.0, 4)
    assert not torch.equal(model.embedding.weight, before)


def test_the_command_trains_a_model_that_transcribes(tmp_path, corpus, capsys):
    command = ["train", "--manifest", corpus, "--head", "attention", "--decoder-layers", "1"]
    command += ["--smoothing", "0.1", "--steps", "2", "--no-progress", "--json"]
    assert main([*command, "--out", str(tmp_path / "mine")]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 2 and "joint" not in summary
    model = load_checkpoint(tmp_path / "mine").model
    assert isinstance(model, AEDModel) and len(model.layers) == 1
    assert json.loads(torch.load(tmp_path / "mine/state.pt")["config"])["smoothing"] == 0.1
    transcribe = ["transcribe", str(tmp_path / "one.wav"), "--model", str(tmp_path / "mine")]
    assert main(transcribe) == 0
    assert "1 of 1 file transcribed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--head", "attention", "--predictor", "lstm"],
            "predictor: expected none with --head attention, got lstm. "
            "Leave it out, or pass --head transducer.",
        ),
        (
            ["--decoder-layers", "3"],
            "--decoder-layers: expected none with --head transducer, got 3. "
            "Leave it out, or pass --head attention.",
        ),
        (
            ["--head", "ctc", "--smoothing", "0.1"],
            "smoothing: expected none with --head ctc, got 0.1. "
            "Leave it out, or pass --head attention.",
        ),
        (
            ["--head", "attention", "--decoder-layers", "0"],
            "--decoder-layers: expected 1 to 100 layers, got 0.",
        ),
        (
            ["--head", "attention", "--decoder-layers", "100000000"],
            "--decoder-layers: expected 1 to 100 layers, got 100000000.",
        ),
    ],
)
def test_what_a_model_has_not_is_refused_in_one_line(tmp_path, corpus, capsys, arguments, said):
    command = ["train", "--manifest", corpus, "--steps", "1", "--no-progress"]
    assert main([*command, "--out", str(tmp_path / "run"), *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error
    assert not (tmp_path / "run").exists()
