"""Word error rate of a checkpoint on a set of utterances."""

import time

from asrkit.data import Utterances, batches
from asrkit.models import Checkpoint
from asrkit.text import ErrorRate, normalize_text, wer
from asrkit.transcribe import recognize


def evaluate(
    checkpoint: Checkpoint, utterances: Utterances, *, batch_seconds: float = 120.0
) -> tuple[ErrorRate, dict[str, str], float]:
    """Word error rate (case ignored), recognised text by utterance id, and RTFx.

    The recogniser has the default `PipelineConfig`, which leaves the model trainable; RTFx is not
    that of `asrkit transcribe`, which optimizes the encoder on a CPU.

    Args:
        checkpoint: Model, tokenizer and features.
        utterances: Speech with its transcripts.
        batch_seconds: Audio of a batch at most, in seconds.

    Returns:
        The error rate, the lower-case text of every utterance, and seconds of speech recognised
        per second of computing.
    """
    tokenizer = checkpoint.tokenizer
    texts = dict[str, str]()
    references = dict[str, str]()
    busy_s = 0.0
    for batch in batches(utterances, tokenizer, batch_seconds=batch_seconds, order="sorted"):
        start = time.perf_counter()
        tokens = recognize(checkpoint, batch.waveforms, batch.sample_lengths).tokens()
        busy_s += time.perf_counter() - start
        for id_, row, reference in zip(batch.ids, tokens, batch.texts, strict=True):
            texts[id_] = normalize_text(tokenizer.decode(row))
            references[id_] = normalize_text(reference)
    hypotheses = [texts[id_] for id_ in references]
    rate = wer(list(references.values()), hypotheses)
    return rate, texts, utterances.total_seconds / busy_s
