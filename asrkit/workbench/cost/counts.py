"""Operations of encoders, and bytes of a transducer's joint and its loss, from formulas alone.

A multiplication and an addition are two operations. Norms, activations and softmax are left out,
which is less than 1 %. Tests compare the formulas with torch's counter.

Bytes at the peak of a training step follow the docstrings of asrkit.losses. Tests compare them with
torch's allocator: they agree within 2 % in float32 and within 5 % in half precision, except for
overwrite and lean. N is the number of lattice nodes in memory at the same time.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asrkit.models import FastConformerConfig, JasperConfig, LSTMEncoderConfig
from asrkit.models.common import without_memory
from asrkit.models.encoders import make_encoder
from asrkit.shapes import expect

VARIANTS = ("torchaudio", "wavefront", "numba", "overwrite", "split", "packed", "lean")
# float32 values that backward needs for each node: log-normaliser, two arcs and their posteriors
NODE_BYTES = 20
TILE_BYTES = {"wavefront": 1 << 20, "lean": 4 << 20}  # on a CPU
# on a GPU: wavefront in plain torch, lean in Triton
GPU_TILE_BYTES = {"wavefront": 1 << 28, "lean": 1 << 28}
MAX_UTTERANCES = 2**31  # for shapes whose utterances need no memory
Config = FastConformerConfig | JasperConfig | LSTMEncoderConfig


def encoder_flops(config: Config, *, B: int, T: int) -> int:
    """Operations of an encoder's products and convolutions in a forward pass.

    Args:
        config: Configuration of the encoder.
        B: Number of utterances.
        T: Feature frames of each utterance, padding included; 100 frames are a second.

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
    """Number of an encoder's trained parameters, from a model on device "meta".

    Each is read at least once for a batch, which is the least memory traffic possible.

    >>> encoder_parameters(JasperConfig())
    332602624
    """
    with without_memory():
        return sum(weight.numel() for weight in make_encoder(config).parameters())


def _fast_conformer(config: FastConformerConfig, B: int, T: int) -> int:
    """Multiplications for a batch (arXiv 2305.05084).

    Limited attention is computed block by block, as in asrkit.models.FastConformer.
    """
    D = config.width
    C = config.subsampling_channels
    F = config.bins
    multiplications = 0
    for stage in range(config.subsampling.bit_length() - 1):  # convolutions of stride 2
        T = (T + 1) // 2
        F = (F + 1) // 2
        pointwise = C * C if stage else 0
        depthwise = 9 * C  # 3 x 3; the first stage is a full convolution of one channel
        multiplications += B * T * F * (depthwise + pointwise)
    multiplications += B * T * C * F * D
    distances, scores = _attention_sizes(T, config.context)
    # two feed-forwards; query, key, value, output; gate and pointwise convolution; depthwise
    linear = (4 * config.expansion + 7) * D * D + config.kernel * D
    attention = distances * D * D + B * T * distances * D + 2 * B * scores * D
    return multiplications + config.layers * (B * T * linear + attention)


def _attention_sizes(T: int, context: tuple[int, int]) -> tuple[int, int]:
    """(relative positions, scores of queries and keys) of an utterance of T encoder frames."""
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
    """Multiplications for an utterance: one for each weight and output frame."""
    multiplications = 0
    inputs = config.bins
    for stage, branches in zip(config.stages, config.branch_channels(), strict=True):
        T = -(-T // stage.stride)
        C = stage.channels
        taps = inputs + (stage.repeat - 1) * C  # input channels of the stage's convolutions
        multiplications += T * C * (taps * stage.kernel + sum(branches))
        inputs = C
    return multiplications


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes by purpose, at the moment with the highest total."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
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
    """Peak memory of the joint and its loss, forward and backward, in addition to their inputs.

    The inputs are the halves (B, T, D) and (B, U1, D), weight and bias. V N for the logits and
    again for their gradient is document 003's formula (with U1 for its U). D N is the hidden layer,
    which the document leaves out at first.

    Args:
        variant: How joint and loss are computed, one of VARIANTS.
        B: Number of utterances.
        T: Number of encoder frames.
        U1: Number of labels plus one.
        V: Number of tokens, blank included.
        D: Width of the hidden layer; 0 for the loss alone, with logits as input.
        itemsize: Bytes of a number: 4 for float32, 2 for half precision.
        nodes: Sum of T (U + 1) over the batch, for the variants packed and lean; None if there is
            no padding.
        size: Utterances of a sub-batch, for the variant split.
        tile_bytes: Size of a tile, for variants with tiles; by default that on a CPU.
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
    after_loss = in_hidden_gradient | {"gradient of logits": logits_B, "gradient of weights": 0}
    if variant == "wavefront":
        row_B = 4 * U1 * V
        frames = min(T, max(1, tile_bytes // row_B))  # of one utterance
        in_loss["tiles"] = (2 if itemsize == 4 else 3) * frames * row_B  # the third in float32
    elif variant == "packed":
        in_hidden_gradient["gradient of hidden layer"] = hidden_B
        in_hidden_gradient["gradient of halves"] = 4 * halves
        in_hidden_gradient["indices"] = 8 * N
    moments = [in_loss, in_weight_gradient, in_hidden_gradient] + [after_loss] * kept
    peak = max(moments, key=lambda parts: sum(parts.values()))
    if at_once < B:  # the gradients of earlier sub-batches are kept
        peak["gradient of earlier sub-batches"] = weight_B + halves * itemsize
    return Peak(parts=peak)


def largest_batch(memory_bytes: int, variant: str, *, padding: float = 0.0, **shape: Any) -> int:
    """The largest number of utterances whose joint and loss fit into memory.

    Args:
        memory_bytes: Bytes of memory.
        variant: As in `joint_bytes`.
        padding: Share of nodes that packing removes.
        shape: T, U1, V and other arguments of `joint_bytes`.

    >>> largest_batch(16 * 2**30, "numba", T=2000, U1=101, V=1024, D=0)
    10
    """

    def needed(B: int) -> int:
        nodes = int(B * shape["T"] * shape["U1"] * (1 - padding))
        return joint_bytes(variant, B=B, nodes=max(1, nodes), **shape).total

    return bisect_right(range(1, MAX_UTTERANCES), memory_bytes, key=needed)
