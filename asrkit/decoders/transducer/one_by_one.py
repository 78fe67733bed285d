"""Greedy transducer decoding as the definition has it: one utterance, one frame, one symbol at a
time.
"""

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.transducer.reading import Carry, Options, Reader


def decode(
    read: Reader, encoded: Tensor, lengths: Tensor, carry: Carry, options: Options
) -> Hypotheses:
    """The readable reference: batch size 1 throughout, the GPU waits for Python at every symbol."""
    rows, scores, carries = [], [], []
    for b, length in enumerate(lengths.tolist()):
        before = carry.select(slice(b, b + 1))
        predicted, state, t, behind = (
            before.predicted,
            before.state,
            int(before.ahead),
            int(before.frames),
        )
        row, total, symbols = [], torch.zeros((), dtype=torch.float32, device=encoded.device), 0
        while t < length:
            token, jump, score, sure = read(encoded[b : b + 1, t], predicted)
            total = total + score[0]
            if token != read.blank:
                row.append(
                    (int(token), t + behind, int(jump), *([] if sure is None else [float(sure)]))
                )
                predicted, state = read.model.predict(token, state)
                symbols += 1
            if not jump and symbols == options.max_symbols:
                jump = jump + 1  # this frame has said enough: on, without a blank
            symbols = 0 if jump else symbols
            t += int(jump)
        rows.append(row)
        scores.append(total)
        carries.append(
            before.after(lengths.new_full((1,), t), lengths[b : b + 1], predicted, state)
        )
    return Hypotheses.from_lists(rows, scores, "one_by_one", Carry.join(carries))
