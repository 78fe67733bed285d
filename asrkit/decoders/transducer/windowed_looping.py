"""Greedy transducer decoding, label by label: every utterance keeps its own clock, and none waits
for another.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses, Step
from asrkit.decoders.nests import choose
from asrkit.decoders.transducer.reading import Carry, Options, Reader


class Place(NamedTuple):
    """Where every utterance stands; a turn of the loop makes a new one."""

    time: Tensor  # (B,) int64, the frame to look at next
    symbols: Tensor  # (B,) int64, labels that this frame has already
    scores: Tensor  # (B,) float32
    predicted: Tensor  # (B, P)
    state: Any  # of the predictor


def look(
    read: Reader, encoded: Tensor, lengths: Tensor, place: Place, options: Options
) -> tuple[Place, Step]:
    """The next label of every utterance that has one within `window` frames; one joint call, one
    prediction for all of them.

    Blanks change no prediction, so the joint can be asked for W frames at once. Which of them are
    reached is settled by pointer jumping: after r rounds `hop` has followed 2 ** r blanks from
    every frame, and stands still on labels and ends. No size depends on what is found and nothing
    is sent to the host, so the turn can be captured in a CUDA graph.
    """
    B, T, _ = encoded.shape
    W = min(options.window, T)
    ahead = torch.arange(
        W + read.reach, device=encoded.device
    )  # of the window, then where a hop may land outside
    frames = place.time[:, None] + ahead[:W]  # (B, W)
    rows = torch.arange(B, device=encoded.device)[:, None]
    token, jump, score, sure = read(
        encoded[rows, frames.clamp(max=T - 1)], place.predicted[:, None]
    )
    stays = (token != read.blank) | (frames >= lengths[:, None])
    hop = torch.cat(
        [ahead[:W] + jump.masked_fill(stays, 0), ahead[W:].expand(B, -1)], 1
    )  # (B, W + reach)
    total = torch.nn.functional.pad(score.masked_fill(stays, 0), (0, read.reach))
    for _ in range((W - 1).bit_length()):
        total, hop = total + total.gather(1, hop), hop.gather(1, hop)
    stop = hop[:, 0]
    at = stop.clamp(max=W - 1)[:, None]
    label, duration, last = (part.gather(1, at)[:, 0] for part in (token, jump, score))
    confidence = None if sure is None else sure.gather(1, at)[:, 0]
    found = place.time + stop
    emitted = (stop < W) & (found < lengths)
    symbols = place.symbols * (stop == 0) + emitted
    full = (duration == 0) & (
        symbols >= options.max_symbols
    )  # this frame has said enough: on, without a blank
    time = found + (duration + full) * emitted
    scores = place.scores + total[:, 0] + last.masked_fill(~emitted, 0)
    after = Place(time, symbols * (time == found), scores, place.predicted, place.state)
    return after, Step(label, found, duration, emitted, confidence)


def speak(read: Reader, place: Place, step: Step) -> Place:
    """One call of the predictor, which moves those who found a label; what it says of the others'
    tokens is not taken.
    """
    after = read.model.predict(step.labels, place.state)
    predicted, state = choose(step.emitted, after, (place.predicted, place.state))
    return place._replace(predicted=predicted, state=state)


def begin(carry: Carry) -> Place:
    """The place from which the loop starts."""
    zero = torch.zeros_like(carry.ahead)
    return Place(carry.ahead, zero, zero.float(), carry.predicted, carry.state)


def decode(
    read: Reader, encoded: Tensor, lengths: Tensor, carry: Carry, options: Options
) -> Hypotheses:
    """As many turns as the utterance with the most labels needs, and a few for long silences."""
    place, steps = begin(carry), list[Step]()
    while bool((place.time < lengths).any()):
        place, step = look(read, encoded, lengths, place, options)
        if bool(step.emitted.any()):
            steps.append(step._replace(frames=step.frames + carry.frames))
            place = speak(read, place, step)
    done = carry.after(place.time, lengths, place.predicted, place.state)
    return Hypotheses.from_steps(steps, place.scores, "windowed_looping", done)
