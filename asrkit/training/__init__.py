"""Training transducers, encoder-decoder and CTC models: AdamW, LAMB or NovoGrad on a one-cycle
schedule, averaged (EMA) weights, checkpoints that survive kill -9, and any number of processes.
"""

from asrkit.training.batches import Prepared, prepare_batch
from asrkit.training.batches_at_once import ahead, prepare_batches
from asrkit.training.beside import Beside
from asrkit.training.config import TrainConfig, isolated_words
from asrkit.training.cross_validation import CrossValidation, Fold, cross_validate
from asrkit.training.evaluation import Evaluation, evaluate
from asrkit.training.graphs import graphed_training
from asrkit.training.joint import chooses_lean, joint_peak_bytes
from asrkit.training.objective import TrainingLoss, attention_loss, training_loss
from asrkit.training.start import TrainResult, train
from asrkit.training.steps import training_step, update

__all__ = [
    "Beside",
    "CrossValidation",
    "Evaluation",
    "Fold",
    "Prepared",
    "TrainConfig",
    "TrainResult",
    "TrainingLoss",
    "ahead",
    "attention_loss",
    "chooses_lean",
    "cross_validate",
    "evaluate",
    "graphed_training",
    "isolated_words",
    "joint_peak_bytes",
    "prepare_batch",
    "prepare_batches",
    "train",
    "training_loss",
    "training_step",
    "update",
]
