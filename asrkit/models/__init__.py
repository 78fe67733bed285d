"""Models: encoders, predictors, joint, and the checkpoints that carry them."""

from asrkit.models.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from asrkit.models.encoders import ConvConfig, ConvEncoder, FastConformer, FastConformerConfig
from asrkit.models.transducer import CTCConfig, CTCModel, LSTMConfig, StatelessConfig, TransducerConfig, TransducerModel

__all__ = [
    "CTCConfig", "CTCModel", "Checkpoint", "ConvConfig", "ConvEncoder", "FastConformer", "FastConformerConfig",
    "LSTMConfig", "StatelessConfig", "TransducerConfig", "TransducerModel", "load_checkpoint", "save_checkpoint",
]  # fmt: skip
