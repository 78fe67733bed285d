"""What a precision costs a trained model: words, and log-probabilities of its CTC head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from asrkit.data import Utterances, batches
from asrkit.models import Checkpoint
from asrkit.text import ErrorRate, normalize_text, wer
from asrkit.transcribe import PipelineConfig, Recognizer

RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class PrecisionCost:
    """A model in one precision beside float32, on the same utterances.

    Attributes:
        precision: As `PipelineConfig` names it.
        errors: Its word error rate with the 95 % interval.
        more: Word errors above those of float32, over reference words.
        low: Of the 95 % interval of `more`, by a bootstrap of utterances.
        high: Of the same interval.
        other_texts: Utterances whose text differs from that of float32.
        log_prob_error: Distance from float32, in nats, of the log-probability that the CTC head
            gives to float32's likeliest token: the mean over frames; None without a CTC head.
    """

    precision: str
    errors: ErrorRate
    more: float
    low: float
    high: float
    other_texts: int
    log_prob_error: float | None


@dataclass(frozen=True, kw_only=True)
class _Heard:
    """What a recogniser makes of utterances, sorted by length."""

    references: list[str]
    texts: list[str]
    log_probs: list[Tensor]  # of the CTC head, (T, V) float32 each; empty without one


def precision_costs(
    checkpoint: Checkpoint,
    utterances: Utterances,
    precisions: Sequence[str] = ("bfloat16", "int8"),
    *,
    batch_seconds: float = 120.0,
    seed: int = 0,
) -> list[PrecisionCost]:
    """The cost of float32, which has none, and of each precision.

    Args:
        checkpoint: A trained model in float32 on a CPU.
        utterances: Speech with its transcripts, in voices that the model was not trained on.
        precisions: As `PipelineConfig` names them.
        batch_seconds: Audio of a batch at most, in seconds.
        seed: Of the bootstrap.

    Raises:
        ValueError: The model or this CPU has not the precision.
    """
    plain = _hear(checkpoint, utterances, "float32", batch_seconds)
    found = [_cost("float32", plain, plain, seed)]
    for precision in precisions:
        heard = _hear(checkpoint, utterances, precision, batch_seconds)
        found.append(_cost(precision, heard, plain, seed))
    return found


def _hear(
    checkpoint: Checkpoint, utterances: Utterances, precision: str, batch_seconds: float
) -> _Heard:
    """What a recogniser in `precision` makes of the utterances, sorted by length."""
    named: Any = precision
    config = PipelineConfig(precision=named)
    recognizer = Recognizer.from_checkpoint(checkpoint, config)
    tokenizer = checkpoint.tokenizer
    texts_of = dict(zip(utterances.ids, utterances.texts, strict=True))
    heard = _Heard(references=[], texts=[], log_probs=[])
    for batch in batches(utterances, tokenizer, batch_seconds=batch_seconds, order="sorted"):
        features, frames = recognizer.features(batch.waveforms, batch.sample_lengths)
        encoded, ends, ctc = recognizer.encode_with_ctc(features, frames)
        for id_, tokens in zip(batch.ids, recognizer.decode(encoded, ends).tokens(), strict=True):
            heard.references.append(normalize_text(texts_of[id_]))
            heard.texts.append(normalize_text(tokenizer.decode(tokens)))
        if ctc is not None:
            heard.log_probs.extend(
                row[:end].clone() for row, end in zip(ctc, ends.tolist(), strict=True)
            )
    return heard


def _cost(precision: str, heard: _Heard, plain: _Heard, seed: int) -> PrecisionCost:
    """The cost of what was heard in `precision`, beside what float32 heard."""
    counted = [
        (_errors(reference, text), _errors(reference, before), len(reference.split()))
        for reference, text, before in zip(heard.references, heard.texts, plain.texts, strict=True)
    ]
    counts = np.array(counted)  # (N, 3): errors, errors of float32, words
    rows = np.random.default_rng(seed).integers(0, len(counts), (RESAMPLES, len(counts)))
    draws = counts[rows].sum(1)
    low, high = np.quantile((draws[:, 0] - draws[:, 1]) / draws[:, 2], [0.025, 0.975])
    errors, before, words = counts.sum(0)
    return PrecisionCost(
        precision=precision,
        errors=wer(heard.references, heard.texts, resamples=RESAMPLES, seed=seed),
        more=float((errors - before) / words),
        low=float(low),
        high=float(high),
        other_texts=sum(a != b for a, b in zip(heard.texts, plain.texts, strict=True)),
        log_prob_error=_log_prob_error(heard.log_probs, plain.log_probs),
    )


def _errors(reference: str, text: str) -> int:
    """Word errors of one utterance."""
    found = wer([reference], [text], resamples=1)
    return found.substitutions + found.insertions + found.deletions


def _log_prob_error(found: Sequence[Tensor], plain: Sequence[Tensor]) -> float | None:
    """Mean distance of the log-probabilities of the likeliest token of `plain`."""
    if not plain:
        return None
    total = 0.0
    frames = 0
    for scores, before in zip(found, plain, strict=True):
        best, tokens = before.max(-1)
        total += (scores.gather(-1, tokens[:, None])[:, 0] - best).abs().sum().item()
        frames += len(before)
    return total / frames
