"""The training loop: steps, the log, checkpoints that survive kill -9, and evaluation.

A run lives in one folder: `log.jsonl` (a line a step), `state.pt` (to resume), `model.safetensors`
(EMA weights, to use). Augmentation and dropout follow from (seed, step). Where `steps` ends the
run, so do batches and rate, and on a CPU a resumed run repeats the losses of an unbroken one; where
`seconds` does, rate and curriculum follow the clock.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from asrkit.data import Batch, Utterances, training_stream
from asrkit.files import content_hash, lock
from asrkit.models import Checkpoint, TransducerConfig, save_checkpoint
from asrkit.shapes import expect
from asrkit.text import ErrorRate, Tokenizer, dump_tokenizer
from asrkit.training.batches import Prepared, prefetch
from asrkit.training.config import TrainConfig
from asrkit.training.evaluation import evaluate
from asrkit.training.objective import compile_losses
from asrkit.training.state import TrainingRun

if TYPE_CHECKING:
    from tqdm import tqdm

OnStep = Callable[[list[dict[str, float]]], None]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run leaves.

    Args:
        path: The exported model, with the averaged weights.
        history: The log, a line a step: step, seconds, loss (nats per label), lr, gradient_norm,
            rtfx, and lean (whether the lean loss computed it).
        dev: Word error rate on the dev set; None if there was none.
    """

    path: Path
    history: list[dict[str, float]]
    dev: ErrorRate | None

    @property
    def joint(self) -> Literal["full", "lean", "mixed"]:
        """What the steps took: the full joint, the lean loss, or each for some of the batches."""
        # a log from before the lean loss was used does not name it
        lean_steps = sum(bool(line.get("lean", False)) for line in self.history)
        if lean_steps == 0:
            return "full"
        if lean_steps == len(self.history):
            return "lean"
        return "mixed"


@dataclass(frozen=True)
class RunFolder:
    """The files of a run."""

    path: Path

    @property
    def log(self) -> Path:
        """A JSON line for each step."""
        return self.path / "log.jsonl"

    @property
    def state(self) -> Path:
        """What is needed to resume."""
        return self.path / "state.pt"

    @property
    def model(self) -> Path:
        """The exported model."""
        return self.path / "model.safetensors"

    def make(self) -> None:
        """Create the folder, and remove what a kill in mid-write left in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        for file in (self.log, self.state, self.model):
            for part in self.path.glob(f".{file.stem}-*{file.suffix}"):
                part.unlink()

    def clear(self) -> None:
        """Remove log and state. Without that a kill before the first checkpoint of a new run would
        resume the old one.
        """
        self.state.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)


def train(  # noqa: PLR0913 - model, data and folder; the rest is keyword-only with defaults
    model_config: TransducerConfig,
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
    """Train a transducer into the folder `out`, or resume the run that it holds.

    Args:
        model_config: The model to train; its vocabulary has to be the tokenizer's.
        tokenizer: Makes labels of transcripts, and is saved with the model.
        train_set: Speech to train on.
        dev_set: Scored every `config.evaluate_s` seconds and at the end; None skips it.
        out: Folder of the run: log.jsonl, state.pt and model.safetensors.
        config: How to train; the defaults of TrainConfig if None.
        device: Where to train, "cpu" or "cuda".
        resume: Whether to go on with the run in `out`; False removes it.
        progress: Whether to show a progress bar.
        on_step: Called after every step with the log so far, e.g. to draw a live curve.
        batches: batches(k) yields the batches of step k and after, without end, in place of
            `training_stream` and its curriculum. A resumed run asks for those that are left.

    Returns:
        The path of the exported model, the log, and the last word error rate on `dev_set`.

    Raises:
        ValueError: An argument of the wrong type, a transcript without tokens, or `out` holds a
            damaged run, one with other settings, or one that another process trains now.
        OSError: `out` cannot be written to.
    """
    _check_arguments(model_config, train_set, dev_set, out, config, device)
    config = config or TrainConfig()
    dev_set = dev_set or None  # an empty one is none
    wanted = str(tokenizer.vocab_size)
    fits = tokenizer.vocab_size == model_config.vocab_size
    expect(fits, "vocab_size", wanted, model_config.vocab_size)
    _expect_tokens(tokenizer, train_set, dev_set)
    folder = RunFolder(Path(out))
    forked = [] if device == "cpu" else [device]
    in_use = f"out: expected a folder of no other training that runs now, got {str(out)!r}. Wait."
    with (
        lock(folder.path, refused=in_use),
        torch.enable_grad(),
        torch.random.fork_rng(forked),
        ExitStack() as after,
    ):
        folder.make()
        after.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(config.threads)
        run = TrainingRun(
            model_config, config, torch.device(device), _identify(tokenizer, train_set)
        )
        if resume and folder.state.exists():
            run.restore(folder.state, folder.log)
            print(f"resuming {out} at step {run.step}", file=sys.stderr)
        if run.step == 0:
            folder.clear()
        stream = batches(run.step) if batches else _default_stream(run, train_set, tokenizer)
        compile_losses(run.model, config)

        def save_if_interrupted(kind: type[BaseException] | None, *_: object) -> None:
            if kind is KeyboardInterrupt:  # Ctrl-C loses no more than a step
                run.save(folder.state)

        after.push(save_if_interrupted)
        loop = _Loop(run, tokenizer, dev_set, folder)
        dev = loop.run_to_end(prefetch(stream, config, run.step), progress, on_step)
    return TrainResult(path=folder.model, history=run.history, dev=dev)


def _check_arguments(
    model_config: TransducerConfig,
    train_set: Utterances,
    dev_set: Utterances | None,
    out: Path,
    config: TrainConfig | None,
    device: str,
) -> None:
    """ValueError for arguments of `train` that are of another type."""
    _expect_instance(model_config, TransducerConfig, "model_config", "TransducerConfig")
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


def _expect_tokens(tokenizer: Tokenizer, train_set: Utterances, dev_set: Utterances | None) -> None:
    """ValueError for a transcript without tokens: now, not when its turn comes."""
    texts = [*train_set.texts]
    if dev_set is not None:
        texts += dev_set.texts
    for text in texts:
        tokenizer.encode(text)


def _default_stream(
    run: TrainingRun, train_set: Utterances, tokenizer: Tokenizer
) -> Iterator[Batch]:
    """Shuffled batches from the run's next step on, under its length curriculum."""
    return training_stream(
        train_set,
        tokenizer,
        batch_seconds=run.config.batch_seconds,
        seed=run.config.seed,
        start_step=run.step,
        max_seconds=run.longest_s,
    )


