"""Configs of published models under their names, tiny ones, and `make_model`, for any config.

A preset has the sizes of the published model and random weights:
`TransducerModel(presets.parakeet_rnnt_1_1b())`. tests/models/test_presets.py compares these
sizes with the published parameter counts.
"""

from collections.abc import Callable
from typing import Any

from asrkit.models.attention_decoder import AEDConfig, AEDModel
from asrkit.models.ctc import CTCConfig, CTCModel
from asrkit.models.fastconformer import FastConformerConfig
from asrkit.models.jasper import JasperConfig, Stage
from asrkit.models.lstm import LSTMEncoderConfig
from asrkit.models.transducer import (
    LSTMConfig,
    TransducerConfig,
    TransducerModel,
)
from asrkit.models.whisper import WhisperEncoderConfig
from asrkit.shapes import expect

ModelConfig = TransducerConfig | CTCConfig | AEDConfig
Model = TransducerModel | CTCModel | AEDModel
TDT = (0, 1, 2, 3, 4)


def make_model(config: ModelConfig) -> Model:
    """The model that `config` describes, with random weights.

    >>> make_model(parakeet_ctc_0_6b())  # doctest: +SKIP
    """
    expect(
        isinstance(config, ModelConfig),
        "config",
        "a TransducerConfig, CTCConfig or AEDConfig",
        type(config).__name__,
        "Call the preset: make_model(presets.tiny()).",
    )
    if isinstance(config, CTCConfig):
        return CTCModel(config)
    if isinstance(config, AEDConfig):
        return AEDModel(config)
    return TransducerModel(config)


def _encoder(layers: int, width: int = 1024, **changes: Any) -> FastConformerConfig:
    settings = {"heads": 8, "subsampling_channels": 256} | changes
    return FastConformerConfig(
        width=width, layers=layers, dropout_attention=0.1, dropout_input=0.1, **settings
    )


