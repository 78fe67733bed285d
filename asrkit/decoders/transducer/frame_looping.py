"""Frame looping: batched greedy transducer decoding, one frame at a time for all utterances.

An utterance whose frame is done idles while others emit more labels on theirs. In `decode` the host
counts the frames; in a CUDA graph, which cannot return to it, `joint_step` does so on the device.
"""

from dataclasses import replace

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Emissions, Hypotheses
from asrkit.decoders.states import select_state
from asrkit.decoders.transducer import label_looping
from asrkit.decoders.transducer.steps import Carry, GreedyModel, GreedyOptions, LoopState


def decode(
    greedy: GreedyModel, encoded: Tensor, lengths: Tensor, carry: Carry, options: GreedyOptions
) -> Hypotheses:
    """Greedy hypotheses by frame looping.

    One joint call serves the whole batch. A frame takes as many calls as the utterance with the
    most labels on it needs.

    Args:
        greedy: The model.
        encoded: (B, T, E).
        lengths: (B,) int64, valid frames.
        carry: State before the first frame.
        options: Uses `max_symbols`.
    """
    T = encoded.shape[1]
    predicted, state, time, earlier_frames = carry
    scores = torch.zeros_like(time, dtype=torch.float32)
    steps = list[Emissions]()
    for t in range(T):
        for _ in range(options.max_symbols):
            active = (time == t) & (t < lengths)
            waits = ~active
            token, jump, score, confidence = greedy.best_tokens(encoded[:, t], predicted)
            scores = scores + score.masked_fill(waits, 0)
            time = time + jump.masked_fill(waits, 0)
            emits = active & (token != greedy.blank)
            # The host waits for the GPU here, at every symbol. Label looping and graphs avoid that.
            if not emits.any():
                break
            step = Emissions(
                labels=token,
                frames=t + earlier_frames,
                durations=jump,
                emitted=emits,
                confidence=confidence,
            )
            steps.append(step)
            label = token.masked_fill(~emits, greedy.blank)
            after = greedy.model.predict(label, state)
            before = (predicted, state)
            predicted, state = select_state(emits, after, before)
        # a frame with max_symbols labels ends without a blank
        full = (time == t) & (t < lengths)
        time = time + full
    after_all = carry.after(time, lengths, predicted, state)
    return Hypotheses.from_steps(steps, scores, "frame_looping", after_all)


def joint_step(
    greedy: GreedyModel,
    encoded: Tensor,
    lengths: Tensor,
    loop_state: LoopState,
    options: GreedyOptions,
) -> tuple[LoopState, Emissions]:
    """One joint call for the utterances on the earliest frame of all; a `JointStep`.

    Args:
        greedy: The model.
        encoded: (B, T, E).
        lengths: (B,) int64, valid frames.
        loop_state: The state before the step.
        options: Uses `max_symbols`.
    """
    time = loop_state.time
    earliest = time.masked_fill(time >= lengths, encoded.shape[1]).amin()
    # the others are beyond an end of 0 frames
    own_lengths = lengths.masked_fill(time != earliest, 0)
    own_options = replace(options, window=1)
    return label_looping.joint_step(greedy, encoded, own_lengths, loop_state, own_options)
