"""Wrong arguments of models, layers and `optimize`: each is refused in one line that names what was expected.

Files that others wrote are refused in the tests of their readers.
"""

import pytest
import torch
from torch import nn

from asrkit.cpu import has_int8
from asrkit.models import (
    AEDConfig,
    ConvConfig,
    ConvEncoder,
    CTCConfig,
    FastConformer,
    FastConformerConfig,
    Jasper,
    JasperConfig,
    LSTMEncoder,
    LSTMEncoderConfig,
    Stage,
    TransducerConfig,
    limit_context,
    optimize,
    phases,
)
from asrkit.models.cpu.prepacked import prepack
from asrkit.models.folding import fold

FAST = FastConformerConfig(bins=8, width=16, layers=1, heads=2, subsampling_channels=4)
DENSE = Stage(channels=4, kernel=3)
STRIDE = Stage(channels=4, kernel=5, repeat=1, stride=2, dense=False)


def conv(features, lengths):
    config = ConvConfig(bins=8, width=4, layers=1)
    return ConvEncoder(config)(features, torch.tensor(lengths))


def lstm(lengths):
    config = LSTMEncoderConfig(bins=8, width=4, before=1, after=1)
    return LSTMEncoder(config)(torch.zeros(2, 9, 8), torch.tensor(lengths))


def aed(**settings):
    sizes = {"vocab_size": 11, "bos": 1, "eos": 2, "pad": 0, "width": 8, "heads": 2}
    return AEDConfig(**sizes | settings)


def packed():
    return optimize(FastConformer(FAST).eval())


def shared_convolution():
    model = Jasper(JasperConfig(bins=8, stages=(STRIDE, DENSE))).eval()
    model.stages[1].repeats[2].conv = model.stages[1].repeats[1].conv
    return model


INT8 = pytest.mark.skipif(not has_int8(), reason="needs a CPU with AVX2")
CALLS = [
    (lambda: ConvConfig(subsampling=3), "subsampling: expected 2, 4 or 8, got 3"),
    (lambda: ConvConfig(kernel=4), "kernel: expected an odd number of frames, got 4"),
    (lambda: CTCConfig(vocab_size=0), "vocab_size: expected at least 1, got 0"),
    (lambda: FastConformerConfig(heads=5), "heads: expected a divisor of width=144, got 5"),
    (lambda: FastConformerConfig(context=(1,)), "context: expected .left, right. in encoder frames, -1 for all"),
    (lambda: limit_context(nn.Linear(2, 2), (1, 1)), "model: expected one with a FastConformer, got Linear"),
    (lambda: Stage(channels=4, kernel=3, stride=2), "stride: expected 1, but for a stage with repeat=1"),
    (lambda: JasperConfig(stages=(DENSE, STRIDE)), "stages: expected no stride after a dense stage, got stride 2 in stage 1"),
    (lambda: JasperConfig(stages=()), "config: expected a bin and a Stage at least"),
    (lambda: TransducerConfig(vocab_size=5, durations=(0,)), "durations: expected distinct whole numbers of frames up to 1000, one above 0"),
    (lambda: TransducerConfig(vocab_size=5, activation="gelu"), "activation: expected one of 'tanh', 'relu', got 'gelu'"),
    (lambda: aed(eos=1), "bos, eos, pad: expected another token for bos than for eos and pad"),
    (lambda: aed(pad=11), "bos, eos, pad: expected tokens from 0 to below vocab_size=11"),
    (lambda: aed(positions="rotary"), "positions: expected one of 'sines', 'learned', got 'rotary'"),
    (lambda: conv(torch.zeros(1, 9, 7), [9]), "features: expected shape .B, T, F=8."),
    (lambda: conv(torch.zeros(2, 9, 8), [9]), "lengths: expected shape .B=2."),
    (lambda: conv(torch.zeros(2, 9, 8), [1.0, 0.6]), "lengths: expected int32 or int64, got torch.float32. Pass numbers of frames, not fractions of T."),
    (lambda: conv(torch.zeros(2, 9, 8), [10, 4]), "lengths: expected 0 to T=9 frames, got 4 to 10"),
    (lambda: conv(torch.zeros(2, 9, 8), [9, -1]), "lengths: expected 0 to T=9 frames, got -1 to 9"),
    (lambda: lstm([10, 9]), "lengths: expected 0 to T=9 frames, got 9 to 10"),
    (lambda: lstm([9, 0]), "lengths: expected at least one frame each, got 0"),
    (lambda: phases([9, 4], 6), "count: expected a whole number from 1 to 5"),
    (lambda: fold(FastConformer(FAST)), "model: expected eval mode, got training mode. Call model.eval"),
    (lambda: fold(shared_convolution()), "model: expected a convolution of its own before each batch norm"),
    (lambda: optimize(FastConformer(FAST)), "model: expected eval mode"),
    (lambda: prepack(FastConformer(FAST).eval().double()), "model: expected one in eval mode on a CPU, in a dtype"),
    (lambda: packed().state_dict(), "model: expected layers that are not prepacked"),
    (lambda: packed().train()(torch.zeros(1, 9, 8), torch.tensor([9])), "model: expected eval mode: its steps are fused"),
    (lambda: packed()(torch.zeros(1, 9, 7), torch.tensor([9])), "features: expected shape .B, T, F=8."),
    (lambda: fold(FastConformer(FAST).eval()).train()(torch.zeros(1, 9, 8), torch.tensor([9])), "model: expected eval mode: its batch norms are folded"),
    (lambda: optimize(FastConformer(FAST).eval(), dtype=torch.int8), "dtype: expected a floating-point dtype, or None, got torch.int8. For int8"),
    (lambda: optimize(FastConformer(FAST).eval(), linear_layers="int4"), "linear_layers: expected one of 'as_it_is', 'int8'"),
    pytest.param(lambda: optimize(nn.Linear(2, 2).eval(), linear_layers="int8"), "int8: expected a FastConformer in float32 or bfloat16 or a Whisper, on a CPU, got Linear", marks=INT8),
]  # fmt: skip


@pytest.mark.parametrize("call, message", CALLS)
def test_wrong_arguments_are_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        call()
    assert "\n" not in str(caught.value)
