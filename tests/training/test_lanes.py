"""Lanes on one process, and what keeps a run safe: states, stops, settings."""

import itertools
import json
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asrkit.cli import main
from asrkit.data import training_stream
from asrkit.models import TransducerModel
from asrkit.optim import numba_cpu
from asrkit.training import TrainConfig, prepare_batch, training_loss, update
from asrkit.training.batches import step_seed
from asrkit.training.config import CONFORMER_PEAK_LR, OPTIMIZERS, PEAK_LR
from asrkit.training.folder import RunFolder
from asrkit.training.lanes import LaneStatistics, weigh
from asrkit.training.processes import Processes, joined
from asrkit.training.signals import StopWish
from asrkit.training.state import TrainingRun, make_optimizer, set_rate

sys.path.insert(0, str(Path(__file__).parent))
from gang import CONFIG, MODEL, PLAIN, TOKENIZER, losses, run

ONE = replace(CONFIG, lanes=1)


def golden_run(speech, config):
    """Losses, gradient norms and averaged weights of the plain loop: a batch, a step, an average."""
    torch.manual_seed(config.seed)
    model = TransducerModel(MODEL).train()
    ema = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make_optimizer(model, config)
    stream = training_stream(
        speech,
        TOKENIZER,
        batch_seconds=config.batch_seconds,
        seed=config.seed,
        max_seconds=lambda step: config.longest_s(step / config.steps),
    )
    seen = []
    for step, batch in enumerate(itertools.islice(stream, config.steps)):
        torch.manual_seed(step_seed(config.seed, step))
        set_rate(optimizer, config.learning_rate(step / config.steps))
        loss = training_loss(model, prepare_batch(batch, config, step), config).per_label
        norm = update(model, optimizer, loss, config)
        decay = min(config.ema, (step + 1) / (10 + step))
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                ema[name].lerp_(value, 1 - decay)
            else:
                ema[name].copy_(value)
        seen.append((loss.item(), norm.item()))
    return seen, ema


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_lane_is_the_plain_loop_bit_for_bit(tiny_speech, tmp_path, one_thread, optimizer):
    config = replace(ONE, optimizer=optimizer)
    seen, ema = golden_run(tiny_speech, config)
    result = run(tiny_speech, tmp_path, config)
    assert [(line["loss"], line["gradient_norm"]) for line in result.history] == seen
    saved = torch.load(tmp_path / "state.pt")["ema"]
    assert all(torch.equal(value, saved[name]) for name, value in ema.items())


def test_the_wait_for_the_first_batch_does_not_move_the_rate(tiny_speech, tmp_path, one_thread):
    """A limit of time that steps stay far below changes nothing."""
    limited = replace(ONE, seconds=600.0)
    rates = [line["lr"] for line in run(tiny_speech, tmp_path, limited).history]
    assert rates == [ONE.learning_rate(step / ONE.steps) for step in range(ONE.steps)]


def two_batches(speech):
    """Two batches with unequal labels, prepared."""
    long_first = sorted(range(len(speech)), key=lambda row: -len(speech.texts[row]))
    config = replace(CONFIG, augment=PLAIN)
    batches = []
    for rows in (long_first[:3], long_first[-1:]):
        batches.append(prepare_batch(speech.batch(rows, TOKENIZER), config, 0))
    return batches


def test_lanes_minimise_the_mean_over_all_labels_which_the_mean_of_their_means_is_not(tiny_speech):
    torch.manual_seed(0)
    model = TransducerModel(MODEL).eval().double()  # no dropout: only the weighing counts
    config = replace(CONFIG, joint="full")
    batches = []
    for batch in two_batches(tiny_speech):
        batches.append(batch._replace(features=batch.features.double()))
    labels = [float(batch.target_lengths.sum()) for batch in batches]
    assert labels[0] > 5 * labels[1]
    per_label = [training_loss(model, batch, config).per_label for batch in batches]
    mean_over_labels = sum(map(math.prod, zip(per_label, labels, strict=True))) / sum(labels)

    def gradient(loss):
        model.zero_grad()
        loss.backward(retain_graph=True)
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    wanted = gradient(mean_over_labels)
    weighed = []
    for loss, count in zip(per_label, labels, strict=True):
        weighed.append(weigh(loss, count, sum(labels), processes=2))
    ours = gradient(sum(weighed) / 2)  # as DDP averages over two processes
    means = gradient(sum(per_label) / 2)
    assert torch.allclose(ours, wanted, rtol=1e-9, atol=1e-12)
    assert (means - wanted).norm() > 0.1 * wanted.norm()


