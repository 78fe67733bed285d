"""Encoders, and a transducer's joint with its loss, counted: no tensor is made.

Operations: a multiplication and its addition are two; norms, activations and softmax are left out,
below 1 %. The tests compare the formulas with what torch counts.

Bytes at the peak of a training step follow the docstrings of asrkit.losses. The tests compare them
with what torch's allocator counts: within 2 % in float32, and in half precision, overwrite and lean
left out, within 5 %. N is the number of lattice nodes held at once.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from asrkit.models import FastConformerConfig, JasperConfig, LSTMEncoderConfig
from asrkit.models.transducer import make_encoder
from asrkit.shapes import expect

VARIANTS = ("torchaudio", "wavefront", "numba", "overwrite", "split", "packed", "lean")
# of a node in float32, what backward still holds: log-normaliser, two arcs and their posteriors
NODE_BYTES = 20
TILE_BYTES = {"wavefront": 1 << 20, "packed": 1 << 20, "lean": 4 << 20}  # on a CPU
# on a GPU in plain torch
GPU_TILE_BYTES = {"wavefront": 1 << 28, "packed": 1 << 26, "lean": 1 << 24}
MOST_UTTERANCES = 2**31  # some shapes cost nothing an utterance
Config = FastConformerConfig | JasperConfig | LSTMEncoderConfig


def encoder_flops(config: Config, *, B: int, T: int) -> int:
    """Operations of an encoder's products and convolutions, forward.

    Args:
        config: Of the encoder.
        B: Utterances.
        T: Feature frames of each, padding included; 100 are a second.

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


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes by what they are for, at the moment that takes most."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of them, in bytes."""
        return sum(self.parts.values())


def joint_bytes(  # noqa: PLR0913  sizes of the legend, one a letter
    variant: str,
    *,
    B: int,
    T: int,
    U1: int,
    V: int,
    D: int = 640,
    itemsize: int = 4,
    nodes: int | None = None,
    size: int = 1,
    tile_bytes: int | None = None,
    kept: bool = False,
) -> Peak:
    """Peak memory of the joint and its loss, forward and backward, beyond their inputs.

    Inputs are the halves (B, T, D) and (B, U1, D), weight and bias. V N for the logits and again
    for their gradient is document 003's formula (with U1 for its U); D N is the hidden layer, which
    it leaves out at first.

    Args:
        variant: One of VARIANTS, how joint and loss are computed.
        B: Utterances.
        T: Encoder frames.
        U1: Labels and one.
        V: Tokens, blank included.
        D: Width of the hidden layer; 0 is the loss on given logits.
        itemsize: Bytes of a number, 4 for float32, 2 for half precision.
        nodes: Sum of T (U + 1) over the batch, which packed and lean variants hold or walk through;
            None: no padding.
        size: Utterances of a sub-batch, for `split`.
        tile_bytes: Size of a tile of those variants that have tiles; by default a CPU's.
        kept: Whether the memory of the gradient of the logits is kept for the next call, as on a
            CPU that of one above 32 MiB is (asrkit.losses.gradient_memory.empty_like).

    >>> joint_bytes("numba", B=1, T=2000, U1=100, V=1024, D=0).parts["logits"] * 2
    1638400000
    """
    expect(variant in VARIANTS, "variant", "one of " + ", ".join(VARIANTS), repr(variant))
    at_once = min(size, B) if variant == "split" else B
    N = at_once * T * U1
    if variant in ("packed", "lean") and nodes is not None:
        N = nodes
    tile_bytes = tile_bytes or TILE_BYTES.get(variant, 0)
    halves = B * (T + U1) * D
    if variant == "lean":
        rows = min(N, max(64, tile_bytes // (max(V, D) * itemsize)))
        tile_B = rows * ((2 * D + V) * itemsize + 32)  # hidden layer, its gradient, logits, indices
        gradients_B = 4 * (halves + V * D)
        return Peak(parts={"tile": tile_B, "lattice": 2 * NODE_BYTES * N, "gradients": gradients_B})
    logits_B = N * V * itemsize
    hidden_B = N * D * itemsize
    weight_B = V * D * itemsize
    in_loss = {
        "logits": logits_B,
        "gradient of logits": 0 if variant == "overwrite" else logits_B,
        "hidden layer": hidden_B,
        "lattice": NODE_BYTES * N,
    }
    in_weight_gradient = {
        "gradient of weights": weight_B,
        "gradient of logits": logits_B,
        "hidden layer": hidden_B,
        "gradient of hidden layer": hidden_B,
    }
    in_hidden_gradient = {
        "gradient of weights": weight_B,
        "hidden layer": hidden_B,
        "gradient of hidden layer": 2 * hidden_B,
    }
    behind_loss = in_hidden_gradient | {"gradient of logits": logits_B, "gradient of weights": 0}
    if variant == "wavefront":
        row_B = 4 * U1 * V
        frames = min(T, max(1, tile_bytes // row_B))  # of one utterance
        in_loss["tiles"] = (2 if itemsize == 4 else 3) * frames * row_B  # one more, in float32
    elif variant == "packed":
        in_hidden_gradient["gradient of hidden layer"] = hidden_B
        in_hidden_gradient["gradient of halves"] = 4 * halves
        in_hidden_gradient["tiles"] = min(tile_bytes, 8 * T * U1 * D) * 9 // 8  # in float64
    moments = [in_loss, in_weight_gradient, in_hidden_gradient] + [behind_loss] * kept
    most = max(moments, key=lambda parts: sum(parts.values()))
    if at_once < B:  # the gradients of earlier sub-batches are kept
        most["gradient of earlier sub-batches"] = weight_B + halves * itemsize
    return Peak(parts=most)


def largest_batch(memory_bytes: int, variant: str, *, padding: float = 0.0, **shape: Any) -> int:
    """The most utterances whose joint and loss fit into memory.

    Args:
        memory_bytes: Bytes of memory.
        variant: As in `joint_bytes`.
        padding: Share of nodes that packing leaves out.
        shape: T, U1, V and what else `joint_bytes` takes.

    >>> largest_batch(16 * 2**30, "numba", T=2000, U1=101, V=1024, D=0)
    10
    """

    def needed(B: int) -> int:
        nodes = int(B * shape["T"] * shape["U1"] * (1 - padding))
        return joint_bytes(variant, B=B, nodes=max(1, nodes), **shape).total

    return bisect_right(range(1, MOST_UTTERANCES), memory_bytes, key=needed)
