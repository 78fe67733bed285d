"""Runs of training: they learn, resume to the same losses, and are refused with other settings."""

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
import torch

from asrkit.data import Buckets, TrainingPlan, oom_search
from asrkit.files import lock
from asrkit.models import ConvConfig, TransducerModel, load_checkpoint
from asrkit.runtime import peak_memory
from asrkit.training import (
    Prepared,
    TrainConfig,
    evaluate,
    prepare_batch,
    training_loss,
    training_step,
    update,
)
from asrkit.training.batches import step_seed
from asrkit.training.optimizer import make_optimizer, set_rate
from asrkit.transcribe import recognize

sys.path.insert(0, str(Path(__file__).parent))
from trainings import (
    ATTENTION,
    CTC,
    ENCODERS,
    PLAIN,
    SHORT,
    TDT,
    TOKENIZER,
    TRANSDUCER,
    a_run,
    losses,
    run,
    stop_after,
)

SAVED = replace(SHORT, steps=6, checkpoint_s=0.0)
KINDS = {
    "rnnt": (TRANSDUCER, {"accumulate": 2}),
    "lean": (TRANSDUCER, {"joint": "lean"}),
    "tdt": (TDT, {"joint": "full", "optimizer": "lamb"}),
    "ctc": (CTC, {"accumulate": 2}),
    "ctc-fastconformer": (replace(CTC, encoder=ENCODERS["fastconformer"]), {}),
    "ctc-lstm": (replace(CTC, encoder=ENCODERS["lstm"]), {}),
    "ctc-jasper": (replace(CTC, encoder=ENCODERS["jasper"]), {"optimizer": "novograd"}),
    "attention": (ATTENTION, {"smoothing": 0.1}),
    "attention-lstm": (replace(ATTENTION, encoder=ENCODERS["lstm"]), {}),
}
CHILD = """
import sys, torch
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_loop import *
run(torch.load({speech!r}, weights_only=False), Path({out!r}), replace(SAVED, steps=12))
"""


def expect_same_models(one, two):
    """Equal weights, bit for bit."""
    weights = [load_checkpoint(path).model.state_dict() for path in (one, two)]
    assert all(
        torch.equal(value, weights[1][name]) for name, value in weights[0].items()
    )


