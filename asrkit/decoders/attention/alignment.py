"""When a text was said, by the attention of the decoder that wrote it: frames in rising order."""

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
    """The frame of each label, (B, N) int64, padding -1: one more pass over the texts.

    Of all sequences of frames that never go back, it is the one that the last layer's heads, in the
    mean, look at most when they choose the labels. Nothing trains attention to look there, so the
    times are rough; those of a translation are rougher still.

    Args:
        model: An `Attention` with `cross_weights`, in evaluation mode.
        encoded: (B, T, D) frames that the texts were decoded from.
        lengths: (B,) valid frames.
        hypotheses: Of these B utterances, greedy ones or a beam's.
        prompt: Tokens before the texts, as they were decoded with.
        memory: What the model remembers of the frames, where it is there already.

    Raises:
        ValueError: The hypotheses are of another batch, or the prompt does not fit.
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
        looks = model.cross_weights(encoded, lengths, tokens[:, :-1], memory)
        looks = looks[:, P - 1 :]  # (B, N, T)
        dtype = torch.promote_types(looks.dtype, torch.float32)  # sums of many
        looks = looks.to(dtype).masked_fill(padding[..., None], 0.0)
        beyond = ~valid_mask(lengths, encoded.shape[1])
        looks = looks.masked_fill(beyond[:, None], -torch.inf)
        frames = rising_frames(looks)
    with torch.inference_mode(False):
        return frames.clone().masked_fill_(padding, PADDING)


def rising_frames(looks: Tensor) -> Tensor:
    """Frames (B, N) that never go back and have the largest sum of `looks` (B, N, T).

    Frame by frame, the best sum of a row that ends there is its own look and the best of the rows
    before that end there or earlier (dynamic programming, in N turns over all frames).
    """
    best = looks[:, 0]  # (B, T)
    before = []
    for row in looks.unbind(1)[1:]:
        highest, where = best.cummax(1)
        before.append(where)
        best = row + highest
    frames = [best.argmax(1, keepdim=True)]
    for where in reversed(before):
        frames.append(where.gather(1, frames[-1]))
    return torch.cat(frames[::-1], 1)
