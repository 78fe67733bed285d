"""Greedy transducer decoding, batched frame by frame: utterances that wait on blank idle while others emit labels."""

from typing import Any

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses
from asrkit.shapes import expect


def choose(mask: Tensor, new: Any, old: Any) -> Any:
    """`new` where mask (B,) is true, else `old`, in every tensor of a nest of tensors whose first dimension is B."""
    if isinstance(new, Tensor):
        return torch.where(mask.view(-1, *[1] * (new.dim() - 1)), new, old)
    if isinstance(new, dict):
        return {key: choose(mask, new[key], old[key]) for key in new}
    expect(new is None or isinstance(new, tuple | list), "state", "tensors in tuples, lists or dicts", type(new).__name__)
    parts = [choose(mask, *pair) for pair in zip(new, old, strict=True)] if new is not None else []
    return None if new is None else type(new)(*parts) if hasattr(new, "_fields") else type(new)(parts)


def decode(model: Any, encoded: Tensor, lengths: Tensor, max_symbols: int) -> Hypotheses:
    """One joint call serves the whole batch; each frame takes as many calls as its most talkative utterance needs."""
    B, T, _ = encoded.shape
    token = lengths.new_full((B,), model.blank, dtype=torch.int64)
    predicted, state = model.predict(token, None)
    scores, steps = torch.zeros(B, device=encoded.device), [(token, token, token != token)]  # a first step that keeps nothing
    for t in range(T):
        emits = t < lengths
        for _ in range(max_symbols):
            best, token = model.join(encoded[:, t], predicted).float().log_softmax(-1).max(-1)
            scores = scores + best.masked_fill(~emits, 0)
            emits = emits & (token != model.blank)
            if not emits.any():  # the GPU waits for Python here, at every symbol: what graphs and label looping remove
                break
            steps.append((token, torch.full_like(token, t), emits))
            after = model.predict(token.masked_fill(~emits, model.blank), state)
            predicted, state = choose(emits, after[0], predicted), choose(emits, after[1], state)
    labels, frames, keep = (torch.stack(part, 1) for part in zip(*steps, strict=True))
    return Hypotheses.pack(labels, frames, keep, scores, "frame_looping")
