"""Word error rate of a checkpoint, evaluation in a background process, and the best checkpoint."""

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from asrkit.data import Utterances, batches
from asrkit.files import content_hash
from asrkit.models import Checkpoint, load_checkpoint, save_checkpoint
from asrkit.models.presets import Model
from asrkit.rtfx import rtfx
from asrkit.text import ErrorRate, Tokenizer, normalize_text, wer
from asrkit.transcribe import PipelineConfig, Recognizer

Score = TypeVar("Score")
BATCH_SECONDS = 120.0  # most seconds of audio in a batch


class Evaluation(NamedTuple):
    """Result of `evaluate`.

    Attributes:
        errors: Word error rate, case ignored.
        texts: Recognised text of each utterance by its id, in lower case.
        rtfx: Seconds of speech recognised per second of computing.
    """

    errors: ErrorRate
    texts: dict[str, str]
    rtfx: float


def evaluate(
    checkpoint: Checkpoint,
    utterances: Utterances,
    *,
    config: PipelineConfig | None = None,
) -> Evaluation:
    """Word error rate (case ignored), recognised text by utterance id, and RTFx.

    The recogniser is that of `asrkit transcribe`. On a CPU it optimizes a copy of the encoder, so
    the model stays trainable.

    Args:
        checkpoint: Model, tokenizer and features.
        utterances: Speech with its transcripts.
        config: Settings of the recogniser; None takes the defaults.
    """
    tokenizer = checkpoint.tokenizer
    recognizer = Recognizer.from_checkpoint(checkpoint, config)
    texts = dict[str, str]()
    busy_s = 0.0
    for batch in batches(utterances, tokenizer, batch_seconds=BATCH_SECONDS):
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
    """Word error rate of a model during training; `BackgroundEvaluation` calls it.

    Args:
        tokenizer: Tokenizer of the model.
        features: Settings of its features, in the form that a checkpoint stores.
        utterances: Speech with its transcripts.
        model: A model in evaluation mode.
    """
    return evaluate(Checkpoint(model, tokenizer, features, {}), utterances).errors


class BackgroundEvaluation(Generic[Score]):
    """Scores a model by `evaluate(model)` in a separate process, during training.

    The weights are copied to memory that both processes share. Training waits for this copy only,
    and continues while it is scored. The copy is not overwritten before it has been scored, so
    another submission waits for that. The process computes with as many threads as torch has here,
    and its scores equal those of `evaluate(model)` bit for bit.

    Use it as a context manager, so that its process ends with the block.

    Args:
        evaluate: evaluate(model) -> score. It must be picklable, as a function of a module or a
            functools.partial of one is, since the process starts afresh ("spawn"). The score must
            be picklable too.
        model: A model of the same shape. Copies are scored on the CPU and in evaluation mode.

    Attributes:
        scores: Scores that have arrived, by step.
        submitted: The copy that was submitted last.

    Raises:
        OSError: Shared memory is too small for the weights.
    """

    def __init__(self, evaluate: Callable[[Any], Score], model: nn.Module) -> None:
        self.scores = dict[int, Score]()
        self._waiting_for: int | None = None
        self.submitted: Any = deepcopy(model).cpu().eval().requires_grad_(False)
        try:
            self.submitted.share_memory()
        except RuntimeError as error:  # with a stale errno: "Inappropriate ioctl for device"
            remedy = "Enlarge it (docker run --shm-size 2g), or evaluate in turn."
            message = f"evaluation: the weights do not fit into /dev/shm ({error}). {remedy}"
            raise OSError(message) from None
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, evaluate, self.submitted, torch.get_num_threads())
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def submit(self, step: int, model: nn.Module) -> None:
        """Submit the weights of `model` for scoring, once earlier ones have been scored.

        Args:
            step: Number of the step, the key of its score in `scores`.
            model: The model with its present weights.

        Raises:
            RuntimeError: The evaluating process has ended, or `evaluate` raised.
        """
        self.collect()
        self.submitted.load_state_dict(model.state_dict())
        self._waiting_for = step
        with suppress(OSError):  # `collect` reports a process that has ended
            self._connection.send(step)

    def poll(self) -> dict[int, Score]:
        """Scores that have arrived so far, by step, without waiting."""
        return self.collect() if self._connection.poll() else self.scores

    def collect(self) -> dict[int, Score]:
        """Scores of all submitted steps; waits for the one that is being computed.

        Raises:
            RuntimeError: The evaluating process has ended, or `evaluate` raised.
        """
        step, self._waiting_for = self._waiting_for, None
        if step is None:
            return self.scores
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
        return self.scores

    def __enter__(self) -> "BackgroundEvaluation[Score]":
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, even while it is scoring."""
        self._connection.close()
        self._process.kill()
        self._process.join()


def _serve(
    connection: Connection, evaluate: Callable[[Any], object], model: nn.Module, threads: int
) -> None:
    """Score `model`, whose weights the parent process writes, whenever a step number arrives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    torch.set_num_threads(threads)
    while True:
        try:
            connection.recv()
        except (EOFError, OSError):  # the parent process has ended
            return
        try:
            result = (evaluate(model), "")
        except Exception:
            result = (None, traceback.format_exc())
        connection.send(result)


