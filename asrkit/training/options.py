"""Settings of a training run that `asrkit train` has options for, with their help texts.

Importing this file needs no torch, so the command line shows its help at once.
"""

from dataclasses import dataclass
from typing import Literal

from asrkit.training.schedule import CONFORMER_PEAK_LR, PEAK_LR
from asrkit.transcribe.options import described

Joint = Literal["auto", "full", "packed", "split", "lean"]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Settings that `asrkit.training.TrainConfig` shares with the command."""

    seconds: float | int = described(  # `expect_types` refuses an infinite plain float
        300.0,
        "training time, the first step after a start not counted; an interrupted run can be "
        "resumed, a finished one cannot be extended",
        type=float,
        group="training",
    )
    steps: int = described(100_000, "optimizer steps at most", metavar="N")
    seed: int = described(0, "seed of weights, batches, augmentation and dropout", metavar="N")
    optimizer: Literal["adamw", "lamb", "novograd"] = described(
        "adamw",
        "lamb: LAMB, for large batches; its steps are proportional to each tensor's norm; "
        "novograd: NovoGrad, for Jasper; its steps do not depend on the scale of the gradients",
    )
    peak_lr: float | None = described(
        None,
        f"highest learning rate (default: {PEAK_LR['adamw']} for adamw, {CONFORMER_PEAK_LR} "
        f"for adamw with a fastconformer, {PEAK_LR['lamb']} for lamb, "
        f"{PEAK_LR['novograd']} for novograd)",
        metavar="RATE",
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = described(
        "auto",
        "dtype that the model computes in, its weights stay in float32; auto: bfloat16 where the "
        "hardware has instructions for it, else float32; float16: with a scaled loss, a step that "
        "overflows is skipped and lowers the scale (slow on a CPU)",
    )
    joint: Joint = described(
        "auto",
        "how a transducer's loss is computed; full: build the joint's logits; packed: without "
        "padding, for RNN-T; split: a few utterances at a time, so that the joint takes at most a "
        "sixteenth of a GPU's memory, or 128 MiB on a CPU; lean: compute the loss tile by tile, in "
        "the least memory; auto: choose for each batch, lean on a GPU in half precision or where "
        "the joint would fill half of it, and on a CPU where it is expected to be about as fast, "
        "else full",
    )
    graphs: bool = described(
        False,
        "on a GPU, replay encoder and predictor as CUDA graphs for batches whose padded size "
        "repeats, as in batches by buckets; not for --head ctc",
    )
    smoothing: float = described(
        0.0,
        "label smoothing of an attention decoder: share of a target's probability that all other "
        "tokens get, up to 0.5",
        metavar="SHARE",
    )
    evaluate: Literal["in turn", "background"] = described(
        "in turn",
        "in turn: training waits while the dev set is scored; background: a separate process "
        "scores it during training, with as many threads again",
    )
    checkpoint_s: float = described(
        30.0,
        "training time between two checkpoints, the most that a crash can lose",
        flag="--checkpoint-seconds",
        metavar="S",
    )
    accumulate: int = described(
        1,
        "batches that each process takes in a step; the loss is the mean over the labels of all "
        "batches",
        metavar="N",
    )
