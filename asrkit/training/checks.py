"""What is looked at before a run begins: its arguments, and each utterance."""

import torch
from torch import nn

from asrkit.data import Utterances
from asrkit.models import AEDConfig, make_model
from asrkit.models.presets import ModelConfig
from asrkit.shapes import count, expect
from asrkit.text import Tokenizer
from asrkit.training.config import TrainConfig
from asrkit.training.objective import alignable

MOST_NAMED = 5  # utterances in a line


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
    """A line that names utterances without an alignment, as long as they are now; "" if all have.

    Raises:
        ValueError: A transcript without tokens or with too many, an utterance that batch norm could
            not train on alone, or no utterance that has an alignment: now, not when its turn comes.
    """
    least = 0
    with torch.device("meta"):
        if any(isinstance(part, nn.BatchNorm1d) for part in make_model(model_config).modules()):
            least = model_config.encoder.subsampling
    slowest = config.augment.speed[0]
    lowest_rate = config.augment.rate[0]
    losses = 1 + (config.ctc_weight > 0)  # that matter: the model's own, and CTC beside it
    aligned = False
    left_out = []
    for n, id_ in enumerate(train_set.ids):
        tokens = tokenizer.encode(train_set.texts[n])
        if isinstance(model_config, AEDConfig):
            most = model_config.most - 1  # bos has a position too
            wanted = f"texts of at most {most} tokens, which the model's `most` has positions for"
            expect(len(tokens) <= most, "train_set", wanted, f"{len(tokens)} in {id_}")
        samples = len(train_set.waveforms[n])
        frames = lowest_rate * config.features.frames(int(slowest * samples))
        wanted = f"more than {least} frames of features, augmented too, in each utterance"
        remedy = "Leave it out: batch norm trains on two frames of the encoder at least."
        expect(frames > least, "train_set", wanted, f"{frames:.1f} in {id_}", remedy)
        sizes = torch.tensor([config.features.frames(samples), len(tokens)], device="cpu")
        labels = torch.tensor([tokens], device="cpu")
        fits = alignable(model_config, sizes[:1], labels, sizes[1:])
        aligned |= bool(fits[0])
        if not fits[:losses].all():
            left_out.append(id_)
    for text in [] if dev_set is None else dev_set.texts:
        tokenizer.encode(text)
    wanted = "frames enough for the labels of some utterance"
    remedy = "Take an encoder with less subsampling, or a tokenizer with fewer tokens a word."
    expect(aligned, "train_set", wanted, "none", remedy)
    if not left_out:
        return ""
    some = ", ".join(left_out[:MOST_NAMED]) + ", ..." * (len(left_out) > MOST_NAMED)
    of_all = f"{len(left_out)} of {count(len(train_set), 'utterance')}"
    return f"{of_all} have too few frames for their labels, so CTC or TDT leaves them out: {some}"
