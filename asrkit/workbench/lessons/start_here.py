"""Notebook 00: a comparison of texts, and the demo model that later notebooks load."""

import contextlib
import html
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from asrkit import files
from asrkit.data import Utterances, corpora
from asrkit.models import TransducerConfig, load_checkpoint
from asrkit.models.checkpoints import Checkpoint
from asrkit.text import CharTokenizer
from asrkit.training import TrainConfig, train
from asrkit.workbench.plots import COLOURS, as_html, canvas

REDRAWN_EVERY_S = 4.0
MODEL = "model.safetensors"


def bare_words(text: str) -> str:
    """A text in lower-case letters and apostrophes, like the references of the recordings."""
    return " ".join(re.findall("[a-z']+", text.lower()))


def compared(reference: str, hypothesis: str) -> str:
    """A reference in HTML, with missing words struck out and the hypothesis's words underlined.

    Args:
        reference: The spoken text, in bare words.
        hypothesis: The recognised text, in bare words.
    """
    import jiwer

    spoken, recognised = reference.split(), hypothesis.split()
    (chunks,) = jiwer.process_words(reference, hypothesis).alignments
    parts = []
    for chunk in chunks:
        removed = " ".join(spoken[chunk.ref_start_idx : chunk.ref_end_idx])
        inserted = " ".join(recognised[chunk.hyp_start_idx : chunk.hyp_end_idx])
        if chunk.type == "equal":
            parts.append(html.escape(removed))
            continue
        marks = {"del": removed, "ins": inserted}
        parts += [f"<{tag}>{html.escape(text)}</{tag}>" for tag, text in marks.items() if text]
    return " ".join(parts)


def demo_test_set() -> Utterances:
    """Spoken digits in voices that are not in the training set of the demo models."""
    speech = corpora.load(["spoken_commands"], kinds=["digits"])
    return Utterances.load(speech["test"], progress=False)


@contextlib.contextmanager
def demo_folder(name: str = "demo") -> Iterator[Path]:
    """An empty folder to train a demo in. The model in it becomes the demo at the end.

    So no notebook loads a model whose training was interrupted. While another process trains the
    demo, this one prints a message and waits.

    Args:
        name: Name of the demo's folder in home().
    """
    folder = files.home() / name
    with files.lock(folder, wait=True, message="Waiting for the demo, which is being trained."):
        training = folder / "training"
        shutil.rmtree(training, ignore_errors=True)
        yield training
        if training.exists():
            (training / MODEL).replace(folder / MODEL)


def demo_model(
    *, seconds: float, steps: int = 400, durations: Sequence[int] = (), device: str = "cpu"
) -> Checkpoint:
    """The demo model of notebook 00, or its TDT variant, from the cache; trained if missing.

    Args:
        seconds: Largest training time.
        steps: Largest number of training steps.
        durations: Numbers of frames that a TDT model may advance by; empty for the RNN-T of
            notebook 00.
        device: Device of the model.
    """
    name = "demo_tdt" if durations else "demo"
    model = files.home() / name / MODEL
    if not model.exists():
        with demo_folder(name) as training:
            if not model.exists():  # another process may have trained it while this one waited
                speech = corpora.load(["spoken_commands"], kinds=["digits"])
                tokenizer = CharTokenizer()
                train(
                    TransducerConfig(vocab_size=tokenizer.vocab_size, durations=tuple(durations)),
                    tokenizer,
                    Utterances.load(speech["train"], progress=False),
                    out=training,
                    progress=False,
                    config=TrainConfig(seconds=seconds, steps=steps),
                )
    return load_checkpoint(model, device=device)


def training_curve(history: Sequence[Mapping[str, float]], ax: Axes) -> Axes:
    """Draw the loss over seconds of training: each step as a thin line, a running median thick.

    Args:
        history: `seconds` and `loss`, in nats per label, of each step.
        ax: Axes to draw on; returned.
    """
    seconds = [step["seconds"] for step in history]
    loss = [step["loss"] for step in history]
    half = max(1, len(loss) // 40)
    medians = [np.median(loss[max(0, k - half) : k + half + 1]) for k in range(len(loss))]
    ax.plot(seconds, loss, lw=0.5, alpha=0.5, color=COLOURS[0], label="each step")
    ax.plot(seconds, medians, lw=2, color=COLOURS[0], label="running median")
    ax.set(xlabel="training time, s", ylabel="loss, nats per label", yscale="log")
    ax.legend(frameon=False)
    return ax


def live_training_curve() -> Callable[..., None]:
    """Display a picture of training, and return the function that updates it: draw(history).

    The picture is redrawn every few seconds; calls in between do nothing, unless done=True.
    """
    from IPython.display import display

    output = display({"text/plain": "training"}, raw=True, display_id=True)
    next_at = time.monotonic() + REDRAWN_EVERY_S

    def draw(history: Sequence[Mapping[str, float]], *, done: bool = False) -> None:
        nonlocal next_at
        if time.monotonic() < next_at and not done:
            return
        next_at = time.monotonic() + REDRAWN_EVERY_S
        last = history[-1]
        title = f"{last['loss']:.2f} nats per label after {last['seconds']:.0f} s of training"
        figure, _ = canvas(title)
        training_curve(history, figure.axes[0])
        data = {"text/html": as_html(figure, f"Falling curve: {title}"), "text/plain": title}
        output.update(data, raw=True)

    return draw
