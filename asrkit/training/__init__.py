"""Training transducers, encoder-decoder and CTC models: AdamW, LAMB or NovoGrad on a one-cycle
schedule, averaged (EMA) weights, checkpoints that survive kill -9, under torchrun or alone.

Where to look for what:

    loop.py         from `train` to the last step, in the order of time: forward, backward, step
    options.py      the settings that the command has, too, described
    config.py       all settings, learning rate and lengths over the run
    optimizer.py    the optimizer and its step, also for a loop of your own
    batches.py      batches drawn, augmented, and prepared ahead
    checks.py       what is looked at before a run begins
    objective.py    the loss of a batch, what it can align, and whether it builds the joint
    statistics.py   running statistics of batch norms
    distributed.py  processes under torchrun
    evaluation.py   word error rates, in turn and beside training
    graphs.py       passes of a module as CUDA graphs

Names are imported when they are first used, so that the command line can read `options` without
loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asrkit.training.batches import Prepared, prepare_batch
    from asrkit.training.config import TrainConfig
    from asrkit.training.evaluation import Beside, Evaluation, evaluate
    from asrkit.training.graphs import graphed_training
    from asrkit.training.loop import TrainResult, train
    from asrkit.training.objective import TrainingLoss, joint_peak_bytes, training_loss
    from asrkit.training.optimizer import training_step, update

__all__ = [
    "Beside",
    "Evaluation",
    "Prepared",
    "TrainConfig",
    "TrainResult",
    "TrainingLoss",
    "evaluate",
    "graphed_training",
    "joint_peak_bytes",
    "prepare_batch",
    "train",
    "training_loss",
    "training_step",
    "update",
]

_FILES = {  # the file of this folder that defines each name
    "batches": ["Prepared", "prepare_batch"],
    "config": ["TrainConfig"],
    "evaluation": ["Beside", "Evaluation", "evaluate"],
    "graphs": ["graphed_training"],
    "loop": ["TrainResult", "train"],
    "objective": ["TrainingLoss", "joint_peak_bytes", "training_loss"],
    "optimizer": ["training_step", "update"],
}


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
