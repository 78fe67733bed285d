"""Evaluation beside training: a process of its own scores the weights while training goes on."""

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from copy import deepcopy
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from asrkit.shapes import expect, whole

Score = TypeVar("Score")


class Beside(Generic[Score]):
    """Scores a model every few steps in a process of its own, as `evaluate(model)` would in turn.

    The weights are copied to memory that both processes share, which takes the time of a copy:
    training goes on while they are scored. The copy stays as it is until it has been scored, so a
    step that is due earlier waits. With equal threads the scores are those of `evaluate(model)` bit
    for bit, since it is the same code on the same numbers.

    Use it as a context manager, so that its process ends with the block.

    Args:
        evaluate: evaluate(model) -> score. It has to be picklable, as a function of a module or a
            functools.partial of one is, for the process starts afresh ("spawn"). What it returns is
            sent back and has to be picklable too.
        model: Whose copy is scored, on the CPU and in evaluation mode.
        every: Steps between two evaluations.
        threads: Threads that the process computes with; None for as many as torch has here.

    Raises:
        ValueError: An argument of the wrong type or out of range.
    """

    def __init__(
        self,
        evaluate: Callable[[Any], Score],
        model: nn.Module,
        *,
        every: int = 1,
        threads: int | None = None,
    ) -> None:
        got = type(model).__name__
        expect(callable(evaluate), "evaluate", "a function of a model", type(evaluate).__name__)
        expect(isinstance(model, nn.Module), "model", "a torch.nn.Module", got)
        expect(whole(every, 1), "every", "at least 1 step", repr(every))
        threads = threads or torch.get_num_threads()
        expect(whole(threads, 1), "threads", "at least 1", repr(threads))
        self.every = every
        self.scores = dict[int, Score]()
        self._waiting_for: int | None = None
        self._shared = deepcopy(model).cpu().eval().requires_grad_(False)
        self._shared.share_memory()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, evaluate, self._shared, threads)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def after_step(self, step: int, model: nn.Module) -> None:
        """Have the weights of `model` scored if `step` is a multiple of `every`.

        Args:
            step: Number of the step, by which `scores` will name the score.
            model: As the one given at first, with the weights of now.

        Raises:
            RuntimeError: The evaluating process has ended, or `evaluate` raised.
        """
        if step % self.every == 0:
            self.submit(step, model)

    def submit(self, step: int, model: nn.Module) -> None:
        """Have the weights of `model` scored as those of `step`; see `after_step`."""
        self.collect()  # what is being scored must not change
        with torch.no_grad():
            pairs = zip(
                self._shared.state_dict().values(), model.state_dict().values(), strict=True
            )
            for shared, value in pairs:
                shared.copy_(value)
        try:
            self._connection.send(step)
        except OSError:
            raise self._ended(step) from None
        self._waiting_for = step

    def poll(self) -> dict[int, Score]:
        """The scores that have come back so far, by step, without waiting."""
        if self._waiting_for is not None and self._connection.poll():
            self._receive(self._waiting_for)
        return dict(self.scores)

    def collect(self) -> dict[int, Score]:
        """The scores of all steps so far; waits for the one that is being computed.

        Raises:
            RuntimeError: The evaluating process has ended, or `evaluate` raised.
        """
        if self._waiting_for is not None:
            self._receive(self._waiting_for)
        return dict(self.scores)

    def close(self) -> None:
        """End the process, whatever it does."""
        self._connection.close()
        self._process.kill()
        self._process.join()

    def __enter__(self) -> "Beside[Score]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _receive(self, step: int) -> None:
        """Take the answer for `step`, or wait for it."""
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise self._ended(step) from None
        self._waiting_for = None
        if answer.error:
            raise RuntimeError(f"evaluation: step {step} failed:\n{answer.error}")
        self.scores[step] = answer.score

    def _ended(self, step: int) -> RuntimeError:
        """What to raise where the process is no more."""
        self._process.join(timeout=5)
        code = self._process.exitcode
        return RuntimeError(
            f"evaluation: its process ended ({code}) before step {step} was scored."
        )


class _Answer(NamedTuple):
    """Of the evaluating process: a score, or what `evaluate` raised, as text."""

    score: Any
    error: str


def _serve(
    connection: Connection, evaluate: Callable[[Any], object], model: nn.Module, threads: int
) -> None:
    """Score `model`, whose weights the parent writes, each time that a step number arrives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process
    torch.set_num_threads(threads)
    while True:
        try:
            connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = _Answer(evaluate(model), "")
        except Exception:
            answer = _Answer(None, traceback.format_exc())
        connection.send(answer)
