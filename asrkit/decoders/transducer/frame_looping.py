"""Greedy transducer decoding, batched frame by frame: utterances that wait on blank idle while
others emit labels.
"""

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses, Step
from asrkit.decoders.nests import choose
from asrkit.decoders.transducer.reading import Carry, Options, Reader


def decode(
    read: Reader, encoded: Tensor, lengths: Tensor, carry: Carry, options: Options
) -> Hypotheses:
    """One joint call serves the whole batch; each frame takes as many calls as its most talkative
    utterance needs.
    """
    B, T, _ = encoded.shape
    predicted, state, time, behind = carry
    scores, steps = torch.zeros_like(time, dtype=torch.float32), list[Step]()
    for t in range(T):
        for _ in range(options.max_symbols):
            asked = (time == t) & (t < lengths)
            token, jump, score, sure = read(encoded[:, t], predicted)
            scores = scores + score.masked_fill(~asked, 0)
            time = time + jump.masked_fill(~asked, 0)
            emits = asked & (token != read.blank)
            # the GPU waits for Python here, at every symbol: what graphs and label looping remove
            if not emits.any():
                break
            steps.append(Step(token, t + behind, jump, emits, sure))
            after = read.model.predict(token.masked_fill(~emits, read.blank), state)
            predicted, state = choose(emits, after, (predicted, state))
        time = time + (
            (time == t) & (t < lengths)
        )  # this frame has said enough: on, without a blank
    return Hypotheses.from_steps(
        steps, scores, "frame_looping", carry.after(time, lengths, predicted, state)
    )
