"""The precision suite: word errors of a trained model in bfloat16 and int8."""

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asrkit.cpu import has_int8
from asrkit.files import home
from asrkit.models import Checkpoint, FastConformer, load_checkpoint
from asrkit.shapes import expect
from asrkit.text import normalize_text
from asrkit.transcribe.options import PipelineConfig
from asrkit.workbench.measure.publishing import error_rate
from asrkit.workbench.records import Measurement
from benchmarks.harness.cases import Case, Suite

COST = "precision-cost"
JOBS = 3000  # utterances of the test set, and of the development set
RESAMPLES = 1000


def suite(
    device: str,
    quick: bool,
    *,
    model: Path | None = None,
    kinds: Sequence[str] | None = None,
) -> Iterator[Case]:
    """Yield the case of a trained model.

    Args:
        device: "cpu".
        quick: few utterances.
        model: checkpoint; None: the one of notebook 00, if it exists.
        kinds: kinds of speech, as of `asrkit train --kinds`. None: all, or digits for the model of
            notebook 00.

    Raises:
        ValueError: the device is a GPU.
    """
    expect(device == "cpu", "device", "cpu", device)
    if model is None:
        model = home(make=False) / "demo" / "model.safetensors"
        kinds = kinds or ["digits"]
    if model.exists():
        yield Case(what=COST, measure=partial(costs, load_checkpoint(model), kinds, quick))
    else:
        logging.getLogger(__name__).warning("No trained model to measure: run notebook 00 first.")


def costs(
    checkpoint: Checkpoint, kinds: Sequence[str] | None, quick: bool
) -> Iterator[Measurement]:
    """Word error rates of a trained model in float32, bfloat16 and, if supported, int8, and the
    changes from float32. No voice and no text of four words or more is in the training set.

    Args:
        checkpoint: checkpoint of the model, in float32 on a CPU.
        kinds: kinds of speech; None: all.
        quick: few utterances.
    """
    from asrkit.data import Utterances, corpora
    from asrkit.training import evaluate

    jobs = 60 if quick else JOBS
    sets = corpora.spoken_commands(train=0, dev=jobs, test=jobs, kinds=kinds, progress=False)
    speech = Utterances.load([*sets["test"], *sets["dev"]], progress=False)
    params = {
        "weights": "trained",
        "kinds": [*(kinds or ["all"])],
        "utterances": len(speech),
        "threads": torch.get_num_threads(),
        "case": f"{len(speech):,} utterances",
    }
    plain: list[str] = []
    for precision in precisions_of(checkpoint):
        result = evaluate(checkpoint, speech, config=PipelineConfig(precision=precision))
        yield error_rate(COST, "wer", result.errors, impl=precision, params=params)
        texts = [result.texts[id_] for id_ in speech.ids]
        if plain:
            references = [normalize_text(text) for text in speech.texts]
            yield from changes(precision, references, plain, texts, params)
        else:
            plain = texts


def precisions_of(checkpoint: Checkpoint) -> list[Any]:
    """float32, bfloat16, and int8 if this CPU and the encoder support it."""
    if has_int8() and isinstance(checkpoint.model.encoder, FastConformer):
        return ["float32", "bfloat16", "int8"]
    logging.getLogger(__name__).warning(
        "int8 is left out: it needs a FastConformer, and an x86 CPU with AVX2."
    )
    return ["float32", "bfloat16"]


def changes(
    precision: str,
    references: Sequence[str],
    plain: Sequence[str],
    other: Sequence[str],
    params: dict[str, Any],
) -> Iterator[Measurement]:
    """The increase of the word error rate over float32, with a bootstrap interval over utterances,
    and the share of texts that differ.

    Args:
        precision: impl of the measurements.
        references: reference texts.
        plain: texts in float32.
        other: texts in this precision.
        params: params of the measurements.
    """
    words = np.array([len(text.split()) for text in references])
    more = _word_errors(references, other) - _word_errors(references, plain)
    draws = np.random.default_rng(0).integers(0, len(words), (RESAMPLES, len(words)))
    rates = more[draws].sum(1) / words[draws].sum(1)
    low, high = np.quantile(rates, [0.025, 0.975]).tolist()
    spread = {"low": low, "high": high, "units": int(words.sum())}
    rate = float(more.sum() / words.sum())
    yield Measurement(
        COST, "more_word_errors", "fraction", rate, impl=precision, params=params | spread
    )
    differ = sum(a != b for a, b in zip(plain, other, strict=True)) / len(plain)
    yield Measurement(COST, "other_texts", "fraction", differ, impl=precision, params=params)


def _word_errors(references: Sequence[str], texts: Sequence[str]) -> Any:
    """Word errors of each text (N,)."""
    import jiwer  # lazily, since a bare GPU machine lacks it

    rows = map(jiwer.process_words, references, texts)
    return np.array([row.substitutions + row.insertions + row.deletions for row in rows])


SUITE = Suite(name="precision", cases=suite, cpu_only=True)
