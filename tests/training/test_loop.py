"""Training runs: they learn, resume to the same losses, and refuse other settings."""

import itertools
import json
import math
import os
import platform
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from asrkit.cli import main
from asrkit.data import UNALTERED, Balanced, Lengths, at_most_seconds, linear, plan
from asrkit.files import lock
from asrkit.memory import peak_memory
from asrkit.models import ConvConfig, TransducerModel, load_checkpoint
from asrkit.text import ErrorRate, wer
from asrkit.training import (
    Evaluation,
    Prepared,
    TrainConfig,
    evaluate,
    prepare_batch,
    training_loss,
    training_step,
    update,
)
from asrkit.training.batches import batch_seed
from asrkit.training.optimizer import make_optimizer, set_rate
from asrkit.training.schedule import learning_rate, longest_utterance_s

sys.path.insert(0, str(Path(__file__).parent))
from trainings import (
    ATTENTION,
    CTC,
    ENCODERS,
    SHORT,
    TDT,
    TOKENIZER,
    TRANSDUCER,
    a_run,
    gradients,
    logged,
    losses,
    noise_corpus,
    run,
    stop_after,
    wait_for_lines,
)

SAVED = replace(SHORT, steps=6, checkpoint_s=0.0)
KINDS = {
    "rnnt": (TRANSDUCER, {"accumulate": 2}),
    "lean": (TRANSDUCER, {"joint": "lean", "batching": "random"}),
    "packed": (TRANSDUCER, {"joint": "packed"}),
    "tdt": (TDT, {"joint": "full", "optimizer": "lamb"}),
    "ctc": (CTC, {"accumulate": 2, "batching": "bucketed2d", "buckets": 2}),
    "ctc-fastconformer": (
        replace(CTC, encoder=ENCODERS["fastconformer"]),
        {"batch_seconds": 9.0},  # in each batch an utterance with enough frames
    ),
    "ctc-lstm": (
        replace(CTC, encoder=ENCODERS["lstm"]),
        {"accumulate": 2, "batching": "presorted", "batch_seconds": 9.0},
    ),
    "ctc-jasper": (
        replace(CTC, encoder=ENCODERS["jasper"]),
        {"optimizer": "novograd", "batching": "bucketed"},
    ),
    "attention": (ATTENTION, {"smoothing": 0.1}),
}


