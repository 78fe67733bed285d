"""Greedy transducer decoding as the definition has it: one utterance, one frame, one symbol at a time."""

from typing import Any

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses


def decode(model: Any, encoded: Tensor, lengths: Tensor, max_symbols: int) -> Hypotheses:
    """The readable reference: batch size 1 throughout, the GPU waits for Python at every symbol."""
    labels, frames, scores = [], [], []
    for utterance, length in zip(encoded, lengths.tolist(), strict=True):
        tokens, emitted, total = [], [], torch.zeros((), device=encoded.device)
        predicted, state = model.predict(lengths.new_full((1,), model.blank, dtype=torch.int64), None)
        for t in range(length):
            for _ in range(max_symbols):
                best, token = model.join(utterance[None, t], predicted)[0].float().log_softmax(-1).max(-1)
                total = total + best
                if token == model.blank:
                    break
                tokens.append(int(token))
                emitted.append(t)
                predicted, state = model.predict(token[None], state)
        labels.append(tokens)
        frames.append(emitted)
        scores.append(total)
    return Hypotheses.from_lists(labels, frames, scores, "one_by_one")
