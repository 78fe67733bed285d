"""Word error rate of a checkpoint on a set of utterances."""

import time
from typing import Any, NamedTuple

from asrkit.data import Utterances, batches
from asrkit.models import Checkpoint
from asrkit.models.presets import Model
from asrkit.text import ErrorRate, Tokenizer, normalize_text, wer
from asrkit.transcribe import PipelineConfig, Recognizer


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
        rtfx=utterances.total_seconds / busy_s,
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
    return evaluate(Checkpoint(model, tokenizer, features, {}), utterances)[0]