HUGE = f"""
import sys
from asrkit.cli import main
from asrkit.training import optimizer
optimizer.FIRST_SCALE = {2.0**24}
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_killed_with_signal_9_resumes_to_the_same_losses(tmp_path, monkeypatch):
    """In float16 the first losses overflow, before the kill and after it."""
    monkeypatch.setattr("asrkit.training.optimizer.FIRST_SCALE", 2.0**24)
    manifest = noise_corpus(tmp_path, "one", "two three", "four five six")
    command = ["train", "--manifest", manifest, "--steps", "24", "--seconds", "inf"]
    command += ["--no-progress", "--checkpoint-seconds", "0"]
    command += ["--precision", "float16", "--out"]
    broken = tmp_path / "broken"
    whole = tmp_path / "whole"
    log = broken / "log.jsonl"
    killed = [sys.executable, "-c", HUGE, *command, str(broken)]
    with subprocess.Popen(killed) as child:
        wait_for_lines(child, log)
        child.send_signal(signal.SIGKILL)
    assert 4 <= len(logged(log)) < 24
    half = (
        broken / ".state-0a1b2c3d.pt"
    )  # as of a process that was killed while writing
    half.write_bytes(b"half")
    for out in (broken, whole):
        assert main([*command, str(out)]) == 0
    assert logged(log) == logged(whole / "log.jsonl")
    assert not half.exists()
    weights = [load_checkpoint(out).model.state_dict() for out in (broken, whole)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    finite = [math.isfinite(line["gradient_norm"]) for line in lines]
    skipped = [line["overflows"] for line in lines]
    assert skipped == [finite[:step].count(False) for step in range(1, 25)]
    assert 4 < skipped[-1] < 24
    state = torch.load(broken / "state.pt")["scaler"]
    assert state["scale"] == 2.0 ** (24 - skipped[-1])


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
    tolerance = 1e-3 if kind in ("tdt", "ctc-lstm") else 1e-5
    assert losses(resumed) == pytest.approx(losses(unbroken), rel=tolerance)
    assert [line["step"] for line in resumed.history] == [1, 2, 3, 4]
    saved = load_checkpoint(resumed.path).model
    assert saved.config == model
    averages = torch.load(tmp_path / "b/state.pt")["ema"]
    torch.testing.assert_close(saved.state_dict(), averages, rtol=0, atol=0)
    forms = {"rnnt": "lean", "lean": "lean", "packed": "packed", "tdt": "full"}
    assert resumed.joint == forms.get(kind)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "novograd"])
def test_float16_clips_and_logs_unscaled_gradients(
    tiny_speech, tmp_path, monkeypatch, optimizer
):
    config = replace(SHORT, accumulate=2, optimizer=optimizer, clip=3.0)
    plain = run(tiny_speech, tmp_path / "plain", config)
    for scale in (4.0, 1024.0):
        monkeypatch.setattr("asrkit.training.optimizer.FIRST_SCALE", scale)
        half = replace(config, precision="float16")
        result = run(tiny_speech, tmp_path / str(scale), half)
        for ours, wanted in zip(result.history, plain.history, strict=True):
            for key in ("loss", "gradient_norm"):
                assert ours[key] == pytest.approx(wanted[key], rel=0.02)
            assert ours["overflows"] == 0


def test_a_run_whose_every_step_overflows_names_the_precision(
    tiny_speech, tmp_path, monkeypatch
):
    monkeypatch.setattr("asrkit.training.optimizer.FIRST_SCALE", 2.0**60)
    with pytest.raises(ValueError, match="^precision: expected a gradient that fits"):
        run(tiny_speech, tmp_path, replace(SHORT, precision="float16"))


def test_the_best_checkpoint_of_the_dev_set_is_kept_also_by_a_resumed_run(
    tiny_speech, tmp_path, monkeypatch
):
    rates = {1: 0.9, 2: 0.4, 3: 0.6, 4: 0.5, 5: 0.7, 6: 0.5}
    fields = asdict(wer(["a b"], ["a c"]))

    def score(checkpoint, utterances):
        rate = rates[checkpoint.notes["step"]]
        return Evaluation(ErrorRate(**fields | {"rate": rate}), {}, 1.0)

    monkeypatch.setattr("asrkit.training.evaluation.evaluate", score)
    config = replace(SAVED, evaluate_s=0.0)
    dev = tiny_speech.select(range(2))
    with pytest.raises(KeyboardInterrupt):
        run(tiny_speech, tmp_path, config, dev_set=dev, on_step=stop_after(4))
    best = tmp_path / "best.safetensors"
    assert load_checkpoint(best).notes["step"] == 2
    result = run(tiny_speech, tmp_path, config, dev_set=dev)
    assert (result.path, result.dev.rate) == (best, 0.4)
    assert load_checkpoint(best).notes["step"] == 2
    assert load_checkpoint(tmp_path).notes["step"] == 6
    rates[6] = 0.4
    run(tiny_speech, tmp_path, config, dev_set=dev)  # a finished run is scored again
    assert load_checkpoint(best).notes["step"] == 6  # the later one of two
    rates[6] = 0.5
    other = tiny_speech.select(range(3))  # rates on another dev set do not compare
    assert run(tiny_speech, tmp_path, config, dev_set=other).dev.rate == 0.5
    rates[6] = 0.95
    run(tiny_speech, tmp_path, config, dev_set=dev, resume=False)
    assert load_checkpoint(best).notes["dev"]["rate"] == 0.4
    run(tiny_speech, tmp_path, SHORT, resume=False)
    assert not best.exists()


def test_other_settings_model_data_or_tokenizer_do_not_resume_a_run(
    tiny_speech, tmp_path
):
    run(tiny_speech, tmp_path)
    for change, message in (
        ({"config": replace(SHORT, steps=5)}, "steps 4 -> 5"),
        ({"config": replace(SHORT, joint="full")}, "joint auto -> full"),
        ({"config": replace(SHORT, accumulate=2)}, "accumulate 1 -> 2"),
        ({"model": replace(TRANSDUCER, joint_width=32)}, "model.joint_width 16 -> 32"),
        ({"speech": replace(tiny_speech, texts=tiny_speech.texts[::-1])}, "train_set"),
    ):
        with pytest.raises(ValueError, match=f"was started with, got other {message}"):
            run(**({"speech": tiny_speech, "out": tmp_path} | change))


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


def test_a_folder_in_use_by_another_training_is_refused(tiny_speech, tmp_path):
    message = f"^out: expected a folder that no other.* Process {os.getpid()} on {platform.node()} holds"
    with lock(tmp_path), pytest.raises(ValueError, match=message):
        run(tiny_speech, tmp_path)
    assert not (tmp_path / "log.jsonl").exists()


def test_a_full_disk_is_an_error_and_earlier_files_stay(tiny_speech, tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    training = a_run(tiny_speech, tmp_path)
    training.save()
    saved = training.state_file.read_bytes()
    room = training.model_file.stat().st_size + 1000  # for the model, not for the state
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    training.step = 1
    message = "state.pt cannot be written. Is the disk full?"
    try:
        with pytest.raises(OSError, match=message):
            training.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert training.state_file.read_bytes() == saved
    assert {*tmp_path.iterdir()} == {training.state_file, training.model_file}


def flipped(content):
    """`content` with one bit of the weights flipped, which torch does not notice."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [
    lambda content: content[:999], flipped, lambda content: b"", lambda content: b"x",
])  # fmt: skip
def test_a_damaged_state_is_refused_in_one_line(tiny_speech, tmp_path, damage):
    training = a_run(tiny_speech, tmp_path)
    training.save()
    training.state_file.write_bytes(damage(training.state_file.read_bytes()))
    message = r"^state: expected a whole file, got [^\n]*state\.pt, which is damaged \([^\n]*\)\. Pass resume"
    with pytest.raises(ValueError, match=message):
        run(tiny_speech, tmp_path)


