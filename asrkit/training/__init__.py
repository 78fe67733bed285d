"""Training transducers, encoder-decoder and CTC models: AdamW, LAMB or NovoGrad on a one-cycle
schedule, averaged (EMA) weights, checkpoints that survive kill -9, under torchrun or alone.
"""

from asrkit.training.batches import Prepared, prepare_batch
from asrkit.training.beside import Beside
from asrkit.training.config import TrainConfig
from asrkit.training.evaluation import Evaluation, evaluate
from asrkit.training.graphs import graphed_training
from asrkit.training.joint import chooses_lean, joint_peak_bytes
from asrkit.training.objective import TrainingLoss, attention_loss, training_loss
from asrkit.training.start import TrainResult, train
from asrkit.training.steps import training_step, update

__all__ = [
    "Beside",
    "Evaluation",
    "Prepared",
    "TrainConfig",
    "TrainResult",
    "TrainingLoss",
    "attention_loss",
    "chooses_lean",
    "evaluate",
    "graphed_training",
    "joint_peak_bytes",
    "prepare_batch",
    "train",
    "training_loss",
    "training_step",
    "update",
]
