"""Training by CTC alone: its loss, and that a run of a CTC model is a run like any other."""

import json
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from asrkit.cli import main, parser
from asrkit.cli.train import _model_config
from asrkit.features import FeatureConfig
from asrkit.losses import ctc_loss
from asrkit.models import (
    ConvConfig,
    CTCConfig,
    CTCModel,
    FastConformerConfig,
    JasperConfig,
    LSTMEncoderConfig,
    Stage,
    load_checkpoint,
)
from asrkit.models.transducer import make_encoder
from asrkit.optim import NovoGrad
from asrkit.text import CharTokenizer
from asrkit.training import (
    Prepared,
    TrainConfig,
    evaluate,
    train,
    training_loss,
    training_step,
    update,
)
from asrkit.training.wrapping import encoder_blocks

sys.path.insert(0, str(Path(__file__).parent))
from gang import PLAIN

TOKENIZER = CharTokenizer()
CONV = ConvConfig(width=16, layers=1, dropout=0.1)
JASPER = JasperConfig(
    bins=80,
    stages=[
        Stage(channels=16, kernel=5, repeat=1, dropout=0.1, stride=2, dense=False),
        Stage(channels=16, kernel=3, repeat=2, dropout=0.1),
        Stage(channels=24, kernel=3, repeat=2, dropout=0.1),
    ],
)
ENCODERS = {
    "conv": CONV,
    "fastconformer": FastConformerConfig(width=16, layers=1, heads=2, subsampling_channels=8),
    "lstm": LSTMEncoderConfig(width=16),
    "jasper": JASPER,
}
SMALL = CTCConfig(vocab_size=TOKENIZER.vocab_size, encoder=CONV)
SHORT = TrainConfig(
    steps=4,
    seconds=math.inf,
    batch_seconds=3.0,
    threads=1,
    optimizer="novograd",
    peak_lr=2e-3,  # at its own rate the last digit of a sum would soon become the third
    precision="float32",
)


def run(speech, out, config=SHORT, model=SMALL, **given):
    """`train` of a CTC model."""
    return train(model, TOKENIZER, speech, out=out, config=config, progress=False, **given)


def losses(result):
    return [line["loss"] for line in result.history]


def stop_after(steps):
    """What interrupts a run after so many steps."""

    def stop(history):
        if len(history) == steps:
            raise KeyboardInterrupt

    return stop


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


def model_in_float64(encoder=CONV):
    torch.manual_seed(1)
    return CTCModel(replace(SMALL, encoder=encoder)).double().eval()  # no dropout


@pytest.mark.parametrize("name", ENCODERS)
def test_the_loss_is_that_of_the_recursion_over_frames_for_each_label_and_so_are_gradients(name):
    batch = four_utterances()
    if name == "lstm":  # it stacks pairs of frames
        batch = batch._replace(lengths=batch.lengths.clamp(min=2))
    model = model_in_float64(ENCODERS[name])
    log_probs, lengths = model(batch.features, batch.lengths)
    nats = ctc_loss(log_probs, batch.targets, lengths, batch.target_lengths, model.blank)
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
    assert training_loss(model, dirty, SHORT).per_label.item() == pytest.approx(loss.item())
    silent = batch._replace(target_lengths=torch.zeros(4, dtype=torch.long))
    assert training_loss(model, silent, SHORT).per_label.isfinite()


@pytest.mark.parametrize("name", ENCODERS)
def test_every_encoder_trains_by_ctc_alone_and_its_run_resumes(tiny_speech, tmp_path, name):
    model = replace(SMALL, encoder=ENCODERS[name])
    unbroken = run(tiny_speech, tmp_path / "a", model=model)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_speech, tmp_path / "b", model=model, on_step=stop_after(2))
    resumed = run(tiny_speech, tmp_path / "b", model=model)
    # sums of an LSTM depend on where its tensors lie
    assert losses(resumed) == pytest.approx(losses(unbroken), rel=1e-3)
    assert [line["step"] for line in resumed.history] == [1, 2, 3, 4]
    assert resumed.joint is None
    saved = load_checkpoint(resumed.path)
    assert isinstance(saved.model, CTCModel) and saved.model.config == model
    averages = torch.load(tmp_path / "b/state.pt")["ema"]
    assert all(torch.equal(value, averages[key]) for key, value in saved.model.state_dict().items())


