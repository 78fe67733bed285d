"""Training into a folder, in the order of time: `train` starts or resumes a run, `Run.take_step` is
forward, backward, step, and `Run.save` writes what a later start resumes from.

A run has one folder: `log.jsonl` (a line a step), `state.pt` (to resume), `model.safetensors` (EMA
weights, to use), with a dev set `best.safetensors` (those with its lowest word error rate), and
with `--memory` `buckets.json`. A step reads nothing back from the device, so its line is logged one
step later. Augmentation and dropout depend on the seed and the number of the batch alone. If
`steps` ends the run, so do batches and learning rate, and on a CPU a resumed run repeats the losses
of an uninterrupted one. If `seconds` ends it, rate and curriculum follow the clock of the first
process.
"""

import json
import math
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from asrkit.data import Batch, Buckets, Utterances
from asrkit.devices import CPU_FLOAT, read_later
from asrkit.files import atomic, content_hash, lock
from asrkit.models import (
    Checkpoint,
    FastConformerConfig,
    TransducerConfig,
    make_model,
    save_checkpoint,
)
from asrkit.models.checkpoints import config_to_dict
from asrkit.models.presets import ModelConfig
from asrkit.rtfx import rtfx
from asrkit.shapes import expect
from asrkit.text import ErrorRate, Tokenizer, dump_tokenizer
from asrkit.training.batch_norm import RunningStatistics
from asrkit.training.batches import Prepared, batch_seed, draw_planned, draw_supplied, prefetch
from asrkit.training.checks import check_arguments, check_speech, expect_a_step, limit_rate
from asrkit.training.config import TrainConfig, differences
from asrkit.training.distributed import Processes, data_parallel, gradient_sync, process_group
from asrkit.training.epochs import Epoch, planned_epochs
from asrkit.training.evaluation import DevScores
from asrkit.training.log import Line, OnStep, RunLog
from asrkit.training.objective import BatchLoss, expect_trainable, label_counts
from asrkit.training.optimizer import (
    Averages,
    backward,
    make_optimizer,
    make_scaler,
    set_rate,
    step_and_clear,
)
from asrkit.training.schedule import default_peak_lr, learning_rate, longest_utterance_s

