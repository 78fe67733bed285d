"""Times of labels from the cross-attention of the decoder that wrote them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders.attention.protocol import Prompt, prompt_of
from asrkit.decoders.hypotheses import PADDING, Hypotheses
from asrkit.shapes import dims, valid_mask


def attention_frames(
    model: Any,
    encoded: Tensor,
    lengths: Tensor,
    hypotheses: Hypotheses,
    *,
    prompt: Prompt | None = None,
    memory: Any = None,
) -> Tensor:
    """The frame of each label, (B, N) int64, padding -1, by one more pass over the texts.

    The last layer's heads weight the frames when they choose a label. Of all sequences of frames
    that never go back, the result has the largest sum of these weights, averaged over the heads.
    Nothing trains attention to follow time, so the frames are rough; those of a translation are
    rougher still.

    Args:
        model: An `Attention` with `cross_weights`, in evaluation mode.
        encoded: (B, T, D) frames that the texts were decoded from.
        lengths: (B,) valid frames.
        hypotheses: The texts of these B utterances, greedy or by a beam.
        prompt: Tokens before the texts, as in decoding.
        memory: The model's memory of the frames, if it exists already.

    Raises:
        ValueError: The hypotheses belong to another batch, or the prompt does not fit.
    """
    labels = hypotheses.labels
    _, N = dims(labels, "B N", "hypotheses", B=len(encoded))
    if N == 0 or encoded.shape[1] == 0:
        return hypotheses.frames
    with torch.inference_mode():
        prompts = prompt_of(model, prompt, encoded)
        P = prompts.shape[1]
        padding = labels == PADDING
        tokens = torch.cat([prompts, labels.masked_fill(padding, model.eos)], 1)
        weights = model.cross_weights(encoded, lengths, tokens[:, :-1], memory)
        return _frames(weights[:, P - 1 :], lengths, padding)


def frames_of_turns(
    model: Any,
    memory: Any,
    lengths: Tensor,
    labels: Tensor,
    turns: Sequence[tuple[Tensor, Tensor, Tensor]],
) -> Tensor:
    """As `attention_frames`, from what greedy decoding kept of its turns, without another pass.

    Args:
        model: An `Attention` with `last_weights`, whose states have `attended` (n, D).
        memory: The model's memory of the B utterances.
        lengths: (B,) valid frames.
        labels: (B, N) int64, padding -1.
        turns: `GreedyLoop.attended`.
    """
    B, N = labels.shape
    if N == 0:
        return labels
    with torch.inference_mode():
        attended = turns[0][2].new_zeros(B, N + 1, turns[0][2].shape[1])
        for rows, counts, last in turns:
            attended[rows, counts] = last  # finished rows write beyond their labels
        weights = model.last_weights(attended[:, :N], memory)
        return _frames(weights, lengths, labels == PADDING)


def _frames(weights: Tensor, lengths: Tensor, padding: Tensor) -> Tensor:
    """Rising frames (B, N) from attention weights (B, N, T); -1 in the padding (B, N)."""
    dtype = torch.promote_types(weights.dtype, torch.float32)  # for long sums
    weights = weights.to(dtype).masked_fill(padding[..., None], 0.0)
    beyond = ~valid_mask(lengths, weights.shape[2])
    frames = rising_frames(weights.masked_fill(beyond[:, None], -torch.inf))
    with torch.inference_mode(False):
        return frames.clone().masked_fill_(padding, PADDING)


def rising_frames(weights: Tensor) -> Tensor:
    """Frames (B, N) that never go back and have the largest sum of the weights `weights` (B, N, T).

    Dynamic programming: the best sum of rows 0 to n, with row n on frame t, is the weight of row n
    there plus the best sum of rows 0 to n - 1 with row n - 1 on frame t or earlier.
    """
    best = weights[:, 0]  # (B, T)
    sources = []  # the best frame of the row before, for each frame of a row
    for row in weights.unbind(1)[1:]:
        highest, source = best.cummax(1)
        sources.append(source)
        best = row + highest
    frames = [best.argmax(1, keepdim=True)]
    for source in reversed(sources):
        frames.append(source.gather(1, frames[-1]))
    return torch.cat(frames[::-1], 1)
