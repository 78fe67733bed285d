"""The case of the suite precision that `--model` asks for: the words that bfloat16 and int8 cost a
trained model, on synthetic speech in voices that no training set of asrkit has.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from asrkit.cpu import has_int8
from asrkit.models import Checkpoint, FastConformer
from asrkit.workbench.bench.cases import Case
from asrkit.workbench.records import Measurement
from asrkit.workbench.tables import aligned, paragraph, percent

if TYPE_CHECKING:  # speech needs packages that a bare GPU machine lacks
    from asrkit.data import Utterances
    from asrkit.workbench.precision_study import PrecisionCost

WHAT = "precision-cost"
JOBS = 3000  # utterances of the test set and of the development set, a third of each kind
QUICK_JOBS = 60


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
    from asrkit.workbench.precision_study import precision_costs

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
    }
    if quick:
        params["quick"] = True
    for cost in precision_costs(checkpoint, speech, precisions_of(checkpoint)):
        yield from _of_precision(cost, params)


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


def _of_precision(cost: "PrecisionCost", params: Mapping[str, Any]) -> Iterator[Measurement]:
    """The measurements of a precision; float32 has nothing to be compared with."""
    errors = cost.errors
    spread = {"low": errors.low, "high": errors.high, "units": errors.units}
    yield _measurement(cost, "wer", errors.rate, params, spread)
    if cost.precision == "float32":
        return
    more = {"low": cost.low, "high": cost.high, "units": errors.units}
    yield _measurement(cost, "more_word_errors", cost.more, params, more)
    others = cost.other_texts / params["utterances"]
    yield _measurement(cost, "other_texts", others, params)
    if cost.log_prob_error is not None:
        yield _measurement(cost, "log_prob_error", cost.log_prob_error, params, unit="nats")


def _measurement(
    cost: "PrecisionCost",
    metric: str,
    value: float,
    params: Mapping[str, Any],
    more: Mapping[str, Any] | None = None,
    *,
    unit: str = "fraction",
) -> Measurement:
    every = {**params, **(more or {})}
    return Measurement(WHAT, metric, unit, value, impl=cost.precision, params=every)


def table(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """A row for each precision: word errors, those above float32, other texts, distance.

    Args:
        records: Of `measurements`.
    """
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for record in records:
        rows.setdefault(record["impl"], {})[record["metric"]] = record
    if not rows:
        return []
    lines = [["precision", "word errors", "of words", "above float32", "other texts", "log-prob"]]
    for precision, found in rows.items():
        words = str(found["wer"]["params"]["units"])
        line = [precision, _rate(found["wer"]), words, "", "", ""]
        if "more_word_errors" in found:
            line[3] = _rate(found["more_word_errors"])
            line[4] = percent(found["other_texts"]["value"], 2)
        if "log_prob_error" in found:
            line[5] = f"{found['log_prob_error']['value']:.4f} nats"
        lines.append(line)
    note = (
        "[ ]: 95 % interval by a bootstrap of utterances. above float32: difference of the two "
        "rates, in percentage points. other texts: share of utterances. "
        "log-prob: mean distance of that of float32's likeliest token, of the CTC head."
    )
    return [*aligned(lines, right=[2]), *paragraph(note)]


def _rate(record: Mapping[str, Any]) -> str:
    """A share with its interval: "5.13 % [4.60 %, 5.71 %]"."""
    low = percent(record["params"]["low"], 2)
    high = percent(record["params"]["high"], 2)
    return f"{percent(record['value'], 2)} [{low}, {high}]"
