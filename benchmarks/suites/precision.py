"""What half precision does to a model's output; what autocast has to cast; and the words that
bfloat16 and int8 cost a trained model, which is what the suite measures.
"""

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
JOBS = 3000  # utterances of the test set and of the development set, a third of each kind
RESAMPLES = 1000


def suite(
    device: str,
    quick: bool,
    *,
    model: Path | None = None,
    kinds: Sequence[str] | None = None,
) -> Iterator[Case]:
    """Yield what precisions cost a trained model.

    Args:
        device: "cpu".
        quick: few utterances.
        model: the checkpoint; None for that of notebook 00, where there is one.
        kinds: of the speech that it reads, as `asrkit train --kinds` names them; None for all, and
            for the digits that the model of notebook 00 was trained on.

    Raises:
        ValueError: a GPU.
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
    """Word error rate of a trained model in float32, bfloat16 and, where this CPU and the encoder
    have it, int8; beside the last two, what changes by them. Neither voices nor texts of four
    words and more are in the training set.

    Args:
        checkpoint: of the model, float32 on a CPU.
        kinds: of the speech; None for all.
        quick: little speech.
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
        found = evaluate(checkpoint, speech, config=PipelineConfig(precision=precision))
        yield error_rate(COST, "wer", found.errors, impl=precision, params=params)
        texts = [found.texts[id_] for id_ in speech.ids]
        if plain:
            references = [normalize_text(text) for text in speech.texts]
            yield from changes(precision, references, plain, texts, params)
        else:
            plain = texts


def precisions_of(checkpoint: Checkpoint) -> list[Any]:
    """float32, bfloat16, and int8 where this CPU has it and the encoder is a FastConformer."""
    if has_int8() and isinstance(checkpoint.model.encoder, FastConformer):
        return ["float32", "bfloat16", "int8"]
    logging.getLogger(__name__).warning(
        "int8 is left out: it needs a FastConformer, and a CPU with VNNI or AMX."
    )
    return ["float32", "bfloat16"]


def changes(
    precision: str,
    references: Sequence[str],
    plain: Sequence[str],
    other: Sequence[str],
    params: dict[str, Any],
) -> Iterator[Measurement]:
    """How many more word errors the texts of a precision have than those of float32, with an
    interval by a bootstrap of utterances, and how many texts differ.

    Args:
        precision: of the texts.
        references: what was said.
        plain: texts of float32.
        other: texts of the precision.
        params: of the measurements.
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
    import jiwer  # lazily, as a bare GPU machine has none

    found = map(jiwer.process_words, references, texts)
    return np.array([one.substitutions + one.insertions + one.deletions for one in found])


SUITE = Suite(name="precision", cases=suite, cpu_only=True)
