import itertools
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import soundfile
import torch

from asrkit.cli import main
from asrkit.data import AugmentConfig, Buckets, Utterances, oom_search
from asrkit.files import LOCK, lock
from asrkit.models import (
    ConvConfig,
    LSTMConfig,
    StatelessConfig,
    TransducerConfig,
    TransducerModel,
    load_checkpoint,
)
from asrkit.runtime import peak_memory
from asrkit.text import CharTokenizer
from asrkit.training import Prepared, TrainConfig, evaluate, train, training_step, update
from asrkit.training.batches import LaneBatches
from asrkit.training.folder import RunFolder
from asrkit.training.state import TrainingRun
from asrkit.transcribe import recognize

TOKENIZER = CharTokenizer()
SMALL = TransducerConfig(
    vocab_size=TOKENIZER.vocab_size,
    encoder=ConvConfig(width=24, layers=1),
    predictor=StatelessConfig(width=24),
    joint_width=24,
)
STEPS = TrainConfig(steps=12, seconds=math.inf, batch_seconds=6.0, checkpoint_s=0.0, threads=1)
PLAIN = AugmentConfig(
    speed=(1, 1),
    rate=(1, 1),
    formants=(1, 1),
    silence=0,
    noise=0,
    room=0,
    telephone=0,
    low_cut=0,
    gain_db=(0.0, 0.0),
    time_masks=0,
    frequency_masks=0,
)
RUN = """
import sys, torch
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_loop import *
speech = torch.load({speech!r}, weights_only=False)
train(SMALL, TOKENIZER, speech, out=Path({out!r}), config=STEPS, progress=False)
"""


