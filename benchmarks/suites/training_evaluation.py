"""A case of the training suite: steps with evaluations in turn, in the background, and without.

A call takes training steps of the default model on noise, on a CPU, with an evaluation after each
quarter of them: the encoder on some batches. What evaluations cost the training is the time of an
arm less that of `none`. A process for the background exists before a call, and the call waits for
its last score.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from asrkit.models import TransducerConfig, TransducerModel
from asrkit.training import TrainConfig, training_step
from asrkit.training.optimizer import make_optimizer, set_rate
from benchmarks.harness.cases import Case

EVALUATIONS = 4
MODEL = TransducerConfig(vocab_size=27)


def evaluation_case(quick: bool) -> Case:
    """Training, and evaluations of as many batches as there are steps between two of them.

    Args:
        quick: few steps.
    """
    between = 2 if quick else 20
    names = ("in_turn", "none", "background")
    return Case(
        what="evaluation-background",
        arms={name: partial(train_and_score, between, name) for name in names},
        params={"dtype": "float32", "steps": between, "evaluations": EVALUATIONS},
        setups={"background": partial(evaluation_process, between)},
        ratios=[("in_turn", "background"), ("background", "none")],
        warmup=1,
    )


def train_and_score(between: int, arm: str, background: Any = None) -> list[Tensor]:
    """The weights after a training, the same with each arm.

    Args:
        between: steps between two evaluations.
        arm: "in_turn", "none" or "background".
        background: the process that scores, with the last arm.
    """
    torch.manual_seed(0)
    model = TransducerModel(MODEL).train()
    config = TrainConfig(precision="float32", joint="full")
    optimizer = make_optimizer(model, config)
    set_rate(optimizer, 1e-3)
    step = training_step(model, optimizer, config)
    for number in range(EVALUATIONS):
        for _ in range(between):
            step(4, 2.0, 20)
        if arm == "in_turn":
            score(between, model.eval())
            model.train()
        elif background:
            background.submit(number, model)
    if background:
        background.collect()
    return [weight.detach() for weight in model.parameters()]


@cache
def evaluation_process(batches: int) -> Any:
    """A process that scores models by `batches` batches; it ends with this one."""
    from asrkit.training import BackgroundEvaluation  # needs packages that a bare machine lacks

    return BackgroundEvaluation(partial(score, batches), TransducerModel(MODEL))


@torch.inference_mode()
def score(batches: int, model: TransducerModel) -> float:
    """Mean of encoded silence, computed as often as there are batches.

    Args:
        batches: number of batches.
        model: model in evaluation mode.
    """
    silence = torch.zeros(4, 200, 80), torch.full((4,), 200)
    return sum(model.encode(*silence)[0].mean().item() for _ in range(batches))
