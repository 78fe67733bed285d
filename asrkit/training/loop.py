"""The training loop: steps until the end, with the log, checkpoints and evaluation between them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import torch

from asrkit.data import Utterances
from asrkit.models import Checkpoint, make_model, save_checkpoint
from asrkit.text import ErrorRate, Tokenizer
from asrkit.training.batches import LaneBatches
from asrkit.training.beside import Beside
from asrkit.training.evaluation import evaluate, score_weights
from asrkit.training.folder import RunFolder
from asrkit.training.processes import STEPPING
from asrkit.training.signals import StopWish
from asrkit.training.state import Agreement, TrainingRun
from asrkit.training.steplog import StepLog

if TYPE_CHECKING:
    from tqdm import tqdm

OnStep = Callable[[list[dict[str, float]]], None]


class Loop:
    """Steps of a run until its end or until a process wishes to stop.

    All processes make the same decisions, from what they have agreed on. Rank 0 writes.

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
        self.first_step = True
        self.log = StepLog(run)
        self.beside: Beside[ErrorRate] | None = None

    def run_to_end(
        self,
        steps: Iterator[LaneBatches],
        stop: StopWish,
        *,
        progress: bool,
        on_step: OnStep | None,
    ) -> ErrorRate | None:
        """Train until the run is over, or has been saved because a process wishes to stop.

        Args:
            steps: Prepared batches from the run's next step on.
            stop: The wish of this process.
            progress: Whether to show a progress bar.
            on_step: Called after every step with the log so far; None for nobody.

        Returns:
            The last word error rate on the dev set; None without one.

        Raises:
            RuntimeError: Another process could not make its batches.
        """
        from tqdm import tqdm  # lazily, so that a machine without it can import asrkit

        first = self.run.processes.first
        bar_format = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
        shown = progress and first
        bar = tqdm(total=100, disable=not shown, unit="%", bar_format=bar_format)
        if not sys.stderr.isatty():
            bar.mininterval = 10.0  # seconds: a log needs no line a step

        def tell(line: dict[str, float]) -> None:
            """Show the progress, and call `on_step`."""
            self._show(bar, line)
            if on_step is not None:
                on_step(self.run.history)

        log = self.folder.log.open("a") if first else nullcontext()
        with log as file, bar, self._evaluating_beside():
            self.log = StepLog(self.run, file, tell)
            try:
                self._step_until_end(steps, stop)
            except KeyboardInterrupt:  # a second Ctrl-C, or one in `on_step`
                if self.run.between_steps and not self.run.processes.grouped:
                    self._save()
                raise
        return self.dev

    @contextmanager
    def _evaluating_beside(self) -> Iterator[None]:
        """A block that has a process which scores the dev set, on rank 0 and if it is asked for."""
        config = self.run.config
        in_turn = config.evaluate == "in turn" or not self.run.processes.first
        if in_turn or self.dev_set is None:
            yield
            return
        score = partial(score_weights, self.tokenizer, asdict(config.features), self.dev_set)
        with torch.random.fork_rng(devices=[]):
            model = make_model(self.run.model.config)
        with Beside(score, model) as self.beside:
            yield

    def _step_until_end(
        self,
        steps: Iterator[LaneBatches],
        stop: StopWish,
    ) -> None:
        """Make the steps, and save and score the end; or save only, where somebody stops."""
        run = self.run
        while run.progress < 1:
            batches, agreed = self._agree(steps, stop)
            if agreed.stop:
                self._save()
                return
            if run.progress >= 1:
                break
            assert batches is not None  # else `_agree` has raised
            line = run.advance(batches.own, agreed)
            if self.first_step:
                run.processes.set_timeout(STEPPING)
                self.first_step = False
            self.log.add(line)
            self._save_and_evaluate_if_due()
        self._save_and_evaluate_the_end()

    def _agree(
        self, steps: Iterator[LaneBatches], stop: StopWish
    ) -> tuple[LaneBatches | None, Agreement]:
        """The next batches of this process, and what all have agreed on.

        An error in making the batches is raised when all know of it, and have saved.
        """
        run = self.run
        failure: Exception | None = None
        batches: LaneBatches | None = None
        with run.timed():
            try:
                batches = next(steps)
            except Exception as error:
                failure = error
        agreed = run.agree(batches, stop=bool(stop))
        if agreed.failed:
            if run.processes.grouped:
                self._save()
            raise failure or RuntimeError("Another process could not make its batches.")
        return batches, agreed

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
        run = self.run
        with run.processes.patience():
            # the model first: a run that says it is finished has its model
            checkpoint = self._checkpoint()
            if run.processes.first:
                save_checkpoint(self.folder.model, checkpoint)
            self._save_state()
            run.processes.wait()
        self.saved_at_s = run.seconds
        self.saved_step = run.step

    def _save_state(self) -> None:
        """Save what is needed to resume, behind the log of all steps in it."""
        self.log.write()
        self.run.save(self.folder)

    def _evaluate(self) -> None:
        run = self.run
        if run.config.evaluate == "beside" and self.dev_set is not None:
            with run.processes.patience():
                model = run.averaged_model()
                if self.beside is not None:
                    self.beside.submit(run.step, model)  # waits for the one before
                run.processes.wait()
        elif self.dev_set is not None:
            with run.processes.patience():
                self.dev, _, _ = evaluate(self._checkpoint(), self.dev_set, processes=run.processes)
        self.evaluated_at_s = run.seconds
        self.evaluated_step = run.step

    def _checkpoint(self) -> Checkpoint:
        run = self.run
        notes = {
            "step": run.step,
            "seconds": round(run.seconds, 1),
            "seed": run.config.seed,
        }
        features = asdict(run.config.features)
        return Checkpoint(run.averaged_model(), self.tokenizer, features, notes)
