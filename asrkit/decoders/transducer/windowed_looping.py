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

from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Emissions, Hypotheses
from asrkit.decoders.states import select_state
from asrkit.decoders.transducer.steps import Carry, GreedyModel, GreedyOptions


class LoopState(NamedTuple):
    """Decoder state of B utterances between two turns of the loop."""

    time: Tensor  # (B,) int64, the frame to decode next
    symbols: Tensor  # (B,) int64, labels emitted on that frame so far
    scores: Tensor  # (B,) float32, log-probability in nats of the path so far
    predicted: Tensor  # (B, P)
    state: Any  # of the predictor


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
    label = token.gather(1, in_window)[:, 0]
    duration = jump.gather(1, in_window)[:, 0]
    label_score = score.gather(1, in_window)[:, 0]
    if confidence is not None:
        confidence = confidence.gather(1, in_window)[:, 0]
    frame = loop_state.time + stop
    emitted = (stop < W) & (frame < lengths)
    symbols = loop_state.symbols * (stop == 0) + emitted
    # a frame with max_symbols labels ends without a blank
    full = (duration == 0) & (symbols >= options.max_symbols)
    time = frame + (duration + full) * emitted
    scores = loop_state.scores + path_score[:, 0]
    scores = scores + label_score.masked_fill(~emitted, 0)
    advanced = loop_state._replace(
        time=time,
        symbols=symbols * (time == frame),
        scores=scores,
    )
    step = Emissions(
        labels=label,
        frames=frame,
        durations=duration,
        emitted=emitted,
        confidence=confidence,
    )
    return advanced, step


def predictor_step(greedy: GreedyModel, loop_state: LoopState, step: Emissions) -> LoopState:
    """Advance the predictor for utterances that emitted; the others keep their state.

    Args:
        greedy: The model.
        loop_state: The state after `joint_step`.
        step: The labels that `joint_step` found.
    """
    after = greedy.model.predict(step.labels, loop_state.state)
    before = loop_state.predicted, loop_state.state
    predicted, state = select_state(step.emitted, after, before)
    return loop_state._replace(predicted=predicted, state=state)


def initial_state(carry: Carry) -> LoopState:
    """The loop state before the first turn."""
    zero = torch.zeros_like(carry.ahead)
    return LoopState(
        time=carry.ahead,
        symbols=zero,
        scores=zero.float(),
        predicted=carry.predicted,
        state=carry.state,
    )


def decode(
    greedy: GreedyModel, encoded: Tensor, lengths: Tensor, carry: Carry, options: GreedyOptions
) -> Hypotheses:
    """Greedy hypotheses by windowed looping.

    Takes about as many turns as the utterance with the most labels has labels, and some more for
    silences longer than the window.

    Args:
        greedy: The model.
        encoded: (B, T, E).
        lengths: (B,) int64, valid frames.
        carry: State before the first frame.
        options: Uses `window` and `max_symbols`.
    """
    loop_state = initial_state(carry)
    steps = list[Emissions]()
    while bool((loop_state.time < lengths).any()):
        loop_state, step = joint_step(greedy, encoded, lengths, loop_state, options)
        if bool(step.emitted.any()):
            steps.append(step._replace(frames=step.frames + carry.frames))
            loop_state = predictor_step(greedy, loop_state, step)
    after = carry.after(loop_state.time, lengths, loop_state.predicted, loop_state.state)
    return Hypotheses.from_steps(steps, loop_state.scores, "windowed_looping", after)