WIDE = ConvConfig(width=64, layers=2, dropout=0.0)
JOINT = {"encoder": WIDE, "joint_width": 64, "dropout": 0.0}
LEARNERS = {
    "stateless": (replace(TRANSDUCER, **JOINT), {"steps": 240}),
    "tdt": (replace(TDT, activation="relu", **JOINT), {"steps": 160}),
    "ctc": (replace(CTC, encoder=WIDE), {"steps": 100}),
    "attention": (
        replace(ATTENTION, encoder=WIDE, width=64, dropout=0.0),
        {"steps": 150, "peak_lr": 3e-3},
    ),
}
LEARNING = TrainConfig(
    seconds=math.inf, batch_seconds=5.0, threads=1, augment=UNALTERED, ema=0.9, precision="float32",
    peak_lr=5e-3, curriculum=(99.0, 0.5),
)  # fmt: skip


@pytest.mark.parametrize("kind", LEARNERS)
def test_training_overfits_two_utterances(tiny_speech, tmp_path, kind):
    model, settings = LEARNERS[kind]
    few = tiny_speech.select(range(2))
    config = replace(LEARNING, **settings)
    result = run(few, tmp_path, config, model, dev_set=few)
    assert losses(result)[-1] < 0.1 * losses(result)[0]
    assert (
        result.dev is not None and result.dev.rate < 1
    )  # the words are learnt, their order not yet
    checkpoint = load_checkpoint(result.path)
    loud = replace(few, texts=[text.upper() for text in few.texts])
    assert evaluate(checkpoint, loud).errors == result.dev


