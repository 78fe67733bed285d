"""Small models of every kind for the tests of training, and runs of a few steps."""

import json
import math
import time
from dataclasses import replace

import soundfile
import torch

from asrkit.models import (
    AEDConfig,
    ConvConfig,
    CTCConfig,
    FastConformerConfig,
    JasperConfig,
    LSTMConfig,
    LSTMEncoderConfig,
    Stage,
    StatelessConfig,
    TransducerConfig,
)
from asrkit.text import CharTokenizer
from asrkit.training import Prepared, TrainConfig, train, training_loss
from asrkit.training.distributed import Processes
from asrkit.training.loop import Run

TOKENIZER = CharTokenizer()
V = TOKENIZER.vocab_size
# In bfloat16, or at AdamW's default rate, rounding would soon reach the third digit of losses.
SHORT = TrainConfig(
    steps=4,
    seconds=math.inf,
    batch_seconds=3.0,
    peak_lr=1e-3,
    precision="float32",
    threads=1,
)
ENCODERS = {
    "conv": ConvConfig(width=16, layers=1, dropout=0.1),
    "fastconformer": FastConformerConfig(
        width=16, layers=1, heads=2, subsampling=4, subsampling_channels=8
    ),
    "lstm": LSTMEncoderConfig(width=16, stack=1),
    "jasper": JasperConfig(
        bins=80,
        stages=[
            Stage(channels=16, kernel=5, repeat=1, dropout=0.1, stride=2, dense=False),
            Stage(channels=24, kernel=3, repeat=2, dropout=0.1),
        ],
    ),
}
TRANSDUCER = TransducerConfig(
    vocab_size=V,
    encoder=ENCODERS["conv"],
    predictor=StatelessConfig(width=16),
    joint_width=16,
    dropout=0.1,
)
TDT = replace(TRANSDUCER, predictor=LSTMConfig(width=16), durations=(0, 1, 2, 4))
CTC = CTCConfig(vocab_size=V, encoder=ENCODERS["conv"])
ATTENTION = AEDConfig(
    vocab_size=V + 3,
    pad=V,
    bos=V + 1,
    eos=V + 2,
    encoder=ENCODERS["conv"],
    width=16,
    layers=2,
    heads=2,
    ctc=True,
)


def run(speech, out, config=SHORT, model=TRANSDUCER, **options):
    """`train` of one of these models."""
    return train(
        model, TOKENIZER, speech, out=out, config=config, progress=False, **options
    )


def a_run(speech, out, config=SHORT):
    """The run of a transducer before its first step."""
    cpu = torch.device("cpu")
    return Run(TRANSDUCER, TOKENIZER, speech, out, config, cpu, Processes())


def losses(result):
    """Loss of every step."""
    return [line["loss"] for line in result.history]


def stop_after(steps):
    """An `on_step` that interrupts a run after `steps` steps."""

    def stop(history):
        if len(history) == steps:
            raise KeyboardInterrupt

    return stop


def four_utterances():
    """A batch in float64: one utterance is too short for its labels, one has no labels, one a single frame."""
    torch.manual_seed(0)
    return Prepared(
        features=torch.randn(4, 40, 80, dtype=torch.float64),
        lengths=torch.tensor([40, 8, 25, 2]),
        targets=torch.randint(V, (4, 6)),
        target_lengths=torch.tensor([5, 6, 0, 1]),
        speech_s=1.0,
    )


def with_padding(batch, label):
    """`batch` with NaN in the padding of features, and `label` in that of labels."""
    features = batch.features.clone()
    targets = batch.targets.clone()
    for row in range(len(features)):
        features[row, batch.lengths[row] :] = math.nan
        targets[row, batch.target_lengths[row] :] = label
    return batch._replace(features=features, targets=targets)


def gradients(loss, model):
    """Gradients of all weights; zeros for unused ones."""
    weights = list(model.parameters())
    return torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)


def loss_and_gradients(model, batch, config=SHORT):
    """The training loss per label, and its gradients."""
    loss = training_loss(model, batch, config).per_label
    return loss, gradients(loss, model)


def expect_same(actual, wanted):
    torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-12)


def noise_corpus(folder, *texts):
    """Path of a manifest of noise with these texts."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for n, text in enumerate(texts):
        samples = 4000 + 2000 * len(text.split())
        noise = 0.1 * torch.randn(samples, generator=generator)
        soundfile.write(folder / f"{n}.wav", noise.numpy(), 16_000)
        rows.append({"audio": f"{n}.wav", "text": text, "split": "train"})
    path = folder / "m.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def logged(log):
    """Step and loss of each line of a log."""
    lines = map(json.loads, log.read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def wait_for_lines(process, log, count=4):
    """Wait until the log of a training process has `count` lines, at most ten minutes."""
    deadline = time.monotonic() + 600
    while not log.exists() or log.read_bytes().count(b"\n") < count:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
