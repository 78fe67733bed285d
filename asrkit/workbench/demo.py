"""The small models that notebooks share: trained once on synthetic speech, then loaded."""

from collections.abc import Sequence

from asrkit import files
from asrkit.data import Utterances, corpora
from asrkit.models import TransducerConfig, load_checkpoint
from asrkit.models.checkpoints import Checkpoint
from asrkit.text import CharTokenizer
from asrkit.training import TrainConfig, train


def demo_test_set() -> Utterances:
    """Spoken digits in voices that the demo models were not trained on."""
    speech = corpora.load(["spoken_commands"], kinds=["digits"])
    return Utterances.load(speech["test"], progress=False)


def demo_model(
    *, seconds: float, steps: int = 500, durations: Sequence[int] = (), device: str = "cpu"
) -> Checkpoint:
    """The model that notebook 00 left in the cache, or its TDT sibling; trained now if missing.

    Args:
        seconds: Most time that training may take.
        steps: Most steps of training.
        durations: Frames that a TDT model may advance by; none for the RNN-T of notebook 00.
        device: "cpu" or "cuda", where the model is put.
    """
    name = "demo"
    if durations:
        name = "demo_tdt"
    folder = files.home() / name
    if not (folder / "model.safetensors").exists():
        speech = corpora.load(["spoken_commands"], kinds=["digits"])
        tokenizer = CharTokenizer()
        train(
            TransducerConfig(vocab_size=tokenizer.vocab_size, durations=tuple(durations)),
            tokenizer,
            Utterances.load(speech["train"], progress=False),
            out=folder,
            progress=False,
            config=TrainConfig(seconds=seconds, steps=steps),
        )
    return load_checkpoint(folder, device=device)