def plain_loop(speech, config):
    """Lines of the log, and averaged weights: a batch, a step, an average."""
    torch.manual_seed(config.seed)
    model = TransducerModel(TRANSDUCER).train()
    ema = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make_optimizer(model, config)
    tokens = [len(TOKENIZER.encode(text)) for text in speech.texts]
    limit = at_most_seconds(config.batch_seconds)
    strategy = Balanced(limit=limit, work=linear(), blur=(0.1, 0.0))
    planned = plan(strategy, Lengths(speech.durations, tokens), seed=config.seed)
    results = []
    for step in range(config.steps):
        (rows,) = planned.steps[step]
        batch = prepare_batch(speech.batch(rows, TOKENIZER), config, step)
        torch.manual_seed(batch_seed(config.seed, step))
        set_rate(optimizer, learning_rate(config, step / config.steps))
        loss = training_loss(model, batch, config).per_label
        norm = update(model, optimizer, loss, config)
        decay = min(config.ema, (step + 1) / (10 + step))
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                ema[name] += (value - ema[name]) * (1 - decay)
            else:
                ema[name].copy_(value)
        frames = batch.features[..., 0].numel()
        padding = 1 - int(batch.lengths.sum()) / frames
        results.append((loss.item(), norm.item(), frames, padding))
    return results, ema


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "novograd"])
def test_a_run_equals_the_plain_loop_bit_for_bit(
    tiny_speech, tmp_path, one_thread, optimizer
):
    config = replace(SHORT, steps=8, optimizer=optimizer, curriculum=(99.0, 0.2))
    wanted, ema = plain_loop(tiny_speech, config)
    result = run(tiny_speech, tmp_path, config)
    logged_names = ("loss", "gradient_norm", "frames", "padding")
    assert [
        tuple(line[name] for name in logged_names) for line in result.history
    ] == wanted
    assert 0 < result.padding < max(line["padding"] for line in result.history)
    saved = torch.load(tmp_path / "state.pt")["ema"]
    torch.testing.assert_close(saved, ema, rtol=0, atol=0)


def test_accumulated_batches_are_weighted_by_their_labels(tiny_speech, tmp_path):
    config = replace(SHORT, steps=1, accumulate=2, augment=UNALTERED)
    encoder = replace(TRANSDUCER.encoder, dropout=0.0)
    model = replace(TRANSDUCER, dropout=0.0, encoder=encoder)
    texts = tiny_speech.texts
    *longest, shortest = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
    batches = [tiny_speech.batch(rows, TOKENIZER) for rows in (longest[:3], [shortest])]
    (line,) = run(
        tiny_speech, tmp_path, config, model, batches=lambda _: itertools.cycle(batches)
    ).history

    torch.manual_seed(0)
    alone = TransducerModel(model).train()
    prepared = [prepare_batch(batch, config, 0) for batch in batches]
    labels = torch.tensor([float(batch.target_lengths.sum()) for batch in prepared])
    per_label = [training_loss(alone, batch, config).per_label for batch in prepared]
    loss = (torch.stack(per_label) @ labels) / labels.sum()
    norm = torch.nn.utils.get_total_norm(gradients(loss, alone))
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_supplied_batches_are_used_in_order_and_a_resumed_run_starts_at_the_next(
    tiny_speech, tmp_path
):
    first_numbers = []

    def supplied(first):
        first_numbers.append(first)
        for number in itertools.count(first):
            yield tiny_speech.batch([number % len(tiny_speech)], TOKENIZER)

    options = {"config": replace(SAVED, augment=UNALTERED), "batches": supplied}
    whole = run(tiny_speech, tmp_path / "a", **options)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_speech, tmp_path / "b", on_step=stop_after(4), **options)
    # a notebook may have switched gradients off
    with torch.no_grad():
        resumed = run(tiny_speech, tmp_path / "b", **options)
    assert first_numbers == [0, 0, 3]
    assert losses(resumed) == losses(whole)
    assert whole.history[0]["seconds"] == 0  # the first step compiles
    message = "batches: expected batches without end, got none for step 4. Start over"
    options["batches"] = lambda first: itertools.islice(supplied(first), 4)
    with pytest.raises(ValueError, match=message):
        run(tiny_speech, tmp_path / "c", **options)


