"""Training into a folder, alone or as one of several processes.

A run lives in one folder: `log.jsonl` (a line a step), `state.pt` (to resume), `model.safetensors`
(EMA weights, to use). Augmentation and dropout follow from the seed and the number of the batch.
Where `steps` ends the run, so do batches and rate, and on a CPU a resumed run repeats the losses of
an unbroken one; where `seconds` does, rate and curriculum follow the clock of the first process.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from asrkit.data import Batch, Utterances
from asrkit.files import content_hash, lock
from asrkit.models import FastConformerConfig
from asrkit.models.assembly import ModelConfig, make_model
from asrkit.shapes import expect
from asrkit.text import ErrorRate, Tokenizer, dump_tokenizer
from asrkit.training.batches import draw_given, draw_planned, prefetch
from asrkit.training.config import CONFORMER_PEAK_LR, TrainConfig
from asrkit.training.distributed import joined
from asrkit.training.folder import RunFolder
from asrkit.training.loop import Loop, OnStep
from asrkit.training.objective import compile_losses, objective_of
from asrkit.training.state import TrainingRun


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run leaves.

    Args:
        path: The exported model, with the averaged weights.
        history: The log, a line a step: step, seconds, loss (nats per label), lr, gradient_norm,
            rtfx, and lean (whether the lean loss computed it).
        dev: Word error rate on the dev set; None if there was none.
        has_joint: Whether the model has a joint; only a transducer has one.
    """

    path: Path
    history: list[dict[str, float]]
    dev: ErrorRate | None
    has_joint: bool = True

    @property
    def joint(self) -> Literal["full", "lean", "mixed"] | None:
        """What the steps took: the full joint, the lean loss, or each for some of the batches; None
        of a model without a joint.
        """
        if not self.has_joint:
            return None
        lean_steps = sum(bool(line["lean"]) for line in self.history)
        if lean_steps == 0:
            return "full"
        if lean_steps == len(self.history):
            return "lean"
        return "mixed"