def _transducer(
    vocab_size: int,
    encoder: FastConformerConfig,
    *,
    layers: int = 2,
    durations: tuple[int, ...] = (),
    ctc: bool = False,
) -> TransducerConfig:
    return TransducerConfig(
        vocab_size=vocab_size,
        encoder=encoder,
        predictor=LSTMConfig(width=640, layers=layers),
        joint_width=640,
        dropout=0.2,
        activation="relu",
        durations=durations,
        ctc=ctc,
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


def _canary(vocab_size: int, encoder: FastConformerConfig, layers: int, most: int) -> AEDConfig:
    """A Canary: a decoder of 1024 with 8 heads, and the special tokens of its tokenizers."""
    return AEDConfig(
        vocab_size=vocab_size,
        pad=2,
        eos=3,
        bos=4,
        encoder=encoder,
        width=1024,
        layers=layers,
        heads=8,
        most=most,
    )


def canary_1b(vocab_size: int = 4128) -> AEDConfig:
    """nvidia/canary-1b: 24 layers of encoder and 24 of decoder, 1,016,677,408 parameters.

    How many tokens the checkpoint has is not published; 4,128 are four tokenizers of 1,024 and 32
    special tokens.
    """
    return _canary(vocab_size, _encoder(24, bins=128), 24, 512)


def canary_1b_flash(vocab_size: int = 5248) -> AEDConfig:
    """nvidia/canary-1b-flash: layers moved to the encoder, 32 and 4: 883,554,432 parameters."""
    return _canary(vocab_size, _encoder(32, bins=128), 4, 1024)


def canary_180m_flash(vocab_size: int = 5248) -> AEDConfig:
    """nvidia/canary-180m-flash: 17 layers of 512 and 4 of 1024, 182,643,840 parameters."""
    return _canary(vocab_size, _encoder(17, 512, bins=128), 4, 1024)


def _whisper(
    vocab_size: int, width: int, layers: int, heads: int, *, decoder_layers: int, bins: int = 80
) -> AEDConfig:
    """A multilingual Whisper: encoder and decoder of one width, and its special tokens.

    transformers counts the encoder's fixed positions too, 1,500 `width`. In asrkit the keys of each
    attention have a bias, which is zero and changes nothing: `width` numbers.
    """
    return AEDConfig(
        vocab_size=vocab_size,
        pad=50_257,
        eos=50_257,
        bos=50_258,
        encoder=WhisperEncoderConfig(bins=bins, width=width, layers=layers, heads=heads),
        width=width,
        layers=decoder_layers,
        heads=heads,
        most=448,
        dropout=0.0,
        activation="gelu",
        positions="learned",
        embedding_norm=False,
        output_bias=False,
    )


def whisper_tiny(vocab_size: int = 51_865) -> AEDConfig:
    """openai/whisper-tiny: 4 and 4 layers of 384 (arXiv 2212.04356, table 1)."""
    return _whisper(vocab_size, 384, 4, 6, decoder_layers=4)


def whisper_base(vocab_size: int = 51_865) -> AEDConfig:
    """openai/whisper-base: 6 and 6 layers of 512 (arXiv 2212.04356, table 1)."""
    return _whisper(vocab_size, 512, 6, 8, decoder_layers=6)


def whisper_small(vocab_size: int = 51_865) -> AEDConfig:
    """openai/whisper-small: 12 and 12 layers of 768 (arXiv 2212.04356, table 1)."""
    return _whisper(vocab_size, 768, 12, 12, decoder_layers=12)


def whisper_large_v3(vocab_size: int = 51_866) -> AEDConfig:
    """openai/whisper-large-v3: 32 and 32 layers of 1280, 128 bins, one more language."""
    return _whisper(vocab_size, 1280, 32, 20, decoder_layers=32, bins=128)


def whisper_large_v3_turbo(vocab_size: int = 51_866) -> AEDConfig:
    """openai/whisper-large-v3-turbo: large-v3 with 4 layers of decoder."""
    return _whisper(vocab_size, 1280, 32, 20, decoder_layers=4, bins=128)


def mlperf_rnnt(vocab_size: int = 1023) -> TransducerConfig:
    """RNN-T of MLPerf Training: five LSTM layers of 1024, 1,023 subwords and blank.

    Sizes and dropout of baseline_v3-1023sp.yaml in github.com/mlcommons/training. The round's model
    has 49,006,080 parameters. This one has 512 more: its predictor embeds blank, which starts every
    utterance, where the round's starts with a vector of zeros that is no parameter.
    """
    return TransducerConfig(
        vocab_size=vocab_size,
        encoder=LSTMEncoderConfig(),
        predictor=LSTMConfig(width=512, layers=2, dropout=0.3, start="mlperf"),
        joint_width=512,
        dropout=0.3,
        activation="relu",
        ctc=False,
    )


def jasper_10x5dr(vocab_size: int = 28) -> CTCConfig:
    """Jasper 10x5 DR: 332,632,349 parameters, 64 bins; 28 characters: space, a to z, apostrophe."""
    return CTCConfig(vocab_size=vocab_size, encoder=JasperConfig())


def mini_jasper(vocab_size: int = 28) -> CTCConfig:
    """Three blocks of two convolutions in 1.66 million weights, which train on a CPU in minutes."""
    first = Stage(channels=96, kernel=11, repeat=1, dropout=0.1, stride=2, dense=False)
    wide = Stage(channels=160, kernel=29, repeat=1, dropout=0.1, dilation=2, dense=False)
    last = Stage(channels=192, kernel=1, repeat=1, dropout=0.1, dense=False)
    blocks = [
        Stage(channels=channels, kernel=kernel, repeat=2, dropout=0.1)
        for channels, kernel in ((96, 11), (96, 13), (128, 15))
    ]
    encoder = JasperConfig(bins=80, stages=(first, *blocks, wide, last))
    return CTCConfig(vocab_size=vocab_size, encoder=encoder)


def tiny(vocab_size: int = 32) -> TransducerConfig:
    """All parts of `tdt_ctc_110m` in 72,000 weights: for tests, and to try a pipeline."""
    return TransducerConfig(
        vocab_size=vocab_size,
        encoder=_encoder(2, 32, heads=2, subsampling_channels=16),
        predictor=LSTMConfig(width=32, layers=1),
        joint_width=32,
        activation="relu",
        durations=TDT,
    )


def tiny_aed(vocab_size: int = 35) -> AEDConfig:
    """Canary's parts and a CTC head in 94,000 weights; its last three tokens are special."""
    return AEDConfig(
        vocab_size=vocab_size,
        pad=vocab_size - 3,
        bos=vocab_size - 2,
        eos=vocab_size - 1,
        encoder=_encoder(2, 32, heads=2, subsampling_channels=16),
        width=32,
        layers=2,
        heads=2,
        most=128,
        ctc=True,
    )


PRESETS: dict[str, Callable[..., ModelConfig]] = {
    preset.__name__: preset
    for preset in (
        parakeet_ctc_0_6b,
        parakeet_ctc_1_1b,
        parakeet_rnnt_0_6b,
        parakeet_rnnt_1_1b,
        parakeet_tdt_0_6b,
        parakeet_tdt_1_1b,
        tdt_ctc_110m,
        canary_1b,
        canary_1b_flash,
        canary_180m_flash,
        whisper_tiny,
        whisper_base,
        whisper_small,
        whisper_large_v3,
        whisper_large_v3_turbo,
        mlperf_rnnt,
        jasper_10x5dr,
        mini_jasper,
        tiny,
        tiny_aed,
    )
}