@pytest.mark.live
def test_background_evaluation_gives_the_scores_of_evaluation_in_turn(
    tiny_speech, tmp_path
):
    in_turn, background = (
        run(
            tiny_speech,
            tmp_path / mode,
            replace(SHORT, evaluate_s=0.0, evaluate=mode),
            dev_set=tiny_speech.select(range(3)),
        )
        for mode in ("in turn", "background")
    )
    assert losses(background) == losses(in_turn)
    assert background.dev == in_turn.dev is not None
    best = [load_checkpoint(result.path) for result in (background, in_turn)]
    torch.testing.assert_close(
        *(one.model.state_dict() for one in best), rtol=0, atol=0
    )


def test_the_rate_rises_then_falls_to_zero_and_the_curriculum_opens():
    config = TrainConfig(peak_lr=5e-3)
    rates = [learning_rate(config, i / 100) for i in range(101)]
    assert max(rates) == rates[5] == 5e-3
    assert rates[-1] < 1e-9
    assert rates[:6] == sorted(rates[:6])
    assert rates[:4:-1] == sorted(rates[5:])
    lengths = [longest_utterance_s(config, i / 100) for i in range(101)]
    assert lengths == sorted(lengths)
    assert lengths[0] == config.curriculum[0]
    assert lengths[-1] == math.inf


@pytest.mark.parametrize("encoder, optimizer, rate", [
    ("conv", "adamw", 5e-3),
    ("conv", "novograd", 2e-2),
    ("fastconformer", "adamw", 2e-3),
    ("fastconformer", "lamb", 1e-2),
])  # fmt: skip
def test_each_optimizer_has_its_default_rate(
    tiny_speech, tmp_path, encoder, optimizer, rate
):
    config = replace(SHORT, steps=1, warmup=0.0, peak_lr=None, optimizer=optimizer)
    model = replace(CTC, encoder=ENCODERS[encoder])
    (line,) = run(tiny_speech, tmp_path, config, model).history
    assert line["lr"] == rate


@pytest.mark.parametrize("model, different", [(TRANSDUCER, 1), (TDT, 3)])
def test_the_loss_of_tdt_depends_on_sigma_and_omega_and_that_of_rnnt_on_neither(
    tiny_speech, tmp_path, model, different
):
    first = set()
    for sigma, omega in ((0.05, 0.0), (0.5, 0.0), (0.05, 1.0)):
        config = replace(SHORT, steps=1, sigma=sigma, omega=omega)
        first.update(losses(run(tiny_speech, tmp_path, config, model, resume=False)))
    assert len(first) == different


@pytest.mark.parametrize("n", [2, 12])
def test_a_step_of_a_run_takes_the_memory_of_training_step(
    tiny_speech, tmp_path, one_thread, n
):
    config = replace(SHORT, joint="full")
    training = a_run(tiny_speech, tmp_path, config)
    searched = training_step(training.model, training.optimizer, config)
    searched(1, 1.0, 1)  # makes the optimizer's state
    features = torch.randn(n, 200, 80)
    frames = torch.full((n,), 200)
    labels = torch.full((n,), 16)
    batch = Prepared(
        features, frames, torch.ones(n, 16, dtype=torch.long), labels, 2.0 * n
    )
    expected = peak_memory(lambda: searched(n, 2.0, 16))
    taken = peak_memory(lambda: training.take_step(iter([[batch]])))
    assert taken <= expected <= 1.05 * (taken + features.nbytes)