def train(  # noqa: PLR0913 - model, data and folder; the rest is keyword-only with defaults
    model_config: ModelConfig,
    tokenizer: Tokenizer,
    train_set: Utterances,
    dev_set: Utterances | None = None,
    *,
    out: Path,
    config: TrainConfig | None = None,
    device: str = "cpu",
    resume: bool = True,
    progress: bool = True,
    on_step: OnStep | None = None,
    batches: Callable[[int], Iterator[Batch]] | None = None,
) -> TrainResult:
    """Train a model of any kind into the folder `out`, or resume the run that it holds.

    Args:
        model_config: The model to train; its vocabulary has to be the tokenizer's, behind which an
            encoder-decoder model has bos, eos and pad. What it is trained for follows from its
            kind: see `asrkit.training.training_loss`.
        tokenizer: Makes labels of transcripts, and is saved with the model.
        train_set: Speech to train on.
        dev_set: Scored every `config.evaluate_s` seconds and at the end; None skips it.
        out: Folder of the run: log.jsonl, state.pt and model.safetensors.
        config: How to train; the defaults of TrainConfig if None.
        device: Where to train, "cpu" or "cuda".
        resume: Whether to go on with the run in `out`; False removes its log and states.
        progress: Whether to show a progress bar.
        on_step: Called after every step with the log so far, e.g. to draw a live curve.
        batches: batches(k) yields batch k of the run and those after, without end, in place of
            `TrainingPlan` and its curriculum. A step takes `config.accumulate` for each process. A
            resumed run asks for those that are left.

    Returns:
        The path of the exported model, the log, and the last word error rate on `dev_set`.

    Raises:
        ValueError: An argument of the wrong type, a transcript without tokens, or `out` holds a
            damaged run, one with other settings, or one that another process trains now.
        OSError: `out` cannot be written to.
    """
    objective = objective_of(model_config)
    _check_arguments(train_set, dev_set, out, config, device)
    config = _with_rate(config or TrainConfig(), model_config)
    dev_set = dev_set or None  # an empty one is none
    objective.check_vocabulary(model_config, tokenizer.vocab_size)
    _expect_tokens(tokenizer, train_set, dev_set, objective.most_labels(model_config))
    _expect_lengths(train_set, model_config, config)
    objective.check(model_config, config)
    where = torch.device(device)
    forked = [] if device == "cpu" else [device]
    with (
        joined(where) as processes,
        ExitStack() as after,
        torch.enable_grad(),
        torch.random.fork_rng(forked),
    ):
        folder = RunFolder(Path(out))
        processes.by_first(lambda: _take_folder(folder, after))
        after.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(max(1, config.threads // processes.local_count))
        run = TrainingRun(model_config, config, where, _identify(tokenizer, train_set), processes)
        _begin(run, folder, resume=resume)
        count = run.batches
        own = processes.share(count)
        if batches is None:
            draw = draw_planned(train_set, tokenizer, config, own, count)
        else:
            draw = draw_given(batches(run.step * count), own, count)
        steps = prefetch(draw, config, own, count, run.step, run.longest_s)
        loop = Loop(run, tokenizer, dev_set, folder)
        dev = loop.run_to_end(steps, progress=progress, on_step=on_step)
    return TrainResult(
        path=folder.model,
        history=run.history,
        dev=dev,
        has_joint=objective.has_joint,
    )


def _with_rate(config: TrainConfig, model_config: ModelConfig) -> TrainConfig:
    """The config, with the rate of a FastConformer under AdamW where it names none."""
    conformer = isinstance(model_config.encoder, FastConformerConfig)
    if conformer and config.optimizer == "adamw" and config.peak_lr is None:
        return replace(config, peak_lr=CONFORMER_PEAK_LR)
    return config


def _take_folder(folder: RunFolder, after: ExitStack) -> None:
    """Lock the folder until `after` ends, and make it ready."""
    out = str(folder.path)
    in_use = f"out: expected a folder of no other training that runs now, got {out!r}. Wait."
    after.enter_context(lock(folder.path, refused=in_use))
    folder.make()


def _begin(run: TrainingRun, folder: RunFolder, *, resume: bool) -> None:
    """Compile, and go back to the state of the folder, if any."""
    processes = run.processes
    what = {name: json.dumps(value) for name, value in run.settings.items()}
    processes.expect_same(what | {"torch": torch.__version__})
    if processes.local_rank == 0:  # the others read what it leaves on the disk
        compile_losses(run.model, run.config)
    state = folder.load_state() if resume else None
    if state is not None:
        run.restore(state, folder)
        if processes.first:
            print(f"resuming {folder.path} at step {run.step}", file=sys.stderr)
            folder.write_log(run.history)
    processes.expect_same({"out": f"a folder with step {run.step}"})
    if run.step == 0:
        processes.by_first(folder.clear)


def _check_arguments(
    train_set: Utterances,
    dev_set: Utterances | None,
    out: Path,
    config: TrainConfig | None,
    device: str,
) -> None:
    """ValueError for arguments of `train` that are of another type."""
    _expect_instance(train_set, Utterances, "train_set", "Utterances")
    _expect_instance(dev_set, Utterances | None, "dev_set", "Utterances or None")
    _expect_instance(out, str | Path, "out", "a path")
    _expect_instance(config, TrainConfig | None, "config", "TrainConfig or None")
    known = True
    try:
        torch.device(device)
    except (RuntimeError, TypeError):
        known = False
    expect(known, "device", "'cpu' or 'cuda'", repr(device))


def _expect_instance(value: object, kind: Any, name: str, wanted: str) -> None:
    expect(isinstance(value, kind), name, wanted, type(value).__name__)


def _expect_tokens(
    tokenizer: Tokenizer, train_set: Utterances, dev_set: Utterances | None, most: float
) -> None:
    """ValueError for a transcript without tokens, or with too many to train on: now, not when its
    turn comes.
    """
    for id_, text in zip(train_set.ids, train_set.texts, strict=True):
        count = len(tokenizer.encode(text))
        wanted = f"texts of at most {most} tokens, which the model's `most` has positions for"
        expect(count <= most, "train_set", wanted, f"{count} in {id_}")
    if dev_set is not None:
        for text in dev_set.texts:
            tokenizer.encode(text)


def _expect_lengths(train_set: Utterances, model_config: ModelConfig, config: TrainConfig) -> None:
    """ValueError for an utterance so short that batch norm could not train on it alone: now, not
    when its turn comes.
    """
    with torch.device("meta"):
        parts = make_model(model_config).modules()
    if not any(isinstance(part, nn.BatchNorm1d) for part in parts):
        return
    subsampling = model_config.encoder.subsampling
    speed, _ = config.augment.speed
    rate, _ = config.augment.rate
    for id_, waveform in zip(train_set.ids, train_set.waveforms, strict=True):
        frames = rate * config.features.frames(int(speed * len(waveform)))
        ms = 1000 * len(waveform) / config.features.rate_hz
        wanted = f"more than {subsampling} frames of features, augmented too, in each utterance"
        got = f"{frames:.1f} in {id_} of {ms:.0f} ms"
        remedy = "Leave it out: batch norm trains on two frames of the encoder at least."
        expect(frames > subsampling, "train_set", wanted, got, remedy)


def _identify(tokenizer: Tokenizer, train_set: Utterances) -> dict[str, str]:
    """Hashes of what a run was started with, beside its settings."""
    samples = [len(waveform) for waveform in train_set.waveforms]
    speech = [[*train_set.ids], [*train_set.texts], samples]
    return {
        "tokenizer": content_hash(dump_tokenizer(tokenizer)),
        "train_set": content_hash(speech),
    }
