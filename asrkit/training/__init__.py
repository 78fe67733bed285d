"""Training a transducer: AdamW on a one-cycle schedule, averaged (EMA) weights, and checkpoints
that survive kill -9.
"""

from asrkit.training.batches import Prepared, prepare_batch
from asrkit.training.config import TrainConfig
from asrkit.training.evaluation import evaluate
from asrkit.training.joint import chooses_lean, joint_peak_bytes
from asrkit.training.loop import TrainResult, train
from asrkit.training.objective import TrainingLoss, training_loss
from asrkit.training.steps import training_step, update

__all__ = [
    "Prepared",
    "TrainConfig",
    "TrainResult",
    "TrainingLoss",
    "chooses_lean",
    "evaluate",
    "joint_peak_bytes",
    "prepare_batch",
    "train",
    "training_loss",
    "training_step",
    "update",
]