@pytest.mark.parametrize("wrong, message", [
    ({"steps": 0}, "steps: expected at least 1, got 0"),
    ({"seconds": math.nan}, "seconds: expected above 0, math.inf for no limit, got nan"),
    ({"ctc_weight": math.nan}, "ctc_weight: expected a finite number, got nan"),
    ({"peak_lr": 0.0}, "peak_lr: expected above 0, or None, got 0.0"),
    ({"curriculum": 2.5}, "curriculum: expected a tuple of two finite numbers, got 2.5"),
    ({"curriculum": (2.5, math.nan)}, "curriculum: expected a tuple of two finite numbers, "),
    ({"curriculum": (-1.0, 0.2)}, "curriculum: expected a pair .seconds, share., both at least 0"),
    ({"joint": "thin"}, "joint: expected one of 'auto', 'full', 'packed', 'split', 'lean', got 'thin'"),
    ({"ctc_weight": -0.3}, "ctc_weight: expected at least 0, got -0.3"),
    ({"omega": 1.5}, "omega: expected a share from 0 to 1, got 1.5"),
    ({"evaluate_s": -1.0}, "evaluate_s: expected at least 0, got -1.0"),
    ({"checkpoint_s": -1.0}, "checkpoint_s: expected at least 0, got -1.0"),
    ({"batch_seconds": "12"}, "batch_seconds: expected a finite number, got '12'"),
    ({"clip": math.nan}, "clip: expected above 0, math.inf for no limit, got nan"),
    ({"seed": 2**60}, "seed: expected from 0 to below"),
    ({"threads": 1.0}, "threads: expected a whole number, got 1.0"),
    ({"augment": None}, "augment: expected AugmentConfig, got None"),
])  # fmt: skip
def test_an_invalid_setting_is_refused_in_one_line(wrong, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        TrainConfig(**wrong)


@pytest.mark.parametrize("wrong, message", [
    ({"model": print}, "model_config: expected a TransducerConfig, CTCConfig or AEDConfig, got"),
    ({"model": replace(CTC, vocab_size=5)}, "vocab_size: expected 28, got 5"),
    ({"model": replace(ATTENTION, pad=0)}, "bos, eos, pad: expected tokens after the tokeni"),
    ({"model": replace(ATTENTION, most=3)}, "train_set: expected texts of at most 2 tokens"),
    ({"speech": ["a.wav"]}, "train_set: expected Utterances, got list"),
    ({"config": {"steps": 3}}, "config: expected TrainConfig, got dict"),
    ({"config": replace(SHORT, accumulate=999)}, "batches: expected from 1 to the number of utterances, 30, got 999. Each process, "),
])  # fmt: skip
def test_invalid_arguments_of_train_are_refused_in_one_line(
    wrong, message, tiny_speech, tmp_path
):
    arguments = {"speech": tiny_speech, "out": tmp_path / "run"} | wrong
    with pytest.raises(ValueError, match=rf"^{message}[^\n]*$"):
        run(**arguments)
    assert not (tmp_path / "run/log.jsonl").exists()


def test_unusable_speech_is_named_before_the_run_begins(tiny_speech, tmp_path):
    dev = replace(tiny_speech, texts=[*tiny_speech.texts[:-1], "room 5"])
    with pytest.raises(ValueError, match=r"\['5'\] in 'room 5'"):
        run(tiny_speech, tmp_path / "run", dev_set=dev)
    first, second, *rest = tiny_speech.waveforms
    short = replace(tiny_speech, waveforms=[first, second[:176], *rest])
    message = (
        f"^train_set: expected more than 4 frames .* got .* in {tiny_speech.ids[1]}"
    )
    with pytest.raises(ValueError, match=message):
        run(short, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    without_batch_norm = replace(CTC, encoder=ENCODERS["lstm"])
    run(short, tmp_path / "lstm", replace(SHORT, steps=1), without_batch_norm)
