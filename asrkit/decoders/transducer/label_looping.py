"""Label looping, after arXiv 2406.06220: a loop over labels around a loop over blanks.

A turn of the outer loop finds one more label for every utterance, with one predictor call. Each
utterance has its own clock. One that has found its label waits while the inner loop continues
through the blanks of the others.

In the paper, the inner loop ends when the last utterance has found its label: the host reads that
from the device in each of its turns. Here the inner loop has `window` turns and nothing is read in
it. An utterance that is still on blanks continues in the next turn of the outer loop, where it
delays nobody else.
"""

from functools import partial

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Emissions
from asrkit.decoders.transducer.steps import (
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
    """Find the next label of every utterance that has one within `options.window` joint calls.

    A `JointStep`. An utterance on a label, or beyond its end, computes the same joint again and
    does not move.

    Args:
        greedy: The model.
        encoded: (B, T, E).
        lengths: (B,) int64, valid frames.
        loop_state: The state before the step.
        options: Uses `window` and `max_symbols`.
    """
    B, T, _ = encoded.shape
    rows = torch.arange(B, device=encoded.device)
    time, scores = loop_state.time, loop_state.scores
    for _ in range(min(options.window, T)):
        here = encoded[rows, time.clamp(max=T - 1)]
        best = greedy.best_tokens(here, loop_state.predicted)
        is_label = best.token != greedy.blank
        is_end = time >= lengths
        stops = is_label | is_end
        time = time + best.jump.masked_fill(stops, 0)
        scores = scores + best.score.masked_fill(stops, 0)
    emitted = is_label & ~is_end
    return emit(loop_state, time, scores, best, emitted, options)


decode = partial(decode_by_turns, joint_step)
