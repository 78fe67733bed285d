"""The case of the suite precision that `--model` asks for: the words that bfloat16 and int8 cost a
trained model, on synthetic speech in voices that no training set of asrkit has.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asrkit.cpu import has_int8
from asrkit.models import Checkpoint, FastConformer
from asrkit.text import normalize_text, wer
from asrkit.transcribe.options import PipelineConfig
from asrkit.transcribe.pipeline import Recognizer
from asrkit.workbench.bench.cases import Case
from asrkit.workbench.records import Measurement

if TYPE_CHECKING:  # speech needs packages that a bare GPU machine lacks
    from asrkit.data import Utterances

WHAT = "precision-cost"
JOBS = 3000  # utterances of the test set and of the development set, a third of each kind
QUICK_JOBS = 60
BATCH_S = 120.0  # audio of a batch at most
RESAMPLES = 1000
Text = tuple[str, str]  # of an utterance: the reference, and what was recognised


def case(checkpoint: Checkpoint, kinds: Sequence[str] | None, quick: bool) -> Case:
    """What bfloat16, and int8 where this CPU and the encoder have it, cost a trained model.

    Args:
        checkpoint: Of the model, float32 on a CPU.
        kinds: Of the speech, as `asrkit train --kinds` names them; None for all.
        quick: Little speech.
    """
    return Case(what=WHAT, measure=partial(measurements, checkpoint, kinds, quick))


def measurements(
    checkpoint: Checkpoint, kinds: Sequence[str] | None, quick: bool
) -> Iterator[Measurement]:
    """Word error rate of each precision; beside those other than float32, what changes by them.

    Args:
        checkpoint: Of the model, float32 on a CPU.
        kinds: Of the speech; None for all.
        quick: Little speech.
    """
    speech = unheard_speech(kinds, QUICK_JOBS if quick else JOBS)
    params: dict[str, Any] = {
        "dtype": "float32",
        "weights": "trained",
        "steps": checkpoint.notes.get("step"),
        "parameters": sum(weight.numel() for weight in checkpoint.model.parameters()),
        "kinds": [*(kinds or ["all"])],
        "utterances": len(speech),
        "speakers": len(set(speech.speakers)),
        "seconds": round(speech.total_seconds),
        "threads": torch.get_num_threads(),
        "case": f"{len(speech):,} utterances",
    }
    if quick:
        params["quick"] = True
    plain = recognised(checkpoint, speech, "float32")
    yield from _costs("float32", plain, plain, params)
    for precision in precisions_of(checkpoint):
        yield from _costs(precision, recognised(checkpoint, speech, precision), plain, params)


def unheard_speech(kinds: Sequence[str] | None, jobs: int) -> "Utterances":
    """Synthetic speech of the test and the development set; neither voices nor texts of four words
    and more are in the training set.

    Args:
        kinds: Of the speech; None for all.
        jobs: Utterances of each set, before those of other kinds are left out.
    """
    from asrkit.data import Utterances, corpora

    sets = corpora.spoken_commands(train=0, dev=jobs, test=jobs, kinds=kinds, progress=False)
    return Utterances.load([*sets["test"], *sets["dev"]], progress=False)


def precisions_of(checkpoint: Checkpoint) -> list[str]:
    """bfloat16, and int8 where this CPU has it and the encoder is a FastConformer.

    Args:
        checkpoint: Whose model is to be measured.
    """
    reasons = []
    if not isinstance(checkpoint.model.encoder, FastConformer):
        reasons.append("its encoder is no FastConformer")
    if not has_int8():
        reasons.append("this CPU has neither VNNI nor AMX")
    if reasons:
        logging.getLogger(__name__).warning("int8 is left out: %s.", " and ".join(reasons))
        return ["bfloat16"]
    return ["bfloat16", "int8"]


def recognised(checkpoint: Checkpoint, speech: "Utterances", precision: Any) -> list[Text]:
    """Normalised texts of all utterances, in batches sorted by length.

    Args:
        checkpoint: A trained model in float32 on a CPU.
        speech: With its transcripts.
        precision: As `PipelineConfig` names it.

    Raises:
        ValueError: The model or this CPU has not the precision.
    """
    from asrkit.data import batches

    recognizer = Recognizer.from_checkpoint(checkpoint, PipelineConfig(precision=precision))
    tokenizer = checkpoint.tokenizer
    references = dict(zip(speech.ids, speech.texts, strict=True))
    texts = []
    for batch in batches(speech, tokenizer, batch_seconds=BATCH_S, order="sorted"):
        found = recognizer(batch.waveforms, batch.sample_lengths).tokens()
        for id_, tokens in zip(batch.ids, found, strict=True):
            text = normalize_text(tokenizer.decode(tokens))
            texts.append((normalize_text(references[id_]), text))
    return texts


def _costs(
    precision: str, texts: Sequence[Text], plain: Sequence[Text], params: dict[str, Any]
) -> Iterator[Measurement]:
    """The measurements of a precision; float32 has nothing to be compared with."""
    fields: dict[str, Any] = {"impl": precision}
    errors = wer(*zip(*texts, strict=True), resamples=RESAMPLES)
    spread = {"low": errors.low, "high": errors.high, "units": errors.units}
    yield Measurement(WHAT, "wer", "fraction", errors.rate, params=params | spread, **fields)
    if precision == "float32":
        return
    counts = np.array(
        [
            (_errors(*one) - _errors(*before), len(one[0].split()))
            for one, before in zip(texts, plain, strict=True)
        ]
    )  # (N, 2): more errors, words
    rows = np.random.default_rng(0).integers(0, len(counts), (RESAMPLES, len(counts)))
    more, words = counts[rows].sum(1).T
    low, high = np.quantile(more / words, [0.025, 0.975]).tolist()
    value = float(counts[:, 0].sum() / counts[:, 1].sum())
    spread = {"low": low, "high": high, "units": errors.units}
    yield Measurement(WHAT, "more_word_errors", "fraction", value, params=params | spread, **fields)
    others = sum(one != before for one, before in zip(texts, plain, strict=True)) / len(texts)
    yield Measurement(WHAT, "other_texts", "fraction", others, params=params, **fields)


def _errors(reference: str, text: str) -> int:
    """Word errors of one utterance."""
    found = wer([reference], [text], resamples=1)
    return found.substitutions + found.insertions + found.deletions
