"""Greedy transducer decoding by windowed looping: no utterance waits for another.

Every utterance keeps its own clock. One turn of the loop, for the whole batch at once:

    frames of one utterance   . . . [ . . . . . . . . ] . . .    W frames from its clock on
                                      |   |   |
    joint_step                    blank blank label    find the first label of the window, if any;
                                                       blanks before it are skipped without a loop
    predictor_step                a new prediction, if there was a label
    LoopState                     the clock moves past the blanks (RNN-T stays on the label's frame)

The loop ends when every clock has passed the end of its utterance.
"""

from functools import partial

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Emissions
from asrkit.decoders.states import map_state
from asrkit.decoders.transducer.steps import (
    BestTokens,
    GreedyModel,
    GreedyOptions,
    LoopState,
    decode_by_turns,
    emit,
)


def joint_step(
    greedy: GreedyModel,
    encoded: Tensor,
    lengths: Tensor,
    loop_state: LoopState,
    options: GreedyOptions,
) -> tuple[LoopState, Emissions]:
    """Find the next label of every utterance that has one within `options.window` frames.

    A blank changes no prediction, so one joint call serves W frames of all utterances. Which of
    these frames the path reaches is found by pointer jumping: after r rounds `hop` has followed
    2 ** r blanks from every frame; labels and ends point at themselves. No size depends on the
    result and nothing is sent to the host, so a CUDA graph can capture this function.

    Args:
        greedy: The model.
        encoded: (B, T, E).
        lengths: (B,) int64, valid frames.
        loop_state: The state before the step.
        options: Uses `window` and `max_symbols`.

    Returns:
        The state with clocks and scores advanced and the predictor unchanged, and the labels.
    """
    B, T, _ = encoded.shape
    W = min(options.window, T)
    # offsets within the window, then the places outside it where a jump may land
    offsets = torch.arange(W + greedy.longest_jump, device=encoded.device)
    inside = offsets[:W]
    outside = offsets[W:]
    frames = loop_state.time[:, None] + inside  # (B, W)
    rows = torch.arange(B, device=encoded.device)[:, None]
    window = encoded[rows, frames.clamp(max=T - 1)]  # (B, W, E)
    token, jump, score, confidence = greedy.best_tokens(window, loop_state.predicted[:, None])

    is_label = token != greedy.blank
    is_end = frames >= lengths[:, None]
    stops = is_label | is_end
    landing = inside + jump.masked_fill(stops, 0)
    hop = torch.cat([landing, outside.expand(B, -1)], 1)  # (B, W + longest_jump)
    blank_score = score.masked_fill(stops, 0)
    path_score = torch.nn.functional.pad(blank_score, (0, greedy.longest_jump))
    for _ in range((W - 1).bit_length()):
        path_score = path_score + path_score.gather(1, hop)
        hop = hop.gather(1, hop)
    stop = hop[:, 0]

    in_window = stop.clamp(max=W - 1)[:, None]
    found = BestTokens(token, jump, score, confidence)
    best = map_state(lambda part: part.gather(1, in_window)[:, 0], found)
    frame = loop_state.time + stop
    emitted = (stop < W) & (frame < lengths)
    scores = loop_state.scores + path_score[:, 0]
    return emit(loop_state, frame, scores, best, emitted, options)


# It takes about as many turns as the utterance with the most labels has labels, and some more for
# silences longer than the window.
decode = partial(decode_by_turns, joint_step)