def _identify(tokenizer: Tokenizer, train_set: Utterances) -> dict[str, str]:
    """Hashes of what a run was started with, beside its settings."""
    samples = [len(waveform) for waveform in train_set.waveforms]
    speech = [[*train_set.ids], [*train_set.texts], samples]
    return {
        "tokenizer": content_hash(dump_tokenizer(tokenizer)),
        "train_set": content_hash(speech),
    }


class _Loop:
    """Steps of a run until its end, with the log, checkpoints and evaluation between them."""

    def __init__(
        self,
        run: TrainingRun,
        tokenizer: Tokenizer,
        dev_set: Utterances | None,
        folder: RunFolder,
    ) -> None:
        self.run = run
        self.tokenizer = tokenizer
        self.dev_set = dev_set
        self.folder = folder
        self.dev: ErrorRate | None = None
        self.saved_at_s = run.seconds
        self.evaluated_at_s = run.seconds

    def run_to_end(
        self, stream: Iterator[Prepared], progress: bool, on_step: OnStep | None
    ) -> ErrorRate | None:
        """Train until the run is over.

        Args:
            stream: Prepared batches from the run's next step on.
            progress: Whether to show a progress bar.
            on_step: Called after every step with the log so far; None for nobody.

        Returns:
            The last word error rate on the dev set; None without one.
        """
        from tqdm import tqdm  # lazily, so that a machine without it can import asrkit

        bar_format = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
        bar = tqdm(total=100, disable=not progress, unit="%", bar_format=bar_format)
        if not sys.stderr.isatty():
            bar.mininterval = 10.0  # seconds: a log needs no line a step
        with self.folder.log.open("a") as log, bar:
            while self.run.progress < 1:
                line = self.run.advance(stream)
                self.run.history.append(line)
                log.write(json.dumps(line) + "\n")
                log.flush()
                self._show(bar, line)
                if on_step is not None:
                    on_step(self.run.history)
                self._save_if_due()
                self._evaluate_if_due()
        if self.dev is None:  # a finished run, resumed: nothing left to do but to score it
            self._evaluate()
        return self.dev

    def _show(self, bar: "tqdm", line: dict[str, float]) -> None:
        error_rate = "-"
        if self.dev is not None:
            error_rate = f"{self.dev.rate:.1%}"
        loss = f"{line['loss']:.2f}"
        rtfx = f"{line['rtfx']:.0f}"
        bar.set_postfix(loss=loss, rtfx=rtfx, wer=error_rate, refresh=False)
        bar.update(100 * self.run.progress - bar.n)

    def _checkpoint(self) -> Checkpoint:
        run = self.run
        notes = {
            "step": run.step,
            "seconds": round(run.seconds, 1),
            "seed": run.config.seed,
        }
        return Checkpoint(run.ema, self.tokenizer, asdict(run.config.features), notes)

    def _is_due(self, last_s: float, every_s: float) -> bool:
        return self.run.progress >= 1 or self.run.seconds - last_s >= every_s

    def _save_if_due(self) -> None:
        if self._is_due(self.saved_at_s, self.run.config.checkpoint_s):
            # the model first: a run that says it is finished has its model
            save_checkpoint(self.folder.model, self._checkpoint())
            self.run.save(self.folder.state)
            self.saved_at_s = self.run.seconds

    def _evaluate_if_due(self) -> None:
        if self._is_due(self.evaluated_at_s, self.run.config.evaluate_s):
            self._evaluate()
            self.evaluated_at_s = self.run.seconds

    def _evaluate(self) -> None:
        if self.dev_set is not None:
            self.dev = evaluate(self._checkpoint(), self.dev_set)[0]
