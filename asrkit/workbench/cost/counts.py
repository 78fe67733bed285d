"""Encoders, counted: floating-point operations by formula, and weights.

A multiplication and its addition are two operations. Norms, activations and softmax are left out:
below 1 %. The tests compare the formulas with what torch counts.
"""

import torch

from asrkit.models import FastConformerConfig, JasperConfig, LSTMEncoderConfig
from asrkit.models.transducer import make_encoder

Config = FastConformerConfig | JasperConfig | LSTMEncoderConfig


def encoder_flops(config: Config, *, B: int, T: int) -> int:
    """Operations of an encoder's products and convolutions, forward.

    Args:
        config: sizes of the encoder.
        B: utterances.
        T: feature frames of each, padding included; 100 are a second.

    >>> from asrkit.models import presets
    >>> encoder_flops(presets.parakeet_rnnt_1_1b().encoder, B=1, T=1000) // 10**9
    282
    >>> encoder_flops(presets.mlperf_rnnt().encoder, B=1, T=1230) // 10**9
    23
    """
    if isinstance(config, FastConformerConfig):
        return 2 * _fast_conformer(config, B, T)
    if isinstance(config, LSTMEncoderConfig):
        return 2 * B * _lstm(config, T)
    return 2 * B * _jasper(config, T)


def encoder_parameters(config: Config) -> int:
    """Trained numbers of an encoder, which is made without memory.

    Each is read at least once a batch, which is the least memory traffic there is.

    Args:
        config: sizes of the encoder.

    >>> encoder_parameters(JasperConfig())
    332602624
    """
    with torch.device("meta"):
        return sum(weight.numel() for weight in make_encoder(config).parameters())


def _fast_conformer(config: FastConformerConfig, B: int, T: int) -> int:
    """Multiplications for a batch (arXiv 2305.05084).

    Limited attention is computed block by block, as asrkit.models.FastConformer does.
    """
    D = config.width
    C = config.subsampling_channels
    F = config.bins
    multiplications = 0
    for stage in range(config.subsampling.bit_length() - 1):  # convolutions of stride 2
        T = (T + 1) // 2
        F = (F + 1) // 2
        pointwise = C * C if stage else 0
        depthwise = 9 * C  # 3 x 3; the first stage is an ordinary convolution of one channel
        multiplications += B * T * F * (depthwise + pointwise)
    multiplications += B * T * C * F * D
    distances, scores = _attention_sizes(T, config.context)
    # two feed-forwards; query, key, value, output; gate and pointwise convolution; depthwise
    linear = (4 * config.expansion + 7) * D * D + config.kernel * D
    attention = distances * D * D + B * T * distances * D + 2 * B * scores * D
    return multiplications + config.layers * (B * T * linear + attention)


def _attention_sizes(T: int, context: tuple[int, int]) -> tuple[int, int]:
    """(relative positions, scores of queries by keys) of an utterance of T encoder frames."""
    attended = sum(context)
    if min(context) < 0 or 2 * attended >= T:
        return 2 * T, T * T
    block = max(attended, 1)
    blocks = -(-T // block)
    return attended + 1, blocks * block * (block + attended)


def _lstm(config: LSTMEncoderConfig, T: int) -> int:
    """Multiplications for an utterance."""
    D = config.width
    frames = -(-T // config.stack_input)
    stacked = -(-frames // config.stack)
    gates = 4 * D  # input, forget, cell and output
    inputs_before = config.bins * config.stack_input + D * (config.before - 1)
    inputs_after = D * config.stack + D * (config.after - 1)
    before = frames * gates * (inputs_before + D * config.before)
    return before + stacked * gates * (inputs_after + D * config.after)


def _jasper(config: JasperConfig, T: int) -> int:
    """Multiplications for an utterance: a weight's for each frame of its output."""
    multiplications = 0
    inputs = config.bins
    for stage, branches in zip(config.stages, config.branch_channels(), strict=True):
        T = -(-T // stage.stride)
        C = stage.channels
        taps = inputs + (stage.repeat - 1) * C  # of a convolution's kernel, in channels
        multiplications += T * C * (taps * stage.kernel + sum(branches))
        inputs = C
    return multiplications
