"""Label looping as it was published (arXiv 2406.06220): an outer loop over labels, an inner loop
over blanks.
"""

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses, Step
from asrkit.decoders.nests import choose
from asrkit.decoders.transducer.reading import Carry, Options, Reader


def decode(
    read: Reader, encoded: Tensor, lengths: Tensor, carry: Carry, options: Options
) -> Hypotheses:
    """Each turn of the outer loop finds one more label for every utterance that has one: one call
    of the predictor.

    Utterances keep a clock each. Whoever has found a label waits, while the joint goes on through
    the others' blanks.
    """
    B, T, _ = encoded.shape
    predicted, state, time, behind = carry
    rows, symbols = torch.arange(B, device=encoded.device), torch.zeros_like(time)
    scores, steps = torch.zeros_like(time, dtype=torch.float32), list[Step]()
    while (time < lengths).any():
        searching, found = time < lengths, torch.zeros_like(time, dtype=torch.bool)
        labels, frames, durations, confidence = time, time, time, None
        while searching.any():
            token, jump, score, sure = read(encoded[rows, time.clamp(max=T - 1)], predicted)
            scores = scores + score.masked_fill(~searching, 0)
            emits, blank = searching & (token != read.blank), searching & (token == read.blank)
            labels, frames, durations = choose(
                emits, (token, time, jump), (labels, frames, durations)
            )
            confidence = (
                sure if confidence is None or sure is None else choose(emits, sure, confidence)
            )
            time, symbols = time + jump.masked_fill(~blank, 0), symbols.masked_fill(blank, 0)
            found, searching = found | emits, blank & (time < lengths)
        time, symbols = time + durations.masked_fill(~found, 0), symbols + found
        full = found & (durations == 0) & (symbols == options.max_symbols)  # on, without a blank
        time, symbols = time + full, symbols.masked_fill(full | (durations > 0), 0)
        steps.append(Step(labels, frames + behind, durations, found, confidence))
        after = read.model.predict(labels.masked_fill(~found, read.blank), state)
        predicted, state = choose(found, after, (predicted, state))
    return Hypotheses.from_steps(
        steps, scores, "label_looping", carry.after(time, lengths, predicted, state)
    )