def test_a_run_killed_with_signal_9_resumes_to_the_same_losses(tiny_speech, tmp_path):
    config = replace(SAVED, steps=12)
    unbroken = run(tiny_speech, tmp_path / "unbroken", config)
    torch.save(tiny_speech, tmp_path / "speech.pt")
    out = tmp_path / "broken"
    script = CHILD.format(
        tests=str(Path(__file__).parent),
        speech=str(tmp_path / "speech.pt"),
        out=str(out),
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = out / "log.jsonl"
    with subprocess.Popen([sys.executable, "-c", script], env=environment) as child:
        patience = time.monotonic() + 120
        while not log.exists() or log.read_bytes().count(b"\n") < 4:
            assert child.poll() is None and time.monotonic() < patience
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
    assert 4 <= log.read_bytes().count(b"\n") < 12
    (out / ".state-0a1b2c3d.pt").write_bytes(b"half")  # what a kill in mid-write leaves
    resumed = run(tiny_speech, out, config)
    assert losses(resumed) == losses(unbroken)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    expect_same_models(resumed.path, unbroken.path)
    assert not list(out.glob(".state-*"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_every_kind_resumes_and_exports_its_averages(
    tiny_speech, tmp_path, kind
):
    model, settings = KINDS[kind]
    config = replace(SAVED, steps=4, **settings)
    unbroken = run(tiny_speech, tmp_path / "a", config, model)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_speech, tmp_path / "b", config, model, on_step=stop_after(3))
    resumed = run(tiny_speech, tmp_path / "b", config, model)
    # sums of an LSTM depend on where its tensors lie
    assert losses(resumed) == pytest.approx(losses(unbroken), rel=1e-3)
    assert [line["step"] for line in resumed.history] == [1, 2, 3, 4]
    saved = load_checkpoint(resumed.path).model
    assert saved.config == model
    averages = torch.load(tmp_path / "b/state.pt")["ema"]
    assert all(
        torch.equal(value, averages[key]) for key, value in saved.state_dict().items()
    )
    assert resumed.joint == {"rnnt": "lean", "lean": "lean", "tdt": "full"}.get(kind)


def test_other_settings_model_data_or_tokenizer_do_not_resume_a_run(
    tiny_speech, tmp_path
):
    run(tiny_speech, tmp_path)
    for change, said in (
        ({"steps": 5}, "steps 4 -> 5"),
        ({"optimizer": "lamb"}, "optimizer adamw -> lamb"),
        ({"joint": "full"}, "joint auto -> full"),
        ({"smoothing": 0.1}, r"smoothing 0\.0 -> 0\.1"),
        ({"accumulate": 2}, "accumulate 1 -> 2"),
    ):
        with pytest.raises(ValueError, match=f"was started with, got other {said}"):
            run(tiny_speech, tmp_path, replace(SHORT, **change))
    with pytest.raises(ValueError, match=r"got other model\.joint_width 16 -> 32"):
        run(tiny_speech, tmp_path, model=replace(TRANSDUCER, joint_width=32))
    with pytest.raises(ValueError, match="got other train_set"):
        run(replace(tiny_speech, texts=tiny_speech.texts[::-1]), tmp_path)
    fresh = run(tiny_speech, tmp_path, replace(SHORT, steps=5), resume=False)
    assert len(fresh.history) == 5


def test_a_fresh_run_killed_before_its_first_checkpoint_does_not_resume_the_run_before(
    tiny_speech, tmp_path
):
    threads = torch.get_num_threads()
    rare = replace(SHORT, checkpoint_s=1e9, threads=threads + 1)
    run(tiny_speech, tmp_path, rare)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_speech, tmp_path, rare, resume=False, on_step=stop_after(1))
    assert torch.get_num_threads() == threads
    steps = []
    run(tiny_speech, tmp_path, rare, on_step=lambda log: steps.append(len(log)))
    assert steps == [1, 2, 3, 4]


def test_a_folder_that_another_training_holds_is_refused(tiny_speech, tmp_path):
    said = f"^out: expected a folder of no other.* Process {os.getpid()} on {platform.node()} holds"
    with lock(tmp_path), pytest.raises(ValueError, match=said):
        run(tiny_speech, tmp_path)
    assert not (tmp_path / "log.jsonl").exists()


def test_a_full_disk_is_said_and_what_was_saved_before_stays(tiny_speech, tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    training = a_run(tiny_speech, tmp_path)
    training.save()
    saved = training.state_file.read_bytes()
    room = training.model_file.stat().st_size + 1000  # for the model, not for the state
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    training.step = 1
    try:
        with pytest.raises(
            OSError, match="state.pt cannot be written. Is the disk full?"
        ):
            training.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert training.state_file.read_bytes() == saved
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"state.pt", "model.safetensors"}


@pytest.mark.parametrize("damage", ["half", "flipped", "empty", "junk", "foreign"])
def test_a_state_that_is_damaged_or_of_no_training_is_refused_in_one_line(
    tiny_speech, tmp_path, damage
):
    training = a_run(tiny_speech, tmp_path)
    training.save()
    file = training.state_file
    content = file.read_bytes()
    if damage == "flipped":  # in the middle of the weights, which torch does not notice
        content = bytearray(content)
        content[len(content) // 2] ^= 0x10
    if damage == "foreign":
        torch.save({"weights": torch.ones(3)}, file)
    else:
        file.write_bytes(
            {"half": content[:999], "empty": b"", "junk": b"x"}.get(damage, content)
        )
    said = r"^state: expected a whole file, got .*state\.pt, which is damaged \(.*\)\. Pass resume"
    if damage == "foreign":
        said = "^config: expected the settings .* was started with, got other .*steps None -> 4"
    with pytest.raises(ValueError, match=said) as error:
        run(tiny_speech, tmp_path)
    assert "\n" not in str(error.value)


WIDE = ConvConfig(width=64, layers=2, dropout=0.0)
LEARNERS = {
    "stateless": (TRANSDUCER, {"steps": 240}),
    "tdt": (replace(TDT, activation="relu"), {"steps": 160}),
    "ctc": (CTC, {"steps": 100}),
    "attention": (
        replace(ATTENTION, width=64, dropout=0.0),
        {"steps": 150, "peak_lr": 3e-3},
    ),
}


@pytest.mark.parametrize("kind", LEARNERS)
def test_it_learns_two_utterances_by_heart(tiny_speech, tmp_path, kind):
    model, settings = LEARNERS[kind]
    few = tiny_speech.select(range(2))
    config = replace(
        TrainConfig(
            seconds=math.inf, batch_seconds=5.0, threads=1, augment=PLAIN, ema=0.9
        ),
        **{"peak_lr": 5e-3, "curriculum": (99.0, 0.5)} | settings,
    )
    model = replace(model, encoder=WIDE)
    if kind in ("stateless", "tdt"):
        model = replace(model, joint_width=64, dropout=0.0)
    result = run(few, tmp_path, config, model, dev_set=few)
    assert result.history[-1]["loss"] < 0.1 * result.history[0]["loss"]
    assert result.dev is not None and result.dev.rate < 1  # it knows what, not yet when
    checkpoint = load_checkpoint(result.path)
    scored = evaluate(
        checkpoint, replace(few, texts=[text.upper() for text in few.texts])
    )
    assert (
        scored.errors == result.dev
        and set(scored.texts) == set(few.ids)
        and scored.rtfx > 0
    )
    if kind == "tdt":
        sound = few.waveforms[0].float()[None] / 32768
        jumps = (
            recognize(checkpoint, sound, torch.tensor([sound.shape[1]]))
            .durations[0]
            .tolist()
        )
        assert set(jumps) <= {0, 1, 2, 4} and max(jumps) > 1


def plain_loop(speech, config):
    """Losses, gradient norms and averaged weights: a batch, a step, an average."""
    torch.manual_seed(config.seed)
    model = TransducerModel(TRANSDUCER).train()
    ema = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make_optimizer(model, config)
    plan = TrainingPlan(speech, batch_seconds=config.batch_seconds, seed=config.seed)
    seen = []
    for step in range(config.steps):
        (rows,) = plan.rows(step, config.longest_s(step / config.steps))
        batch = prepare_batch(speech.batch(rows, TOKENIZER), config, step)
        torch.manual_seed(step_seed(config.seed, step))
        set_rate(optimizer, config.learning_rate(step / config.steps))
        loss = training_loss(model, batch, config).per_label
        norm = update(model, optimizer, loss, config)
        decay = min(config.ema, (step + 1) / (10 + step))
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                ema[name].lerp_(value, 1 - decay)
            else:
                ema[name].copy_(value)
        seen.append((loss.item(), norm.item()))
    return seen, ema


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "novograd"])
def test_a_run_is_the_plain_loop_bit_for_bit(
    tiny_speech, tmp_path, one_thread, optimizer
):
    config = replace(SHORT, steps=8, optimizer=optimizer)
    seen, ema = plain_loop(tiny_speech, config)
    result = run(tiny_speech, tmp_path, config)
    assert [(line["loss"], line["gradient_norm"]) for line in result.history] == seen
    saved = torch.load(tmp_path / "state.pt")["ema"]
    assert all(torch.equal(value, saved[name]) for name, value in ema.items())


