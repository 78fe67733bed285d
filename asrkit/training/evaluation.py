"""Word error rate of a checkpoint, and evaluation in a process of its own beside training."""

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from multiprocessing.connection import Connection
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from asrkit.data import Utterances, batches
from asrkit.models import Checkpoint
from asrkit.models.presets import Model
from asrkit.rtfx import rtfx
from asrkit.shapes import expect, whole
from asrkit.text import ErrorRate, Tokenizer, normalize_text, wer
from asrkit.transcribe import PipelineConfig, Recognizer

Score = TypeVar("Score")


class Evaluation(NamedTuple):
    """What `evaluate` finds out about a checkpoint.

    Attributes:
        errors: Word error rate, case ignored.
        texts: Recognised text of every utterance by its id, in lower case.
        rtfx: Seconds of speech recognised per second of computing.
    """

    errors: ErrorRate
    texts: dict[str, str]
    rtfx: float


def evaluate(
    checkpoint: Checkpoint,
    utterances: Utterances,
    *,
    batch_seconds: float = 120.0,
    config: PipelineConfig | None = None,
) -> Evaluation:
    """Word error rate (case ignored), recognised text by utterance id, and RTFx.

    The recogniser is that of `asrkit transcribe`: on a CPU it optimizes a copy of the encoder, and
    the model stays trainable.

    Args:
        checkpoint: Model, tokenizer and features.
        utterances: Speech with its transcripts.
        batch_seconds: Audio of a batch at most, in seconds.
        config: Of the recogniser; None: the defaults.
    """
    tokenizer = checkpoint.tokenizer
    recognizer = Recognizer.from_checkpoint(checkpoint, config)
    texts = dict[str, str]()
    busy_s = 0.0
    for batch in batches(utterances, tokenizer, batch_seconds=batch_seconds, order="sorted"):
        start = time.perf_counter()
        tokens = recognizer(batch.waveforms, batch.sample_lengths).tokens()
        busy_s += time.perf_counter() - start
        for id_, row in zip(batch.ids, tokens, strict=True):
            texts[id_] = normalize_text(tokenizer.decode(row))
    references = [normalize_text(text) for text in utterances.texts]
    hypotheses = [texts[id_] for id_ in utterances.ids]
    return Evaluation(
        errors=wer(references, hypotheses),
        texts=texts,
        rtfx=rtfx(utterances.total_seconds, busy_s),
    )


def score_weights(
    tokenizer: Tokenizer,
    features: dict[str, Any],
    utterances: Utterances,
    model: Model,
) -> ErrorRate:
    """Word error rate of a model that is no checkpoint yet; `asrkit.training.Beside` calls it.

    Args:
        tokenizer: Of the model.
        features: Settings of its features, as a checkpoint holds them.
        utterances: Speech with its transcripts.
        model: In evaluation mode.
    """
    return evaluate(Checkpoint(model, tokenizer, features, {}), utterances).errors


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
        OSError: Shared memory is too small for the weights.
    """

    def __init__(
        self,
        evaluate: Callable[[Any], Score],
        model: nn.Module,
        *,
        every: int = 1,
        threads: int | None = None,
    ) -> None:
        expect(whole(every, 1), "every", "at least 1 step", repr(every))
        self.every = every
        self.scores = dict[int, Score]()
        self._waiting_for: int | None = None
        self._shared = deepcopy(model).cpu().eval().requires_grad_(False)
        try:
            self._shared.share_memory()
        except RuntimeError as error:  # with whatever errno holds: "Inappropriate ioctl for device"
            remedy = "Enlarge it (docker run --shm-size 2g), or evaluate in turn."
            said = f"evaluation: the weights do not fit into /dev/shm ({error}). {remedy}"
            raise OSError(said) from None
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, evaluate, self._shared, threads or torch.get_num_threads())
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def after_step(self, step: int, model: nn.Module) -> None:
        """Have the weights of `model` scored if `step` is a multiple of `every`; see `submit`."""
        if step % self.every == 0:
            self.submit(step, model)

    def submit(self, step: int, model: nn.Module) -> None:
        """Have the weights of `model` scored, once those before have been.

        Args:
            step: Number of the step, by which `scores` will name the score.
            model: As the one given at first, with the weights of now.

        Raises:
            RuntimeError: The evaluating process has ended, or `evaluate` raised.
        """
        self.collect()
        self._shared.load_state_dict(model.state_dict())
        self._waiting_for = step
        with suppress(OSError):  # `collect` finds out that the process has ended
            self._connection.send(step)

    def poll(self) -> dict[int, Score]:
        """The scores that have come back so far, by step, without waiting."""
        if self._connection.poll():
            return self.collect()
        return dict(self.scores)

    def collect(self) -> dict[int, Score]:
        """The scores of all steps so far; waits for the one that is being computed.

        Raises:
            RuntimeError: The evaluating process has ended, or `evaluate` raised.
        """
        step, self._waiting_for = self._waiting_for, None
        if step is None:
            return dict(self.scores)
        try:
            score, error = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(timeout=5)
            code = self._process.exitcode
            raise RuntimeError(
                f"evaluation: its process ended ({code}) before step {step} was scored."
            ) from None
        if error:
            raise RuntimeError(f"evaluation: step {step} failed:\n{error}")
        self.scores[step] = score
        return dict(self.scores)

    def __enter__(self) -> "Beside[Score]":
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, whatever it does."""
        self._connection.close()
        self._process.kill()
        self._process.join()


def _serve(
    connection: Connection, evaluate: Callable[[Any], object], model: nn.Module, threads: int
) -> None:
    """Score `model`, whose weights the parent writes, each time that a step number arrives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process
    torch.set_num_threads(threads)
    while True:
        try:
            connection.recv()
        except (EOFError, OSError):  # the parent has ended
            return
        try:
            answer = (evaluate(model), "")
        except Exception:
            answer = (None, traceback.format_exc())
        connection.send(answer)
