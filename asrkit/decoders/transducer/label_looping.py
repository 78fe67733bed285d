"""Label looping as published (arXiv 2406.06220): a loop over labels around a loop over blanks."""

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Emissions, Hypotheses
from asrkit.decoders.states import select_state
from asrkit.decoders.transducer.steps import Carry, GreedyModel, GreedyOptions


def decode(
    greedy: GreedyModel, encoded: Tensor, lengths: Tensor, carry: Carry, options: GreedyOptions
) -> Hypotheses:
    """Greedy hypotheses by label looping.

    A turn of the outer loop finds one more label for every utterance that has one, with one
    predictor call. Each utterance has its own clock. One that has found its label waits while the
    inner loop continues through the blanks of the others.

    Args:
        greedy: The model.
        encoded: (B, T, E).
        lengths: (B,) int64, valid frames.
        carry: State before the first frame.
        options: Uses `max_symbols`.
    """
    B, T, _ = encoded.shape
    predicted, state, time, earlier_frames = carry
    rows = torch.arange(B, device=encoded.device)
    symbols = torch.zeros_like(time)
    scores = torch.zeros_like(time, dtype=torch.float32)
    steps = list[Emissions]()
    while (time < lengths).any():
        searching = time < lengths
        emitted = torch.zeros_like(searching)
        labels = frames = durations = time  # overwritten where an utterance emits
        confidence = None
        while searching.any():
            here = encoded[rows, time.clamp(max=T - 1)]
            best = greedy.best_tokens(here, predicted)
            scores = scores + best.score.masked_fill(~searching, 0)
            is_blank = best.token == greedy.blank
            emits = searching & ~is_blank
            skips = searching & is_blank
            labels = torch.where(emits, best.token, labels)
            frames = torch.where(emits, time, frames)
            durations = torch.where(emits, best.jump, durations)
            if confidence is None or best.confidence is None:
                confidence = best.confidence
            else:
                confidence = torch.where(emits, best.confidence, confidence)
            time = time + best.jump.masked_fill(~skips, 0)
            symbols = symbols.masked_fill(skips, 0)
            emitted = emitted | emits
            searching = skips & (time < lengths)
        time = time + durations.masked_fill(~emitted, 0)
        symbols = symbols + emitted
        # a frame with max_symbols labels ends without a blank
        full = emitted & (durations == 0) & (symbols == options.max_symbols)
        time = time + full
        symbols = symbols.masked_fill(full | (durations > 0), 0)
        step = Emissions(
            labels=labels,
            frames=frames + earlier_frames,
            durations=durations,
            emitted=emitted,
            confidence=confidence,
        )
        steps.append(step)
        last_label = labels.masked_fill(~emitted, greedy.blank)
        after = greedy.model.predict(last_label, state)
        before = (predicted, state)
        predicted, state = select_state(emitted, after, before)
    after_all = carry.after(time, lengths, predicted, state)
    return Hypotheses.from_steps(steps, scores, "label_looping", after_all)
