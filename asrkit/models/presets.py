"""Configs of the Parakeet models under their published names, and a tiny one for tests and lessons.

A preset has the sizes of the published checkpoint and random weights:
`TransducerModel(presets.parakeet_rnnt_1_1b())`. What the published configs state, checkpoint by
checkpoint, is tested against their parameter counts in tests/models/test_presets.py.
"""

from collections.abc import Callable
from typing import Any

from asrkit.models.fastconformer import FastConformerConfig
from asrkit.models.transducer import CTCConfig, LSTMConfig, TransducerConfig

TDT = (0, 1, 2, 3, 4)


def _encoder(layers: int, width: int = 1024, **changes: Any) -> FastConformerConfig:
    published = {
        "heads": 8,
        "subsampling_channels": 256,
        "dropout_attention": 0.1,
        "dropout_input": 0.1,
    }
    settings: dict[str, Any] = published | changes
    return FastConformerConfig(width=width, layers=layers, **settings)


def _transducer(
    vocab_size: int, encoder: FastConformerConfig, *, layers: int = 2, **changes: object
) -> TransducerConfig:
    rest = {"joint_width": 640, "dropout": 0.2, "activation": "relu", "ctc": False} | changes
    return TransducerConfig(
        vocab_size=vocab_size,
        encoder=encoder,
        predictor=LSTMConfig(width=640, layers=layers),
        **rest,  # type: ignore[arg-type]
    )


def parakeet_ctc_0_6b(vocab_size: int = 1024) -> CTCConfig:
    """nvidia/parakeet-ctc-0.6b: 24 layers of 1024, input scaled."""
    return CTCConfig(vocab_size=vocab_size, encoder=_encoder(24, scale_input=True))


def parakeet_ctc_1_1b(vocab_size: int = 1024) -> CTCConfig:
    """nvidia/parakeet-ctc-1.1b: 42 layers of 1024, input scaled."""
    return CTCConfig(vocab_size=vocab_size, encoder=_encoder(42, scale_input=True))


def parakeet_rnnt_0_6b(vocab_size: int = 1024) -> TransducerConfig:
    """nvidia/parakeet-rnnt-0.6b: 24 layers of 1024, input scaled, an LSTM of two layers of 640."""
    return _transducer(vocab_size, _encoder(24, scale_input=True))


def parakeet_rnnt_1_1b(vocab_size: int = 1024) -> TransducerConfig:
    """nvidia/parakeet-rnnt-1.1b: 42 layers of 1024, input scaled, an LSTM of two layers of 640."""
    return _transducer(vocab_size, _encoder(42, scale_input=True))


def parakeet_tdt_0_6b(vocab_size: int = 1024) -> TransducerConfig:
    """nvidia/parakeet-tdt-0.6b-v2: 128 bins and no biases; v3 is the same with vocab_size=8192."""
    return _transducer(vocab_size, _encoder(24, bins=128, bias=False), durations=TDT)


def parakeet_tdt_1_1b(vocab_size: int = 1024) -> TransducerConfig:
    """nvidia/parakeet-tdt-1.1b: 42 layers of 1024, two LSTM layers of 640, durations 0 to 4."""
    return _transducer(vocab_size, _encoder(42), durations=TDT)


def tdt_ctc_110m(vocab_size: int = 1024) -> TransducerConfig:
    """nvidia/parakeet-tdt_ctc-110m: 17 layers of 512, one LSTM layer of 640, and a CTC head."""
    return _transducer(vocab_size, _encoder(17, 512), layers=1, durations=TDT, ctc=True)


def tiny(vocab_size: int = 32) -> TransducerConfig:
    """All parts of `tdt_ctc_110m` in 72,000 weights: for tests, and to try a pipeline."""
    encoder = _encoder(2, 32, heads=2, subsampling_channels=16)
    predictor = LSTMConfig(width=32, layers=1)
    return TransducerConfig(
        vocab_size=vocab_size,
        encoder=encoder,
        predictor=predictor,
        joint_width=32,
        activation="relu",
        durations=TDT,
    )


PRESETS: dict[str, Callable[..., TransducerConfig | CTCConfig]] = {
    preset.__name__: preset
    for preset in (
        parakeet_ctc_0_6b,
        parakeet_ctc_1_1b,
        parakeet_rnnt_0_6b,
        parakeet_rnnt_1_1b,
        parakeet_tdt_0_6b,
        parakeet_tdt_1_1b,
        tdt_ctc_110m,
        tiny,
    )
}
