"""The training loop: steps until the end, with the log, checkpoints and evaluation between them."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import torch

from asrkit.data import Utterances
from asrkit.models import Checkpoint, make_model, save_checkpoint
from asrkit.text import ErrorRate, Tokenizer
from asrkit.training.batches import Prepared
from asrkit.training.beside import Beside
from asrkit.training.evaluation import evaluate, score_weights
from asrkit.training.folder import RunFolder
from asrkit.training.state import TrainingRun

if TYPE_CHECKING:
    from tqdm import tqdm

OnStep = Callable[[list[dict[str, float]]], None]


class Loop:
    """Steps of a run until its end. The first process writes and scores; the others only step.

    Args:
        run: At its next step.
        tokenizer: Saved with the model.
        dev_set: Scored now and then; None for nothing.
        folder: Of the run.
    """

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
        self.saved_step = run.step
        self.evaluated_step = -1
        self.beside: Beside[ErrorRate] | None = None

    def run_to_end(
        self, steps: Iterator[list[Prepared]], *, progress: bool, on_step: OnStep | None
    ) -> ErrorRate | None:
        """Train until the run is over.

        Args:
            steps: Prepared batches from the run's next step on.
            progress: Whether to show a progress bar.
            on_step: Called after every step with the log so far; None for nobody.

        Returns:
            The last word error rate on the dev set; None without one, and on other processes.
        """
        run = self.run
        if not run.processes.first:
            while run.progress < 1:
                run.advance(steps)
            return None
        with self.folder.log.open("a") as log, _bar(progress) as bar, self._evaluating_beside():
            while run.progress < 1:
                line = run.advance(steps)
                log.write(json.dumps(line) + "\n")
                log.flush()
                self._show(bar, line)
                if on_step is not None:
                    on_step(run.history)
                self._save_and_evaluate_if_due()
            self._save_and_evaluate_the_end()
        return self.dev

    @contextmanager
    def _evaluating_beside(self) -> Iterator[None]:
        """A block that has a process which scores the dev set, if it is asked for."""
        config = self.run.config
        if config.evaluate == "in turn" or self.dev_set is None:
            yield
            return
        score = partial(score_weights, self.tokenizer, asdict(config.features), self.dev_set)
        with torch.random.fork_rng(devices=[]):
            model = make_model(self.run.model.config)
        with Beside(score, model) as self.beside:
            yield

    def _show(self, bar: "tqdm", line: dict[str, float]) -> None:
        error_rate = "-"
        if self.beside is not None:
            scores = self.beside.poll()
            if scores:
                self.dev = scores[max(scores)]
        if self.dev is not None:
            error_rate = f"{100 * self.dev.rate:.1f} %"
        loss = f"{line['loss']:.2f}"
        rtfx = f"{line['rtfx']:.0f}"
        bar.set_postfix(loss=loss, rtfx=rtfx, wer=error_rate, refresh=False)
        bar.update(100 * self.run.progress - bar.n)

    def _save_and_evaluate_if_due(self) -> None:
        run = self.run
        if run.progress >= 1:
            return  # the end does both
        if run.seconds - self.saved_at_s >= run.config.checkpoint_s:
            self._save()
        if run.seconds - self.evaluated_at_s >= run.config.evaluate_s:
            self._evaluate()

    def _save_and_evaluate_the_end(self) -> None:
        """Save and score the finished run, where that has not been done."""
        if self.saved_step != self.run.step:
            self._save()
        if self.evaluated_step != self.run.step:
            self._evaluate()
        if self.beside is not None:
            self.dev = self.beside.collect()[self.run.step]

    def _save(self) -> None:
        # the model first: a run that says it is finished has its model
        save_checkpoint(self.folder.model, self._checkpoint())
        self.run.save(self.folder)
        self.saved_at_s = self.run.seconds
        self.saved_step = self.run.step

    def _evaluate(self) -> None:
        if self.beside is not None:
            self.beside.submit(self.run.step, self.run.averaged_model())  # waits for the one before
        elif self.dev_set is not None:
            self.dev = evaluate(self._checkpoint(), self.dev_set).errors
        self.evaluated_at_s = self.run.seconds
        self.evaluated_step = self.run.step

    def _checkpoint(self) -> Checkpoint:
        run = self.run
        notes = {
            "step": run.step,
            "seconds": round(run.seconds, 1),
            "seed": run.config.seed,
        }
        features = asdict(run.config.features)
        return Checkpoint(run.averaged_model(), self.tokenizer, features, notes)


def _bar(progress: bool) -> "tqdm":
    """A progress bar of per cent, if it is asked for."""
    from tqdm import tqdm  # lazily, so that a machine without it can import asrkit

    bar_format = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
    bar = tqdm(total=100, disable=not progress, unit="%", bar_format=bar_format)
    if not sys.stderr.isatty():
        bar.mininterval = 10.0  # seconds: a log needs no line a step
    return bar
