"""What the tests of training train: a small model of every kind, for a few steps."""

import math
from dataclasses import replace

import torch

from asrkit.data import AugmentConfig
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
from asrkit.training import TrainConfig, train
from asrkit.training.distributed import Processes
from asrkit.training.loop import Run

TOKENIZER = CharTokenizer()
V = TOKENIZER.vocab_size
PLAIN = AugmentConfig(
    speed=(1, 1),
    rate=(1, 1),
    formants=(1, 1),
    silence=0,
    noise=0,
    room=0,
    telephone=0,
    low_cut=0,
    gain_db=(0.0, 0.0),
    time_masks=0,
    frequency_masks=0,
)
# In bfloat16, or at AdamW's own rate, the last bit of a gradient would soon move the third digit.
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
        width=16, layers=1, heads=2, subsampling_channels=8
    ),
    "lstm": LSTMEncoderConfig(width=16),
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


def run(speech, out, config=SHORT, model=TRANSDUCER, **given):
    """`train` of one of these models."""
    return train(
        model, TOKENIZER, speech, out=out, config=config, progress=False, **given
    )


def a_run(speech, out, config=SHORT):
    """The run of a transducer before its first step."""
    cpu = torch.device("cpu")
    return Run(TRANSDUCER, TOKENIZER, speech, out, config, cpu, Processes())


def losses(result):
    """Loss of every step."""
    return [line["loss"] for line in result.history]


def stop_after(steps):
    """What interrupts a run after so many steps."""

    def stop(history):
        if len(history) == steps:
            raise KeyboardInterrupt

    return stop
