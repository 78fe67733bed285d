"""`ctc_draft`: what a CTC head heard, as a draft that attention verifies."""

from dataclasses import replace

import torch

from asrkit.decoders.attention.steps import Attention, check_model
from asrkit.decoders.hypotheses import Hypotheses
from asrkit.shapes import expect


def ctc_draft(model: Attention, heard: Hypotheses) -> Hypotheses:
    """The labels of a CTC head without those that no text holds, for `aed_greedy(draft=...)`.

    Left out are `bos`, `eos` and whatever is no token of the decoder. All else may be wrong: the
    decoder keeps what it would have said itself, so its result does not depend on the draft, only
    its time.

    Args:
        model: Whose decoder is to verify the draft; the CTC head has the same tokens.
        heard: Of `ctc_greedy` or `ctc_beam`, from the CTC head's log-probabilities.

    Returns:
        Hypotheses with the labels, frames and durations that are left. Scores are those of `heard`;
        confidence and alternatives are dropped.

    Raises:
        ValueError: `model` does not follow the protocol, or `heard` are no Hypotheses.

    >>> frames, ends, ctc = model.encode(features, lengths)  # doctest: +SKIP
    >>> draft = ctc_draft(model, ctc_greedy(ctc, ends))  # doctest: +SKIP
    >>> aed_greedy(model, frames, ends, draft=draft).tokens()  # doctest: +SKIP
    """
    check_model(model)
    is_one = isinstance(heard, Hypotheses)
    expect(is_one, "heard", "Hypotheses", type(heard).__name__, "Try ctc_greedy.")
    labels = heard.labels
    spoken = (labels >= 0) & (labels < model.vocab_size)
    spoken &= (labels != model.bos) & (labels != model.eos)
    spoken &= torch.arange(labels.shape[1], device=labels.device) < heard.lengths[:, None]
    kept = heard.only(spoken)
    return replace(kept, impl=f"{heard.impl}, as a draft", confidence=None, alternatives=())
