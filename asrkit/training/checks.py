"""What is looked at before a run begins: its arguments, and each utterance."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from asrkit.data import Utterances
from asrkit.models import AEDConfig, make_model
from asrkit.models.common import without_memory
from asrkit.models.presets import ModelConfig
from asrkit.shapes import count, expect
from asrkit.text import Tokenizer
from asrkit.training.config import TrainConfig
from asrkit.training.objective import alignable

MOST_NAMED = 5  # utterances in a line
TOO_FEW = "Left out for too few frames for their labels"
TOO_FEW_BESIDE = "Left out by the auxiliary CTC loss alone, for too few frames"
UNKNOWN = "Text that the tokenizer has no pieces for, which the model learns as unknown"
REQUIRED = {
    TOO_FEW: "an utterance with frames enough for its labels",
    UNKNOWN: "text that the tokenizer has pieces for",
}
FEW = 0.01  # share without the auxiliary CTC loss that is worth no line: other losses take them
CHUNK = 1000  # utterances that are looked at together


def check_arguments(train_set: object, dev_set: object, config: object) -> None:
    """ValueError for an argument of another class."""
    expected = [("train_set", train_set, Utterances), ("config", config, TrainConfig)]
    if dev_set is not None:
        expected.append(("dev_set", dev_set, Utterances))
    for name, value, kind in expected:
        expect(isinstance(value, kind), name, kind.__name__, type(value).__name__)


def check_speech(
    model_config: ModelConfig,
    config: TrainConfig,
    tokenizer: Tokenizer,
    train_set: Utterances,
    dev_set: Utterances | None,
) -> str:
    """Lines that name utterances without an alignment, as long as they are now, and those with text
    that is unknown to the tokenizer; "" if there are none.

    Raises:
        ValueError: A transcript without tokens or with too many, an utterance that batch norm could
            not train on alone, or no utterance that has an alignment or known text: now, not when
            its turn comes.
    """
    expect_frames = _batch_norm_check(model_config, config)
    left_out: dict[str, list[str]] = {TOO_FEW: [], TOO_FEW_BESIDE: [], UNKNOWN: []}
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
                left_out[TOO_FEW].append(id_)
            if not ctc and config.ctc_weight > 0:
                left_out[TOO_FEW_BESIDE].append(id_)
    for text in [] if dev_set is None else dev_set.texts:
        tokenizer.encode(text)
    return "\n".join(filter(None, (_line(*one, train_set) for one in left_out.items())))


def _batch_norm_check(model_config: ModelConfig, config: TrainConfig) -> Callable[[str, int], None]:
    """check(id, samples): ValueError for an utterance that batch norm could not train on alone."""
    least = 0
    with without_memory():
        if any(isinstance(part, nn.BatchNorm1d) for part in make_model(model_config).modules()):
            least = model_config.encoder.subsampling
    slowest = config.augment.speed[0]
    lowest_rate = config.augment.rate[0]

    def check(id_: str, samples: int) -> None:
        frames = lowest_rate * config.features.frames(int(slowest * samples))
        wanted = f"more than {least} frames of features, augmented too, in each utterance"
        remedy = "Leave it out: batch norm trains on two frames of the encoder at least."
        expect(frames > least, "train_set", wanted, f"{frames:.1f} in {id_}", remedy)

    return check


def _line(what: str, ids: Sequence[str], train_set: Utterances) -> str:
    """A line about some utterances, "" about none; ValueError where it is about all."""
    if not ids or (what == TOO_FEW_BESIDE and len(ids) <= FEW * len(train_set)):
        return ""
    if what != TOO_FEW_BESIDE:
        remedy = "Take an encoder with less subsampling, or a tokenizer made for these texts."
        expect(len(ids) < len(train_set), "train_set", REQUIRED[what], "none", remedy)
    some = ", ".join(ids[:MOST_NAMED]) + ", ..." * (len(ids) > MOST_NAMED)
    return f"{what}: {len(ids)} of {count(len(train_set), 'utterance')}, {some}"