def log(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_a_run_killed_with_signal_9_resumes_to_the_same_losses(tiny_speech, tmp_path):
    unbroken = train(
        SMALL, TOKENIZER, tiny_speech, out=tmp_path / "unbroken", config=STEPS, progress=False
    )
    torch.save(tiny_speech, tmp_path / "speech.pt")
    script = RUN.format(
        tests=str(Path(__file__).parent),
        speech=str(tmp_path / "speech.pt"),
        out=str(tmp_path / "broken"),
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    patience = time.monotonic() + 120
    while (
        not (tmp_path / "broken/log.jsonl").exists()
        or len((tmp_path / "broken/log.jsonl").read_bytes().splitlines()) < 4
    ):
        assert child.poll() is None and time.monotonic() < patience
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    written = len(log_lines(tmp_path / "broken"))
    assert 4 <= written < STEPS.steps
    resumed = train(
        SMALL, TOKENIZER, tiny_speech, out=tmp_path / "broken", config=STEPS, progress=False
    )
    assert [line["loss"] for line in resumed.history] == [line["loss"] for line in unbroken.history]
    assert [line["step"] for line in log(tmp_path / "broken")] == list(range(1, 13))
    weights = [
        load_checkpoint(tmp_path / name).model.state_dict() for name in ("unbroken", "broken")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_folder_that_another_training_holds_is_refused(tiny_speech, tmp_path):
    with (
        lock(tmp_path),
        pytest.raises(ValueError, match="^out: expected a folder of no other") as caught,
    ):
        train(SMALL, TOKENIZER, tiny_speech, out=tmp_path, config=STEPS, progress=False)
    assert str(caught.value).endswith(f"Process {os.getpid()} on {platform.node()} holds it.")
    assert not (tmp_path / "log.jsonl").exists()


def test_a_disk_that_is_full_is_said_to_be(tiny_speech, tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    short = replace(STEPS, steps=1)
    run = TrainingRun(SMALL, short, torch.device("cpu"), {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="state.pt cannot be written. Is the disk full?"):
            run.save(RunFolder(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def log_lines(out: Path) -> list[bytes]:
    return (out / "log.jsonl").read_bytes().splitlines()


def test_another_seed_gives_other_losses(tiny_speech, tmp_path):
    short = replace(STEPS, steps=2)
    a = train(SMALL, TOKENIZER, tiny_speech, out=tmp_path / "a", config=short, progress=False)
    b = train(
        SMALL,
        TOKENIZER,
        tiny_speech,
        out=tmp_path / "b",
        config=replace(short, seed=1),
        progress=False,
    )
    assert a.history[1]["loss"] != b.history[1]["loss"]


def test_other_settings_do_not_resume_a_run_by_accident(tiny_speech, tmp_path):
    train(
        SMALL, TOKENIZER, tiny_speech, out=tmp_path, config=replace(STEPS, steps=1), progress=False
    )
    with pytest.raises(ValueError, match="Pass resume=False to start anew"):
        train(
            SMALL,
            TOKENIZER,
            tiny_speech,
            out=tmp_path,
            config=replace(STEPS, steps=2),
            progress=False,
        )
    fresh = train(
        SMALL,
        TOKENIZER,
        tiny_speech,
        out=tmp_path,
        config=replace(STEPS, steps=2),
        resume=False,
        progress=False,
    )
    assert len(fresh.history) == 2


@pytest.mark.parametrize(
    "predictor", [StatelessConfig(width=48), LSTMConfig(width=48)], ids=["stateless", "lstm"]
)
def test_it_learns_two_utterances_by_heart(tiny_speech, tmp_path, predictor):
    few = Utterances(
        **{
            name: getattr(tiny_speech, name)[:2]
            for name in ("waveforms", "ids", "texts", "speakers")
        }
    )
    config = TransducerConfig(
        vocab_size=TOKENIZER.vocab_size,
        encoder=ConvConfig(width=64, layers=2, dropout=0.0),
        predictor=predictor,
        joint_width=64,
    )
    plain = TrainConfig(
        steps=240,
        seconds=math.inf,
        batch_seconds=5.0,
        peak_lr=5e-3,
        curriculum=(99.0, 0.5),
        threads=1,
        augment=PLAIN,
        ema=0.9,
    )
    result = train(config, TOKENIZER, few, few, out=tmp_path, config=plain, progress=False)
    assert (
        result.history[-1]["loss"] < 0.05 * result.history[0]["loss"]
    )  # few steps: it knows what, not yet when
    again, texts, rtfx = evaluate(load_checkpoint(result.path), few)
    assert result.dev is not None and result.dev.rate < 1
    assert again == result.dev and set(texts) == set(few.ids) and rtfx > 0


def test_the_rate_climbs_then_falls_to_zero_and_the_curriculum_opens():
    config = TrainConfig()
    rates = [config.learning_rate(i / 100) for i in range(101)]
    top = rates.index(max(rates))
    assert (
        top == 5 and rates[:6] == sorted(rates[:6]) and rates[5:] == sorted(rates[5:], reverse=True)
    )
    assert rates[-1] < 1e-9
    lengths = [config.longest_s(i / 100) for i in range(101)]
    assert (
        lengths == sorted(lengths)
        and lengths[0] == config.curriculum[0]
        and lengths[-1] == math.inf
    )


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"seconds": 0.0}])
def test_a_run_without_length_is_refused(wrong):
    with pytest.raises(ValueError, match="steps, seconds: expected both > 0"):
        TrainConfig(**wrong)


def test_a_model_for_another_vocabulary_is_refused(tiny_speech, tmp_path):
    with pytest.raises(ValueError, match="vocab_size: expected 28, got 5"):
        train(
            replace(SMALL, vocab_size=5),
            TOKENIZER,
            tiny_speech,
            out=tmp_path,
            config=STEPS,
            progress=False,
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", ["texts", "model", "tokenizer"])
def test_other_speech_model_or_tokenizer_does_not_resume_a_run(tiny_speech, tmp_path, change):
    two = replace(STEPS, steps=2)
    train(SMALL, TOKENIZER, tiny_speech, out=tmp_path, config=two, progress=False)
    model = replace(SMALL, joint_width=32) if change == "model" else SMALL
    tokenizer = CharTokenizer(TOKENIZER.alphabet[::-1]) if change == "tokenizer" else TOKENIZER
    speech = (
        replace(tiny_speech, texts=tiny_speech.texts[::-1]) if change == "texts" else tiny_speech
    )
    with pytest.raises(
        ValueError, match=f"was started with, got other {change.replace('texts', 'train_set')}"
    ):
        train(model, tokenizer, speech, out=tmp_path, config=two, progress=False)


def test_a_damaged_state_is_refused_in_one_line(tiny_speech, tmp_path):
    one = replace(STEPS, steps=1)
    train(SMALL, TOKENIZER, tiny_speech, out=tmp_path, config=one, progress=False)
    for damage in (b"", b"junk", (tmp_path / "state.pt").read_bytes()[:999]):
        (tmp_path / "state.pt").write_bytes(damage)
        with pytest.raises(ValueError, match=r"state.pt is damaged \(.*\)\. Pass resume=False"):
            train(SMALL, TOKENIZER, tiny_speech, out=tmp_path, config=one, progress=False)


def test_a_text_without_tokens_is_refused_before_any_step(tiny_speech, tmp_path):
    dev = replace(tiny_speech, texts=[*tiny_speech.texts[:-1], "room 5"])
    with pytest.raises(ValueError, match=r"\['5'\] in 'room 5'"):
        train(
            SMALL, TOKENIZER, tiny_speech, dev, out=tmp_path / "run", config=STEPS, progress=False
        )
    assert not (tmp_path / "run").exists()


class Killed(Exception):
    pass


def test_a_kill_at_any_rename_loses_no_model_and_leaves_no_litter(
    tiny_speech, tmp_path, monkeypatch
):
    rename, three = os.replace, replace(STEPS, steps=3)
    whole = train(
        SMALL, TOKENIZER, tiny_speech, out=tmp_path / "whole", config=three, progress=False
    )
    for fatal in range(1, 9):  # a model, the state before and a state a step
        out, calls = tmp_path / str(fatal), iter(range(1, 99))

        def replace_or_die(source, target, fatal=fatal, calls=calls):
            rename(source, target)
            if next(calls) == fatal:
                raise Killed

        monkeypatch.setattr(os, "replace", replace_or_die)
        with pytest.raises(Killed):
            train(SMALL, TOKENIZER, tiny_speech, out=out, config=three, progress=False)
        monkeypatch.setattr(os, "replace", rename)
        for name in ("state.pt", "model.safetensors", "log.jsonl"):
            (out / f".{name.partition('.')[0]}-0a1b2c3d.{name.partition('.')[2]}").write_bytes(
                b"half"
            )
        (out / ".tmpRPWrGU").write_bytes(b"half")
        again = train(SMALL, TOKENIZER, tiny_speech, out=out, config=three, progress=False)
        assert [line["loss"] for line in again.history] == [line["loss"] for line in whole.history]
        weights = [load_checkpoint(path).model.state_dict() for path in (whole.path, again.path)]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        assert sorted(path.name for path in out.iterdir()) == [
            LOCK,
            "log.jsonl",
            "model.safetensors",
            "state-previous.pt",
            "state.pt",
        ]


def test_a_fresh_run_killed_before_its_first_checkpoint_does_not_resume_the_run_before(
    tiny_speech, tmp_path
):
    threads = torch.get_num_threads()
    rare = replace(STEPS, steps=3, checkpoint_s=1e9, threads=threads + 1)
    train(SMALL, TOKENIZER, tiny_speech, out=tmp_path, config=rare, progress=False)

    def die(history):
        raise Killed

    with pytest.raises(Killed):
        train(
            SMALL,
            TOKENIZER,
            tiny_speech,
            out=tmp_path,
            config=rare,
            resume=False,
            progress=False,
            on_step=die,
        )
    assert torch.get_num_threads() == threads
    steps = []
    train(
        SMALL,
        TOKENIZER,
        tiny_speech,
        out=tmp_path,
        config=rare,
        progress=False,
        on_step=lambda log: steps.append(len(log)),
    )
    assert steps == [1, 2, 3]


def test_upper_case_transcripts_score_as_what_they_say(tiny_speech, tmp_path):
    short = train(
        SMALL, TOKENIZER, tiny_speech, out=tmp_path, config=replace(STEPS, steps=1), progress=False
    )
    loud = replace(tiny_speech, texts=[text.upper() for text in tiny_speech.texts])
    checkpoint = load_checkpoint(short.path)
    assert evaluate(checkpoint, loud)[0] == evaluate(checkpoint, tiny_speech)[0]


def test_ctrl_c_saves_the_step_it_came_at(tiny_speech, tmp_path):
    def stop(history):
        if len(history) == 3:
            raise KeyboardInterrupt

    rarely = replace(STEPS, steps=6, checkpoint_s=1e9)
    with pytest.raises(KeyboardInterrupt):
        train(
            SMALL,
            TOKENIZER,
            tiny_speech,
            out=tmp_path / "a",
            config=rarely,
            progress=False,
            on_step=stop,
        )
    resumed = train(
        SMALL, TOKENIZER, tiny_speech, out=tmp_path / "a", config=rarely, progress=False
    )
    unbroken = train(
        SMALL, TOKENIZER, tiny_speech, out=tmp_path / "b", config=rarely, progress=False
    )
    assert [line["loss"] for line in resumed.history] == [line["loss"] for line in unbroken.history]
    assert torch.load(tmp_path / "a/state.pt", weights_only=True)["step"] == 6


def test_batches_of_ones_own_are_trained_on_in_order_and_a_resumed_run_asks_for_those_that_are_left(
    tiny_speech, tmp_path
):
    asked, lengths = [], [len(waveform) for waveform in tiny_speech.waveforms]

    def own(first):
        asked.append(first)
        return (
            tiny_speech.batch([step % len(tiny_speech)], TOKENIZER)
            for step in itertools.count(first)
        )

    def stop(history):
        if len(history) == 3:
            raise KeyboardInterrupt

    given = {"config": replace(STEPS, steps=6, augment=PLAIN), "progress": False, "batches": own}
    whole = train(SMALL, TOKENIZER, tiny_speech, out=tmp_path / "a", **given)
    with pytest.raises(KeyboardInterrupt):
        train(SMALL, TOKENIZER, tiny_speech, out=tmp_path / "b", on_step=stop, **given)
    resumed = train(SMALL, TOKENIZER, tiny_speech, out=tmp_path / "b", **given)
    with torch.no_grad():  # as a notebook may have it: training wants gradients all the same
        train(SMALL, TOKENIZER, tiny_speech, out=tmp_path / "d", **given)
    assert asked == [0, 0, 3, 0]
    assert [line["loss"] for line in resumed.history] == [line["loss"] for line in whole.history]
    seen, ended = [], 0.0
    for line in whole.history:
        seen.append(round(line["rtfx"] * (line["seconds"] - ended) * 16_000))
        ended = line["seconds"]
    assert seen == pytest.approx([lengths[step % len(lengths)] for step in range(6)], abs=1)
    with pytest.raises(
        ValueError,
        match="batches: expected batches without end, got none for step 4. Begin anew where they end",
    ):
        train(
            SMALL,
            TOKENIZER,
            tiny_speech,
            out=tmp_path / "c",
            **given | {"batches": lambda first: itertools.islice(own(first), 4)},
        )


TDT = replace(SMALL, durations=(0, 1, 2, 4), activation="relu")


def test_a_tdt_model_learns_two_utterances_by_heart_and_jumps_over_frames_when_it_says_them(
    tiny_speech, tmp_path
):
    few = Utterances(
        **{
            name: getattr(tiny_speech, name)[:2]
            for name in ("waveforms", "ids", "texts", "speakers")
        }
    )
    config = replace(
        TDT,
        encoder=ConvConfig(width=64, layers=2, dropout=0.0),
        predictor=StatelessConfig(width=48),
        joint_width=64,
    )
    plain = TrainConfig(
        steps=160,
        seconds=math.inf,
        batch_seconds=5.0,
        peak_lr=5e-3,
        curriculum=(99.0, 0.5),
        threads=1,
        augment=PLAIN,
        ema=0.9,
    )
    result = train(config, TOKENIZER, few, out=tmp_path, config=plain, progress=False)
    assert result.history[-1]["loss"] < 0.1 * result.history[0]["loss"]
    checkpoint = load_checkpoint(result.path)
    assert checkpoint.model.config == config and checkpoint.model.durations == (0, 1, 2, 4)
    assert evaluate(checkpoint, few)[0].rate < 0.5  # silence and noise have at least 1
    sound = few.waveforms[0].float()[None] / 32768
    jumps = recognize(checkpoint, sound, torch.tensor([sound.shape[1]])).durations[0].tolist()
    assert set(jumps) <= {0, 1, 2, 4} and max(jumps) > 1


def test_a_tdt_run_resumes_to_the_same_losses_and_not_with_other_durations(tiny_speech, tmp_path):
    def stop(history):
        if len(history) == 3:
            raise KeyboardInterrupt

    six = replace(STEPS, steps=6)
    unbroken = train(TDT, TOKENIZER, tiny_speech, out=tmp_path / "a", config=six, progress=False)
    with pytest.raises(KeyboardInterrupt):
        train(
            TDT,
            TOKENIZER,
            tiny_speech,
            out=tmp_path / "b",
            config=six,
            progress=False,
            on_step=stop,
        )
    with pytest.raises(ValueError, match="was started with, got other model"):
        train(
            replace(TDT, durations=(0, 1, 2)),
            TOKENIZER,
            tiny_speech,
            out=tmp_path / "b",
            config=six,
            progress=False,
        )
    resumed = train(TDT, TOKENIZER, tiny_speech, out=tmp_path / "b", config=six, progress=False)
    assert [line["loss"] for line in resumed.history] == [line["loss"] for line in unbroken.history]
    assert len(resumed.history) == 6


def test_the_loss_of_tdt_depends_on_sigma_and_omega_and_that_of_rnnt_on_neither(
    tiny_speech, tmp_path
):
    first = {}
    for config in (SMALL, TDT):
        for sigma, omega in ((0.05, 0.0), (0.5, 0.0), (0.05, 1.0)):
            how = replace(STEPS, steps=1, sigma=sigma, omega=omega)
            out = tmp_path / f"{config.durations}{sigma}{omega}"
            (line,) = train(
                config, TOKENIZER, tiny_speech, out=out, config=how, progress=False
            ).history
            first.setdefault(config.durations, []).append(line["loss"])
    assert len(set(first[()])) == 1 and len(set(first[TDT.durations])) == 3


def corpus(folder):
    """A manifest of two utterances of noise."""
    generator = torch.Generator().manual_seed(0)
    for name in ("one", "two"):
        soundfile.write(
            str(folder / f"{name}.wav"),
            0.1 * torch.randn(16_000, generator=generator).numpy(),
            16_000,
        )
    rows = [
        {"audio": f"{name}.wav", "text": name, "split": "train", "duration": 1.0, "speaker": name}
        for name in ("one", "two")
    ]
    (folder / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "m.jsonl")


def test_the_command_trains_tdt_and_says_what_is_wrong_with_durations_in_one_line(tmp_path, capsys):
    command = ["train", "--manifest", corpus(tmp_path), "--steps", "2", "--no-progress", "--json"]
    command += ["--out"]
    assert main([*command, str(tmp_path / "tdt"), "--durations", "0", "1", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    model = load_checkpoint(tmp_path / "tdt").model
    assert model.durations == (0, 1, 2) and model.output.out_features == model.blank + 1 + 3
    for durations, got in ((["0"], "(0,)"), (["-1", "2"], "(-1, 2)"), (["1", "1"], "(1, 1)")):
        assert main([*command, str(tmp_path / "bad"), "--durations", *durations]) == 2
        said = capsys.readouterr().err.strip()
        assert "\n" not in said and "durations: expected" in said and f"got {got}" in said
        assert not (tmp_path / "bad").exists()


def test_the_command_takes_a_joint_and_says_which_it_was(tmp_path, capsys):
    command = ["train", "--manifest", corpus(tmp_path), "--steps", "2", "--no-progress", "--out"]
    for choice, took in (("full", "full"), ("lean", "lean"), ("auto", "lean")):
        assert main([*command, str(tmp_path / choice), "--joint", choice, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["joint"] == took


@pytest.fixture
def model_and_optimizer():
    torch.manual_seed(0)
    model = TransducerModel(SMALL).train()
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def test_sizes_that_oom_search_finds_are_those_that_a_run_survives(model_and_optimizer, one_thread):
    model, optimizer = model_and_optimizer
    before = [value.clone() for value in model.state_dict().values()]
    budget, buckets = 12_000_000, Buckets([0.5, 1.0, 2.0], [4, 8, 16], [1, 1, 1])
    step = training_step(model, optimizer, STEPS)
    found = oom_search(step, buckets, budget_bytes=budget, state=(model, optimizer), progress=False)
    assert all(map(torch.equal, before, model.state_dict().values())) and not optimizer.state
    run = TrainingRun(SMALL, STEPS, torch.device("cpu"), {})

    def advance(n, seconds, tokens):
        T = round(100 * seconds)

        def step():
            batch = Prepared(
                torch.randn(n, T, 80),
                torch.full((n,), T),
                torch.randint(SMALL.vocab_size, (n, tokens)),
                torch.full((n,), tokens),
                n * seconds,
            )
            run.advance([batch], run.agree(LaneBatches([batch], 0)))

        return peak_memory(step)

    advance(1, 1.0, 1)  # makes the optimizer's state
    for seconds, tokens, n in zip(
        buckets.seconds, buckets.tokens, found.table.sizes.tolist(), strict=True
    ):
        assert n > 3 and advance(n, seconds, tokens) <= budget < advance(
            int(n / 0.95) + 1, seconds, tokens
        )
    assert (
        abs(found.errors).max() < 0.2
    )  # what a convolution takes beside its tensors depends on the CPU


def test_an_update_leaves_no_gradients_and_none_is_made_of_a_gradient_that_is_not_finite(
    model_and_optimizer,
):
    model, optimizer = model_and_optimizer
    before = [value.detach().clone() for value in model.parameters()]
    loss = sum(p.square().sum() for p in model.parameters())
    assert update(model, optimizer, loss * math.inf, STEPS).isfinite().logical_not()
    assert all(map(torch.equal, before, model.parameters())) and all(
        p.grad is None for p in model.parameters()
    )
    loss = sum(p.square().sum() for p in model.parameters())
    assert update(model, optimizer, loss, STEPS) > STEPS.clip  # as it was before clipping
    assert not all(map(torch.equal, before, model.parameters())) and all(
        p.grad is None for p in model.parameters()
    )
