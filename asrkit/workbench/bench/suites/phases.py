"""Cases of the LSTM encoder: batches in phases, whole, and as PackedSequence.

A step is a forward and a backward pass. Its least work is that of the utterances without padding:
`cells` is the share of the frames of the whole batch that an arm computes, `useful_cells` the share
that is no padding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from asrkit.models import LSTMEncoder, LSTMEncoderConfig, phases
from asrkit.models.lstm import stack_frames
from asrkit.workbench.bench.cases import Case
from asrkit.workbench.cost import encoder_flops
from asrkit.workbench.measure.ops import dtype_name

COUNTS = (2, 4, 8)
FRAMES_PER_S = 100
QUICK = LSTMEncoderConfig(bins=8, width=16, dropout=0.0)
# On a CPU each step of a PackedSequence's backward pass fills a gradient of the whole input
# (github.com/pytorch/pytorch/issues/149194): quadratic in T, so its case has shorter utterances.
PACKED_SHORTER = 3
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # cuDNN computes an LSTM in TF32


@dataclass(frozen=True)
class Speech:
    """Random features (B, T, F), their lengths (B,) on the host, and the gradient of the output."""

    features: Tensor
    lengths: Tensor
    gradient: Tensor


Encode = Callable[[LSTMEncoder, Speech], Tensor]  # encoded frames (B, T', D), zero in the padding


def cases(device: str, quick: bool) -> Iterator[Case]:
    """Steps on LibriSpeech's lengths and on equal ones, and with PackedSequence.

    On a GPU the encoder has the sizes of MLPerf's and computes in bfloat16, in batches of 64 and
    256; on a CPU it is a quarter as wide, in batches of 32.

    Args:
        device: "cpu" or "cuda".
        quick: One small batch of each.
    """
    config = LSTMEncoderConfig(width=256, dropout=0.0)
    sizes: tuple[int, ...] = (32,)
    dtype = torch.float32
    cuda = device.startswith("cuda")
    if quick:
        config = QUICK
        sizes = (4,)
    elif cuda:
        config = replace(config, width=1024)
        sizes = (64, 256)
        dtype = torch.bfloat16
    encoder = random_encoder(config).to(device, dtype)
    for B in sizes:
        lengths = drawn_lengths(B)
        if quick:
            lengths = lengths // 20
        equal = torch.full_like(lengths, int(lengths.float().mean()))
        yield _phases_case("lstm-phases-librispeech", encoder, lengths, COUNTS)
        yield _phases_case("lstm-phases-equal", encoder, equal, COUNTS[-1:])
        yield _packed_case(encoder, lengths if cuda else lengths // PACKED_SHORTER)


def random_encoder(config: LSTMEncoderConfig) -> LSTMEncoder:
    """An encoder with seeded random weights, in training mode: cuDNN has no other backward pass."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LSTMEncoder(config).train()


def drawn_lengths(B: int) -> Tensor:
    """Feature frames of B utterances drawn from LibriSpeech's train-clean-100, (B,) int64."""
    from asrkit.data import shipped_lengths

    seconds = shipped_lengths("librispeech_train_clean_100").seconds
    drawn = np.random.default_rng(0).choice(seconds, B)
    return torch.from_numpy(drawn * FRAMES_PER_S).long().clamp(min=1)


