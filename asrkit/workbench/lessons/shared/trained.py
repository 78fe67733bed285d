"""Small models that are trained on spoken digits: speech, an encoder-decoder, and the training."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from asrkit.models import AEDConfig, Checkpoint, FastConformerConfig, load_checkpoint
from asrkit.models.presets import ModelConfig
from asrkit.text import CharTokenizer

if TYPE_CHECKING:  # a bare GPU machine lacks what speech and training need
    from asrkit.data import Utterances
    from asrkit.training import TrainConfig

LAYERS = {"deep": (2, 4), "shallow": (4, 1)}  # of encoder and decoder; about equal parameters
WIDTH = 144
TOKENIZER = CharTokenizer()


def spoken_digits(*, train: int = 1000, dev: int = 500, test: int = 500) -> "dict[str, Utterances]":
    """Strings of digits by synthetic voices; no voice is in two sets.

    Args:
        train: Number of utterances in the training set.
        dev: Number of utterances in the development set.
        test: Number of utterances in the test set.
    """
    from asrkit.data import Utterances, corpora

    sizes = {"train": 3 * train, "dev": 3 * dev, "test": 3 * test}  # a third is digits
    sets = corpora.spoken_commands(**sizes, kinds=["digits"], progress=False)
    return {name: Utterances.load(cuts, progress=False) for name, cuts in sets.items()}


def encoder_decoder(layers: tuple[int, int]) -> AEDConfig:
    """A FastConformer with a CTC head and an attention decoder of the same width, for characters.

    Args:
        layers: Number of layers of encoder and decoder.
    """
    V = TOKENIZER.vocab_size
    in_encoder, in_decoder = layers
    return AEDConfig(
        vocab_size=V + 3,
        pad=V,
        bos=V + 1,
        eos=V + 2,
        encoder=FastConformerConfig(width=WIDTH, layers=in_encoder, subsampling=4),
        width=WIDTH,
        layers=in_decoder,
        ctc=True,
    )


def trained(
    config: ModelConfig,
    speech: "Mapping[str, Utterances]",
    folder: Path,
    settings: "TrainConfig",
    device: str = "cpu",
) -> Checkpoint:
    """Train a model, or resume its training; a finished one is read.

    Args:
        config: Sizes of the model.
        speech: Utterances by set; those of "train" are trained on.
        folder: Folder of the run, as of `asrkit train --out`.
        settings: Settings of the run.
        device: Device that computes.
    """
    from asrkit.training import train

    train_set = speech["train"]
    result = train(
        config, TOKENIZER, train_set, out=folder, config=settings, device=device, progress=False
    )
    return load_checkpoint(result.path, device=device)