def test_batch_norm_sees_its_lane_only_and_keeps_the_mean_over_lanes():
    norm = torch.nn.BatchNorm1d(2).train()
    lanes = [torch.randn(5, 2), torch.randn(9, 2)]
    alone = []
    for lane in lanes:
        one = torch.nn.BatchNorm1d(2).train()
        one(lane)
        alone.append(one.running_var)
    statistics = LaneStatistics(norm, 2)
    statistics.begin_step()
    for lane in lanes:
        statistics.begin_lane()
        norm(lane)
        statistics.end_lane(torch.tensor(0.5))
    assert statistics.end_step(Processes()).item() == 1.0
    torch.testing.assert_close(norm.running_var, (alone[0] + alone[1]) / 2)
    assert norm.num_batches_tracked == 1


def test_lanes_are_shared_out_once_each():
    shares = [Processes(rank, 4).lanes(8) for rank in range(4)]
    assert sorted(lane for share in shares for lane in share) == list(range(8))
    with pytest.raises(ValueError, match="lanes: expected a multiple of the 4 processes, got 6"):
        Processes(0, 4).lanes(6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_of_two_lanes_resumes_and_not_with_other_settings(tiny_speech, tmp_path, optimizer):
    config = replace(CONFIG, optimizer=optimizer)
    other = next(name for name in OPTIMIZERS if name != optimizer)

    def stop(history):
        if len(history) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny_speech, tmp_path / "a", config, on_step=stop)
    with pytest.raises(ValueError, match="was started with, got other lanes 2 -> 4"):
        run(tiny_speech, tmp_path / "a", replace(config, lanes=4))
    with pytest.raises(ValueError, match=f"optimizer {optimizer} -> {other}"):
        run(tiny_speech, tmp_path / "a", replace(config, optimizer=other))
    resumed = run(tiny_speech, tmp_path / "a", config)
    assert losses(resumed) == losses(run(tiny_speech, tmp_path / "b", config))
    states = [torch.load(tmp_path / name / "state.pt") for name in "ab"]
    for part in ("model", "ema"):
        for name, value in states[0][part].items():
            assert torch.equal(value, states[1][part][name]), name


