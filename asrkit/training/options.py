"""The settings of a training run that `asrkit train` has options for, defined and described once.

Importing this file needs no torch, so the command line can show these texts at once.
"""

from dataclasses import dataclass
from typing import Literal

from asrkit.transcribe.options import described

Joint = Literal["auto", "full", "lean"]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `asrkit.training.TrainConfig` has in common with the command."""

    seconds: float | int = described(  # infinity too, which `expect_types` refuses of a plain float
        300.0,
        "training time, without the first step after a start; an interrupted run can be resumed, a "
        "finished one cannot be extended",
        type=float,
        group="training",
    )
    steps: int = described(100_000, "optimizer steps at most", metavar="N")
    seed: int = described(0, "seed of weights, batches, augmentation and dropout", metavar="N")
    optimizer: Literal["adamw", "lamb", "novograd"] = described(
        "adamw",
        "lamb: LAMB, for large batches; its steps are in proportion to each tensor's norm; "
        "novograd: NovoGrad, as for Jasper; its steps do not depend on the scale of the gradients",
    )
    peak_lr: float | None = described(
        None,
        "highest learning rate (default: 0.005 for adamw, 0.002 for it with a fastconformer, "
        "0.01 for lamb, 0.02 for novograd)",
        metavar="RATE",
    )
    joint: Joint = described(
        "auto",
        "of a transducer; full: build the joint's logits; lean: compute the loss tile by tile, in "
        "less memory; auto: batch by batch, lean on a GPU in half precision or where the joint "
        "would fill half of it, and on a CPU where it is expected to be about as fast",
    )
    smoothing: float = described(
        0.0,
        "of an attention decoder: the share of a target's probability that all other tokens get, "
        "up to 0.5",
        metavar="SHARE",
    )
    evaluate: Literal["in turn", "beside"] = described(
        "in turn",
        "in turn: training waits while the dev set is scored; beside: a process of its own, with "
        "as many threads more, scores it meanwhile",
    )
    checkpoint_s: float = described(
        30.0,
        "training time between two checkpoints: what a crash can lose",
        flag="--checkpoint-seconds",
        metavar="S",
    )
    accumulate: int = described(
        1,
        "batches that each process, or the only one, takes in a step; the loss is the mean over "
        "the labels of all batches",
        metavar="N",
    )
