"""`aed_greedy`: the best token of every utterance in each turn, with or without a draft."""

import torch
from torch import Tensor

from asrkit.decoders.attention.draft import draft_of, verify_draft
from asrkit.decoders.attention.loop import GreedyLoop
from asrkit.decoders.attention.protocol import (
    REQUIRED,
    Attention,
    Prompt,
    limits_of,
    prompt_of,
    trim_frames,
)
from asrkit.decoders.hypotheses import Hypotheses, check_batch, check_model
from asrkit.threads import eager


@eager
def aed_greedy(
    model: Attention,
    encoded: Tensor,
    lengths: Tensor,
    *,
    prompt: Prompt | None = None,
    draft: Hypotheses | None = None,
    max_labels: int | None = None,
    confidence: bool = False,
) -> Hypotheses:
    """Greedy `Hypotheses` of a batch of encoded utterances.

    The best token is taken until it is eos. All utterances take one step at a time. Those that have
    ended wait for the last one, or leave the batch once few are active.

    Args:
        model: Used in the mode it is in: call model.eval() first.
        encoded: (B, T, D) frames, of `model.encode`.
        lengths: (B,) valid frames, int32 or int64; an utterance of 0 frames has no labels.
        prompt: Tokens before the text, (P,) for all or (B, P); None is `model.bos` alone. The
            prompts of a batch have one length.
        draft: A guess at the texts, for instance `ctc_draft`'s of a CTC head. One call of `step`
            verifies all its tokens, and the right beginning is kept. After a mistake the rest is
            verified as well, 16 tokens a call, while that is worth its time. The result is that
            without a draft except for rounding; a right draft takes one call in all.
        max_labels: Most labels of an utterance; None is 50 more than it has frames. Texts without
            eos at this limit are returned as they are, and their `ended` is False.
        confidence: Whether to return the confidence of each label, its probability.

    Returns:
        Hypotheses with scores in nats, eos included. NaN among the logits ends an utterance, with
        score NaN; `ended` is False, and `impl` says so. Durations are 0.

    Raises:
        ValueError: An argument does not fit, or the model does not follow the protocol.

    >>> frames, ends, ctc = model.encode(features, lengths)  # doctest: +SKIP
    >>> draft = ctc_draft(model, ctc_greedy(ctc, ends))  # doctest: +SKIP
    >>> aed_greedy(model, frames, ends, draft=draft).tokens()  # doctest: +SKIP
    """
    longest = check_batch(encoded, lengths, "B T D", "encoded")
    check_model(model, *REQUIRED)
    prompts = prompt_of(model, prompt, encoded)
    limits = limits_of(model, lengths, prompts.shape[1], max_labels)
    impl = "attention"
    with torch.inference_mode():
        guess = None if draft is None else draft_of(model, draft, limits)
        memory = model.prefill(trim_frames(encoded, longest), lengths)
        loop = GreedyLoop(model, memory, prompts, limits, lengths > 0, confidence=confidence)
        if guess is not None and guess.tokens.shape[1]:
            impl += ", draft"
            verify_draft(loop, guess)
        loop.run()
    return loop.hypotheses(impl)