WIDE_JASPER = JasperConfig(
    bins=80,
    stages=[
        Stage(channels=48, kernel=5, repeat=1, dropout=0.0, stride=2, dense=False),
        Stage(channels=48, kernel=5, repeat=2, dropout=0.0),
        Stage(channels=64, kernel=1, repeat=1, dropout=0.0, dense=False),
    ],
)


@pytest.mark.parametrize(
    "optimizer, encoder",
    [("adamw", ConvConfig(width=64, layers=2, dropout=0.0)), ("novograd", WIDE_JASPER)],
)
def test_it_learns_two_utterances_by_heart(tiny_speech, tmp_path, optimizer, encoder):
    few = tiny_speech.select(range(2))
    config = TrainConfig(
        steps=100,
        seconds=math.inf,
        batch_seconds=5.0,
        optimizer=optimizer,
        curriculum=(99.0, 0.5),
        threads=1,
        augment=PLAIN,
        ema=0.9,
    )
    result = run(few, tmp_path, config, replace(SMALL, encoder=encoder), dev_set=few)
    assert result.history[-1]["loss"] < 0.1 * result.history[0]["loss"]
    assert result.dev is not None and result.dev.rate < 0.5
    assert evaluate(load_checkpoint(result.path), few).errors == result.dev


def test_a_transducer_is_not_resumed_as_a_ctc_model_nor_with_another_optimizer(
    tiny_speech, tmp_path
):
    run(tiny_speech, tmp_path)
    with pytest.raises(ValueError, match="optimizer novograd -> adamw"):
        run(tiny_speech, tmp_path, replace(SHORT, optimizer="adamw"))
    with pytest.raises(ValueError, match=r"was started with, got other model\.encoder\.") as error:
        run(tiny_speech, tmp_path, model=replace(SMALL, encoder=JASPER))
    assert len(str(error.value)) < 500  # what differs, and not both configs whole


