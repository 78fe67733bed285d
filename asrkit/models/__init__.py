"""Models: encoders, CTC, transducers, attention decoders, and their checkpoints."""

from asrkit.models import presets
from asrkit.models.attention_decoder import AEDConfig, AEDModel
from asrkit.models.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from asrkit.models.conv import ConvConfig, ConvEncoder
from asrkit.models.ctc import CTCConfig, CTCModel
from asrkit.models.fastconformer import FastConformer, FastConformerConfig, limit_context
from asrkit.models.inference import optimize
from asrkit.models.jasper import Jasper, JasperConfig, Stage
from asrkit.models.lstm import LSTMEncoder, LSTMEncoderConfig, phases
from asrkit.models.presets import make_model
from asrkit.models.transducer import (
    LSTMConfig,
    StatelessConfig,
    TransducerConfig,
    TransducerModel,
)
from asrkit.models.whisper import WhisperEncoder, WhisperEncoderConfig

__all__ = [
    "AEDConfig",
    "AEDModel",
    "CTCConfig",
    "CTCModel",
    "Checkpoint",
    "ConvConfig",
    "ConvEncoder",
    "FastConformer",
    "FastConformerConfig",
    "Jasper",
    "JasperConfig",
    "LSTMConfig",
    "LSTMEncoder",
    "LSTMEncoderConfig",
    "Stage",
    "StatelessConfig",
    "TransducerConfig",
    "TransducerModel",
    "WhisperEncoder",
    "WhisperEncoderConfig",
    "limit_context",
    "load_checkpoint",
    "make_model",
    "optimize",
    "phases",
    "presets",
    "save_checkpoint",
]