def make_speech(encoder: LSTMEncoder, lengths: Tensor) -> Speech:
    """Noise of these lengths where the encoder lies, in its dtype."""
    weight = next(encoder.parameters())
    draw = torch.Generator().manual_seed(1)
    B = len(lengths)
    T = int(lengths.max())
    features = torch.randn(B, T, encoder.config.bins, generator=draw)
    encoded_T = -(-T // encoder.config.subsampling)
    gradient = torch.randn(B, encoded_T, encoder.width, generator=draw)
    return Speech(features.to(weight), lengths, gradient.to(weight))


@dataclass(frozen=True)
class Step:
    """A call computes encoded frames and the gradients of all weights.

    Attributes:
        encoder: In training mode.
        speech: Its input.
        encode: The way to run a batch.
    """

    encoder: LSTMEncoder
    speech: Speech
    encode: Encode

    def __call__(self) -> tuple[Tensor, ...]:
        self.encoder.zero_grad(set_to_none=True)
        encoded = self.encode(self.encoder, self.speech)
        encoded.backward(self.speech.gradient)
        gradients = [weight.grad for weight in self.encoder.parameters() if weight.grad is not None]
        return (encoded.detach(), *gradients)


def in_phases(count: int) -> Encode:
    """Encode in at most `count` phases."""

    def encode(encoder: LSTMEncoder, speech: Speech) -> Tensor:
        encoder.config = replace(encoder.config, phases=count)
        return encoder(speech.features, speech.lengths)[0]

    return encode


def packed(encoder: LSTMEncoder, speech: Speech) -> Tensor:
    """Encode with torch's PackedSequence, which computes no padding at all."""
    config = encoder.config
    x = speech.features.transpose(0, 1)
    x, lengths = stack_frames(x, speech.lengths, config.stack_input)
    x = _run_packed(encoder.before, x, lengths)
    x, lengths = stack_frames(x, lengths, config.stack)
    x = _run_packed(encoder.after, x, lengths)
    return x.transpose(0, 1)


def _run_packed(lstm: nn.LSTM, x: Tensor, lengths: Tensor) -> Tensor:
    """The outputs (T, B, D) of an LSTM, zero in the padding."""
    sequence, _ = lstm(pack_padded_sequence(x, lengths, enforce_sorted=False))
    return pad_packed_sequence(sequence, total_length=len(x))[0]


def computed_cells(encoder: LSTMEncoder, lengths: Tensor, count: int) -> int:
    """Stacked frames that the first LSTMs compute in `count` phases, in sum over the batch."""
    frames = -(-lengths // encoder.config.stack_input)
    cells = 0
    start = 0
    for end, rows in phases(frames, count, stack=encoder.config.stack):
        cells += (end - start) * rows
        start = end
    return cells


def _phases_case(what: str, encoder: LSTMEncoder, lengths: Tensor, counts: tuple[int, ...]) -> Case:
    """The whole batch, then in phases."""
    speech = make_speech(encoder, lengths)
    arms: dict[str, Callable[..., Any]] = {"whole": Step(encoder, speech, in_phases(1))}
    whole_cells = computed_cells(encoder, lengths, 1)
    cells = {"whole": 1.0}
    for count in counts:
        name = f"phases_{count}"
        arms[name] = Step(encoder, speech, in_phases(count))
        cells[name] = computed_cells(encoder, lengths, count) / whole_cells
    return Case(
        what=what,
        arms=arms,
        params=_params(encoder, lengths),
        arm_params={name: {"cells": share} for name, share in cells.items()},
        ratios=[("whole", name) for name in arms if name != "whole"],
        tolerance=TOLERANCES[speech.features.dtype],
        warmup=1,
    )


def _packed_case(encoder: LSTMEncoder, lengths: Tensor) -> Case:
    """The whole batch, eight phases, and torch's own answer to padding."""
    speech = make_speech(encoder, lengths)
    arms = {
        "whole": Step(encoder, speech, in_phases(1)),
        "phases_8": Step(encoder, speech, in_phases(8)),
        "packed": Step(encoder, speech, packed),
    }
    return Case(
        what="lstm-packed",
        arms=arms,
        params=_params(encoder, lengths),
        ratios=[("whole", "phases_8"), ("whole", "packed"), ("packed", "phases_8")],
        tolerance=TOLERANCES[speech.features.dtype],
        warmup=1,
    )


def _params(encoder: LSTMEncoder, lengths: Tensor) -> dict[str, Any]:
    """What every record of a case states: shape, dtype, useful share and operations of a step."""
    config = encoder.config
    forward = sum(encoder_flops(config, B=1, T=T) for T in lengths.tolist())
    useful = int((-(-lengths // config.stack_input)).sum())
    B = len(lengths)
    T = int(lengths.max())
    return {
        "shape": [B, T, config.width, config.layers],
        "dtype": dtype_name(next(encoder.parameters()).dtype),
        "useful_cells": useful / computed_cells(encoder, lengths, 1),
        "floor_FLOP": 3 * forward,  # a backward pass computes two products for each of the forward
    }
