"""Models: encoders, predictors, joint, and the checkpoints that carry them."""

from asrkit.models import presets
from asrkit.models.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from asrkit.models.encoders import ConvConfig, ConvEncoder
from asrkit.models.fastconformer import FastConformer, FastConformerConfig, limit_context
from asrkit.models.inference import optimize
from asrkit.models.transducer import (
    CTCConfig,
    CTCModel,
    LSTMConfig,
    StatelessConfig,
    TransducerConfig,
    TransducerModel,
    make_model,
)

__all__ = [
    "CTCConfig",
    "CTCModel",
    "Checkpoint",
    "ConvConfig",
    "ConvEncoder",
    "FastConformer",
    "FastConformerConfig",
    "LSTMConfig",
    "StatelessConfig",
    "TransducerConfig",
    "TransducerModel",
    "limit_context",
    "load_checkpoint",
    "make_model",
    "optimize",
    "presets",
    "save_checkpoint",
]