class DevScores(ExitStack):
    """Scores checkpoints of a run on its dev set, and keeps the best.

    Use it as a context manager, so that a background process ends with the block.

    Args:
        dev_set: Speech with its transcripts; None scores nothing.
        file: Gets the checkpoint with the lowest word error rate, of equal ones the last, with the
            rate in its notes. If it exists and was scored on this dev set, only a checkpoint that
            is as good replaces it.
        checkpoint: A checkpoint of the run.
        background: Whether a separate process scores, during training.

    Attributes:
        last: The word error rate that arrived last; None before.
        best: The rate of the checkpoint in `file`; None if there is none.
    """

    def __init__(
        self, dev_set: Utterances | None, file: Path, checkpoint: Checkpoint, *, background: bool
    ) -> None:
        super().__init__()
        self.dev_set = dev_set
        self.file = file
        self.last: ErrorRate | None = None
        self.best: ErrorRate | None = None
        self._submitted: Checkpoint | None = None
        self._background: BackgroundEvaluation[ErrorRate] | None = None
        if dev_set is None:
            return
        self._hash = content_hash([[*dev_set.ids], [*dev_set.texts]])
        notes = load_checkpoint(file).notes if file.exists() else {}
        if notes.get("dev_set") == self._hash:
            self.best = ErrorRate(**notes["dev"])
        if background:
            score = partial(score_weights, checkpoint.tokenizer, checkpoint.features, dev_set)
            evaluation = BackgroundEvaluation(score, checkpoint.model)
            self._background = self.enter_context(evaluation)

    def submit(self, checkpoint: Checkpoint) -> None:
        """Score a checkpoint, whose notes have its `step`; in the background, after earlier ones.

        Raises:
            OSError: `file` cannot be written.
            RuntimeError: A background evaluation failed.
        """
        self.collect()
        if self._background is not None:
            self._background.submit(checkpoint.notes["step"], checkpoint.model)
            self._submitted = checkpoint._replace(model=self._background.submitted)
        elif self.dev_set is not None:
            self._keep(checkpoint, evaluate(checkpoint, self.dev_set).errors)

    def collect(self, *, wait: bool = True) -> None:
        """Take the score of the submitted checkpoint, if it has arrived or `wait` is true."""
        if self._background is not None and self._submitted is not None:
            scores = self._background.collect() if wait else self._background.poll()
            step = self._submitted.notes["step"]
            if step in scores:
                self._keep(self._submitted, scores[step])
                self._submitted = None

    def _keep(self, checkpoint: Checkpoint, errors: ErrorRate) -> None:
        """Note the score of a checkpoint, and write the checkpoint if it is the best."""
        self.last = errors
        if self.best is None or errors.rate <= self.best.rate:
            notes = checkpoint.notes | {"dev": asdict(errors), "dev_set": self._hash}
            save_checkpoint(self.file, checkpoint._replace(notes=notes))
            self.best = errors
