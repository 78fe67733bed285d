"""Training transducers, encoder-decoder and CTC models: AdamW, LAMB or NovoGrad on a one-cycle
schedule, averaged (EMA) weights, checkpoints that survive kill -9, with torchrun or without.

Where to look:

    loop.py         from `train` to the last step, in the order of time: forward, backward, step
    schedule.py     learning rate and longest utterance over a run; default peak rates
    options.py      settings that `asrkit train` has options for, with their help texts
    config.py       all settings
    epochs.py       which utterances share a batch, and how many
    batches.py      batches: drawn, augmented, and prefetched
    objective.py    loss of a batch, which utterances can be aligned, the form of the joint
    optimizer.py    the optimizer and its step, also for your own loop; averages of the weights
    batch_norm.py   running statistics of batch norms
    log.py          the log of a run, progress bar and warnings
    checks.py       checks of arguments and speech before a run begins
    distributed.py  processes that torchrun started
    evaluation.py   word error rates, in turn and in a background process; the best checkpoint
    graphs.py       forward and backward passes of a module, and those of a step, as CUDA graphs

Names are imported on first use, so that the command line can read `options` without loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asrkit.training.batches import Prepared, prepare_batch
    from asrkit.training.config import TrainConfig
    from asrkit.training.evaluation import BackgroundEvaluation, Evaluation, evaluate
    from asrkit.training.graphs import graphed_training
    from asrkit.training.loop import TrainResult, train
    from asrkit.training.objective import TrainingLoss, joint_peak_bytes, training_loss
    from asrkit.training.optimizer import training_step, update

__all__ = [
    "BackgroundEvaluation",
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
_FILES = ("config", "batches", "objective", "optimizer", "evaluation", "graphs", "loop")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for file in _FILES:
            module = import_module(f"{__name__}.{file}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