def test_lanes_evaluation_beside_and_sharding_change_no_loss_of_a_ctc_model(
    tiny_speech, tmp_path, monkeypatch
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dev = tiny_speech.select(range(3))
    two = replace(SHORT, lanes=2)
    model = replace(SMALL, encoder=JASPER)
    in_turn = run(tiny_speech, tmp_path / "a", two, model, dev_set=dev)
    beside = run(tiny_speech, tmp_path / "b", replace(two, evaluate="beside"), model, dev_set=dev)
    assert losses(beside) == losses(in_turn) and beside.dev == in_turn.dev is not None
    sharded = run(tiny_speech, tmp_path / "c", replace(two, shard=True), model)
    assert losses(sharded) == pytest.approx(losses(in_turn), rel=1e-4)


def test_fields_about_the_transducer_change_nothing(tiny_speech, tmp_path):
    plain = run(tiny_speech, tmp_path / "a")
    other = replace(SHORT, joint="lean", ctc_weight=0.0, sigma=0.5, omega=1.0)
    assert losses(run(tiny_speech, tmp_path / "b", other)) == losses(plain)


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


def test_a_step_of_a_ctc_model_serves_the_search_for_batch_sizes():
    model = CTCModel(SMALL).train()
    before = model.output.weight.detach().clone()
    training_step(model, torch.optim.AdamW(model.parameters()), SHORT)(3, 1.0, 4)
    assert not torch.equal(model.output.weight, before)


@pytest.mark.parametrize("name", ENCODERS)
def test_the_blocks_that_are_sharded_one_by_one(name):
    count = {"conv": 0, "fastconformer": 1, "lstm": 0, "jasper": 3}[name]
    assert len(encoder_blocks(make_encoder(ENCODERS[name]))) == count


def test_what_is_no_model_is_refused_before_anything_is_written(tiny_speech, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"^model_config: expected TransducerConfig or CTCConfig or AEDConfig, got ConvConfig\.",
    ):
        run(tiny_speech, tmp_path / "run", model=CONV)
    assert not (tmp_path / "run").exists()


def test_the_command_trains_a_jasper_whose_model_transcribes(tmp_path, corpus, capsys):
    command = ["train", "--manifest", corpus, "--head", "ctc", "--encoder", "jasper", "--json"]
    command += ["--optimizer", "novograd", "--ema", "0", "--steps", "2", "--no-progress"]
    assert main([*command, "--out", str(tmp_path / "mine")]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 2 and "joint" not in summary
    model = load_checkpoint(tmp_path / "mine").model
    assert isinstance(model, CTCModel)
    assert 1.6e6 < sum(weight.numel() for weight in model.parameters()) < 1.7e6
    state = torch.load(tmp_path / "mine/state.pt")
    assert json.loads(state["config"])["peak_lr"] == 0.02
    for name, value in state["ema"].items():  # --ema 0: no average
        assert torch.equal(value, state["model"][name])
    assert main(["transcribe", str(tmp_path / "one.wav"), "--model", str(tmp_path / "mine")]) == 0
    assert "1 of 1 file transcribed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given, rate",
    [({}, 2e-3), ({"peak_lr": 4e-3}, 4e-3), ({"optimizer": "lamb"}, 1e-2)],
)
def test_adamw_has_a_rate_of_its_own_for_a_fastconformer(tiny_speech, tmp_path, given, rate):
    settings = {"steps": 1, "optimizer": "adamw", "peak_lr": None} | given
    model = replace(SMALL, encoder=ENCODERS["fastconformer"])
    run(tiny_speech, tmp_path, replace(SHORT, **settings), model)
    state = torch.load(tmp_path / "state.pt")
    assert json.loads(state["config"])["peak_lr"] == rate


def test_the_fastconformer_of_the_command_has_frames_for_all_characters(tiny_speech):
    args = parser().parse_args(["train", "--encoder", "fastconformer", "--out", "mine"])
    subsampling = _model_config(args, TOKENIZER.vocab_size).encoder.subsampling
    for waveform, text in zip(tiny_speech.waveforms, tiny_speech.texts, strict=True):
        frames = math.ceil(FeatureConfig().frames(len(waveform)) / subsampling)
        labels = TOKENIZER.encode(text)
        repeats = sum(a == b for a, b in pairwise(labels))  # CTC puts a blank between them
        assert frames >= len(labels) + repeats


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--predictor", "lstm"], "predictor: expected none with --head ctc, got lstm."),
        (["--durations", "0", "1"], "durations: expected none with --head ctc, got [0, 1]."),
        (["--joint", "lean"], "joint: expected none with --head ctc, got lean."),
        (["--ema", "1.5"], "ema: expected a share from 0 to 1, got 1.5."),
    ],
)
def test_what_a_ctc_model_has_not_is_refused_in_one_line(tmp_path, corpus, capsys, arguments, said):
    command = ["train", "--manifest", corpus, "--head", "ctc", "--steps", "1"]
    command += ["--no-progress", "--out", str(tmp_path / "run")]
    assert main([*command, *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error
    assert not (tmp_path / "run").exists()


def test_an_utterance_too_short_for_batch_norm_is_named_before_the_run_begins(
    tiny_speech, tmp_path
):
    waveforms = [*tiny_speech.waveforms]
    waveforms[1] = waveforms[1][:176]
    short = replace(tiny_speech, waveforms=waveforms)
    said = f"^train_set: expected more than 4 frames .* got .* in {tiny_speech.ids[1]} of 11 ms"
    with pytest.raises(ValueError, match=said) as error:
        run(short, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
    lstm = replace(SMALL, encoder=ENCODERS["lstm"])  # has no batch norm
    assert len(run(short, tmp_path / "lstm", replace(SHORT, steps=1), lstm).history) == 1
