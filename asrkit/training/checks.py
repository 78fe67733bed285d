"""Checks before a run begins, of arguments and each utterance, and at its end."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from asrkit.data import Lengths, Utterances
from asrkit.models import AEDConfig, make_model
from asrkit.models.common import without_memory
from asrkit.models.presets import ModelConfig
from asrkit.shapes import count, expect
from asrkit.text import Tokenizer
from asrkit.training.config import TrainConfig
from asrkit.training.objective import alignable

MAX_NAMED = 5  # utterances named in a warning
TOO_FAST = "Left out for more than {} tokens a second"
TOO_SHORT = "Left out for too few frames for their labels"
TOO_SHORT_FOR_CTC = "Left out by the auxiliary CTC loss alone, for too few frames"
UNKNOWN = "Text that the tokenizer has no pieces for, which the model learns as unknown"
REQUIRED = {
    TOO_SHORT: "an utterance with enough frames for its labels",
    UNKNOWN: "text that the tokenizer has pieces for",
}
NEGLIGIBLE = 0.01  # share of utterances that the auxiliary CTC loss may omit without a warning
CHUNK = 1000  # utterances that are checked together


def check_arguments(train_set: object, dev_set: object, config: object) -> None:
    """ValueError for an argument of the wrong class."""
    expected = [("train_set", train_set, Utterances), ("config", config, TrainConfig)]
    if dev_set is not None:
        expected.append(("dev_set", dev_set, Utterances))
    for name, value, kind in expected:
        expect(isinstance(value, kind), name, kind.__name__, type(value).__name__)


def limit_rate(
    train_set: Utterances, tokenizer: Tokenizer, config: TrainConfig
) -> tuple[Utterances, Lengths, str]:
    """Utterances within `config.tokens_per_second`, their lengths, and a line that names others.

    Raises:
        ValueError: A transcript cannot be encoded, or no utterance is within the limit.
    """
    texts = ([text] for text in train_set.texts)
    lengths = Lengths.of_texts(zip(train_set.durations, texts, strict=True), tokens=tokenizer)
    most = config.tokens_per_second
    if most is None:
        return train_set, lengths, ""
    kept = lengths.tokens_per_second <= most
    remedy = f"The slowest has {lengths.tokens_per_second.min():.1f}."
    expect(bool(kept.any()), "tokens_per_second", "a rate that utterances have", most, remedy)
    left_out = train_set.select(np.flatnonzero(~kept).tolist()).ids
    line = _warning(TOO_FAST.format(f"{most:g}"), left_out, train_set)
    return train_set.select(np.flatnonzero(kept).tolist()), lengths.take(kept), line


def expect_a_step(history: Sequence[dict[str, Any]]) -> None:
    """ValueError if every step of a run was skipped: nothing was learnt."""
    if not history or any(math.isfinite(line["gradient_norm"]) for line in history):
        return
    if any(math.isfinite(line["loss"]) for line in history):  # float16's range was too small
        remedy = "Train for more steps, each of which lowers its scale, or in another precision."
        expect(False, "precision", "a gradient that fits into float16", "none", remedy)
    expect(False, "train_set", "a step with a finite loss and gradient", "none")


def check_speech(
    model_config: ModelConfig,
    config: TrainConfig,
    tokenizer: Tokenizer,
    train_set: Utterances,
    dev_set: Utterances | None,
) -> str:
    """Warnings that name utterances without an alignment, before augmentation, and utterances with
    text that is unknown to the tokenizer; "" if there are none.

    Raises:
        ValueError: A transcript cannot be encoded or has too many tokens, an utterance is too short
            for batch norm, or no utterance has an alignment or known text.
    """
    expect_frames = _batch_norm_check(model_config, config)
    left_out: dict[str, list[str]] = {TOO_SHORT: [], TOO_SHORT_FOR_CTC: [], UNKNOWN: []}
    for first in range(0, len(train_set), CHUNK):
        chunk = train_set.select(range(first, min(first + CHUNK, len(train_set))))
        rows = [tokenizer.encode(text) for text in chunk.texts]
        frames = [config.features.frames(len(waveform)) for waveform in chunk.waveforms]
        for id_, waveform, tokens in zip(chunk.ids, chunk.waveforms, rows, strict=True):
            expect_frames(id_, len(waveform))
            if isinstance(model_config, AEDConfig):
                most = model_config.most - 1  # bos has a position too
                wanted = f"texts of at most {most} tokens, as the model's `most` has positions for"
                got = f"{len(tokens)} in {id_}"
                expect(len(tokens) <= most, "train_set", wanted, got, "Cut it, or leave it out.")
            if getattr(tokenizer, "unknown", None) in tokens:
                left_out[UNKNOWN].append(id_)
        labels = [torch.tensor(row, dtype=torch.int64, device="cpu") for row in rows]
        sizes = torch.tensor([frames, [*map(len, rows)]], device="cpu")
        fits = alignable(model_config, sizes[0], pad_sequence(labels, batch_first=True), sizes[1])
        for id_, own, ctc in zip(chunk.ids, *fits.tolist(), strict=True):
            if not own:
                left_out[TOO_SHORT].append(id_)
            if not ctc and config.ctc_weight > 0:
                left_out[TOO_SHORT_FOR_CTC].append(id_)
    for text in [] if dev_set is None else dev_set.texts:
        tokenizer.encode(text)
    warnings = (_warning(reason, ids, train_set) for reason, ids in left_out.items())
    return "\n".join(filter(None, warnings))


def _batch_norm_check(model_config: ModelConfig, config: TrainConfig) -> Callable[[str, int], None]:
    """check(id, samples): ValueError for an utterance that is too short for batch norm."""
    least = 0
    with without_memory():
        if any(isinstance(part, nn.BatchNorm1d) for part in make_model(model_config).modules()):
            least = model_config.encoder.subsampling
    slowest = config.augment.speed[0]
    lowest_rate = config.augment.rate[0]

    def check(id_: str, samples: int) -> None:
        frames = lowest_rate * config.features.frames(int(slowest * samples))
        wanted = f"more than {least} frames of features in each utterance, also after augmentation"
        remedy = "Leave it out: batch norm needs at least two frames of the encoder."
        expect(frames > least, "train_set", wanted, f"{frames:.1f} in {id_}", remedy)

    return check


def _warning(reason: str, ids: Sequence[str], train_set: Utterances) -> str:
    """A line that names utterances; "" for none, ValueError if it concerns all of them."""
    if not ids or (reason == TOO_SHORT_FOR_CTC and len(ids) <= NEGLIGIBLE * len(train_set)):
        return ""
    if reason in REQUIRED:
        remedy = "Take an encoder with less subsampling, or a tokenizer made for these texts."
        expect(len(ids) < len(train_set), "train_set", REQUIRED[reason], "none", remedy)
    names = ", ".join(ids[:MAX_NAMED]) + ", ..." * (len(ids) > MAX_NAMED)
    return f"{reason}: {len(ids)} of {count(len(train_set), 'utterance')}, {names}"