def test_accumulated_batches_are_weighed_by_their_labels(tiny_speech, tmp_path):
    longest_first = sorted(
        range(len(tiny_speech)), key=lambda row: -len(tiny_speech.texts[row])
    )
    parts = [longest_first[:3], longest_first[-1:]]
    config = replace(SHORT, steps=1, accumulate=2, augment=PLAIN)
    given = [tiny_speech.batch(rows, TOKENIZER) for rows in parts]
    model = replace(
        TRANSDUCER, dropout=0.0, encoder=replace(TRANSDUCER.encoder, dropout=0.0)
    )
    (line,) = run(
        tiny_speech,
        tmp_path,
        config,
        model,
        batches=lambda first: itertools.cycle(given),
    ).history

    torch.manual_seed(0)
    alone = TransducerModel(model).train()
    prepared = [prepare_batch(batch, config, 0) for batch in given]
    labels = torch.tensor([float(batch.target_lengths.sum()) for batch in prepared])
    assert labels[0] > 5 * labels[1]
    per_label = [training_loss(alone, batch, config).per_label for batch in prepared]
    loss = (torch.stack(per_label) @ labels) / labels.sum()
    loss.backward()
    norm = torch.nn.utils.get_total_norm(
        [p.grad for p in alone.parameters() if p.grad is not None]
    )
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_batches_of_ones_own_are_trained_on_in_order_and_a_resumed_run_asks_for_those_that_are_left(
    tiny_speech, tmp_path
):
    asked = []

    def own(first):
        asked.append(first)
        for number in itertools.count(first):
            yield tiny_speech.batch([number % len(tiny_speech)], TOKENIZER)

    given = {"config": replace(SAVED, augment=PLAIN), "batches": own}
    whole = run(tiny_speech, tmp_path / "a", **given)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_speech, tmp_path / "b", on_step=stop_after(4), **given)
    with (
        torch.no_grad()
    ):  # as a notebook may have it: training wants gradients all the same
        resumed = run(tiny_speech, tmp_path / "b", **given)
    assert asked == [0, 0, 3]
    assert losses(resumed) == losses(whole)
    seconds = [line["seconds"] for line in whole.history]
    assert seconds[0] == 0 and seconds == sorted(seconds)  # the first step compiles
    said = "batches: expected batches without end, got none for step 4. Begin anew where they end"
    given["batches"] = lambda first: itertools.islice(own(first), 4)
    with pytest.raises(ValueError, match=said):
        run(tiny_speech, tmp_path / "c", **given)


