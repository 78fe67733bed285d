"""What an attention decoder costs, counted: operations of a text, and bytes that are kept and read.

Counts are of `asrkit.models.AEDModel`'s decoder, in the ways of `asrkit.models.attention_memory`;
the encoder has `encoder_flops`. The integers are of sizes alone; no tensor is made.
"""

from dataclasses import dataclass

from asrkit.models.attention_memory import CROSS, PAST
from asrkit.shapes import expect


@dataclass(frozen=True, kw_only=True)
class DecoderFLOP:
    """Operations of a decoder by what they are for; a multiplication and its addition are two.

    Attributes:
        frames: Projections of the encoder's frames to keys and values.
        again: Tokens of earlier steps, computed again.
        tokens: What each new token takes in the layers.
        output: The output layer, whose products have a row for each token of the vocabulary.
    """

    frames: int
    again: int
    tokens: int
    output: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.frames + self.again + self.tokens + self.output


def aed_flops(  # noqa: PLR0913  sizes of the legend, one a letter
    *,
    T: int,
    U: int,
    D: int,
    layers: int,
    V: int,
    heads: int,
    cross: str,
    past: str,
    expansion: int = 4,
) -> DecoderFLOP:
    """Operations of the products of greedy decoding of an utterance; U tokens take U steps.

    Norms, activations and softmax are left out.

    Args:
        T: Encoder frames, padding included.
        U: Tokens that are written, eos included.
        D: Width of the decoder.
        layers: Its layers.
        V: Tokens of the vocabulary.
        heads: Attention heads; they count where frames are absorbed.
        cross: "kept", "absorbed" or "recomputed".
        past: "kept", "states" or "none".
        expansion: Width of the feed-forward layers, in D.

    >>> flops = aed_flops(
    ...     T=250, U=70, D=1024, layers=24, V=4128, heads=8, cross="recomputed", past="states"
    ... )
    >>> flops.total // 10**9  # Canary-1B, 20 seconds
    2056
    """
    _check(cross, past)
    products = 6 + 2 * expansion  # of a token: self-attention 4, query and output 2, feed-forward
    looks = 1
    if cross == "absorbed":
        products += 2  # the weights of key and value
        looks = heads  # each head's query is as wide as a frame
    projected = 2 * T * D * D  # keys and values of all frames
    frames = projected if cross == "kept" else 0
    again = 0
    tokens = 0
    for earlier in range(U):
        token = products * D * D + 2 * (earlier + 1) * D + 2 * looks * T * D
        tokens += token
        if cross == "recomputed":
            frames += projected
        if past == "none":
            again += earlier * token
        elif past == "states":
            again += earlier * 2 * D * D
    return DecoderFLOP(
        frames=2 * layers * frames,
        again=2 * layers * again,
        tokens=2 * layers * tokens,
        output=2 * U * V * D,
    )


@dataclass(frozen=True, kw_only=True)
class DecoderBytes:
    """Bytes of an attention decoder: what is kept between steps, and what one step reads.

    Attributes:
        frames: Kept of the encoder's frames.
        past: Kept of the text, with room for U tokens.
        weights_read: Weights that a step reads, whatever the batch.
        frames_read: What a step reads for the frames; projections of "recomputed" are written and
            read as well.
        past_read: What the last step reads for the text, likewise.
    """

    frames: int
    past: int
    weights_read: int
    frames_read: int
    past_read: int

    @property
    def kept(self) -> int:
        """All that is kept between steps."""
        return self.frames + self.past


def aed_bytes(  # noqa: PLR0913  sizes of the legend, one a letter
    *,
    B: int,
    T: int,
    U: int,
    D: int,
    layers: int,
    V: int,
    cross: str,
    past: str,
    itemsize: int = 2,
) -> DecoderBytes:
    """Bytes that greedy decoding keeps, and that a step of one token an utterance reads.

    A step is counted as if no cache held anything from one layer or step to the next, without
    the vectors between its products, and without biases and norms. Absorbed frames are read twice
    a layer, as many bytes as keys and values; being the same in all layers, they may come from a
    cache.

    Args:
        B: Utterances.
        T: Encoder frames of each, padding included.
        U: Tokens that there is room for, prompt included.
        D: Width of the decoder.
        layers: Its layers.
        V: Tokens of the vocabulary.
        cross: "kept", "absorbed" or "recomputed".
        past: "kept", "states" or "none".
        itemsize: Bytes of a number, 2 for half precision, 4 for float32.

    >>> sizes = {"B": 128, "T": 250, "U": 70, "D": 1024, "layers": 24, "V": 4128}
    >>> kept = aed_bytes(**sizes, cross="kept", past="kept")
    >>> kept.frames / 1e9, kept.weights_read / 1e9  # Canary-1B, 128 times 20 seconds
    (3.145728, 0.713097216)
    """
    _check(cross, past)
    frames = B * T * D
    text = B * U * D
    weights = 14 * D * D  # self-attention 4, query and output 2, feed-forward 2 times 4
    if cross != "kept":
        weights += 2 * D * D
    frames_kept = {"kept": 2 * layers * frames, "absorbed": frames, "recomputed": frames}
    # frames, then keys and values written and read; "none" keeps and reads tokens of 8 bytes
    frames_read = {"kept": 2 * frames, "absorbed": 2 * frames, "recomputed": 5 * frames}
    past_kept = {"kept": 2 * layers * text, "states": layers * text, "none": 0}
    past_read = {"kept": 2 * text, "states": 5 * text, "none": 4 * text}
    tokens = 8 * B * U if past == "none" else 0
    return DecoderBytes(
        frames=itemsize * frames_kept[cross],
        past=itemsize * past_kept[past] + tokens,
        weights_read=itemsize * (layers * weights + V * D),
        frames_read=itemsize * layers * frames_read[cross],
        past_read=itemsize * layers * past_read[past] + tokens,
    )


def _check(cross: str, past: str) -> None:
    expect(cross in CROSS, "cross", f"one of {', '.join(CROSS)}", repr(cross))
    expect(past in PAST, "past", f"one of {', '.join(PAST)}", repr(past))
