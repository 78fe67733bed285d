"""All encoders: the union of their configs, and `make_encoder`.

Each takes features (B, T, F) and lengths (B,), and returns encoded frames (B, T', D) and their
lengths (B,).
"""

from asrkit.models.conv import ConvConfig, ConvEncoder
from asrkit.models.fastconformer import FastConformer, FastConformerConfig
from asrkit.models.jasper import Jasper, JasperConfig
from asrkit.models.lstm import LSTMEncoder, LSTMEncoderConfig
from asrkit.models.whisper import WhisperEncoder, WhisperEncoderConfig

EncoderConfig = (
    ConvConfig | FastConformerConfig | LSTMEncoderConfig | JasperConfig | WhisperEncoderConfig
)
Encoder = ConvEncoder | FastConformer | LSTMEncoder | Jasper | WhisperEncoder


def make_encoder(config: EncoderConfig) -> Encoder:
    """The encoder that `config` describes, with random weights."""
    classes = {
        ConvConfig: ConvEncoder,
        FastConformerConfig: FastConformer,
        JasperConfig: Jasper,
        LSTMEncoderConfig: LSTMEncoder,
        WhisperEncoderConfig: WhisperEncoder,
    }
    return classes[type(config)](config)