def test_a_dev_set_scored_beside_gives_what_it_gives_in_turn(tiny_speech, tmp_path):
    dev = tiny_speech.select(range(3))
    config = replace(SHORT, evaluate_s=0.0)
    in_turn = run(tiny_speech, tmp_path / "a", config, dev_set=dev)
    beside = run(
        tiny_speech, tmp_path / "b", replace(config, evaluate="beside"), dev_set=dev
    )
    assert losses(beside) == losses(in_turn) and beside.dev == in_turn.dev is not None


def test_the_rate_climbs_then_falls_to_zero_and_the_curriculum_opens():
    config = TrainConfig(peak_lr=5e-3)
    rates = [config.learning_rate(i / 100) for i in range(101)]
    assert rates.index(max(rates)) == 5 and rates[-1] < 1e-9
    assert rates[:6] == sorted(rates[:6]) and rates[5:] == sorted(
        rates[5:], reverse=True
    )
    lengths = [config.longest_s(i / 100) for i in range(101)]
    assert lengths == sorted(lengths)
    assert lengths[0] == config.curriculum[0] and lengths[-1] == math.inf


@pytest.mark.parametrize(
    ("encoder", "given", "rate"),
    [
        ("conv", {}, 5e-3),
        ("conv", {"optimizer": "novograd"}, 2e-2),
        ("fastconformer", {}, 2e-3),
        ("fastconformer", {"peak_lr": 4e-3}, 4e-3),
        ("fastconformer", {"optimizer": "lamb"}, 1e-2),
    ],
)
def test_each_optimizer_has_its_rate_unless_one_is_named(
    tiny_speech, tmp_path, encoder, given, rate
):
    config = replace(SHORT, **{"steps": 1, "peak_lr": None, "warmup": 0.0} | given)
    (line,) = run(
        tiny_speech, tmp_path, config, replace(CTC, encoder=ENCODERS[encoder])
    ).history
    assert line["lr"] == rate


def test_the_loss_of_tdt_depends_on_sigma_and_omega_and_that_of_rnnt_on_neither(
    tiny_speech, tmp_path
):
    for model, different in ((TRANSDUCER, 1), (TDT, 3)):
        first = set()
        for sigma, omega in ((0.05, 0.0), (0.5, 0.0), (0.05, 1.0)):
            config = replace(SHORT, steps=1, sigma=sigma, omega=omega)
            first.update(
                losses(run(tiny_speech, tmp_path, config, model, resume=False))
            )
        assert len(first) == different