def test_a_process_may_shard_alone_and_go_on_without(tiny_speech, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    three = replace(ONE, steps=3)
    whole = run(tiny_speech, tmp_path / "a", three)
    sharded = run(tiny_speech, tmp_path / "b", replace(three, shard=True))
    assert losses(sharded) == pytest.approx(losses(whole), rel=1e-5)
    assert not torch.distributed.is_initialized()
    again = run(tiny_speech, tmp_path / "b", three)
    assert losses(again) == losses(sharded)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_mid_step_ends_the_process_when_the_step_is_saved(
    tiny_speech, tmp_path, number
):
    received = []
    before = signal.signal(number, lambda *_: received.append(number))

    def interrupt(history):
        if len(history) == 3:
            os.kill(os.getpid(), number)

    try:
        stopped = run(tiny_speech, tmp_path, on_step=interrupt)
    finally:
        signal.signal(number, before)
    assert received == [number]  # passed on, once all was saved
    assert not stopped.finished and len(stopped.history) == 3
    assert torch.load(tmp_path / "state.pt")["step"] == 3
    assert len(run(tiny_speech, tmp_path).history) == CONFIG.steps


def test_a_second_ctrl_c_does_not_wait_and_a_rank_takes_none_for_a_second():
    for rank, stops in ((False, True), (True, False)):
        with StopWish(rank=rank) as stop:
            assert not stop
            signal.raise_signal(signal.SIGINT)
            assert stop
            if stops:
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
            else:
                signal.raise_signal(signal.SIGINT)


def test_an_orphaned_rank_wishes_to_stop():
    with StopWish(rank=True) as stop:
        stop.parent = -1
        assert stop
    with StopWish(rank=False) as alone:
        alone.parent = -1
        assert not alone


def state_of(folder, step):
    """Save a small state."""
    folder.make()
    weights = torch.arange(1000.0) + step
    folder.save_state({"step": step, "weights": weights, "config": json.dumps({})})


@pytest.mark.parametrize("damage", ["half", "flipped", "empty", "junk", "gone"])
def test_a_damaged_state_is_told_and_the_one_before_is_taken(tmp_path, damage):
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        state_of(folder, step)
    assert folder.newest_state() == folder.state
    content = bytearray(folder.state.read_bytes())
    content[len(content) // 2] ^= 0x10  # in the middle of the weights
    damaged = {"half": content[: len(content) // 2], "flipped": content, "empty": b"", "junk": b"x"}
    if damage == "gone":  # killed between the two renames
        folder.state.unlink()
    else:
        folder.state.write_bytes(bytes(damaged[damage]))
    assert folder.newest_state() == folder.previous_state
    if damage == "flipped":
        assert torch.load(folder.state)["step"] == 2  # torch alone does not notice
    folder.previous_state.write_bytes(b"x")
    with pytest.raises(ValueError, match="state: expected one that is whole, got .* is damaged"):
        folder.newest_state()


def test_a_run_goes_on_from_the_state_before_when_the_last_is_damaged(
    tiny_speech, tmp_path, capsys
):
    def stop(history):
        if len(history) == 4:
            raise KeyboardInterrupt

    config = replace(CONFIG, checkpoint_s=0.0)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_speech, tmp_path / "a", config, on_step=stop)
    content = bytearray((tmp_path / "a/state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "a/state.pt").write_bytes(bytes(content))
    resumed = run(tiny_speech, tmp_path / "a", config)
    assert "at step 3; " in capsys.readouterr().err
    assert losses(resumed) == losses(run(tiny_speech, tmp_path / "b", config))


def test_a_state_of_0_2_which_numbers_the_parameters_is_resumed(tiny_speech, tmp_path):
    config = replace(ONE, peak_lr=None)

    def stop(history):
        if len(history) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny_speech, tmp_path / "a", config, on_step=stop)
    state = torch.load(tmp_path / "a/state.pt")
    names = list(state["optimizer"]["state"])
    numbered = {names.index(name): value for name, value in state["optimizer"]["state"].items()}
    group = state["optimizer"]["param_groups"][0] | {"params": list(range(len(names)))}
    state["optimizer"] = {"state": numbered, "param_groups": [group]}
    settings = json.loads(state["config"])
    assert settings["peak_lr"] == 5e-3  # as 0.2 saved it
    del settings["lanes"], settings["shard"], settings["optimizer"]
    del settings["model"]["predictor"]["dropout"], settings["model"]["predictor"]["start"]
    del settings["features"]["range_db"], settings["augment"]["trim"]
    del settings["augment"]["trim_db"]
    torch.save(state | {"config": json.dumps(settings)}, tmp_path / "a/state.pt")
    resumed = run(tiny_speech, tmp_path / "a", config)
    assert losses(resumed) == losses(run(tiny_speech, tmp_path / "b", config))


def test_a_process_alone_forms_no_group():
    with joined(torch.device("cpu")) as processes:
        assert processes == Processes() and not torch.distributed.is_initialized()


WRONG = [
    {"lanes": 0},
    {"lanes": 1.5},
    {"shard": 1},
    {"optimizer": "sgd"},
    {"peak_lr": -1.0},
    {"peak_lr": 0.0},  # would train nothing
    {"peak_lr": "high"},
    {"peak_lr": float("inf")},
    {"peak_lr": 1e300},
    {"clip": 0.0},
    {"weight_decay": -0.1},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_settings_of_lanes_shards_and_optimizers_are_checked(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: expected"):
        replace(CONFIG, **wrong)


def test_each_optimizer_has_its_rate_unless_one_is_named():
    assert [TrainConfig(optimizer=name).highest_rate for name in OPTIMIZERS] == [5e-3, 1e-2, 2e-2]
    assert TrainConfig(optimizer="lamb", peak_lr=1e-9).highest_rate == 1e-9


def test_help_tells_the_rate_of_each_optimizer(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    adamw, *others = (f"{rate:g} for {name}" for name, rate in PEAK_LR.items())
    conformer = f"{CONFORMER_PEAK_LR:g} for it with a fastconformer"
    assert f"(default: {', '.join([adamw, conformer, *others])})" in said


def test_the_kernels_of_lamb_are_compiled_before_the_clock_starts(
    tiny_speech, tmp_path, monkeypatch
):
    names = ("_squared_norm", "_moments", "_move")
    called = []  # which kernels, in order, and "clock" where it starts

    def noting(note, action):
        return lambda *arguments: called.append(note) or action(*arguments)

    for name in names:
        monkeypatch.setattr(numba_cpu, name, noting(name, getattr(numba_cpu, name)))
    monkeypatch.setattr(TrainingRun, "timed", noting("clock", TrainingRun.timed))
    run(tiny_speech, tmp_path, replace(ONE, steps=1, optimizer="lamb"))
    assert set(called[: called.index("clock")]) == set(names)