HALF_WRITTEN = (
    ".log-*.jsonl",
    ".state-*.pt",
    ".model-*.safetensors",
    ".best-*.safetensors",
    ".buckets-*.json",
    ".tmp??????",
)
CHANGEABLE = ("threads", "evaluate")  # settings that a resumed run may change
FRESH = "Pass resume=False to start over (asrkit train --fresh)."


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The outcome of a run.

    Args:
        path: The exported model, with the averaged weights: with a dev set the best one, else the
            last.
        history: The log, a line a step: step, seconds, loss (nats per label), lr, gradient_norm,
            rtfx, joint ("full", "packed", "split" or "lean"; "" without a joint), frames (computed
            for all batches, padding included) and padding (their share that is padding). The
            gradient_norm of a skipped step is not finite. In float16 also overflows: steps so far
            that were skipped. With graphs also replays: batches
            since this start whose encoder ran as a CUDA graph.
        dev: Word error rate of that model on the dev set; None without a dev set.
        joint: The form of the joint in all steps, or "mixed"; None for a model without a joint, or
            if the log is missing.
    """

    path: Path
    history: list[Line]
    dev: ErrorRate | None
    joint: str | None

    @property
    def padding(self) -> float:
        """Share of the computed frames of all steps that is padding; NaN if the log is missing."""
        frames = sum(line["frames"] for line in self.history)
        return sum(line["frames"] * line["padding"] for line in self.history) / (frames or math.nan)


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
    """Train a model of any kind into the folder `out`, or resume the run in it.

    Args:
        model_config: The model to train. Its vocabulary must be the tokenizer's, followed by bos,
            eos and pad in an encoder-decoder model. Its kind decides the loss: see
            `asrkit.training.training_loss`.
        tokenizer: Encodes transcripts as labels, and is saved with the model.
        train_set: Speech to train on.
        dev_set: Speech that is scored every `config.evaluate_s` seconds and at the end, if any.
        out: Folder of the run: log.jsonl, state.pt, model.safetensors and best.safetensors.
        config: Settings of the run; None takes the defaults.
        device: Device to train on, "cpu" or "cuda".
        resume: Whether to resume the run in `out`; False removes its log and states.
        progress: Whether to show a progress bar.
        on_step: Called for every step with the log so far, e.g. to draw a live curve, usually
            while the next step is computed.
        batches: batches(k) yields batch k of the run and all later ones, without end. It replaces
            `config.batching` and the curriculum. A step takes `config.accumulate` batches for each
            process. A resumed run calls it with the number of the next batch.

    Returns:
        The path of the exported model, the log, and the word error rate on `dev_set`.

    Raises:
        ValueError: An argument of the wrong type, a transcript without tokens, or `out` holds a
            damaged run, a run with other settings, or one that another process is training.
        OSError: `out` cannot be written to.
    """
    config = config or TrainConfig()
    check_arguments(train_set, dev_set, config)
    expect_trainable(model_config, config, tokenizer.vocab_size)
    train_set, lengths, too_fast = limit_rate(train_set, tokenizer, config)
    unaligned = check_speech(model_config, config, tokenizer, train_set, dev_set)
    warnings = "\n".join(filter(None, (too_fast, unaligned)))
    config = _with_peak_lr(config, model_config)
    torch_device = torch.device(device)
    generators = [] if torch_device.type == "cpu" else [torch_device]
    with (
        process_group(torch_device) as processes,
        ExitStack() as cleanup,
        torch.enable_grad(),
        torch.random.fork_rng(generators),
    ):
        processes.in_first(lambda: _claim_folder(Path(out), cleanup))
        cleanup.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(max(1, config.threads // processes.on_machine))
        run = Run(model_config, tokenizer, train_set, Path(out), config, torch_device, processes)
        if resume:
            run.restore()
        state = {"step": run.step, "torch": torch.__version__}
        processes.expect_same(run.settings | state)
        if batches is None:
            epochs = planned_epochs(run, lengths, progress=progress)
            draw = draw_planned(train_set, tokenizer, epochs, run.places)
        else:
            draw = draw_supplied(batches(run.step * run.batches), run.places, run.batches)
        steps = prefetch(draw, run, torch_device)
        # created after all checks, and removed at the end: DDP that outlives its group may hang
        cleanup.callback(setattr, run, "loss", None)
        run.loss = data_parallel(run.loss, processes)
        if run.step == 0:
            processes.in_first(run.clear)
        if processes.first:
            if warnings:
                print(warnings, file=sys.stderr)
            run.to_end(steps, dev_set or None, progress=progress, on_step=on_step)
        else:
            while run.progress < 1:
                run.take_step(steps)
            run.complete_log()
    joint = _joint(run.history) if isinstance(model_config, TransducerConfig) else None
    path = run.best_file if dev_set else run.model_file
    return TrainResult(path=path, history=run.history, dev=run.dev, joint=joint)


def _with_peak_lr(config: TrainConfig, model_config: ModelConfig) -> TrainConfig:
    """`config`, with the default peak of its optimizer and this model if it has none."""
    if config.peak_lr is not None:
        return config
    conformer = isinstance(model_config.encoder, FastConformerConfig)
    return replace(config, peak_lr=default_peak_lr(config.optimizer, fastconformer=conformer))


def _joint(history: list[Line]) -> str | None:
    """The form of the joint in all steps, or "mixed"; None if the log is missing."""
    forms = {line["joint"] for line in history}
    return "mixed" if len(forms) > 1 else next(iter(forms), None)


def _claim_folder(out: Path, cleanup: ExitStack) -> None:
    """Lock the folder until `cleanup` closes, and remove half-written files of a killed process."""
    in_use = f"out: expected a folder that no other training uses, got {str(out)!r}. Wait."
    cleanup.enter_context(lock(out, message=in_use))
    for pattern in HALF_WRITTEN:
        for part in out.glob(pattern):
            part.unlink()


class Run:
    """One run: its model, averaged weights, optimizer, position and log, and their files.

    Args:
        model_config: The model to create, with weights drawn from `config.seed`.
        tokenizer: Saved with the model.
        train_set: Speech to train on. A run resumes only with the same speech.
        out: Folder of the run.
        config: Settings of the run, with a `peak_lr`.
        device: Device to train on.
        processes: Processes that train together.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        train_set: Utterances,
        out: Path,
        config: TrainConfig,
        device: torch.device,
        processes: Processes,
    ) -> None:
        torch.manual_seed(config.seed)
        self.tokenizer = tokenizer
        self.config = config
        self.processes = processes
        self.log_file = out / "log.jsonl"
        self.state_file = out / "state.pt"
        self.model_file = out / "model.safetensors"
        self.best_file = out / "best.safetensors"
        self.table_file = out / "buckets.json"
        self.batches = config.accumulate * processes.count  # of a step, over all processes
        self.places = range(processes.rank, self.batches, processes.count)  # of this process
        self.model = make_model(model_config).to(device).train()
        self.loss: Any = BatchLoss(self.model, config)
        self.graphs = self.loss.graphs
        self.optimizer = make_optimizer(self.model, config)
        self.scaler = make_scaler(config, device, processes.count)
        self.average = Averages(self.model)
        self.statistics = RunningStatistics(self.model)
        self.step = 0
        self.seconds = 0.0  # training time, by the clock of the first process
        self.compiled = False
        self.sizes: Buckets | None = None  # of the batches, by `memory` or `bucket_sizes`
        self.epochs: list[Epoch] = []  # that have begun; the thread that draws batches adds to them
        self.history: list[Line] = []
        # the last line, and a call that returns its loss and norm
        self.incomplete: tuple[Line, Callable[[], list[float]]] | None = None
        self.dev: ErrorRate | None = None
        samples = [len(waveform) for waveform in train_set.waveforms]
        settings = asdict(config) | {"accumulate": self.batches}
        settings |= {
            "model": config_to_dict(model_config),
            "tokenizer": content_hash(dump_tokenizer(tokenizer)),
            "train_set": content_hash([[*train_set.ids], [*train_set.texts], samples]),
        }
        for name in CHANGEABLE:
            del settings[name]
        self.settings = json.loads(json.dumps(settings))

    @property
    def progress(self) -> float:
        """Share of the run that is done, 0..1; the same on all processes."""
        return min(1.0, max(self.step / self.config.steps, self.seconds / self.config.seconds))

    def longest_s(self, step: int) -> float:
        """Longest utterance, in seconds, that the length curriculum admits at this step."""
        by_steps = step / self.config.steps
        by_time = self.seconds / self.config.seconds
        return longest_utterance_s(self.config, max(by_steps, by_time))

    def restore(self) -> None:
        """Load the saved state, if any, and drop log lines written after it.

        Raises:
            ValueError: The state is damaged, or belongs to a run with other settings.
        """
        if not self.state_file.exists():
            return
        state = _load_state(self.state_file)
        changed = differences(json.loads(state.get("config", "{}")), self.settings)
        wanted = f"the settings {self.state_file.parent} was started with"
        expect(not changed, "config", wanted, f"other {changed}", FRESH)
        self.model.load_state_dict(state["model"])
        self.average.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.epochs = state["epochs"]
        self.sizes = state["sizes"] and Buckets(**state["sizes"])
        self.step = state["step"]
        self.seconds = state["seconds"]
        text = self.log_file.read_text() if self.log_file.exists() else ""
        whole = [line for line in text.splitlines() if line.endswith("}")]  # a kill may cut one
        lines = map(json.loads, whole)
        self.history = [line for line in lines if line["step"] <= self.step]
        if self.processes.first:
            print(f"resuming {self.state_file.parent} at step {self.step}", file=sys.stderr)
            with atomic(self.log_file) as temporary:
                temporary.write_text("".join(json.dumps(line) + "\n" for line in self.history))

    def clear(self) -> None:
        """Remove state, log and best model of an earlier run, which a kill before this run's first
        checkpoint would otherwise resume; write the sizes of this run's batches.
        """
        for file in (self.best_file, self.state_file, self.log_file, self.table_file):
            file.unlink(missing_ok=True)
        if self.sizes is not None:
            self.sizes.save(self.table_file)

    def to_end(
        self,
        steps: Iterator[Sequence[Prepared]],
        dev_set: Utterances | None,
        *,
        progress: bool,
        on_step: OnStep | None,
    ) -> None:
        """Take all remaining steps, and log, save and score the run. Called in the first process.

        Args:
            steps: Prepared batches from the run's next step on.
            dev_set: Speech to score the model on, if any.
            progress: Whether to show a progress bar.
            on_step: Called after every step with the log so far.
        """
        config = self.config
        saved_s = self.seconds
        scored_s = self.seconds
        background = config.evaluate == "background"
        with (
            RunLog(self.log_file, self.history, progress=progress, on_step=on_step) as log,
            DevScores(dev_set, self.best_file, self.checkpoint(), background=background) as scores,
        ):
            while self.progress < 1:
                self.take_step(steps)
                log.write(self.progress, scores)
                over = self.progress >= 1
                saves = over or self.seconds - saved_s >= config.checkpoint_s
                evaluates = not over and self.seconds - scored_s >= config.evaluate_s
                if saves or evaluates:
                    self.complete_log()
                    log.write(self.progress, scores)
                if saves:
                    self.save()
                    saved_s = self.seconds
                if evaluates:
                    scores.submit(self.checkpoint())
                    scored_s = self.seconds
            expect_a_step(self.history)
            scores.submit(self.checkpoint())
            scores.collect()
            self.dev = scores.best

    def take_step(self, steps: Iterator[Sequence[Prepared]]) -> None:
        """Queue one optimizer step, and complete the log up to the step before.

        The loss is the mean over the labels of all batches of the step, utterances without an
        alignment left out. A mean of the batches' means would weigh the labels of small batches
        more. If loss or gradient is not finite on any process, the step is skipped: weights,
        averages, running statistics and the optimizer stay as they were, and the log shows the
        loss. That is decided on the device: the host reads nothing of this step. Its time is the
        host's, which on a GPU includes the wait for the step before. A process's first step
        compiles kernels; its time does not count as training.

        Args:
            steps: Yields the batches of this process for each step.
        """
        start = time.perf_counter()
        batches = next(steps)
        counts = torch.stack([label_counts(self.model.config, batch) for batch in batches])
        own = [(batch.speech_s, batch.useful, batch.computed) for batch in batches]
        own_sums = map(sum, zip(*own, strict=True))
        *labels, speech_s, useful, frames = self.processes.sum(*counts.sum(0).tolist(), *own_sums)
        step_labels = torch.tensor(labels, **CPU_FLOAT)
        rate = learning_rate(self.config, self.progress)
        set_rate(self.optimizer, rate)
        losses = []
        joint: Any = ""
        statistics = self.statistics.read()
        moved = torch.zeros_like(statistics)
        for place, batch in zip(self.places, batches, strict=True):
            last = place == self.places[-1]
            torch.manual_seed(batch_seed(self.config.seed, self.step * self.batches + place))
            with gradient_sync(self.loss, last):
                loss, joint = self.loss(batch, step_labels)
                after = self.statistics.read()
                loss = loss + 0 * after.sum()  # NaN where a variance overflows
                # DDP divides by the number of processes
                backward(self.model, loss, self.scaler, self.processes.count)
            moved += after
            if not last:
                self.statistics.write(statistics)  # each batch starts from those before the step
            losses.append(loss.detach().double())
        moved = self.processes.all_reduce(moved) / self.batches
        total = self.processes.all_reduce(torch.stack(losses).sum(0, keepdim=True))
        norm = step_and_clear(self.model, self.optimizer, self.config, self.scaler)
        applies = norm.isfinite()
        self.statistics.write(torch.where(applies, moved, statistics))
        # the smaller decay of early steps lets the initial weights fade
        decay = min(self.config.ema, (1 + self.step) / (10 + self.step))
        self.average.move(self.model, applies * (1 - decay))
        read = read_later(torch.cat((total, norm.double()[None])))
        self.complete_log()
        own_s = time.perf_counter() - start
        (taken_s,) = self.processes.sum(own_s if self.processes.first else 0.0)
        self.step += 1
        if self.compiled:
            self.seconds += taken_s
        self.compiled = True
        line = {
            "step": self.step,
            "seconds": self.seconds,
            "loss": math.nan,  # `complete_log` reads it
            "lr": rate,
            "gradient_norm": math.nan,
            "rtfx": rtfx(speech_s, taken_s),
            "joint": joint,
            "frames": int(frames),
            "padding": 1 - useful / frames,
        }
        if self.graphs is not None:
            line["replays"] = self.graphs.encoder.replayed
        self.incomplete = line, read

    def complete_log(self) -> None:
        """Append the line of the last step to `history`, once its loss and norm have arrived."""
        if self.incomplete is None:
            return
        line, read = self.incomplete
        self.incomplete = None
        line["loss"], line["gradient_norm"] = read()
        if self.scaler.is_enabled():
            before = self.history[-1]["overflows"] if self.history else 0
            line["overflows"] = before + (not math.isfinite(line["gradient_norm"]))
        self.history.append(line)

    def save(self) -> None:
        """Write the model, then the state to resume from, so that a finished run has its model.

        Raises:
            OSError: A file cannot be written.
        """
        save_checkpoint(self.model_file, self.checkpoint())
        state = {
            "model": self.model.state_dict(),
            "ema": self.average.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "sizes": self.sizes and self.sizes.columns(),
            "epochs": [epoch for epoch in self.epochs if epoch[0] <= self.step],
            "config": json.dumps(self.settings),
        }
        with atomic(self.state_file) as temporary:
            try:
                torch.save(state, temporary)
            except RuntimeError as error:  # torch counts bytes instead of naming the reason
                reason = f"Is the disk full? ({error})"
                raise OSError(f"{self.state_file} cannot be written. {reason}") from None

    def checkpoint(self) -> Checkpoint:
        """The model with averaged weights, to save or to score."""
        model: Any = deepcopy(self.average.module).eval().requires_grad_(False)
        notes = {
            "step": self.step,
            "seconds": round(self.seconds, 1),
            "seed": self.config.seed,
        }
        return Checkpoint(model, self.tokenizer, asdict(self.config.features), notes)


def _load_state(file: Path) -> dict[str, Any]:
    """The state that `Run.save` wrote. No code in the file is run."""
    state: Any = None
    try:
        with zipfile.ZipFile(file) as archive:
            damage = archive.testzip()  # torch.load ignores checksums
        if damage is None:
            state = torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # a truncated pickle may raise anything
        damage = f"{type(error).__name__}: {error}".splitlines()[0]
    got = f"{file}, which is damaged ({damage!s:.80})"
    expect(isinstance(state, dict), "state", "a whole file", got, FRESH)
    return state