def test_sizes_that_oom_search_finds_are_those_that_a_run_survives(
    tiny_speech, tmp_path, one_thread
):
    torch.manual_seed(0)
    model = TransducerModel(TRANSDUCER).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = [value.clone() for value in model.state_dict().values()]
    budget = 12_000_000
    buckets = Buckets([0.5, 1.0, 2.0], [4, 8, 16], [1, 1, 1])
    config = replace(SHORT, joint="full")
    step = training_step(model, optimizer, config)
    found = oom_search(
        step, buckets, budget_bytes=budget, state=(model, optimizer), progress=False
    )
    assert (
        all(map(torch.equal, before, model.state_dict().values()))
        and not optimizer.state
    )
    training = a_run(tiny_speech, tmp_path, config)

    def advance(n, seconds, tokens):
        T = round(100 * seconds)

        def step():
            batch = Prepared(
                torch.randn(n, T, 80),
                torch.full((n,), T),
                torch.randint(TRANSDUCER.vocab_size, (n, tokens)),
                torch.full((n,), tokens),
                n * seconds,
            )
            training.take_step(iter([[batch]]))

        return peak_memory(step)

    advance(1, 1.0, 1)  # makes the optimizer's state
    table = zip(
        buckets.seconds, buckets.tokens, found.table.sizes.tolist(), strict=True
    )
    for seconds, tokens, n in table:
        assert n > 3
        assert advance(n, seconds, tokens) <= budget
        assert advance(int(n / 0.95) + 1, seconds, tokens) > budget


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"steps": 2.0}, "steps: expected a whole number, got 2.0"),
        ({"seed": True}, "seed: expected a whole number, got True"),
        ({"accumulate": 0}, "accumulate: expected at least 1, got 0"),
        (
            {"seconds": math.nan},
            "seconds: expected above 0, math.inf for no limit, got nan",
        ),
        ({"ctc_weight": math.nan}, "ctc_weight: expected a finite number, got nan"),
        ({"batch_seconds": 0}, "batch_seconds: expected above 0, got 0"),
        ({"warmup": 1}, "warmup: expected a share from 0 to below 1, got 1"),
        ({"ema": 1.5}, "ema: expected a share from 0 to 1, got 1.5"),
        ({"peak_lr": 0.0}, "peak_lr: expected above 0, or None, got 0.0"),
        ({"smoothing": 0.6}, "smoothing: expected a share from 0 to 0.5, got 0.6"),
        (
            {"curriculum": 2.5},
            r"curriculum: expected a pair \(seconds, share\), got 2.5",
        ),
        ({"augment": None}, "augment: expected AugmentConfig, got None"),
        (
            {"joint": "thin"},
            "joint: expected one of 'auto', 'full', 'lean', got 'thin'",
        ),
        (
            {"evaluate": "never"},
            "evaluate: expected one of 'in turn', 'beside', got 'never'",
        ),
    ],
)
def test_a_setting_that_is_none_is_refused_in_one_line(wrong, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        TrainConfig(**wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"model": print},
            "model_config: expected a TransducerConfig, CTCConfig or AEDConfig, got",
        ),
        ({"model": replace(CTC, vocab_size=5)}, "vocab_size: expected 28, got 5"),
        (
            {"model": replace(ATTENTION, pad=0)},
            "bos, eos, pad: expected tokens behind the tokeni",
        ),
        (
            {"model": replace(ATTENTION, most=3)},
            "train_set: expected texts of at most 2 tokens",
        ),
        (
            {"model": replace(ATTENTION, ctc=False)},
            "ctc_weight: expected 0 for a model without",
        ),
        ({"speech": ["a.wav"]}, "train_set: expected Utterances, got list"),
        ({"dev_set": "dev"}, "dev_set: expected Utterances, got str"),
        ({"config": {"steps": 3}}, "config: expected TrainConfig, got dict"),
        (
            {"config": replace(SHORT, accumulate=999)},
            "batches: expected from 1 to the number of",
        ),
    ],
)
def test_what_train_cannot_take_is_refused_in_one_line(
    wrong, said, tiny_speech, tmp_path
):
    given = {"speech": tiny_speech, "out": tmp_path / "run"} | wrong
    with pytest.raises(ValueError, match=f"^{said}") as error:
        run(**given)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run/log.jsonl").exists()


def test_speech_that_could_not_be_trained_on_is_named_before_the_run_begins(
    tiny_speech, tmp_path
):
    dev = replace(tiny_speech, texts=[*tiny_speech.texts[:-1], "room 5"])
    with pytest.raises(ValueError, match=r"\['5'\] in 'room 5'"):
        run(tiny_speech, tmp_path / "run", dev_set=dev)
    waveforms = [*tiny_speech.waveforms]
    waveforms[1] = waveforms[1][:176]
    short = replace(tiny_speech, waveforms=waveforms)
    said = f"^train_set: expected more than 4 frames .* got .* in {tiny_speech.ids[1]}"
    with pytest.raises(ValueError, match=said):
        run(short, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    lstm = replace(CTC, encoder=ENCODERS["lstm"])  # has no batch norm
    once = run(short, tmp_path / "lstm", replace(SHORT, steps=1), lstm)
    assert len(once.history) == 1
