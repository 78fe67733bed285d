"""The definition of greedy transducer decoding: one utterance, one frame, one symbol at a time."""

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.transducer.steps import Carry, GreedyModel, GreedyOptions


def decode(
    greedy: GreedyModel, encoded: Tensor, lengths: Tensor, carry: Carry, options: GreedyOptions
) -> Hypotheses:
    """Greedy hypotheses at batch size 1: the readable reference.

    Args:
        greedy: The model.
        encoded: (B, T, E).
        lengths: (B,) int64, valid frames.
        carry: State before the first frame.
        options: Uses `max_symbols`.
    """
    rows = []
    scores = []
    carries = []
    for b, length in enumerate(lengths.tolist()):
        own_carry = carry.select(slice(b, b + 1))
        row, score, after = _decode_one(greedy, encoded[b : b + 1], length, own_carry, options)
        rows.append(row)
        scores.append(score)
        carries.append(after)
    return Hypotheses.from_lists(rows, scores, "one_by_one", Carry.join(carries))


def _decode_one(
    greedy: GreedyModel, encoded: Tensor, length: int, carry: Carry, options: GreedyOptions
) -> tuple[list[tuple], Tensor, Carry]:
    """Labels with frames and durations, score () and carry of encoded (1, T, E)."""
    predicted = carry.predicted
    state = carry.state
    t = int(carry.ahead)
    earlier_frames = int(carry.frames)
    labels: list[tuple] = []
    total = torch.zeros((), dtype=torch.float32, device=encoded.device)
    symbols = 0
    while t < length:
        token, jump, score, confidence = greedy.best_tokens(encoded[:, t], predicted)
        total = total + score[0]
        if token != greedy.blank:
            label: tuple = (int(token), t + earlier_frames, int(jump))
            if confidence is not None:
                label = (*label, float(confidence))
            labels.append(label)
            predicted, state = greedy.model.predict(token, state)
            symbols += 1
        if not jump and symbols == options.max_symbols:
            jump = jump + 1  # a frame with max_symbols labels ends without a blank
        if jump:
            symbols = 0
        t += int(jump)
    time = carry.ahead.new_full((1,), t)
    lengths = carry.ahead.new_full((1,), length)
    return labels, total, carry.after(time, lengths, predicted, state)
